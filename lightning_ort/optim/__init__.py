"""Optimizer hooks: another implementation of the optimizer that ``configure_optimizers`` returned.

- :mod:`~lightning_ort.optim.registry`: the names of ``optim=`` and what each one stands for
- :mod:`~lightning_ort.optim.swap`: put one in place, in the user's own optimizer object
- :mod:`~lightning_ort.optim.states`: optimizer states from one implementation to another
- :mod:`~lightning_ort.optim.eight_bit`: 8-bit optimizers that read and write other checkpoints
- :mod:`~lightning_ort.optim.anyprecision`: AdamW with bfloat16 states
- :mod:`~lightning_ort.optim.sharded`: states split over processes
- :mod:`~lightning_ort.optim.param_groups`: weight decay for matrices only
- :mod:`~lightning_ort.optim.memory`: bytes of parameters, gradients and states
"""
