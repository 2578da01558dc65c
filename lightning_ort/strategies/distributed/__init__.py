"""Several processes in one run, used by :class:`~lightning_ort.strategies.parallel.ORTParallelMixin`.

- :mod:`~lightning_ort.strategies.distributed.sigterm`: all processes end after the same batch
- :mod:`~lightning_ort.strategies.distributed.watchdog`: processes that are gone
- :mod:`~lightning_ort.strategies.distributed.relaunch`: the other processes start as the first one did
"""
