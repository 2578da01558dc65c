"""The strategies; :mod:`lightning_ort.lightning` and :mod:`lightning_ort.pytorch_lightning` have their classes.

- :mod:`~lightning_ort.strategies.mixin`: what every strategy does
- :mod:`~lightning_ort.strategies.race`: which way a step of a LightningModule runs
- :mod:`~lightning_ort.strategies.capture`: the steps, captured
- :mod:`~lightning_ort.strategies.optimizers`: other implementations of the optimizers
- :mod:`~lightning_ort.strategies.host_memory`: freed memory stays in the process for the next step
- :mod:`~lightning_ort.strategies.dropout_masks`: masks of dropout are drawn faster
- :mod:`~lightning_ort.strategies.checkpoints`: checkpoint files that are complete or absent
- :mod:`~lightning_ort.strategies.report_delivery`: the report at the end of a run: log, file, the Trainer's loggers
- :mod:`~lightning_ort.strategies.auto_device`: one device that the Trainer chooses, for ``ort``
- :mod:`~lightning_ort.strategies.parallel`: several processes, for ``ort_ddp`` and ``ort_zero1_native``
- :mod:`~lightning_ort.strategies.distributed`: its parts
- :mod:`~lightning_ort.strategies.deepspeed`: DeepSpeed's ZeRO stage 1, for ``ort_zero1``
"""
