"""A trained module as an ONNX model, and back into a Trainer that predicts with it.

- :mod:`~lightning_ort.onnx_export.export`: from a module to a file that gives the same results, or has smaller weights
- :mod:`~lightning_ort.onnx_export.signature`: what goes in and comes out, by name
- :mod:`~lightning_ort.onnx_export.failure`: which line of the user's cannot be exported
- :mod:`~lightning_ort.onnx_export.session`: a file run on torch tensors
- :mod:`~lightning_ort.onnx_export.predict`: what a LightningModule around it does, for both namespaces
"""
