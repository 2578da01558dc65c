"""A step that is recorded once while it runs, and replayed.

- :mod:`.calls`: the ATen calls of a step, written down while it runs
- :mod:`.program`: what of them is to be replayed, with inputs and results
- :mod:`~lightning_ort.compat.torchscript`: torch's interpreter in C++, which replays them
- :mod:`.replay`: runs it on the batches of the same signature, and compares with eager
"""
