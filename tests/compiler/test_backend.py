"""The compiler end to end, without Lightning: values, gradients, shapes, randomness, failures."""

import copy
import dataclasses
import gc
import logging
from collections import Counter
from collections.abc import Callable

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from ort_settings import config_of
from torch import Tensor, nn

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend, ORTFallbackError
from lightning_ort.compiler.compilation import Compilation
from lightning_ort.compiler.executors.ort import binding as runtime
from lightning_ort.compiler.executors.ort import kernels, session
from lightning_ort.compiler.executors.ort.conversion.registry import CONVERTERS
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.regions.region import RegionRejected

aten = torch.ops.aten


def always(**options):
    return ORTBackend(config_of(**{"placement": "always", **options}))


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def assert_same_training_step(module, inputs, backend, rtol=1e-4, atol=1e-5):
    """One step in eager and one compiled, from the same seed: output, gradients and buffers agree, and ORT ran."""
    reference = copy.deepcopy(module)
    torch.manual_seed(7)
    expected = reference(*inputs)
    expected.sum().backward()
    torch.manual_seed(7)
    got = torch.compile(module, backend=backend, dynamic=backend.config.dynamic)(*inputs)
    got.sum().backward()
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    for (name, grad), (_, other) in zip(gradients(module).items(), gradients(reference).items(), strict=True):
        if other is None:
            assert grad is None, name
        else:
            torch.testing.assert_close(grad, other, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
    for (name, buffer), (_, other) in zip(module.named_buffers(), reference.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=lambda m, name=name: f"{name}: {m}")
    assert backend.report.ort_runs > 0


def mlp(depth=2):
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 3))


def test_training_step_equals_eager():
    backend = always()
    assert_same_training_step(mlp(), (torch.randn(4, 8),), backend)
    assert backend.report.ort_node_fraction == 1.0
    assert [graph.name for graph in backend.report.graphs] == ["forward_0", "backward_0"]
    assert not backend.report.fallbacks


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_after_compiling_only(enabled, monkeypatch):
    seen = []
    compile_graph = Compilation.compile_graph
    monkeypatch.setattr(Compilation, "compile_graph", lambda *args: seen.append(gc.isenabled()) or compile_graph(*args))
    backend = ORTBackend(ORTConfig(placement="always", debug={"min_region_nodes": 1}))
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        torch.compile(nn.Linear(4, 4), backend=backend)(torch.randn(2, 4)).sum().backward()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False, False]
    assert backend.report.ort_runs > 0


def test_a_compiled_module_stays_right_over_optimizer_steps():
    backend, module = always(), mlp()
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, reference)]
    for _ in range(10):
        x = torch.randn(4, 8)
        losses = []
        for call, optimizer in ((compiled, optimizers[0]), (reference, optimizers[1])):
            optimizer.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert backend.report.ort_runs == 20


def test_inference_graph():
    backend, module = always(), mlp()
    x = torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=backend)(x), module(x), rtol=1e-5, atol=1e-6)
    assert [graph.name for graph in backend.report.graphs] == ["inference_0"]
    assert backend.report.ort_runs == 1


class DropoutNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x):
        return self.second(self.drop(torch.relu(self.first(self.drop(x)))))


def test_dropout_draws_the_masks_of_eager_and_does_not_cut_the_region():
    backend = always()
    assert_same_training_step(DropoutNet(), (torch.randn(32, 16),), backend)
    forward = backend.report.graphs[0]
    assert [region.executor for region in forward.regions] == ["torch", "ort"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_multiplies_as_eager_to_the_bit(dtype, tmp_path):
    def f(x):
        return F.dropout(x, 0.3)

    x = torch.randn(50, 70, dtype=dtype)
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    results = []
    backend = always(min_region_nodes=1, save_onnx_dir=tmp_path)
    for call in (f, torch.compile(f, backend=backend)):
        x = x.detach().requires_grad_()
        torch.manual_seed(4)
        y = call(x)
        y.backward(x.detach().flip(0))
        results.append((y.detach(), x.grad))
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit(), expected.signbit())
    assert backend.report.ort_runs == 2
    for path in tmp_path.glob("*.onnx"):
        ops = Counter(node.op_type for node in onnx.load(path).graph.node)
        scaled = {"Cast": 1, "DequantizeLinear": 1, "Mul": 1} if dtype is torch.float32 else {"Cast": 1, "Mul": 2}
        assert ops == scaled


