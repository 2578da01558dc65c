"""The strategies; :mod:`lightning_ort.lightning` and :mod:`lightning_ort.pytorch_lightning` have their classes.

:mod:`.mixin` is what every strategy does, and lists its parts. :mod:`.auto_device` is one device, for ``ort``;
:mod:`.parallel` and :mod:`.distributed` are several processes, for ``ort_ddp`` and ``ort_zero1_native``;
:mod:`.deepspeed` is DeepSpeed's ZeRO stage 1, for ``ort_zero1``. Which way a step runs is decided in :mod:`.race`.
"""
