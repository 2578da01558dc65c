"""What goes into a module's ``forward`` and what comes out, as named tensors."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_ort._imports import is_inherited
from lightning_ort.compat.torch import tree_map

# how weights are made smaller
Quantize = Literal["fp16", "int8"]
# a name for each tensor, in the lists and dicts that the tensors came in
Structure: TypeAlias = "str | list[Structure] | dict[str, Structure]"


def bind_sample(module: nn.Module, sample: Any = None) -> inspect.BoundArguments:
    """Match sample inputs with the parameters of a module's ``forward``, and move them to the module's device."""
    name = type(module).__name__
    if type(module).forward.__module__ == nn.Module.__module__ or is_inherited(type(module).forward):
        raise ValueError(f"{name} has no `forward` method to export. Define one; the steps can call it.")
    if sample is None:
        sample = getattr(module, "example_input_array", None)
    if sample is None:
        raise ValueError(
            f"{name} has no sample inputs to export it with. Set `self.example_input_array` in the module or pass a "
            "sample: a tensor, a tuple of positional arguments or a dict of arguments by name."
        )
    signature = inspect.signature(module.forward)
    try:
        if isinstance(sample, Mapping):
            bound = signature.bind(**sample)
        else:
            bound = signature.bind(*(sample if isinstance(sample, (tuple, list)) else (sample,)))
    except TypeError as error:
        raise TypeError(f"The sample inputs do not fit {name}.forward{signature}: {error}.") from None
    for key, value in named_inputs(bound).items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"The sample input {key!r} of {name} is a {type(value).__name__}; the inputs of an ONNX model are "
                "tensors. Leave it out if it has a default, or give it a default."
            )
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    return mapped(bound, lambda tensor: tensor.detach().to(device))


def named_inputs(bound: inspect.BoundArguments) -> dict[str, Tensor]:
    """Return each argument by its name; those of ``*args`` are numbered."""
    named: dict[str, Tensor] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}_{index}": item for index, item in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def mapped(bound: inspect.BoundArguments, function: Callable[[Tensor], Tensor]) -> inspect.BoundArguments:
    """Return the arguments with a function applied to each tensor."""
    arguments = {name: tree_map(function, value) for name, value in bound.arguments.items()}
    return inspect.BoundArguments(bound.signature, arguments)


def named_outputs(outputs: Any, taken: Iterable[str]) -> tuple[Structure, dict[str, Tensor]]:
    """Name the tensors that a ``forward`` returned, alone or in tuples, lists and mappings.

    Returns the names where the tensors were, and the tensors by name in the order in which torch.export flattens them.
    A name in ``taken``, which an input has, is not used again.
    """
    named: dict[str, Tensor] = {}

    def structure(value: Any, path: str) -> Structure:
        if isinstance(value, Mapping):
            return {str(key): structure(item, f"{path}_{key}".lstrip("_")) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            return [structure(item, f"{path or 'output'}_{index}") for index, item in enumerate(value)]
        if not isinstance(value, Tensor):
            raise TypeError(
                f"forward returned a {type(value).__name__} ({path or 'output'}); the outputs of an ONNX model are "
                "tensors, alone or in tuples, lists and dicts."
            )
        name = path or "output"
        while name in named or name in taken:
            name += "_out"
        named[name] = value
        return name

    taken = set(taken)
    return structure(outputs, ""), named


def restored(structure: Structure, named: Mapping[str, Any]) -> Any:
    """Put values where their names are; lists become tuples."""
    if isinstance(structure, str):
        return named[structure]
    if isinstance(structure, list):
        return tuple(restored(item, named) for item in structure)
    return {key: restored(item, named) for key, item in structure.items()}
