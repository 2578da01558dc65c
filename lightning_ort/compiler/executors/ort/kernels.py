"""The installed onnxruntime and the kernels it has, which are found by loading small models, not by version."""

import functools
import importlib.metadata
import logging
import re
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from lightning_ort.compat.onnxruntime import binds_bfloat16, ep_devices, import_onnxruntime, without_device_warning
from lightning_ort.compiler.executors.ort.providers import CPU, PROVIDERS, provider_of
from lightning_ort.compiler.executors.ort.streams import on_device
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.regions.reproducer_script import DISABLED_OPTIMIZERS
from lightning_ort.config import ORTConfig

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime

    from lightning_ort.compiler.regions.region import Region

log = logging.getLogger(__name__)

# all of them install the same import package `onnxruntime`
_BUILDS = ("", "-gpu", "-training", "-training-cpu", "-directml", "-openvino", "-qnn")
DISTRIBUTIONS = tuple(f"onnxruntime{build}" for build in _BUILDS)
MINIMUM = Version("1.19")
INSTALL = "pip install onnxruntime-training-cpu (Python up to 3.12; or onnxruntime, onnxruntime-gpu)"

# gradient operators that are no slower than their expansion: shapes of float32 inputs, number of outputs, attributes
_MATRIX = (2, 2)
TRAINING_OPS: dict[str, tuple[tuple[tuple[int, ...], ...], int, dict[str, Any]]] = {
    "LayerNormalizationGrad": ((_MATRIX, _MATRIX, (2,), (2, 1), (2, 1)), 3, {"axis": -1}),
    "SoftmaxGrad_13": ((_MATRIX, _MATRIX), 1, {"axis": -1}),
}

ANY_GPU = torch.device("cuda")
_CPU = torch.device("cpu")

_load_errors: dict[Hashable, str | None] = {}


def unavailable(loads: bool = True) -> Reason | None:
    """Return why onnxruntime cannot be used here, or ``None`` if it can, as far as is known before it loads."""
    text = _unavailable_text(loads)
    return None if text is None else Reason(ReasonType.RUNTIME_UNAVAILABLE, text)


def _unavailable_text(loads: bool) -> str | None:
    found = builds()
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
    if not loads:
        return None
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
        return _version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None  # until somebody installs it


_seen_builds: dict[str, str] = {}


def builds() -> dict[str, str]:
    """Return the installed builds of onnxruntime with their versions, which are looked for until there is one."""
    if not _seen_builds:
        _seen_builds.update({name: version for name in DISTRIBUTIONS if (version := installed(name))})
    return _seen_builds


@functools.cache
def _version(distribution: str) -> str:
    found = importlib.metadata.distribution(distribution)
    # `version` parses all of a file that ends with a readme, in a millisecond
    line = re.search("^Version: *(.*)", found.read_text("METADATA") or "", re.MULTILINE)
    return line[1] if line else found.version


def check_config(config: ORTConfig) -> None:
    """Raise ``ValueError`` if the installed onnxruntime lacks a provider or the kernels that the config names."""
    available = available_providers()
    for provider in config.debug.providers or ():
        if provider not in available:
            raise ValueError(f"providers: {provider} is not in this onnxruntime; available are {', '.join(available)}.")
    Kernels(config.debug.kernels, config.debug.providers or (CPU,), current_device(config.debug.providers or (CPU,)))


def available_providers() -> list[str]:
    """Return the execution providers of the installed onnxruntime, with those that were added to it as plug-ins."""
    return list(dict.fromkeys([*import_onnxruntime().get_available_providers(), *ep_devices()]))


def current_device(providers: Sequence[str]) -> torch.device:
    """Return the device on which providers are asked what they can do, before there is any tensor."""
    if not _are_for_cuda(providers):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def providers_for(device: torch.device) -> tuple[str, ...] | None:
    """Return the installed execution providers for tensors on a device, or ``None``."""
    installed = available_providers()
    fitting = [name for name, one in PROVIDERS.items() if one.by_default and one.tensors == device.type]
    first = next((name for name in fitting if name in installed), None)
    return None if first is None else tuple(dict.fromkeys((first, CPU)))


def _are_for_cuda(providers: Sequence[str]) -> bool:
    return any(provider_of(name).tensors == "cuda" for name in providers)


def session_options(threads: int) -> "onnxruntime.SessionOptions":
    """Return the options of every session, with a number of intra-op threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised, and we report them
    # the threads spin between two kernels, but not after the last one, when torch needs the cores
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def new_session(
    model: bytes | str,
    options: "onnxruntime.SessionOptions",
    providers: Sequence[str],
    device: torch.device,
    region: "Region | None" = None,
    stream: torch.cuda.Stream | None = None,
    *,
    disabled_optimizers: Sequence[str] = DISABLED_OPTIMIZERS,
) -> "onnxruntime.InferenceSession":
    """Return a session, on the GPU of ``device`` if a provider is for one; torch's current device stays as it is."""
    import onnxruntime

    built_in = onnxruntime.get_available_providers()
    configured = with_options(providers, device, region, stream)
    plug_ins = [(name, own) for name, own in configured if name not in built_in]
    if plug_ins:
        for name, own in plug_ins:
            options.add_provider_for_devices(ep_devices()[name], own)
        return onnxruntime.InferenceSession(model, options, disabled_optimizers=disabled_optimizers)
    quiet = without_device_warning() if device.index else nullcontext()
    with on_device(device if _are_for_cuda(providers) else torch.device("cpu")), quiet:
        return onnxruntime.InferenceSession(
            model, options, providers=configured, disabled_optimizers=disabled_optimizers
        )