@pytest.mark.parametrize("change", [lambda x: x.transpose(0, 2), lambda x: x.permute(2, 0, 1), lambda x: x[:, ::2]])
@pytest.mark.parametrize("dynamic", [False, True])
def test_dropout_of_a_view_draws_the_mask_of_eager(change, dynamic):
    class Net(DropoutNet):
        def forward(self, x):
            x = change(x)  # eager draws in the order of memory
            return self.second(self.drop(torch.relu(self.first(self.drop(x) @ x.new_ones(x.shape[-1], 16)))))

    assert_same_training_step(Net(), (torch.randn(5, 6, 7),), always(dynamic=dynamic))


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 5, 3, 8)])
@pytest.mark.parametrize("train", [True, False])
def test_dropout_of_a_transposed_batch_norm_draws_the_mask_of_eager(shape, train):
    """Eager's result is contiguous, where torch's trace says that it lies as the transposed input."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = (nn.BatchNorm1d if len(shape) < 4 else nn.BatchNorm2d)(5 if len(shape) == 2 else 8)
            self.norm.train(train)

        def forward(self, x):
            x = x.t() if x.dim() == 2 else x.movedim(-1, 1)  # of four dimensions: channels_last
            return F.dropout(F.relu(self.norm(x)), 0.5)

    assert_same_training_step(Net(), (torch.randn(shape),), always(min_region_nodes=1))


def test_random_ops_keep_their_order():
    def f(x):
        a = torch.rand_like(x) + x  # depends on nothing
        b = torch.bernoulli(torch.sigmoid(a @ a))  # depends on an ORT region
        return (b @ b) + torch.rand_like(x) @ x

    backend = always(min_region_nodes=1)
    x = torch.randn(4, 4)
    torch.manual_seed(3)
    expected = f(x)
    torch.manual_seed(3)
    torch.testing.assert_close(torch.compile(f, backend=backend)(x), expected)
    assert backend.report.ort_runs > 0


def test_batch_norm_updates_its_statistics():
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    assert_same_training_step(module, (torch.randn(32, 8),), always())


def test_frozen_and_shared_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight
            self.c.requires_grad_(False)

        def forward(self, x):
            return self.b(torch.relu(self.c(torch.relu(self.a(x)))))

    assert_same_training_step(Tied(), (torch.randn(4, 8),), always())


def test_outputs_that_alias_and_in_place_updates():
    def f(x, buffer):
        y = torch.relu(x @ x)
        buffer.add_(y.sum(0))
        y.mul_(2)
        return y, y.view(-1), y.t(), x.detach()

    backend = always(min_region_nodes=1)
    x, mine, other = torch.randn(4, 4), torch.zeros(4), torch.zeros(4)
    for got, expected in zip(torch.compile(f, backend=backend)(x, mine), f(x, other), strict=True):
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()
    torch.testing.assert_close(mine, other)
    assert backend.report.ort_runs > 0


def test_non_contiguous_inputs():
    backend, module = always(), mlp()
    compiled = torch.compile(module, backend=backend)
    base = torch.randn(8, 4)
    for x in (base.t(), base.t().contiguous(), base.t()):
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)
    assert backend.report.ort_runs >= 3


def test_distinct_lengths_compile_twice_at_most():
    backend, module = always(), mlp()
    compiled = torch.compile(module, backend=backend)
    for length in (4, 7, 5, 9, 12, 3):
        x = torch.randn(length, 8)
        module.zero_grad()
        compiled(x).sum().backward()
        got = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        module(x).sum().backward()
        for grad, p in zip(got, module.parameters(), strict=True):
            torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-5)
    assert len({graph.name for graph in backend.report.graphs if graph.name.startswith("forward")}) <= 2
    assert backend.report.ort_runs == 12


def test_two_dynamic_sizes():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x):
            batch, length, width = x.shape
            q, k, v = self.qkv(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
            weights = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1)
            return (weights @ v).transpose(1, 2).reshape(batch, length, width)

    module = Attention()
    for batch, length in ((2, 5), (3, 7)):
        assert_same_training_step(module, (torch.randn(batch, length, 16),), always(dynamic=True))
        module.zero_grad()


def test_zero_size_batch():
    backend, module = always(dynamic=True), mlp()
    compiled = torch.compile(module, backend=backend, dynamic=True)
    compiled(torch.randn(4, 8)).sum().backward()
    assert compiled(torch.randn(0, 8)).shape == (0, 3)
    assert backend.report.ort_runs > 0


def test_empty_tensors_of_elementwise_operations():
    backend = always()
    compiled = torch.compile(lambda x: (x * 2).exp(), backend=backend, dynamic=False)
    assert compiled(torch.randn(0, 8)).shape == (0, 8)
    assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks


# choices of the user


def test_torch_ops_stay_in_torch():
    for name in ("aten.relu", "aten.relu.default"):
        torch._dynamo.reset()
        backend = always(torch_ops=[name])
        assert_same_training_step(mlp(), (torch.randn(4, 8),), backend)
        reasons = {
            op: reason.type
            for graph in backend.report.graphs
            for region in graph.regions
            for op, reason in region.node_reasons.items()
        }
        assert reasons["aten.relu.default"] is ReasonType.USER


def test_small_regions_stay_in_torch():
    backend = always(min_region_nodes=50)
    module, x = mlp(), torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(module, backend=backend)(x), module(x))
    assert backend.report.ort_runs == 0
    assert {r.reason.type for g in backend.report.graphs for r in g.regions} == {ReasonType.TOO_SMALL}


def test_measured_placement_keeps_the_faster(monkeypatch):
    def slower(*args):
        measured = original(*args)
        return dataclasses.replace(measured, ms={**measured.ms, "ort": measured.ms["torch"] * 2})

    original = timing.measure
    monkeypatch.setattr(timing, "measure", slower)
    backend = ORTBackend()
    module, x = mlp(), torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(module, backend=backend)(x), module(x))
    regions = [region for graph in backend.report.graphs for region in graph.regions]
    assert {region.reason.type for region in regions} == {ReasonType.SLOWER}
    assert all(region.ms["ort"] == pytest.approx(2 * region.ms["torch"]) for region in regions)
    assert backend.report.ort_runs == 0
    assert not backend.report.fallbacks


def test_measured_placement_reports_both_times(monkeypatch):
    def faster(*args):
        measured = original(*args)
        return dataclasses.replace(measured, ms={**measured.ms, "ort": measured.ms["torch"] / 2})

    original = timing.measure
    monkeypatch.setattr(timing, "measure", faster)
    backend = ORTBackend()
    assert_same_training_step(mlp(), (torch.randn(4, 8),), backend)
    assert all(r.ms["ort"] and r.ms["torch"] and r.threads for g in backend.report.graphs for r in g.regions)


def test_a_region_of_torch_has_the_times_of_what_lost_there(monkeypatch):
    given = iter([(4.0, 1.0), (1.0, 4.0), (8.0, 2.0)])  # of three regions: the second stays on onnxruntime

    def measure(*args):
        return dataclasses.replace(original(*args), ms=dict(zip(("ort", "torch"), next(given), strict=True)))

    original = timing.measure
    monkeypatch.setattr(timing, "measure", measure)
    backend = ORTBackend({"cache_dir": None, "debug": {"torch_ops": ["aten.cos"], "min_region_nodes": 1}})
    function, x = lambda x: (((x + 1).sin().cos() * 2).sin().cos() * 3).sin(), torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))
    (graph,) = backend.report.graphs
    assert [region.executor for region in graph.regions] == ["torch", "ort", "torch"]
    assert [region.ms for region in graph.regions] == [
        {"ort": 4.0, "torch": 1.0},
        {"ort": 1.0, "torch": 4.0},
        {"ort": 8.0, "torch": 2.0},
    ]


def _lookup(weight: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return weight[(share * 1e4).long()].sin() * 2


def _waves(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2 + x.tanh()


@pytest.mark.parametrize("placement", ["always", "measured"])
def test_made_up_numbers_that_become_bad_indices_decide_nothing(
    placement: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # two numbers of threads to compare
    backend = ORTBackend(
        {"placement": placement, "fallback": "raise", "cache_dir": None, "debug": {"min_region_nodes": 1}}
    )
    weight, share = torch.randn(10, 4), torch.linspace(0, 9e-4, 50)
    got = torch.compile(_lookup, backend=backend)(weight, share)
    torch.testing.assert_close(got, _lookup(weight, share))
    assert not backend.report.fallbacks
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    reasons = {region.reason.type for graph in backend.report.graphs for region in graph.regions if region.reason}
    assert reasons == (set() if placement == "always" else {ReasonType.NOT_TIMED})
    assert backend.report.ort_runs == (1 if placement == "always" else 0)


def test_deterministic_mode_times_nothing(monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda *args: pytest.fail("timed under deterministic mode"))
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_training_step(mlp(), (torch.randn(4, 8),), ORTBackend())
        # what no product would pay for runs on ONNX Runtime only where everything does
        for placement, runs in (("measured", 0), ("always", 1)):
            torch._dynamo.reset()
            backend = ORTBackend({"placement": placement, "cache_dir": None, "debug": {"min_region_nodes": 1}})
            x = torch.randn(40, 8)
            torch.testing.assert_close(torch.compile(_waves, backend=backend)(x), _waves(x))
            assert backend.report.ort_runs == runs
    finally:
        torch.use_deterministic_algorithms(False)


def test_save_onnx_dir_that_can_no_longer_be_written(tmp_path, caplog):
    backend = always(save_onnx_dir=tmp_path / "models")
    (tmp_path / "models").write_text("in the way")
    x = torch.randn(4, 8)
    module = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=backend)(x), module(x))
    assert backend.report.ort_runs == 1
    assert not backend.report.fallbacks
    assert "save_onnx_dir" in caplog.text


def test_save_onnx_dir_holds_checked_models(tmp_path):
    backend = always(save_onnx_dir=tmp_path)
    torch.compile(mlp(), backend=backend)(torch.randn(4, 8)).sum().backward()
    paths = sorted(tmp_path.glob("*.onnx"))
    assert [path.name for path in paths] == ["backward_0.ort_1.onnx", "forward_0.ort_1.onnx"]
    for path in paths:
        onnx.checker.check_model(onnx.load(path))


@pytest.mark.parametrize("options", [{}, {"placement": "always", "debug": {"torch_ops": ["aten.relu"]}}])
def test_string_backend(options):
    module, x = mlp(), torch.randn(4, 8)
    compiled = torch.compile(module, backend="ort", options=options)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)


# failures: each is named, and training goes on in torch or stops under fallback="raise"


# dynamo wraps what a backend raises while it compiles
REFUSED = (ORTFallbackError, torch._dynamo.exc.BackendCompilerFailed)


def assert_falls_back(reason, where, caplog, module=None):
    """Training goes on in torch with a warning, or stops under ``fallback="raise"``; something is broken already."""
    module, x = module or mlp(), torch.randn(4, 8)
    backend = always()
    with caplog.at_level(logging.WARNING, logger="lightning_ort"):
        got = torch.compile(module, backend=backend)(x)
        got.sum().backward()
        torch.testing.assert_close(got, module(x))
    assert reason in {fallback.reason.type for fallback in backend.report.fallbacks}
    assert all(p.grad is not None for p in module.parameters())
    assert any(where in record.getMessage() for record in caplog.records)
    torch._dynamo.reset()
    with pytest.raises(REFUSED, match=where):
        torch.compile(module, backend=always(fallback="raise"))(x).sum().backward()


def test_unsupported_op(caplog, monkeypatch):
    monkeypatch.delitem(CONVERTERS, torch.ops.aten.erf.default)

    class Erf(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return torch.erf(torch.tanh(self.linear(x)) * 0.5)

    backend, module, x = always(fallback="raise"), Erf(), torch.randn(4, 8)
    with caplog.at_level(logging.INFO, logger="lightning_ort"):
        assert_same_training_step(module, (x,), backend)
    # a choice, and torch runs it as fast as ever: no warning, no error, a line in the report
    assert not backend.report.fallbacks
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    reasons = {op: why for g in backend.report.graphs for r in g.regions for op, why in r.node_reasons.items()}
    assert reasons["aten.erf.default"].type is ReasonType.NO_CONVERTER
    assert "no converter: aten.erf" in backend.report.to_text()


def test_transformer_encoder_in_evaluation_under_raise():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
    backend = always(fallback="raise")
    with torch.no_grad():  # one op for a whole layer
        torch.testing.assert_close(torch.compile(encoder, backend=backend)(x), encoder(x))
    assert not backend.report.fallbacks


def test_converter_that_raises(monkeypatch, caplog):
    def broken(ctx, node, *args):
        raise RuntimeError("broken converter")

    monkeypatch.setitem(CONVERTERS, aten.relu.default, broken)
    assert_falls_back(ReasonType.CONVERSION_FAILED, "broken converter", caplog)


def test_checker_failure(monkeypatch, caplog):
    def refuse(model):
        raise onnx.checker.ValidationError("refused by the checker")

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    assert_falls_back(ReasonType.CHECKER_FAILED, "refused by the checker", caplog)


def test_session_that_does_not_build(monkeypatch, caplog):
    def refuse(*args):
        raise RegionRejected(ReasonType.SESSION_FAILED, "no session today")

    monkeypatch.setattr(session, "build", refuse)
    assert_falls_back(ReasonType.SESSION_FAILED, "no session today", caplog)


def test_kernel_that_raises_in_its_first_run(monkeypatch, caplog):
    def refuse(self, *args):
        raise RuntimeError("kernel exploded")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # nothing to time: the first run is the real one
    monkeypatch.setattr(runtime.BoundSession, "__call__", refuse)
    assert_falls_back(ReasonType.RUN_FAILED, "kernel exploded", caplog)


def test_mismatch_with_eager(monkeypatch, caplog):
    def wrong(ctx, node, x):
        return ctx.op("Neg", ctx.value(x))

    monkeypatch.setitem(CONVERTERS, aten.relu.default, wrong)
    module, x = mlp(), torch.randn(4, 8)
    backend = always(check_against_eager=True)
    torch.testing.assert_close(torch.compile(module, backend=backend)(x), module(x))
    assert [f.reason.type for f in backend.report.fallbacks] == [ReasonType.MISMATCH]
    torch._dynamo.reset()
    with pytest.raises(REFUSED, match="differs from eager"):
        torch.compile(module, backend=always(check_against_eager=True, fallback="raise"))(x)


def test_check_against_eager_passes_what_is_right():
    backend = always(check_against_eager=True)
    assert_same_training_step(mlp(), (torch.randn(4, 8),), backend)
    assert not backend.report.fallbacks


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "no onnxruntime is installed"),
        ({"onnxruntime": "1.25.0", "onnxruntime-training-cpu": "1.19.2"}, "are installed together"),
        ({"onnxruntime": "1.17.0"}, "is too old"),
    ],
)
def test_unusable_onnxruntime(installed, message, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "builds", lambda: installed)
    with pytest.raises(ORTFallbackError, match=message):
        always(fallback="raise")
    with caplog.at_level(logging.WARNING, logger="lightning_ort"):
        backend = always()
    assert not backend.available
    assert [record for record in caplog.records if message in record.getMessage()]
    module, x = mlp(), torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(module, backend=backend)(x), module(x))
    assert backend.report.fallbacks[0].reason.type is ReasonType.RUNTIME_UNAVAILABLE


def test_onnxruntime_that_does_not_import(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "does not import" in str(kernels.unavailable())


def test_training_kernels_that_are_not_there(monkeypatch):
    monkeypatch.setattr(kernels, "_has_training_kernel", lambda *args: False)
    with pytest.raises(ValueError, match="no gradient kernels"):
        kernels.Kernels("training", ("CPUExecutionProvider",))


def test_unknown_provider_is_refused():
    with pytest.raises(ValueError, match="TPUExecutionProvider.*available"):
        ORTBackend(ORTConfig(debug={"providers": ["TPUExecutionProvider"]}))
    assert "CPUExecutionProvider" in onnxruntime.get_available_providers()


def test_losses_with_class_indices():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, y):
            return F.cross_entropy(self.net(x), y, ignore_index=-100)

    assert_same_training_step(Classifier(), (torch.randn(4, 8), torch.tensor([0, 2, -100, 1])), always())


@pytest.mark.parametrize("function", [torch.sigmoid, F.silu, lambda x: x.sigmoid().log()])
def test_sigmoid_far_below_zero(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(-80, 0, 41)
    backend = always(min_region_nodes=1)
    got = torch.compile(lambda x: function(x), backend=backend)(x)
    assert backend.report.ort_runs == 1
    torch.testing.assert_close(got.double(), function(x.double()), rtol=1e-5, atol=0)


def test_log_records_hold_no_session(caplog: pytest.LogCaptureFixture) -> None:
    """Who keeps records, as some handlers do, would keep what was compiled."""
    backend = always(fallback="raise")
    with caplog.at_level(logging.DEBUG, "lightning_ort"):
        torch.compile(nn.Linear(4, 4), backend=backend)(torch.randn(2, 4)).sum().backward()
    assert backend.report.ort_runs > 0
    graphs = [record for record in caplog.records if record.name == "lightning_ort.compiler.placement.placer"]
    assert len(graphs) == 2
    assert all(type(arg) is str for record in graphs for arg in record.args)


class Shifted(torch.Tensor):
    """Adds one to each product, which dynamo traces."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return torch.Tensor.add(out.as_subclass(torch.Tensor), 1).as_subclass(cls) if func is torch.mul else out


