"""An ONNX model run by ONNX Runtime on torch tensors: :class:`OnnxSession`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ort._arguments import check_path, passed
from lightning_ort.compat.onnxruntime import import_onnxruntime
from lightning_ort.compiler.executors.ort.conversion.metadata import DTYPES, element_type
from lightning_ort.compiler.executors.ort.kernels import (
    available_providers,
    current_device,
    new_session,
    session_options,
)
from lightning_ort.compiler.executors.ort.providers import CUDA
from lightning_ort.compiler.executors.ort.session import provider_missing_reason
from lightning_ort.compiler.executors.ort.streams import on_device
from lightning_ort.onnx_export.signature import Structure, restored

# how onnxruntime writes a type
_DTYPES = {f"tensor({data_type.name.lower()})": dtype for dtype, data_type in DTYPES.items()}
METADATA_PREFIX = "lightning_ort."


@dataclass(frozen=True)
class Value:
    """An input or output of a model."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str | None, ...]  # a name for a size that may change

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


class OnnxSession:
    """An ONNX model that takes and gives torch tensors, without copying them where they are on the provider's device.

    With the CUDA provider first, tensors on its GPU are read and written there. Outputs whose shape is only known after
    the run are copied once. Tensors on another device are copied to the CPU and back. It has as many threads as torch
    has when it is made. Arguments and errors are those of :class:`~lightning_ort.ORTPredictor`.
    """

    def __init__(self, path: Path | str, providers: Sequence[str] = ("CPUExecutionProvider",)) -> None:
        import_onnxruntime()
        self.path = Path(check_path("path", path))
        available = available_providers()
        if isinstance(providers, str) or not isinstance(providers, Sequence) or not providers:
            raise TypeError(f"{passed('providers', providers)}: pass a list of one or more of {', '.join(available)}.")
        self.providers = tuple(providers)
        if not self.path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file. `lightning-ort export` writes one.")
        for provider in self.providers:
            if provider not in available:
                raise ValueError(f"providers: this onnxruntime has no {provider}; it has {', '.join(available)}.")
        options = session_options(torch.get_num_threads())
        try:
            # as any other program would load it, so that what is verified here is right there
            self._session = new_session(
                str(self.path), options, self.providers, current_device(self.providers), disabled_optimizers=()
            )
        except Exception as error:  # onnxruntime raises classes of its own that derive from Exception alone
            raise ValueError(f"{path}: onnxruntime cannot load it. {error}") from error
        if (obstacle := provider_missing_reason(self._session, self.providers[0])) is not None:
            raise RuntimeError(obstacle)
        properties = self._session.get_modelmeta().custom_metadata_map
        try:
            self.metadata: dict[str, Any] = {
                key.removeprefix(METADATA_PREFIX): json.loads(text)
                for key, text in properties.items()
                if key.startswith(METADATA_PREFIX)
            }
            self.inputs = self._values(self._session.get_inputs(), "inputs")
            self.outputs = self._values(self._session.get_outputs(), "outputs")
        except (AttributeError, KeyError, TypeError, RecursionError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: `lightning-ort export` did not write its metadata: {error!r}") from error
        names = [value.name for value in self.outputs]
        self._structure: Structure = self.metadata.get("structure", names[0] if len(names) == 1 else names)
        self._used = {argument.name for argument in self._session.get_inputs()}

    def __call__(self, inputs: Mapping[str, Tensor]) -> Any:
        """Run the model on all inputs by name; see :class:`~lightning_ort.ORTPredictor`.

        A model from elsewhere returns a tensor or a tuple of tensors. Results are on the device of the first input.
        """
        sizes = self._check(inputs)
        device = next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
        memory = self._memory_for(device)
        place = (memory.type, memory.index or 0)
        binding = self._session.io_binding()
        kept = {name: tensor.detach().to(memory).contiguous() for name, tensor in inputs.items() if name in self._used}
        for name, tensor in kept.items():
            binding.bind_input(name, *place, element_type(tensor.dtype), tuple(tensor.shape), tensor.data_ptr())
        results: dict[str, Tensor | None] = {}
        for value in self.outputs:
            shape = [size if isinstance(size, int) else sizes.get(size) for size in value.shape]
            if None in shape or 0 in shape:  # onnxruntime takes no address of an empty tensor
                binding.bind_output(value.name, "cpu")
                results[value.name] = None
                continue
            tensor = torch.empty(shape, dtype=value.dtype, device=memory)  # type: ignore[arg-type]
            results[value.name] = tensor
            binding.bind_output(value.name, *place, element_type(value.dtype), shape, tensor.data_ptr())
        if memory.type == "cuda":  # the session has a stream of its own, for which it waits at the end of a run
            torch.cuda.current_stream(memory).synchronize()
        with on_device(memory):
            self._session.run_with_iobinding(binding)
        for (name, result), output in zip(results.items(), binding.get_outputs(), strict=True):
            results[name] = (torch.from_numpy(output.numpy()) if result is None else result).to(device)
        return restored(self._structure, results)

    def _memory_for(self, device: torch.device) -> torch.device:
        """Where the tensors of a run are: on the session's GPU if they come from there, else on the CPU."""
        if device.type != "cuda" or self.providers[0] != CUDA:
            return torch.device("cpu")
        own = int(self._session.get_provider_options()[CUDA].get("device_id", 0))
        return device if (device.index or 0) == own else torch.device("cpu")

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "providers": self.providers}  # a session cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def describe_inputs(self) -> str:
        """Return how the inputs are called and what they are, for messages."""
        return ", ".join(map(str, self.inputs))

    def _values(self, arguments: Sequence[Any], kind: str) -> tuple[Value, ...]:
        if kind in self.metadata:  # onnxruntime leaves out inputs that no node reads
            return tuple(
                Value(item["name"], getattr(torch, item["dtype"]), tuple(item["shape"])) for item in self.metadata[kind]
            )
        for argument in arguments:
            if argument.type not in _DTYPES:
                raise ValueError(
                    f"{self.path}: {argument.name!r} has the type {argument.type}, for which torch has no tensor."
                )
        return tuple(Value(argument.name, _DTYPES[argument.type], tuple(argument.shape)) for argument in arguments)

    def _check(self, inputs: Mapping[str, Tensor]) -> dict[str | None, int]:
        """Refuse what the model does not take, and return the sizes that may change."""
        if {value.name for value in self.inputs} != set(inputs):
            given = ", ".join(map(str, inputs)) or "none"
            raise TypeError(f"{self.path.name} expects the inputs {self.describe_inputs()}; got: {given}.")
        sizes: dict[str | None, int] = {}
        for value in self.inputs:
            tensor = inputs[value.name]
            if not isinstance(tensor, Tensor):
                raise TypeError(f"Input {value.name!r} is a {type(tensor).__name__}; pass a torch.Tensor.")
            if tensor.numel() == 0:
                raise ValueError(
                    f"Input {value.name!r} is empty, and ONNX Runtime's kernels fail on empty tensors: leave it out."
                )
            if tensor.dtype != value.dtype:
                raise TypeError(f"Input {value.name!r} is {tensor.dtype}, but {self.path.name} expects {value}.")
            shape = tuple(tensor.shape)
            fits = len(shape) == len(value.shape) and all(
                expected is None
                or size == (expected if isinstance(expected, int) else sizes.setdefault(expected, size))
                for size, expected in zip(shape, value.shape, strict=True)
            )
            if not fits:
                found = f" with {sizes}" if sizes else ""
                raise ValueError(
                    f"Input {value.name!r} has shape {shape}, but {self.path.name} expects {value}{found}."
                )
        return sizes