def with_options(
    names: Sequence[str], device: torch.device, region: "Region | None" = None, stream: torch.cuda.Stream | None = None
) -> list[tuple[str, dict[str, str]]]:
    """Return providers with their options for a device, and for a region if it is for one."""
    # 0 is the default; of a number that is given, 1.31 says that no plug-in has it
    number = {"device_id": str(device.index)} if device.index else {}
    return [
        (name, {**(number if one.takes_number else {}), **({} if region is None else one.options(region, stream))})
        for name, one in zip(names, map(provider_of, names), strict=True)
    ]


def _described(node: "ir.Node") -> tuple[Any, ...]:
    cast_to = node.attributes["to"].value if "to" in node.attributes else None
    return (node.domain, node.op_type, len(node.outputs), *sorted(node.attributes), cast_to)


class Kernels:
    """The kernels that converters may use with these execution providers and :class:`ORTConfig`'s ``kernels=mode``.

    They are looked for on ``device``. Raises ``ValueError`` if ``mode`` is ``"training"`` and the installed onnxruntime
    has no gradient kernels.
    """

    def __init__(self, mode: str, providers: tuple[str, ...], device: torch.device = _CPU) -> None:
        self.providers = providers
        self.device = device
        self._standard = mode == "standard"
        if mode == "training" and not any(_has_training_kernel(op, providers, device) for op in TRAINING_OPS):
            raise ValueError(
                "kernels='training': the installed onnxruntime has no gradient kernels; "
                "pip install onnxruntime-training-cpu, or use kernels='auto'."
            )

    def has_training(self, op_type: str) -> bool:
        """Return whether a gradient operator of ``TRAINING_OPS`` may be used."""
        return not self._standard and _has_training_kernel(op_type, self.providers, self.device)

    def bfloat16_missing(self) -> str | None:
        """Return why no tensor of bfloat16 can be handed to a session, or ``None``."""
        import onnxruntime

        if binds_bfloat16():
            return None
        return f"onnxruntime {onnxruntime.__version__} cannot bind a tensor of bfloat16; 1.20 and later ones can"

    def provider_failure(self) -> str | None:
        """Return why a provider that the build contains does not load here, or ``None``."""
        first = self.providers[0]
        load_error = provider_of(first).load_error
        if load_error is None or (error := self.missing(_of_one_node("Identity", [(1,)]))) is None:
            return None
        return f"{first} does not load: {load_error() or error}"

    def missing(self, model: "ir.Model") -> str | None:
        """Return why onnxruntime does not load a small model, such as a missing kernel, or ``None``.

        The answer is remembered for models with the same operators, attribute names, casts and input dtypes.
        """
        graph = model.graph
        key = (
            self.providers,
            tuple(map(_described, graph)),
            tuple((value.dtype, value.shape.rank() if value.shape else None) for value in graph.inputs),
        )
        if key not in _load_errors:
            _load_errors[key] = _load_error(model, self.providers, self.device)
        return _load_errors[key]


def _load_error(model: "ir.Model", providers: tuple[str, ...], device: torch.device) -> str | None:
    import onnx_ir as ir  # not at the top: it loads onnx, and the report asks here for versions alone
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if provider_of(providers[0]).asked_alone:
        # beside the CPU's provider every op has a kernel, and two copies between the memories
        providers = providers[:1]
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        new_session(ir.to_proto(model).SerializeToString(), options, providers, device)
    except Exception as error:  # onnxruntime's own exceptions derive from Exception directly
        return str(error).strip().splitlines()[0]
    return None


def _of_one_node(
    op_type: str,
    shapes: Sequence[tuple[int, ...]],
    domain: str = "",
    num_outputs: int = 1,
    attributes: dict[str, Any] | None = None,
) -> "ir.Model":
    import onnx_ir as ir

    float32 = ir.TensorType(ir.DataType.FLOAT)
    inputs = [ir.Value(name=f"i{index}", type=float32, shape=ir.Shape(shape)) for index, shape in enumerate(shapes)]
    node = ir.node(op_type, inputs, attributes or {}, domain=domain, num_outputs=num_outputs)
    for index, output in enumerate(node.outputs):
        output.name, output.type = f"o{index}", float32
    node.outputs[0].shape = inputs[0].shape
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 18, "com.microsoft": 1}, name=op_type)
    return ir.Model(graph, ir_version=10)


@functools.cache
def _has_training_kernel(op_type: str, providers: tuple[str, ...], device: torch.device) -> bool:
    shapes, num_outputs, attributes = TRAINING_OPS[op_type]
    model = _of_one_node(op_type, shapes, "com.microsoft", num_outputs, attributes)
    error = _load_error(model, providers, device)
    log.debug("training kernel %s: %s", op_type, error or "found")
    return error is None
