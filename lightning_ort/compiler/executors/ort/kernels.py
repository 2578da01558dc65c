"""Which onnxruntime is installed, and which kernels it really has: asked by loading models, not by version."""

import functools
import importlib
import importlib.metadata
import logging
import sys
from types import ModuleType
from typing import Any

import onnx_ir as ir
import torch
from packaging.version import Version

from lightning_ort.compiler.report import Reason, ReasonType
from lightning_ort.config import ORTConfig

log = logging.getLogger(__name__)

# all of these install the same import package `onnxruntime`
DISTRIBUTIONS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
)
MINIMUM = Version("1.19")
INSTALL = "pip install onnxruntime-training-cpu (Python up to 3.12; or onnxruntime, onnxruntime-gpu)"

# contributed gradient operators: inputs (None: float32 of 2 dimensions, else shape), outputs, attributes
_F = (2, 2)
TRAINING_OPS: dict[str, tuple[tuple[tuple[int, ...], ...], int, dict[str, Any]]] = {
    "LayerNormalizationGrad": ((_F, _F, (2,), (2, 1), (2, 1)), 3, {"axis": -1}),
    "SoftmaxGrad_13": ((_F, _F), 1, {"axis": -1}),
    "LogSoftmaxGrad_13": ((_F, _F), 1, {"axis": -1}),
    "GeluGrad": ((_F, _F), 1, {}),
    "FastGeluGrad": ((_F, _F), 1, {}),
    "ReluGrad": ((_F, _F), 1, {}),
    "SigmoidGrad": ((_F, _F), 1, {}),
    "TanhGrad": ((_F, _F), 1, {}),
}


def import_onnxruntime() -> ModuleType:
    """Import onnxruntime without ORTModule, which the training build imports by itself (1.19).

    It does not import on today's torch. The attempt takes seconds and 40 MB, imports DeepSpeed where that is installed,
    and leaves ``torch.utils.checkpoint.checkpoint`` replaced. ``import onnxruntime.training`` works as ever afterwards.
    """
    name = "onnxruntime.training"
    if "onnxruntime" not in sys.modules:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: an import of it fails
    try:
        return importlib.import_module("onnxruntime")
    finally:
        if sys.modules.get(name, sys) is None:
            del sys.modules[name]


def unavailable() -> Reason | None:
    """Why onnxruntime cannot be used here, or ``None`` if it can."""
    found = {name: version for name in DISTRIBUTIONS if (version := installed(name))}
    if not found:
        return Reason(ReasonType.RUNTIME_UNAVAILABLE, f"no onnxruntime is installed; {INSTALL}")
    if len(found) > 1:
        listed = " and ".join(f"{name} {version}" for name, version in found.items())
        return Reason(
            ReasonType.RUNTIME_UNAVAILABLE,
            f"{listed} are installed together and overwrite each other's files; uninstall all, then install one: "
            f"pip uninstall -y {' '.join(found)} && {INSTALL}",
        )
    ((name, version),) = found.items()
    if Version(version) < MINIMUM:
        return Reason(
            ReasonType.RUNTIME_UNAVAILABLE, f"{name} {version} is too old, {MINIMUM} is the oldest supported; {INSTALL}"
        )
    try:
        onnxruntime = import_onnxruntime()
    except Exception as error:  # a broken build fails in many ways: ImportError, OSError, AttributeError
        return Reason(ReasonType.RUNTIME_UNAVAILABLE, f"{name} {version} does not import: {error}")
    if not hasattr(onnxruntime, "InferenceSession"):  # an empty folder imports
        return Reason(
            ReasonType.RUNTIME_UNAVAILABLE,
            f"files of {name} {version} are missing, as when another build was uninstalled after it; install it again: "
            f"pip install --force-reinstall --no-deps {name}=={version}",
        )
    return None


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or ``None``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_config(config: ORTConfig) -> None:
    """Refuse what the installed onnxruntime cannot give.

    Raises:
        ValueError: If it lacks a provider or the kernels that the config names.

    """
    import onnxruntime

    available = onnxruntime.get_available_providers()
    for provider in config.providers or ():
        if provider not in available:
            raise ValueError(f"providers: {provider} is not in this onnxruntime; available are {', '.join(available)}.")
    if config.kernels == "training":
        Kernels(config.kernels, config.providers or ("CPUExecutionProvider",))


class Kernels:
    """What converters may use on one device.

    Args:
        mode: ``"auto"``, ``"training"`` or ``"standard"``, see :class:`~lightning_ort.config.ORTConfig`.
        providers: The execution providers of the sessions.

    Raises:
        ValueError: If ``mode`` is ``"training"`` and the installed onnxruntime has no gradient kernels.

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
        """Whether the gradient operator ``op_type`` may be used."""
        if op_type not in TRAINING_OPS:
            raise KeyError(f"{op_type} is not among TRAINING_OPS")
        return not self._standard and _has_training_kernel(op_type, self.providers)

    def missing(self, model: ir.Model) -> str | None:
        """Why the nodes of a small model have no kernel, or ``None`` where all have one.

        The answer is kept by operators, attribute names and input dtypes.
        """
        graph = model.graph
        key = (
            tuple((node.domain, node.op_type, len(node.outputs), *sorted(node.attributes)) for node in graph),
            tuple((value.dtype, value.shape.rank() if value.shape else None) for value in graph.inputs),
        )
        return _load_error(key, self.providers, _Model(model))


class _Model:
    """Carries a model past a cache that must not look at it."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Model)

    def __hash__(self) -> int:
        return 0


@functools.cache
def _load_error(key: tuple[Any, ...], providers: tuple[str, ...], carrier: _Model) -> str | None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        model = ir.to_proto(carrier.model).SerializeToString()
        onnxruntime.InferenceSession(model, options, providers=list(providers))
    except Exception as error:  # onnxruntime raises classes of its own that derive from Exception alone
        return str(error).strip().splitlines()[0]
    finally:
        carrier.model = None  # type: ignore[assignment]  # the cache keeps the key, not the model
    return None


@functools.cache
def _has_training_kernel(op_type: str, providers: tuple[str, ...]) -> bool:
    shapes, num_outputs, attributes = TRAINING_OPS[op_type]
    inputs = [
        ir.Value(name=f"i{index}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        for index, shape in enumerate(shapes)
    ]
    node = ir.node(op_type, inputs, attributes, domain="com.microsoft", num_outputs=num_outputs)
    for index, output in enumerate(node.outputs):
        output.name = f"o{index}"
        output.type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 18, "com.microsoft": 1}, name=op_type)
    error = _load_error((op_type,), providers, _Model(ir.Model(graph, ir_version=10)))
    log.debug("training kernel %s: %s", op_type, error or "found")
    return error is None


def providers_for(device: torch.device) -> tuple[str, ...] | None:
    """The installed execution providers that serve tensors on ``device``, or ``None``."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if device.type == "cpu":
        return ("CPUExecutionProvider",)
    if device.type == "cuda" and "CUDAExecutionProvider" in available:
        return ("CUDAExecutionProvider", "CPUExecutionProvider")
    return None
