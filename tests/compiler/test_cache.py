"""What is kept between runs: found again, checked, shared by processes, and never in the way."""

import json
import logging
import math
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.cache import cache, cache_folder
from lightning_ort.compiler.cache.cache import Cache, Entry
from lightning_ort.compiler.cache.fingerprint import fingerprint
from lightning_ort.compiler.executors.ort import kept_models, session, support
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.regions.region import Timing

MS = {"ort": 1.0, "torch": 2.0}
TIMING = Timing(MS, 1)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def train(backend: ORTBackend, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch._dynamo.reset()
    module.zero_grad()
    y = torch.compile(module, backend=backend)(x)
    y.sum().backward()
    return [y, *(parameter.grad.clone() for parameter in module.parameters())]


def regions(backend: ORTBackend) -> list[Any]:
    return [region for graph in backend.report.graphs for region in graph.regions]


def forbid_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "measure", lambda *args: pytest.fail("timed in spite of the cache"))
    monkeypatch.setattr(session, "convert", lambda *args: pytest.fail("converted in spite of the cache"))
    monkeypatch.setattr(support, "check", lambda *args: pytest.fail("asked in spite of the cache"))


@pytest.mark.parametrize("choices", [{"placement": "always"}, {"placement": "measured"}])
def test_second_run_converts_and_times_nothing(monkeypatch, choices, limits):
    """Its results are the first one's, bit for bit; what was timed on a busy machine is timed again."""
    module, x = mlp(), torch.randn(4, 8)
    if choices["placement"] == "measured":
        limits(slowdown=0.0)
        train(ORTBackend(choices), module, x)
        limits(slowdown=math.inf)
    first, second = ORTBackend(choices), ORTBackend(choices)
    expected = train(first, module, x)
    assert cache_folder.entries(cache_folder.default_folder())
    forbid_work(monkeypatch)
    for got, wanted in zip(train(second, module, x), expected, strict=True):
        assert torch.equal(got, wanted)
    placed = [[(region.name, region.executor, region.threads) for region in regions(b)] for b in (first, second)]
    assert placed[0] == placed[1]
    assert not any(region.cached for region in regions(first))
    assert all(region.cached for region in regions(second) if region.executor == "ort")
    if choices["placement"] == "always":
        assert second.report.ort_runs == 2
    assert not second.report.fallbacks


def torch_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(executor: str, calls: Any, *args: Any) -> Timing:
        return Timing({executor: 2.0, "torch": 1.0}, next(iter(calls)))

    monkeypatch.setattr(timing, "measure", measure)


def test_what_torch_runs_as_a_whole_is_not_traced_again(monkeypatch):
    module, x = mlp(), torch.randn(4, 8)
    torch_wins(monkeypatch)
    first, second = ORTBackend(), ORTBackend()
    expected = train(first, module, x)
    assert any(path.name.startswith("graphs-") for path in cache_folder.entries(cache_folder.default_folder()))
    monkeypatch.setattr(
        "lightning_ort.compiler.compilation.aot_backend", lambda *args: pytest.fail("traced in spite of the cache")
    )
    for got, wanted in zip(train(second, module, x), expected, strict=True):
        assert torch.equal(got, wanted)
    assert [graph.name for graph in second.report.graphs] == ["forward_0", "backward_0"]
    assert second.report.to_text(200).splitlines()[1:-1] == first.report.to_text(200).splitlines()[1:-1]
    assert all(region.cached for region in regions(second))
    assert {region.reason.type for region in regions(second)} == {ReasonType.SLOWER}
    with pytest.raises(RuntimeError, match="cache_dir=None"):
        regions(second)[0].save_reproducer("folder")


