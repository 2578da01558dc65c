"""A module's training step as an ONNX model, which trains where PyTorch is not.

In reading order:

- :mod:`.export`: from a LightningModule and a batch to a folder: :func:`~.export.export_training`
- :mod:`.batch`: the fields of a batch, by name, and which of its sizes may change
- :mod:`.steps`: the steps that become models, each a function of tensors, without a Trainer
- :mod:`.tracing`: the step and its gradients as one ATen graph
- :mod:`.graph`: the ONNX graph, of standard operators alone; its :mod:`.forms`; and :mod:`.random` numbers
- :mod:`.optimizers`: the update of the parameters
- :mod:`.models`: the three models of a folder
- :mod:`.verify`: some steps in onnxruntime and in PyTorch, compared, and for which sizes
- :mod:`.folder`: the files; :mod:`.runner` is copied into it
- :mod:`.restore`: back into PyTorch
"""