@pytest.mark.parametrize(
    "options", [{"placement": "always", "debug": {"min_region_nodes": 1}}, {"debug": {"torch_ops": ("aten.mul",)}}]
)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_class_of_tensors_with_functions_of_its_own(options, needs_gradient):
    """The graph has the results of its function already: torch's own eager backend calls it once more (2.13)."""

    def step(x, w):
        y = w * w
        torch._dynamo.graph_break()
        return torch.mul(x, y).square().mean()

    backend = ORTBackend(config_of(**{"cache_dir": None, **options}))
    found = []
    for call in (step, torch.compile(step, backend=backend)):
        torch.manual_seed(0)
        x = torch.randn(4, 4).as_subclass(Shifted).requires_grad_(needs_gradient)
        w = torch.randn(4, 4, requires_grad=True)
        loss = call(x, w)
        loss.backward()
        found.append((type(loss), loss.as_subclass(torch.Tensor).detach(), w.grad, x.grad))
    assert found[0][0] is found[1][0] is Shifted
    torch.testing.assert_close(found[1][1:], found[0][1:])
    assert "an input is a Shifted, a class of tensors with functions of its own" in backend.report.to_text()
    assert (backend.report.ort_runs > 0) == ("placement" in options)
    assert not backend.report.fallbacks