def test_a_region_that_has_lost_in_an_earlier_run_is_not_tried_again(monkeypatch):
    timed = []

    def measure(executor: str, calls: Any, *args: Any) -> Timing:
        timed.append(executor)
        return Timing({executor: 1.0 if len(timed) == 1 else 3.0, "torch": 2.0}, next(iter(calls)))

    monkeypatch.setattr(timing, "measure", measure)
    module, x = mlp(), torch.randn(4, 8)
    first, second = ORTBackend(), ORTBackend()
    train(first, module, x)
    assert len(timed) > 1
    forbid_work(monkeypatch)
    train(second, module, x)
    for backend, earlier in ((first, False), (second, True)):
        assert backend.report.ort_runs == 1
        lost = [region.reason for region in regions(backend) if region.executor == "torch"]
        assert lost
        assert {(reason.type, "in an earlier run" in reason.text) for reason in lost} == {(ReasonType.SLOWER, earlier)}
    assert not second.report.fallbacks


CHANGES = [
    {},
    {"placement": "always"},
    {"debug": {"min_region_nodes": 1}},
    {"debug": {"torch_ops": ["aten.gelu"]}},
    {"activation_memory_budget": 0.5},
    {"debug": {"intra_op_threads": 3}},
    {"debug": {"kernels": "standard"}},
]


def test_a_graph_has_another_entry_under_another_config():
    gm, inputs = fx.symbolic_trace(lambda x: torch.relu(x)), [torch.randn(4, 8)]
    names = {Cache(ORTConfig(**change)).graphs_name(gm, inputs, False, False) for change in CHANGES}
    names |= {Cache(ORTConfig()).graphs_name(gm, inputs, *facts) for facts in ((True, False), (False, True))}
    assert len(names) == len(CHANGES) + 2


def test_a_graph_left_to_torch_is_traced_for_other_inputs_and_modes(monkeypatch):
    module, x = mlp(), torch.randn(4, 8)
    torch_wins(monkeypatch)
    train(ORTBackend(), module, x)
    wide = nn.Sequential(*mlp()[:3], nn.ReLU())
    for other, batch in ((module, torch.randn(5, 8)), (module, x.double()), (wide, x)):
        backend = ORTBackend()
        train(backend, other.to(batch.dtype), batch)
        assert not any(region.cached for region in regions(backend))
        assert regions(backend)
    module.float()
    backend = ORTBackend()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend)(x)
    assert [graph.name for graph in backend.report.graphs] == ["inference_0"]
    assert not any(region.cached for region in regions(backend))


def test_a_graph_with_a_part_on_onnxruntime_or_a_failure_is_traced_again(monkeypatch):
    module, x = mlp(), torch.randn(4, 8)
    for options in ({"placement": "always"}, {"debug": {"providers": ["CPUExecutionProvider"]}}):
        first, second = ORTBackend(options), ORTBackend(options)
        with monkeypatch.context() as patch:
            if "providers" in options:
                patch.setattr(timing, "race", lambda *args: 1 / 0)
            train(first, module, x)
        assert bool(first.report.fallbacks) == ("providers" in options)
        train(second, module, x)
        assert all(graph.seconds > 0 for graph in second.report.graphs)


def test_nothing_is_kept_without_a_folder():
    train(ORTBackend({"placement": "always", "cache_dir": None}), mlp(), torch.randn(4, 8))
    assert not cache_folder.default_folder().exists()


def test_threads_and_shapes_have_their_own_entries(tmp_path, monkeypatch):
    options = {"placement": "always", "cache_dir": tmp_path}
    train(ORTBackend(options), mlp(), torch.randn(4, 8))
    count = len(cache_folder.entries(tmp_path))
    other_shape = ORTBackend(options)
    train(other_shape, mlp(), torch.randn(6, 8))
    assert len(cache_folder.entries(tmp_path)) == 2 * count
    other_threads = ORTBackend({**options, "debug": {"intra_op_threads": 2}})
    train(other_threads, mlp(), torch.randn(4, 8))
    kept_in_torch = ORTBackend({**options, "debug": {"torch_ops": ["aten.gelu"]}})
    train(kept_in_torch, mlp(), torch.randn(4, 8))
    for backend in (other_shape, other_threads, kept_in_torch):
        # the backward graph is the same one whoever runs the forward graph's gelu
        changed = backend.report.graphs[:1] if backend is kept_in_torch else backend.report.graphs
        assert not any(region.cached for graph in changed for region in graph.regions)
        assert backend.report.ort_runs


