"""The command ``lightning-ort``.

- :mod:`~lightning_ort.cli.memory`: bytes of parameters, gradients and optimizer states
- :mod:`~lightning_ort.cli.convert`: a checkpoint of DeepSpeed's as a plain one
"""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from jsonargparse import auto_cli
    except ImportError:
        sys.exit("The command line needs jsonargparse: pip install 'lightning-ort[cli]'")
    from lightning_ort.cli.convert import convert
    from lightning_ort.cli.memory import memory

    auto_cli(
        {"convert": convert, "memory": memory}, prog="lightning-ort", description="ONNX Runtime for PyTorch Lightning"
    )