def test_a_result_whose_gradient_has_a_hook():
    """Compiled graphs run it inside, so that the gradient that the result keeps would be the one before the hook."""
    backend = always(min_region_nodes=1)
    found = []

    def step(x, w):
        y = w * w
        torch._dynamo.graph_break()
        hidden = torch.tanh(x * y)
        hidden.register_hook(lambda gradient: gradient * 0.5)
        torch._dynamo.graph_break()
        hidden.retain_grad()
        return hidden, (hidden * 2).square().mean()

    for call in (step, torch.compile(step, backend=backend)):
        torch.manual_seed(0)
        x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
        hidden, loss = call(x, w)
        (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        loss.backward()
        found.append((gradient, hidden.grad, w.grad))
    torch.testing.assert_close(found[1], found[0])
    assert backend.report.ort_runs > 0
    assert [note.reason.type for note in backend.report.notes] == [ReasonType.HOOKED_RESULT]
    assert not backend.report.fallbacks


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("entered_within", [False, True])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "make",
    [lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda: SelfAttention(16, 2, batch_first=True)],
    ids=["encoder layer", "attention"],
)
def test_kernels_for_inference_that_cast_within(
    make: Callable[[], nn.Module], fast: bool, entered_within: bool
) -> None:
    """Eager's kernel runs under autocast; a graph has no autocast, but what it would cast."""
    layer = make().eval()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=entered_within or torch.is_autocast_enabled("cpu")):
            return layer(x).float().sin()

    backend = ORTBackend(ORTConfig(placement="always", fallback="raise", debug={"min_region_nodes": 1}))
    x = torch.randn(3, 5, 16)
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not entered_within):
            expected, actual = step(x), torch.compile(step, backend=backend)(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)
    assert not backend.report.fallbacks
    left = any("set_fastpath_enabled(False)" in str(note) for note in backend.report.notes)
    assert left == (backend.report.ort_runs == 0) == (fast and isinstance(layer, nn.TransformerEncoderLayer))