MACHINES: list[tuple[str, Any]] = [
    ("lightning_ort.compiler.cache.cache.torch.get_num_threads", lambda: 77),
    ("lightning_ort.compiler.cache.cache.processor", lambda: "another processor"),
    ("lightning_ort.compiler.cache.cache.float32_matmul_precision", lambda: "another precision"),
    ("lightning_ort.compiler.cache.cache.graphics", lambda: ("a GPU", "a driver")),
    ("lightning_ort.compiler.cache.cache.software", lambda: ("other versions",)),
]


@pytest.mark.parametrize(("function", "other"), MACHINES, ids=[name.rpartition(".")[2] for name, _ in MACHINES])
def test_what_a_time_depends_on_names_its_entry(monkeypatch, function, other):
    kept = Cache(ORTConfig())
    name = kept.name("a graph", ("ort", "a build"))
    assert kept.name("a graph", ("ort", "a build")) == name
    monkeypatch.setattr(function, other)
    assert kept.name("a graph", ("ort", "a build")) != name


@pytest.mark.parametrize("option", [{"debug": {"kernels": "standard"}}, {"debug": {"intra_op_threads": 3}}])
def test_options_that_change_a_session_name_its_entry(option):
    names = {Cache(config).name("a graph", ("ort",)) for config in (ORTConfig(), ORTConfig(**option))}
    names |= {Cache(ORTConfig()).name("another graph", ("ort",)), Cache(ORTConfig()).name("a graph", ("another",))}
    assert len(names) == 4


def write_json(path: Path, content: Any) -> None:
    """As the cache does, whatever the content."""
    text = json.dumps({"sha256": cache._checksum(path.stem, content), "content": content})
    path.write_text(text)


def change(path: Path, key: str, value: Any) -> None:
    """Change a value of a timing; the key is a path."""
    content = json.loads(path.read_text())["content"]
    *parents, last = key.split("/")
    changed = content
    for parent in parents:
        changed = changed[parent]
    changed[last] = value
    write_json(path, content)


DAMAGED = [b"", b"[]", b"[[]]", b"{}", b"null", b"1", b'"text"', b"\xff\xfe\x00", b"\x00", b"[" * 100_000, b"{" * 9]
DAMAGED += [b'{"a":' * 100_000, b'{"sha256": 1}', b'{"content": [], "sha256": []}', b"1" * 5000, b'[["NONSENSE", 1]]']
DAMAGED += [b'{"model": "", "timing": {"ms": {"ort": 1}}}', b"[NaN, Infinity]", b" " * (cache_folder.MAX_BYTES + 1)]


def check_same(backend: ORTBackend, module: nn.Module, x: torch.Tensor, expected: list[torch.Tensor]) -> None:
    for got, wanted in zip(train(backend, module, x), expected, strict=True):
        assert torch.equal(got, wanted)
    assert not backend.report.fallbacks
    assert backend.report.ort_runs == 2


@pytest.fixture
def kept(tmp_path: Path) -> tuple[dict[str, Any], nn.Module, torch.Tensor, list[torch.Tensor]]:
    """A folder after a run, as options of the next one, and what that one has to compute."""
    module, x = mlp(), torch.randn(4, 8)
    options = {"placement": "always", "cache_dir": tmp_path, "fallback": "raise"}
    return options, module, x, train(ORTBackend(options), module, x)


