"""Replaces the implementation of the optimizers that ``configure_optimizers`` returned.

- :mod:`~lightning_ort.optim.registry`: the names of ``optim=`` and what each one stands for
- :mod:`~lightning_ort.optim.states`: converts optimizer states between implementations
- :mod:`~lightning_ort.optim.replacement`: gives the user's optimizer object another class
- :mod:`~lightning_ort.optim.fused`: switches on the fused loops of torch's optimizers
- :mod:`~lightning_ort.optim.swap`: chooses and checks the implementation, then does one of these two
- :mod:`~lightning_ort.optim.eight_bit`: 8-bit optimizers that read and write other checkpoints
- :mod:`~lightning_ort.optim.anyprecision`: AdamW with bfloat16 states
- :mod:`~lightning_ort.optim.sharded`: states split over processes
- :mod:`~lightning_ort.optim.shard_files`: reads files of ``torch.save`` without running code that is in them
- :mod:`~lightning_ort.optim.param_groups`: weight decay for matrices only
- :mod:`~lightning_ort.optim.memory`: bytes of parameters, gradients and states
"""
