"""The table of operations: what stands for each ATen overload, in runs and in exports.

The docstring of this package says what a function needs that converts one. Which of several holds is the order of

- a run: its converter (:func:`converts`); torch's decomposition; the operation stays in PyTorch
- a model for everywhere, which has no PyTorch at hand: what is traced in its place, with the gradient of that
  (:func:`in_parts` above autograd) or without; its form (:func:`form`); its converter; torch's decomposition; an error

An operation that one function writes with standard operators needs a converter alone, and is exported by it.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from lightning_ort.compat.torch_graphs import OpOverload, schema_of
from lightning_ort.compiler.reason import Reason, ReasonType

Converter = Callable[..., Any]

CONVERTERS: dict[OpOverload, Converter] = {}
FORMS: dict[OpOverload, Converter] = {}
PARTS: dict[OpOverload, Callable[..., Any]] = {}
PARTS_ABOVE_AUTOGRAD: dict[OpOverload, Callable[..., Any]] = {}
TIMED: set[OpOverload] = set()
TAKES_EMPTY: set[OpOverload] = set()


class Unsupported(Exception):
    """Raised by a converter for arguments that it cannot express; the text says what is not supported."""

    def __init__(self, text: str, type: ReasonType = ReasonType.UNSUPPORTED_ARGUMENTS) -> None:
        super().__init__(text)
        self.reason = Reason(type, text)


def converts(
    *overloads: OpOverload, timed: bool = False, takes_empty: bool = False
) -> Callable[[Converter], Converter]:
    """Register a converter for exact ATen overloads.

    Args:
        *overloads: The overloads.
        timed: Whether torch's kernel may be so much faster that a large op is timed by itself, before its region.
        takes_empty: Whether tensors without elements may be among its operands, and its results after the first.

    Raises:
        TypeError: If one is not an overload, such as ``aten.add`` instead of ``aten.add.Tensor``.
        ValueError: If one has a converter already, or the docstring is not the schema of one of them.
    """

    def register(converter: Converter) -> Converter:
        for overload in overloads:
            if not isinstance(overload, OpOverload):
                allowed = ", ".join(getattr(overload, "overloads", list)()) or "none known"
                raise TypeError(f"converts({overload}): name an overload, one of: {allowed}")
            if overload in CONVERTERS:
                raise ValueError(f"converts({overload}): already converted by {CONVERTERS[overload].__qualname__}")
        schemas = [schema for schema in map(schema_of, overloads) if schema is not None]
        if schemas and _names_in(converter.__doc__ or "") not in map(_names_in, schemas):
            raise ValueError(f"the docstring of {converter.__qualname__} must be a schema: {' or '.join(schemas)}")
        for overload in overloads:
            CONVERTERS[overload] = converter
            if timed:
                TIMED.add(overload)
            if takes_empty:
                TAKES_EMPTY.add(overload)
        return converter

    return register


def form(*overloads: OpOverload) -> Callable[[Converter], Converter]:
    """Register how ops are written in a model for everywhere, where a converter does it otherwise, or there is none."""
    return _entering(FORMS, "form", overloads)


def in_parts(
    *overloads: OpOverload, above_autograd: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what is traced in place of ops of a model for everywhere; ``NotImplemented`` leaves one whole.

    With ``above_autograd`` their gradient is that of the function's parts.
    """
    return _entering(PARTS_ABOVE_AUTOGRAD if above_autograd else PARTS, "in_parts", overloads)


def _entering(
    table: dict[OpOverload, Callable[..., Any]], what: str, overloads: Sequence[OpOverload]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that enters a function for ops in a table, once for each."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for overload in overloads:
            if overload in table:
                raise ValueError(f"{what}({overload}): already written by {table[overload].__qualname__}")
            table[overload] = function
        return function

    return register


def _names_in(schema: str) -> tuple[str, list[str], int]:
    """The names of the op and of its arguments, and the number of results; not the types and defaults."""
    signature, _, results = schema.partition(" -> ")
    name, _, arguments = signature.partition("(")
    without_defaults = re.sub(r"=(\[[^]]*\]|[^,)]*)", "", arguments.removesuffix(")"))
    names = [argument.split()[-1].rstrip("?") for argument in without_defaults.split(",") if argument.strip()]
    return name.rpartition("::")[2], names, results.count(",") + 1