@pytest.mark.parametrize("pattern", ["graph-*.json", "region-*.json", "region-*.onnx"])
def test_damaged_files_count_as_absent(kept, tmp_path, pattern):
    options, module, x, expected = kept
    whole = {path: path.read_bytes() for path in tmp_path.glob(pattern)}
    assert whole
    # of one kind after the other: one compilation for all of them
    for number, content in enumerate(DAMAGED):
        for path in whole:
            path.write_bytes(content)
        read = Cache(ORTConfig(cache_dir=str(tmp_path)))
        for path in whole:
            assert read.load(path.stem) is None if "region" in pattern else read._read(path.stem, list) is None
        if number % 6 == 0:
            check_same(ORTBackend(options), module, x, expected)
            assert all(path.read_bytes() != content for path in whole), "not mended"
            assert {path: path.read_bytes() for path in tmp_path.glob(pattern)}.keys() == whole.keys()


@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "folder", "link to itself", "unreadable"])
def test_files_that_are_not_whole_count_as_absent(kept, tmp_path, damage):
    options, module, x, expected = kept
    for path in cache_folder.entries(tmp_path):
        content = bytearray(path.read_bytes())
        if damage == "cut":
            path.write_bytes(content[: len(content) // 2])
        elif damage == "flipped":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        elif damage == "longer":
            path.write_bytes(content + content)
        else:
            path.unlink()
        if damage == "folder":
            path.mkdir()
        if damage == "link to itself":
            path.symlink_to(path)
        if damage == "unreadable":
            os.mkfifo(path)
    check_same(ORTBackend(options), module, x, expected)


def test_files_under_another_name_count_as_absent(tmp_path):
    """The graph of one layer is not computed by the model of another, which takes the same inputs."""
    options = {"placement": "always", "cache_dir": tmp_path, "fallback": "raise"}
    x = torch.randn(4, 8)
    modules = [nn.Sequential(nn.Linear(8, 8), activation) for activation in (nn.Tanh(), nn.Sigmoid())]
    expected = [train(ORTBackend({**options, "cache_dir": None}), module, x) for module in modules]
    train(ORTBackend(options), modules[0], x)
    first = cache_folder.entries(tmp_path)
    train(ORTBackend(options), modules[1], x)
    second = [path for path in cache_folder.entries(tmp_path) if path not in first]
    pairs = [(a, b) for a in first for b in second if a.suffix == b.suffix and a.name[:6] == b.name[:6]]
    assert len(pairs) >= 8
    contents = {path: path.read_bytes() for path in (*first, *second)}
    for mine, other in pairs:  # of a forward and a backward graph: each in the place of each
        mine.write_bytes(contents[other])
        other.write_bytes(contents[mine])
        for module, wanted in zip(modules, expected, strict=True):
            backend = ORTBackend(options)
            for got, reference in zip(train(backend, module, x), wanted, strict=True):
                assert torch.equal(got, reference)
            assert backend.report.ort_runs == 2
        for path, content in contents.items():
            path.write_bytes(content)


@pytest.mark.parametrize(("key", "value"), [("threads", 2000), ("threads", 7)])
def test_a_session_has_the_threads_that_would_be_tried(kept, tmp_path, monkeypatch, key, value):
    options, module, x, expected = kept
    options = {**options, "placement": "measured"}
    monkeypatch.setattr(timing, "measure", lambda executor, calls, *args: Timing(MS, next(iter(calls))))
    train(ORTBackend(options), module, x)
    for path in tmp_path.glob("region-*.json"):
        change(path, key, value)
    made = []
    build = session.build
    monkeypatch.setattr(session, "build", lambda *args: [made.append((args[3], args[5])), build(*args)][1])
    check_same(ORTBackend(options), module, x, expected)
    assert set(made) == {(1, None)}


@pytest.mark.parametrize(("kind", "asked"), [(ReasonType.DTYPE, 1), (ReasonType.SESSION_FAILED, 2)])
def test_what_failed_is_asked_for_again(tmp_path, kind, asked):
    module = fx.GraphModule(nn.Module(), traced(torch.neg, torch.ones(2)))
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    answers = []
    for _ in range(2):
        cache = Cache(ORTConfig(cache_dir=str(tmp_path)))
        found = cache.refusals(module, ("ort",), lambda: answers.append(kind) or {node: Reason(kind, "why")})
        assert found == {node: Reason(kind, "why")}
    assert len(answers) == asked


def hostile(model: onnx.ModelProto, kind: str, secret: Path) -> None:
    """Make something of a model that no converter makes."""
    graph = model.graph
    tensor = onnx.helper.make_tensor("secret", onnx.TensorProto.UINT8, [4], b"1234", raw=True)
    if "external" in kind:
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", str(secret)
    if "huge" in kind:
        tensor.dims[:] = [2**40]
    node = onnx.helper.make_node("Identity", ["i0"], ["unused"])
    if "initializer" in kind:
        graph.initializer.append(tensor)
    elif "attribute" in kind:
        node = onnx.helper.make_node("Constant", [], ["unused"], value=tensor)
    elif "subgraph" in kind:
        then = onnx.helper.make_graph([node], "then", [], [graph.output[0]], [tensor])
        node = onnx.helper.make_node("If", ["i0"], ["unused"], then_branch=then, else_branch=then)
    elif kind == "sparse":
        graph.sparse_initializer.add().dims.append(2**40)
    elif kind == "function":
        opset = [onnx.helper.make_opsetid("", 18)]
        model.functions.append(onnx.helper.make_function("mine", "f", ["x"], ["y"], [], opset))
    elif kind == "domain":
        node.domain = "mine"
    elif kind == "opset":
        model.opset_import.add().domain = "mine"
    elif kind == "python":
        node.op_type, node.domain = "PythonOp", "com.microsoft"
    elif kind == "metadata":
        onnx.helper.set_model_props(model, {"ort_config": "{}"})
    graph.node.append(node)


HOSTILE = ("external initializer", "external attribute", "external subgraph", "huge initializer", "huge attribute")
HOSTILE += ("sparse", "function", "domain", "opset", "python", "metadata")


@pytest.mark.parametrize("kind", HOSTILE)
def test_models_that_reach_out_are_not_run(kept, tmp_path, monkeypatch, kind):
    options, module, x, expected = kept
    (tmp_path / "secret").write_bytes(b"1234")
    written = Cache(ORTConfig(cache_dir=str(tmp_path)))
    for path in tmp_path.glob("region-*.onnx"):
        entry = written.load(path.stem)
        assert kept_models.untrusted_reason(entry.model) is None
        model = onnx.ModelProto.FromString(entry.model)
        hostile(model, kind, tmp_path / "secret")
        assert kept_models.untrusted_reason(model.SerializeToString()) is not None
        written.store(path.stem, Entry(model.SerializeToString(), entry.timing))
    given = []
    build = session.build
    monkeypatch.setattr(session, "build", lambda *args: [given.append(args[0]), build(*args)][1])
    check_same(ORTBackend(options), module, x, expected)
    assert given
    assert all(kept_models.untrusted_reason(model) is None for model in given)


def test_a_model_that_onnxruntime_refuses_is_made_again(kept, tmp_path):
    options, module, x, expected = kept
    written = Cache(ORTConfig(cache_dir=str(tmp_path)))
    for path in tmp_path.glob("region-*.onnx"):
        entry = written.load(path.stem)
        model = onnx.ModelProto.FromString(entry.model)
        model.graph.node[0].op_type = "Nonsense"
        written.store(path.stem, Entry(model.SerializeToString(), entry.timing))
    check_same(ORTBackend(options), module, x, expected)


def test_what_is_kept_is_a_model(kept, tmp_path):
    own_format = onnxruntime.SessionOptions()
    own_format.optimized_model_filepath = str(tmp_path / "model.ort")
    own_format.add_session_config_entry("session.save_model_format", "ORT")
    for path in tmp_path.glob("region-*.onnx"):
        onnx.checker.check_model(onnx.load(path))
        model = Cache(ORTConfig(cache_dir=str(tmp_path))).load(path.stem).model
        assert kept_models.untrusted_reason(model) is None
        assert kept_models.untrusted_reason(model[:-1]) is not None
        onnxruntime.InferenceSession(model, own_format, providers=["CPUExecutionProvider"])
        assert kept_models.untrusted_reason((tmp_path / "model.ort").read_bytes()) is not None


@pytest.mark.parametrize("chosen", [True, False])
def test_a_folder_that_cannot_be_written(tmp_path, caplog, monkeypatch, chosen):
    """Since the run began, or without having been chosen for it; another one is an error."""
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    backend = ORTBackend({"placement": "always", "cache_dir": tmp_path / "file" / "cache" if chosen else "auto"})
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        train(backend, mlp(), torch.randn(4, 8))
    assert backend.report.ort_runs == 2
    assert not backend.report.fallbacks
    assert len([record for record in caplog.records if "Nothing is kept between runs" in record.message]) == 1


REGION = f"region-{'0' * 64}"


def _store_again_and_again(folder: Path, models: list[bytes], times: int = 200) -> None:
    kept = Cache(ORTConfig(cache_dir=str(folder)))
    for number in range(times):
        kept.store(REGION, Entry(models[number % 2], TIMING))


def test_processes_share_a_folder(tmp_path):
    """A reader finds a whole entry or none, whatever the writers do."""
    models = [bytes(5000), b"1" * 7000]
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_store_again_and_again, args=(tmp_path, models)) for _ in range(2)]
    for writer in writers:
        writer.start()
    reader = Cache(ORTConfig(cache_dir=str(tmp_path)))
    found = 0
    while any(writer.is_alive() for writer in writers):
        if (entry := reader.load(REGION)) is not None:
            found += 1
            assert entry.model in models
            assert entry.timing == TIMING
    assert found
    assert not list(tmp_path.glob("*.tmp"))
    assert [writer.exitcode for writer in writers] == [0, 0]


