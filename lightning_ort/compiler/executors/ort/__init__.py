"""ONNX Runtime as an executor of regions."""
