"""The installed onnxruntime and the kernels it has, which are found by loading small models, not by version."""

import functools
import importlib.metadata
import logging
from collections.abc import Hashable
from typing import Any

import onnx_ir as ir
import torch
from packaging.version import Version

from lightning_ort.compat.onnxruntime import import_onnxruntime
from lightning_ort.compiler.report import Reason, ReasonType
from lightning_ort.config import ORTConfig

log = logging.getLogger(__name__)

# all of them install the same import package `onnxruntime`
_BUILDS = ("", "-gpu", "-training", "-training-cpu", "-directml", "-openvino", "-qnn")
DISTRIBUTIONS = tuple(f"onnxruntime{build}" for build in _BUILDS)
MINIMUM = Version("1.19")
INSTALL = "pip install onnxruntime-training-cpu (Python up to 3.12; or onnxruntime, onnxruntime-gpu)"

# contributed gradient operators: the shapes of their float32 inputs, number of outputs, attributes
_MATRIX = (2, 2)
TRAINING_OPS: dict[str, tuple[tuple[tuple[int, ...], ...], int, dict[str, Any]]] = {
    "LayerNormalizationGrad": ((_MATRIX, _MATRIX, (2,), (2, 1), (2, 1)), 3, {"axis": -1}),
    "SoftmaxGrad_13": ((_MATRIX, _MATRIX), 1, {"axis": -1}),
    "LogSoftmaxGrad_13": ((_MATRIX, _MATRIX), 1, {"axis": -1}),
    **dict.fromkeys(("GeluGrad", "FastGeluGrad", "ReluGrad", "SigmoidGrad", "TanhGrad"), ((_MATRIX, _MATRIX), 1, {})),
}

_load_errors: dict[Hashable, str | None] = {}


def unavailable() -> Reason | None:
    """Return why onnxruntime cannot be used here, or ``None`` if it can."""
    text = _unavailable_text()
    return None if text is None else Reason(ReasonType.RUNTIME_UNAVAILABLE, text)


def _unavailable_text() -> str | None:
    found = {name: version for name in DISTRIBUTIONS if (version := installed(name))}
    if not found:
        return f"no onnxruntime is installed; {INSTALL}"
    if len(found) > 1:
        listed = " and ".join(f"{name} {version}" for name, version in found.items())
        return (
            f"{listed} are installed together and overwrite each other's files; uninstall all, then install one: "
            f"pip uninstall -y {' '.join(found)} && {INSTALL}"
        )
    ((name, version),) = found.items()
    if Version(version) < MINIMUM:
        return f"{name} {version} is too old, {MINIMUM} is the oldest supported version; {INSTALL}"
    try:
        onnxruntime = import_onnxruntime()
    except Exception as error:  # a broken build fails in many ways: ImportError, OSError, AttributeError
        return f"{name} {version} does not import: {error}"
    if not hasattr(onnxruntime, "InferenceSession"):  # an empty folder imports
        return (
            f"files of {name} {version} are missing, which happens when another build is uninstalled after it; "
            f"install it again: pip install --force-reinstall --no-deps {name}=={version}"
        )
    return None


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or ``None``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_config(config: ORTConfig) -> None:
    """Raise ``ValueError`` if the installed onnxruntime lacks a provider or the kernels that the config names."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    for provider in config.providers or ():
        if provider not in available:
            raise ValueError(f"providers: {provider} is not in this onnxruntime; available are {', '.join(available)}.")
    Kernels(config.kernels, config.providers or ("CPUExecutionProvider",))


def providers_for(device: torch.device) -> tuple[str, ...] | None:
    """Return the installed execution providers for tensors on a device, or ``None``."""
    import onnxruntime

    if device.type == "cpu":
        return ("CPUExecutionProvider",)
    if device.type == "cuda" and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return ("CUDAExecutionProvider", "CPUExecutionProvider")
    return None


class Kernels:
    """The kernels that converters may use with these execution providers and :class:`ORTConfig`'s ``kernels=mode``.

    Raises ``ValueError`` if ``mode`` is ``"training"`` and the installed onnxruntime has no gradient kernels.
    """

    def __init__(self, mode: str, providers: tuple[str, ...]) -> None:
        self.providers = providers
        self._standard = mode == "standard"
        if mode == "training" and not any(_has_training_kernel(op, providers) for op in TRAINING_OPS):
            raise ValueError(
                "kernels='training': the installed onnxruntime has no gradient kernels; "
                "pip install onnxruntime-training-cpu, or use kernels='auto'."
            )

    def has_training(self, op_type: str) -> bool:
        """Return whether a gradient operator of ``TRAINING_OPS`` may be used."""
        if op_type not in TRAINING_OPS:
            raise KeyError(f"{op_type} is not among TRAINING_OPS")
        return not self._standard and _has_training_kernel(op_type, self.providers)

    def missing(self, model: ir.Model) -> str | None:
        """Return why onnxruntime does not load a small model, such as a missing kernel, or ``None``.

        The answer is remembered for models with the same operators, attribute names and input dtypes.
        """
        graph = model.graph
        key = (
            self.providers,
            tuple((node.domain, node.op_type, len(node.outputs), *sorted(node.attributes)) for node in graph),
            tuple((value.dtype, value.shape.rank() if value.shape else None) for value in graph.inputs),
        )
        if key not in _load_errors:
            _load_errors[key] = _load_error(model, self.providers)
        return _load_errors[key]


def _load_error(model: ir.Model, providers: tuple[str, ...]) -> str | None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=list(providers))
    except Exception as error:  # onnxruntime's own exceptions derive from Exception directly
        return str(error).strip().splitlines()[0]
    return None


@functools.cache
def _has_training_kernel(op_type: str, providers: tuple[str, ...]) -> bool:
    shapes, num_outputs, attributes = TRAINING_OPS[op_type]
    float32 = ir.TensorType(ir.DataType.FLOAT)
    inputs = [ir.Value(name=f"i{index}", type=float32, shape=ir.Shape(shape)) for index, shape in enumerate(shapes)]
    node = ir.node(op_type, inputs, attributes, domain="com.microsoft", num_outputs=num_outputs)
    for index, output in enumerate(node.outputs):
        output.name, output.type = f"o{index}", float32
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 18, "com.microsoft": 1}, name=op_type)
    error = _load_error(ir.Model(graph, ir_version=10), providers)
    log.debug("training kernel %s: %s", op_type, error or "found")
    return error is None