@pytest.mark.slow
def test_killed_writers_lose_nothing_and_leave_nothing(tmp_path, monkeypatch):
    """An entry that was there stays there, and a later process takes away what was begun."""
    monkeypatch.setattr(cache_folder, "_ABANDONED_SECONDS", -1)
    models = [bytes(5000), b"1" * 700_000]
    fork = multiprocessing.get_context("fork")
    _store_again_and_again(tmp_path, models, times=1)
    begun = 0
    random = torch.Generator().manual_seed(0)
    for _ in range(100):
        writer = fork.Process(target=_store_again_and_again, args=(tmp_path, models, 10**6))
        writer.start()
        time.sleep(0.005 + 0.03 * torch.rand((), generator=random).item())
        writer.kill()
        writer.join()
        assert writer.exitcode == -9
        begun += len(cache_folder.partial_files(tmp_path))
        entry = Cache(ORTConfig(cache_dir=str(tmp_path))).load(REGION)
        assert entry is not None
        assert entry.model in models
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"{REGION}.json", f"{REGION}.onnx"]
    assert begun, "no writer was met at its work"


def test_partial_files_of_dead_writers_are_taken_away(tmp_path):
    old, young = (tmp_path / f"{REGION}.json.{name}.tmp" for name in ("abc123", "abc124"))
    mine, entry = tmp_path / "mine.tmp", tmp_path / f"{REGION}.json"
    for path, hours in ((old, 1.1), (young, 0.9), (mine, 1000)):
        path.write_text("{")
        then = time.time() - hours * 60 * 60
        os.utime(path, (then, then))
    Cache(ORTConfig(cache_dir=str(tmp_path))).load(REGION)
    assert not old.exists()
    assert young.exists(), "of a writer that may be at work"
    assert mine.exists()
    Cache(ORTConfig(cache_dir=str(tmp_path))).store(REGION, Entry(b"", Timing({}, 1)))
    assert entry.exists()


