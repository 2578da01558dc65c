"""Which ATen overload is converted by which function.

A converter is called as ``converter(ctx, node, *args, **kwargs)`` with the arguments of the FX node as they are: FX
nodes for tensors (and for symbolic integers), plain Python values for the rest. It emits ONNX nodes through ``ctx`` and
returns one value, or a tuple of them for an op with several results. What it cannot express it refuses by raising
:class:`Unsupported`: the node then stays in torch, with that reason in the report. Its docstring is the ATen schema.

Some ops can be written in several variants: a contributed kernel, or an expansion into ONNX's own ops. Their converters
list them, ask ``ctx.variant(node)`` which to write, and :mod:`~lightning_ort.compiler.autotune` times them.
"""

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from lightning_ort.compiler.report import Reason, ReasonType

Converter = Callable[..., Any]

CONVERTERS: dict[OpOverload, Converter] = {}
VARIANTS: dict[OpOverload, tuple[str, ...]] = {}

EXPANDED = "expanded"


class Unsupported(Exception):
    """Raised by a converter for arguments that it cannot express.

    Args:
        text: What about the node is not supported, for a person.
        type: The kind of reason.

    """

    def __init__(self, text: str, type: ReasonType = ReasonType.UNSUPPORTED_ARGUMENTS) -> None:
        super().__init__(text)
        self.reason = Reason(type, text)


def converts(*overloads: OpOverload, variants: tuple[str, ...] = ()) -> Callable[[Converter], Converter]:
    """Register a converter for exact ATen overloads.

    Args:
        *overloads: The overloads.
        variants: What it can write, the default first: names of training kernels, and :data:`EXPANDED`. An op with any
            is timed by itself, against torch's kernel too.

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
            if variants:
                VARIANTS[overload] = variants
        return converter

    return register
