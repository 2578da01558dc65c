"""A trained module as an ONNX model, and back into a Trainer that predicts with it."""
