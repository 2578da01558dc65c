"""Which ATen overload is converted by which function.

A converter is called as ``converter(ctx, node, *args, **kwargs)`` with the arguments of the FX node as they are: FX
nodes for tensors (and for symbolic integers), plain Python values for the rest. It emits ONNX nodes through ``ctx`` and
returns one value, or a tuple of them for an op with several results. What it cannot express it refuses by raising
:class:`Unsupported`: the node then stays in torch, with that reason in the report. Its docstring is the ATen schema.
"""

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from lightning_ort.compiler.report import Reason, ReasonType

Converter = Callable[..., Any]

CONVERTERS: dict[OpOverload, Converter] = {}


class Unsupported(Exception):
    """Raised by a converter for arguments that it cannot express.

    Args:
        text: What about the node is not supported, for a person.
        type: The kind of reason.

    """

    def __init__(self, text: str, type: ReasonType = ReasonType.UNSUPPORTED_ARGUMENTS) -> None:
        super().__init__(text)
        self.reason = Reason(type, text)


def converts(*overloads: OpOverload) -> Callable[[Converter], Converter]:
    """Register a converter for exact ATen overloads.

    Raises:
        TypeError: If one is not an overload, such as ``aten.add`` instead of ``aten.add.Tensor``.
        ValueError: If one has a converter already.

    """

    def register(converter: Converter) -> Converter:
        for overload in overloads:
            if not isinstance(overload, OpOverload):
                allowed = ", ".join(getattr(overload, "overloads", list)()) or "none known"
                raise TypeError(f"converts({overload}): name an overload, one of: {allowed}")
            if overload in CONVERTERS:
                raise ValueError(f"converts({overload}): already converted by {CONVERTERS[overload].__qualname__}")
            CONVERTERS[overload] = converter
        return converter

    return register