def test_nothing_is_left_of_a_write_that_fails(tmp_path, monkeypatch, caplog):
    kept = Cache(ORTConfig(cache_dir=str(tmp_path)))

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    kept.store(REGION, Entry(b"model", TIMING))
    assert not list(tmp_path.iterdir())
    assert caplog.text.count("no space left on device") == 1


def test_the_folder_is_for_its_user_alone(tmp_path):
    before = os.umask(0)
    try:
        folder = tmp_path / "of" / "mine"
        Cache(ORTConfig(cache_dir=str(folder))).store(REGION, Entry(b"model", TIMING))
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, caplog, mode):
    check_not_used(tmp_path, caplog, lambda: tmp_path.chmod(mode), f"chmod 700 {tmp_path}")


def test_a_folder_of_somebody_else_is_not_used(tmp_path, caplog, monkeypatch):
    # as the one to whom it does not belong
    user = os.getuid() + 1
    check_not_used(tmp_path, caplog, lambda: monkeypatch.setattr(os, "getuid", lambda: user), "LIGHTNING_ORT_CACHE_DIR")


def check_not_used(folder, caplog, spoil, advice):
    options = {"placement": "always", "cache_dir": folder}
    module, x = mlp(), torch.randn(4, 8)
    expected = train(ORTBackend(options), module, x)
    content = {path: path.read_bytes() for path in folder.iterdir()}
    assert content
    spoil()
    with caplog.at_level(logging.WARNING):
        backend = ORTBackend(options)
        check_same(backend, module, x, expected)
    (said,) = [record.message for record in caplog.records if "Nothing is kept between runs" in record.message]
    assert advice in said
    assert not any(region.cached for region in regions(backend))
    assert {path: path.read_bytes() for path in folder.iterdir()} == content


