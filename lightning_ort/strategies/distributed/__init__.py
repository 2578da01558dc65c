"""Several processes in one run, used by :class:`~lightning_ort.strategies.parallel.ORTParallelMixin`."""
