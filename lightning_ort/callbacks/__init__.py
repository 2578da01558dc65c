"""Callbacks; :mod:`lightning_ort.lightning` and :mod:`lightning_ort.pytorch_lightning` have their classes.

- :mod:`~lightning_ort.callbacks.export_onnx`: the trained module as an ONNX model
- :mod:`~lightning_ort.callbacks.swap_optimizers`: another implementation of the optimizers, under any strategy
"""
