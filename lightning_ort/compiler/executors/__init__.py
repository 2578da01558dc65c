"""Who can run a region: ONNX Runtime, torch."""
