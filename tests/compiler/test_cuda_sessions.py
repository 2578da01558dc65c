"""How sessions on a GPU are built, how their runs are ordered with torch's, and what is kept; without a GPU."""

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ort import ORTConfig
from lightning_ort.compiler.cache import fingerprint
from lightning_ort.compiler.cache.cache import Cache
from lightning_ort.compiler.executors.ort import kernels, providers, streams
from lightning_ort.compiler.executors.ort.binding import BoundSession
from lightning_ort.compiler.executors.ort.executor import OrtExecutor
from lightning_ort.compiler.executors.ort.streams import OrderedRun
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.regions.region import Region
from lightning_ort.onnx_export.session import OnnxSession, Value
from tests.compiler.fake_cuda import CUDA, FakeCuda, Session, Stream, run_op


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def build_one(cuda: FakeCuda, function: Any = lambda x: x.relu() + 1, **settings: Any) -> Any:
    run_op(function, torch.randn(4, 4), **settings)
    return cuda.sessions[-1]


def test_torchs_default_stream_has_a_name(cuda: FakeCuda) -> None:
    options = cuda.options(build_one(cuda))
    assert (options["user_compute_stream"], options["device_id"]) == ("1", "0")


def test_a_stream_that_onnxruntime_did_not_take_is_refused(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LEGACY_STREAM", 0)  # as it was
    report = run_op(lambda x: x.relu() + 1, torch.randn(4, 4))
    (fallback,) = report.fallbacks
    assert fallback.reason.type is ReasonType.SESSION_FAILED
    assert "'has_user_compute_stream': '0'" in fallback.reason.text


@pytest.mark.parametrize("index", [0, 1])
def test_onnxruntime_is_not_asked_to_warn_of_each_session(
    index: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.31 warns where the number of a GPU is given, whatever the severity of the session."""
    severities, asked = [2], list[Any]()
    monkeypatch.setattr("onnxruntime.set_default_logger_severity", severities.append)
    build = Session.__new__
    monkeypatch.setattr(Session, "__new__", lambda cls, *args, **kwargs: note(build(cls, *args, **kwargs)))

    def note(session: Any) -> Any:
        asked.append(("device_id" in dict(session.configured)["CUDAExecutionProvider"], severities[-1]))
        return session

    OrtExecutor(ORTConfig(), torch.device("cuda", index)).kernels.missing(relu_model())
    assert asked == [(False, 2) if index == 0 else (True, 3)]
    assert severities[-1] == 2


def relu_model() -> ir.Model:
    float32, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1])
    node = ir.node("Relu", [ir.Value(name="i0", type=float32, shape=shape)])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "o0", float32, shape
    return ir.Model(
        ir.Graph(node.inputs, node.outputs, nodes=[node], opset_imports={"": 18}, name="relu"), ir_version=10
    )


@pytest.mark.parametrize("current", [0, 1])
def test_probes_are_on_the_device_and_leave_the_current_one(current: int, cuda: FakeCuda) -> None:
    cuda.device, device = current, torch.device("cuda", 1)
    assert OrtExecutor(ORTConfig(), device).kernels.missing(relu_model()) is None
    (probe,) = cuda.probes
    assert cuda.options(probe)["device_id"] == "1"
    assert (probe.built_on, cuda.device) == (1, current)


def test_one_thread_is_enough_on_a_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    region = Region("ort", 1)
    assert [*OrtExecutor(ORTConfig(), CUDA).thread_counts(region)] == [1]
    assert [*OrtExecutor(ORTConfig(), torch.device("cpu")).thread_counts(region)] == [1, 8]


@pytest.mark.parametrize(
    ("ops", "matmul", "conv", "expected"),
    [
        (["mm"], "tf32", "ieee", "1"),
        (["mm"], "ieee", "tf32", "0"),
        (["convolution"], "ieee", "tf32", "1"),
        (["convolution"], "tf32", "ieee", "0"),
        (["convolution", "mm"], "ieee", "tf32", "0"),
        (["convolution", "mm"], "tf32", "tf32", "1"),
    ],
)
def test_tf32_follows_torchs_two_settings(
    ops: list[str], matmul: str, conv: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(fp32_precision=matmul)),
        cudnn=SimpleNamespace(conv=SimpleNamespace(fp32_precision=conv), benchmark=False),
    )
    monkeypatch.setattr(torch, "backends", backends)
    graph = torch.fx.Graph()
    for name in ops:
        graph.call_function(getattr(torch.ops.aten, name).default)
    region = Region("ort", 1)
    region.module = SimpleNamespace(graph=graph)  # type: ignore[assignment]
    options = providers.PROVIDERS[providers.CUDA].options(region, Stream(5, []))  # type: ignore[arg-type]
    assert options["use_tf32"] == expected


@pytest.mark.parametrize(
    ("benchmark", "deterministic", "search"),
    [(False, False, "HEURISTIC"), (True, False, "EXHAUSTIVE"), (True, True, "HEURISTIC")],
)
def test_algorithms_are_searched_for_where_torch_does(
    benchmark: bool, deterministic: bool, search: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    torch.use_deterministic_algorithms(deterministic)
    try:
        session = build_one(cuda)
    finally:
        torch.use_deterministic_algorithms(False)
    assert cuda.options(session)["cudnn_conv_algo_search"] == search
    assert session.settings.use_deterministic_compute == deterministic


def test_a_provider_that_does_not_load_is_a_fallback(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("CUDA failure 35")

    monkeypatch.setattr(Session, "without_kernel", fail)
    text = "libcudnn.so.9: cannot open shared object file"
    failing = replace(providers.PROVIDERS[providers.CUDA], load_error=lambda: text)
    monkeypatch.setitem(providers.PROVIDERS, providers.CUDA, failing)  # type: ignore[arg-type]
    report = run_op(lambda x: x.relu() + 1, torch.randn(4, 4))
    (fallback,) = report.fallbacks
    assert fallback.reason.type is ReasonType.DEVICE
    assert "CUDAExecutionProvider does not load: libcudnn.so.9" in fallback.reason.text
    assert not cuda.sessions


def test_the_provider_of_the_cpu_computes_nothing_on_a_gpu(cuda: FakeCuda) -> None:
    report = run_op(lambda x: x.relu() + 1, torch.randn(4, 4), providers=("CPUExecutionProvider",))
    (fallback,) = report.fallbacks
    assert fallback.reason.type is ReasonType.DEVICE


TENSORRT = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")


def test_another_provider_than_cuda_has_streams_of_its_own(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: list(TENSORRT))
    report = run_op(lambda x: x.relu() + 1, torch.randn(4, 4), providers=TENSORRT)
    session = cuda.sessions[-1]
    assert not report.fallbacks
    assert dict(session.configured)["TensorrtExecutionProvider"] == {}  # GPU 0
    options = cuda.options(session)
    assert "user_compute_stream" not in options
    assert "use_tf32" in options  # the numbers are as torch's settings say all the same


# runs


@pytest.mark.parametrize("on_torchs_stream", [False, True])
def test_who_waits(on_torchs_stream: bool, cuda: FakeCuda) -> None:
    """A run that does not wait at its end keeps memory of the host, until the session aborts the process (1.31)."""
    given: list[Any] = []

    def run(binding: Any, options: Any) -> None:
        cuda.log.append("run")
        given.append(options)

    session = SimpleNamespace(
        get_inputs=list,
        get_providers=list,
        io_binding=lambda: SimpleNamespace(_iobinding=None),
        _sess=SimpleNamespace(run_with_iobinding=run),
    )
    stream = cuda.default if on_torchs_stream else None
    bound = BoundSession(Region("ort", 1), session, CUDA, stream=stream)  # type: ignore[arg-type]
    assert list(bound()) == []
    assert cuda.log == (["run"] if on_torchs_stream else [(0, "is waited for"), "run"])
    assert given == [None]  # onnxruntime's default is to wait


def test_what_is_in_host_memory_is_new_in_each_run(cuda: FakeCuda) -> None:
    """onnxruntime copies a size, and a scalar on the CPU, to the GPU when it is bound."""
    graph = make_fx(lambda x, scalar: x.view(-1, x.size(0)) * scalar, tracing_mode="symbolic")(
        torch.randn(4, 4), torch.tensor(1)
    ).graph
    (size,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    _, scalar = graph.find_nodes(op="placeholder")
    feeds: dict[str, int] = {}
    runs: list[list[int]] = []

    def bind_input(name: str, memory: Any, dtype: Any, shape: Any, address: int) -> None:
        feeds[name] = ctypes.c_int64.from_address(address).value

    session = SimpleNamespace(
        get_inputs=lambda: [SimpleNamespace(name="i0"), SimpleNamespace(name="i1")],
        io_binding=lambda: SimpleNamespace(_iobinding=SimpleNamespace(bind_input=bind_input)),
        _sess=SimpleNamespace(run_with_iobinding=lambda *args: runs.append(list(feeds.values()))),
    )
    given = torch.tensor(5)
    # on the CPU too where a provider keeps tensors elsewhere
    for inputs, device, provider in (
        ([size, scalar], CUDA, "CUDAExecutionProvider"),
        ([scalar], CUDA, "CUDAExecutionProvider"),
        ([scalar], torch.device("cpu"), "OtherExecutionProvider"),
        ([scalar], torch.device("cpu"), "CPUExecutionProvider"),
    ):
        session.get_providers = lambda provider=provider: [provider, "CPUExecutionProvider"]
        bound = BoundSession(Region("ort", 1, inputs=inputs), session, device)  # type: ignore[arg-type]
        for number in (3, 7):
            bound(*([number] if size in inputs else []), given.fill_(number + 2))
        feeds.clear()
    assert runs == [[3, 5], [7, 9], [5], [9], [5], [9], [5], [5]]  # the last one reads it where it is


def test_a_session_whose_run_failed_stays(cuda: FakeCuda) -> None:
    class Run:
        def __call__(self) -> None:
            raise RuntimeError("no execution plan")

        def __del__(self) -> None:
            cuda.log.append("destroyed")

    run = OrderedRun(Run(), CUDA, cuda.default)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no execution plan"):
        run()
    del run
    assert cuda.log == []


def test_torch_waits_for_a_run_that_fails(cuda: FakeCuda) -> None:
    def run() -> None:
        raise RuntimeError("out of memory")

    cuda.current = Stream(9, cuda.log)
    with pytest.raises(RuntimeError, match="out of memory"):
        OrderedRun(run, CUDA, cuda.default)()  # type: ignore[arg-type]
    assert cuda.log == [(0, "waits for", 9), (9, "waits for", 0)]


def test_a_time_is_that_of_the_gpu_though_only_numbers_go_in(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", log.append)
    with FakeTensorMode():
        made = torch.empty(3, device="cuda")
    timing.race({"a": lambda size: log.append("run") or [made]}, [3])  # type: ignore[func-returns-value]
    assert log == ["run", CUDA]


def ordered(cuda: FakeCuda) -> OrderedRun:
    return OrderedRun(lambda: cuda.log.append("run"), CUDA, cuda.default)  # type: ignore[arg-type]


def test_on_the_stream_of_the_session_nobody_waits(cuda: FakeCuda) -> None:
    ordered(cuda)()
    assert cuda.log == ["run"]


def test_on_another_stream_both_sides_wait(cuda: FakeCuda) -> None:
    run = ordered(cuda)
    cuda.current = Stream(9, cuda.log)
    run()
    assert cuda.log == [(0, "waits for", 9), "run", (9, "waits for", 0)]


def test_a_run_leaves_torchs_current_device(cuda: FakeCuda) -> None:
    def run() -> None:
        cuda.device = 0  # as onnxruntime does

    cuda.device = 3
    OrderedRun(run, CUDA, cuda.default)()  # type: ignore[arg-type]
    assert cuda.device == 3


# what is kept


def test_times_are_those_of_a_gpu_its_driver_and_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    name = Cache(ORTConfig(cache_dir=None)).name("graph", ("ort",))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    names: list[str] = []
    for gpus, matmul in ((("A", "1"), "ieee"), (("B", "1"), "ieee"), (("B", "2"), "ieee"), (("B", "2"), "tf32")):
        monkeypatch.setattr(fingerprint, "_gpus", lambda gpus=gpus: gpus)
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=matmul))
        names.append(Cache(ORTConfig(cache_dir=None)).name("graph", ("ort",)))
    assert len({name, *names}) == 5


def test_plug_ins_are_providers_too(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(ep_name="PlugInExecutionProvider")
    monkeypatch.setattr(kernels, "ep_devices", lambda: {"PlugInExecutionProvider": [device]})
    assert kernels.available_providers()[-1] == "PlugInExecutionProvider"
    kernels.check_config(ORTConfig(debug={"providers": ("CPUExecutionProvider",)}))
    with pytest.raises(ValueError, match="PlugInExecutionProvider"):
        kernels.check_config(ORTConfig(debug={"providers": ("OtherExecutionProvider",)}))
    added: list[Any] = []
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda *args, **kwargs: args)
    options = SimpleNamespace(add_provider_for_devices=lambda *args: added.append(args))
    kernels.new_session(b"", options, ("PlugInExecutionProvider",), torch.device("cpu"))  # type: ignore[arg-type]
    assert added == [([device], {})]


# a model for prediction


def test_a_predictor_binds_tensors_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    found = object.__new__(OnnxSession)
    binding = SimpleNamespace(
        bind_input=lambda *args: log.append(("input", *args[:3])),
        bind_output=lambda *args: log.append(("output", *args[:3])),
        get_outputs=lambda: [None],
    )
    found._session = SimpleNamespace(
        io_binding=lambda: binding,
        run_with_iobinding=lambda binding: log.append("run"),
        get_provider_options=lambda: {"CUDAExecutionProvider": {"device_id": "0"}},
    )
    found.providers, found._structure, found._used = ("CUDAExecutionProvider",), "y", {"x"}
    found.inputs = (Value("x", torch.float32, (2, 3)),)
    found.outputs = (Value("y", torch.float32, (2, 3)),)
    assert found._memory_for(torch.device("cuda", 1)) == torch.device("cpu")  # another GPU's
    assert found._memory_for(torch.device("cpu")) == torch.device("cpu")
    stream = SimpleNamespace(synchronize=lambda: log.append("torch is done"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with FakeTensorMode(), monkeypatch.context() as context:
        context.setattr(torch.Tensor, "data_ptr", lambda self: 0)
        result = found({"x": torch.empty(2, 3, device="cuda")})
    assert result.device == CUDA
    assert log == [("input", "x", "cuda", 0), ("output", "y", "cuda", 0), "torch is done", "run"]