def test_a_system_without_owners(tmp_path, monkeypatch):
    """As Windows is."""
    monkeypatch.delattr(os, "getuid")
    tmp_path.chmod(0o777)
    Cache(ORTConfig(cache_dir=str(tmp_path))).store(REGION, Entry(b"model", TIMING))
    assert Cache(ORTConfig(cache_dir=str(tmp_path))).load(REGION) == Entry(b"model", TIMING)


def traced(function: Any, *args: Any, dynamic: bool = False) -> fx.Graph:
    return make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*args).graph


def test_description_is_of_what_is_computed():
    """Neither names nor the order in which sizes were numbered matter; all else does."""
    x, y = torch.randn(3, 5), torch.randn(5, 7)
    same = traced(lambda a, b: torch.relu(a @ b), x, y)
    text = fingerprint(same)
    for number, node in enumerate(list(same.nodes)):
        node.name = f"renamed_{number}"
    assert fingerprint(same) == text
    others = [
        traced(lambda a, b: torch.tanh(a @ b), x, y),
        traced(lambda a, b: torch.relu(a @ b), x.double(), y.double()),
        traced(lambda a, b: torch.relu(a @ b), x, torch.randn(5, 8)),
        traced(lambda a, b: torch.relu(a @ b), x, torch.randn(7, 5).t()),
        traced(lambda a, b: torch.relu(a @ b), x, y, dynamic=True),
        traced(lambda a, b: torch.relu(a @ b) * 2.0, x, y),
        traced(lambda a, b: torch.relu(a @ b) * 2.5, x, y),
        traced(lambda a, b: torch.relu(a @ b) * 2, x, y),
    ]
    assert len({text, *map(fingerprint, others)}) == 1 + len(others)
    symbolic = traced(lambda a, b: torch.relu(a @ b), x, y, dynamic=True)
    assert fingerprint(symbolic) == fingerprint(others[4])
    assert "n0=3" in fingerprint(symbolic)
