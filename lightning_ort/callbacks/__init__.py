"""Callbacks; :mod:`lightning_ort.lightning` and :mod:`lightning_ort.pytorch_lightning` have their classes.

- :mod:`~lightning_ort.callbacks.export_onnx`: the trained module as an ONNX model
- :mod:`~lightning_ort.callbacks.training_settings`: how a fit runs, where the Trainer has no argument for it
"""
