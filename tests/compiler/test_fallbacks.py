"""A compiled graph that fails while it runs: eager takes its place, and nothing else changes."""

import copy
import itertools
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from ort_settings import config_of
from torch import fx, nn

from lightning_ort import ORTConfig
from lightning_ort.compat.aot_autograd import GraphFacts
from lightning_ort.compiler import compilation as backend_module
from lightning_ort.compiler.backend import ORTBackend, ORTFallbackError
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.running import fallbacks
from lightning_ort.compiler.running.graph_check import GraphCheck
from lightning_ort.compiler.running.guarded_region import GuardedRegion
from tests.compiler.failures import BACKWARD, FORWARD, TRIAL, inject


class Net(nn.Module):
    """Dropout shows the random numbers, the batch norm its running statistics."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def train(module, call, change=None, steps=4):
    """Losses, and the parameters and buffers at the end, of steps from a seed."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 6)
        optimizer.zero_grad()
        out = call(x)
        loss = out.square().mean()
        loss /= 2
        loss.backward() if change is None else change(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: value.clone() for key, value in module.state_dict().items()}


def compiled(module, **options):
    backend = ORTBackend(config_of(cache_dir=None, **{"placement": "always", **options}))
    return torch.compile(module, backend=backend), backend


@pytest.mark.parametrize(
    ("where", "after", "step_graph"),
    [(FORWARD, 0, "auto"), (BACKWARD, 0, "auto"), (FORWARD, 6, "split"), (FORWARD, 6, "joint")],
)
def test_a_failing_pass_changes_no_number(where, after, step_graph, monkeypatch, caplog):
    module = Net()
    stock = copy.deepcopy(module)
    failed = inject(monkeypatch, where, after)
    call, backend = compiled(module, step_graph=step_graph)
    caplog.set_level(logging.WARNING, "lightning_ort")
    got, expected = train(module, call, steps=after + 3), train(stock, stock, steps=after + 3)
    assert failed == [where]  # once, then it is given up
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-7)
    assert backend.report.ort_runs > 0
    assert backend.report.ort_node_fraction == 0
    (fallback,) = backend.report.fallbacks
    assert (fallback.where, fallback.reason.type) == ("graph_0", ReasonType.RUN_FAILED)
    (warning,) = caplog.messages
    assert f"injected into {where}" in warning


@pytest.mark.parametrize("after", [0, 6])
def test_a_compiled_graph_that_runs_out_of_memory_changes_no_number(after):
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3))
    stock, failures, runs = copy.deepcopy(module), [], itertools.count()

    def compile(gm, inputs):
        def run(*args):
            results = gm.forward(*args)
            if next(runs) == after:
                raise torch.OutOfMemoryError("injected")
            return results

        return run

    call = torch.compile(module, backend=inductor.GuardedBackend(compile, failures.append))
    assert train(module, call, steps=after + 3)[0] == train(stock, stock, steps=after + 3)[0]
    assert len(failures) == 1
    assert next(runs) == after + 1


def test_a_region_that_runs_out_of_memory_is_freed_before_torch_runs():
    class Session:
        def __call__(self, *args):
            raise torch.OutOfMemoryError("injected")

    session = Session()
    alive = weakref.ref(session)

    def module(*args):
        return [alive() is None]

    module.graph = fx.Graph()
    report, reasons = SimpleNamespace(), []
    region = GuardedRegion(
        SimpleNamespace(name="one", module=module, inputs=[]), session, report, reasons.append, check=False
    )
    del session
    assert region(torch.ones(1)) == [True]
    assert [reason.type for reason in reasons] == [ReasonType.RUN_FAILED]


def test_a_graph_that_runs_out_of_memory_is_freed_before_eager_runs():
    class Compiled:
        def __call__(self, *args):
            raise torch.OutOfMemoryError("injected")

    compiled, failures = Compiled(), []
    alive = weakref.ref(compiled)
    graph = fallbacks.GuardedGraph(
        compiled, lambda x: [alive() is None], fallbacks.PassMonitor(1), failures.append, failures.append
    )
    del compiled
    assert graph(torch.ones(1)) == [True]
    assert [type(failure) for failure in failures] == [torch.OutOfMemoryError]


def test_an_input_that_eager_does_not_need_may_change_before_the_backward_pass():
    """Nothing is compared then: eager would begin with the changed one."""
    told = []
    check = GraphCheck(lambda seconds, largest: told.append(largest), told.append)
    graph = fallbacks.GuardedGraph(
        exponentials, exponentials, fallbacks.PassMonitor(1), *[told.append] * 2, check=check
    )
    x = nn.Parameter(torch.ones(2))
    (out,) = graph(x)
    with torch.no_grad():
        x.mul_(2)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2).exp())
    assert told == [0]  # the results


def exponentials(x):
    return (x.exp(),)


def test_a_result_has_a_pass_of_its_own_after_what_the_other_one_needs_has_changed():
    """As in a GAN whose optimizers take turns, where the first pass must not free what the second one needs."""

    def pair(a, b):
        return a.exp(), b.exp()

    def eager(*args):
        return pair(*args)

    told, a, b = [], nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    graph = fallbacks.GuardedGraph(pair, eager, fallbacks.PassMonitor(2), *[told.append] * 2, separate=True)
    first, second = graph(a, b)
    first.sum().backward()
    with torch.no_grad():
        a.mul_(2)
    second.sum().backward()
    torch.testing.assert_close([a.grad, b.grad], [torch.ones(2).exp()] * 2)
    assert [reason.type for reason in told] == [ReasonType.SEPARATE_GRADIENTS]


def test_a_graph_without_backward_passes_is_no_longer_prepared_for_one():
    told, x = [], nn.Parameter(torch.ones(2))
    graph = fallbacks.GuardedGraph(exponentials, exponentials, fallbacks.PassMonitor(1), *[told.append] * 2)
    trusted = [(graph(x), graph.trusted)[1] for _ in range(200)]
    assert trusted == sorted(trusted)
    assert trusted[0] < trusted[-1]
    assert not told


def test_results_that_share_memory():
    def f(x):
        product = x.exp() * 2
        return product[:2], product[1:]

    call, backend = compiled(f, min_region_nodes=1)
    for _ in range(2):
        found = []
        for function in (f, call):
            x = torch.arange(3.0, requires_grad=True)
            first, second = function(x)
            (first.sum() + second.square().sum()).backward()
            found.append(x.grad)
        torch.testing.assert_close(*found)
    assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks


def test_a_region_that_torch_cannot_time_stays_on_onnxruntime(monkeypatch, caplog):
    module = Net().eval()
    stock = copy.deepcopy(module)
    failed = inject(monkeypatch, TRIAL)
    call, backend = compiled(module, placement="measured")
    got, expected = train(module, call), train(stock, stock)
    assert len(failed) == 2  # forward and backward
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks
    assert "injected into trial" in str(backend.report.notes)


@pytest.mark.parametrize("where", [FORWARD, BACKWARD])
def test_raises_where_fallbacks_are_refused(where, monkeypatch):
    inject(monkeypatch, where)
    call, _ = compiled(Net(), fallback="raise")
    with pytest.raises(ORTFallbackError, match=f"graph_0 cannot run on ONNX Runtime: .*injected into {where}"):
        call(torch.randn(4, 6)).sum().backward()


def test_an_error_of_the_user_is_eagers(caplog):
    def f(table, index):
        return (table.exp() * 2)[index]

    call, backend = compiled(f)
    index = torch.tensor([1, 9])
    with pytest.raises(IndexError, match="out of bounds") as caught:
        call(torch.randn(3, 4, requires_grad=True), index)
    assert not backend.report.fallbacks
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert caught.value.__context__ is None
    index[1] = 2
    call(torch.randn(3, 4, requires_grad=True), index).sum().backward()  # it was not given up
    assert backend.report.ort_runs > 0


@pytest.mark.parametrize("where", ["", BACKWARD])
def test_the_first_backward_pass_may_be_repeated(where, monkeypatch):
    module = Net().eval()
    x = torch.randn(4, 6)
    if where:
        inject(monkeypatch, where)
    call, backend = compiled(module)
    loss = call(x).square().sum()
    first = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(module.parameters()))
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected)
    assert backend.report.ort_runs > 0


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("step_graph", ["joint", "split"])
def test_weights_changed_before_the_backward_pass(step_graph, retained):
    """As eager: the gradients would be those of other weights."""
    module = Net().eval()
    call, backend = compiled(module, step_graph=step_graph)
    for run in (module, call):
        loss = run(torch.randn(4, 6)).square().sum()
        if retained:
            loss.backward(retain_graph=True)
        with torch.no_grad():
            module.layers[4].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks


@torch._dynamo.config.patch(allow_rnn=True)
def test_what_fails_around_the_passes(caplog):
    """AOTAutograd of torch 2.13 raises for what a traced LSTM saves, after its forward pass."""
    module = nn.LSTM(6, 4)
    call, backend = compiled(lambda x: (module(x)[0] * 2).tanh().sum())
    x = torch.randn(3, 2, 6)
    call(x).backward()
    found = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    (module(x)[0] * 2).tanh().sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in module.parameters()])
    assert backend.report.ort_runs > 0  # before it failed
    (fallback,) = backend.report.fallbacks
    assert fallback.reason.type is ReasonType.RUN_FAILED


def test_what_fails_around_the_passes_later_reaches_the_user():
    """What has run before has written what it writes to: nothing can be done again."""
    fails = []

    def run(x):
        if fails:
            raise RuntimeError("around the passes")
        return (x * 2,)

    def unexpected(*args):
        raise AssertionError

    graph = fallbacks.GuardedGraph(run, unexpected, fallbacks.PassMonitor(1), unexpected, unexpected)
    assert graph(torch.ones(1)) == (2.0,)
    fails.append(True)
    with pytest.raises(RuntimeError, match="around the passes"):
        graph(torch.ones(1))


def test_what_is_trained_is_none_of_what_an_unknown_graph_may_write_to():
    monitor = fallbacks.PassMonitor(2)
    monitor.facts = GraphFacts(1, [], True)  # of other inputs
    weight, x, checks = nn.Parameter(torch.ones(2)), torch.zeros(2), []
    assert monitor.copies_of_written([weight, x]).keys() == {1}

    def run(weight, x):
        with torch.no_grad():
            weight.add_(1)
        return (weight * x,)

    check = SimpleNamespace(results=lambda *args: checks.append(args), skipped=checks.append)
    fallbacks.GuardedGraph(run, run, monitor, checks.append, checks.append, check=check)(weight, x)
    assert not checks  # with eager, which would start from another weight


@pytest.mark.parametrize("plain", [0, 1, fallbacks.PASSES - 1])
def test_gradients_of_gradients_are_eagers(plain):
    """As in penalties of gradients, also after so many steps without one."""
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        module = Net()
        call, backend = compiled(module) if ours else (module, None)
        weight, seen = module.layers[0].weight, []
        weight.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        torch.manual_seed(1)
        for step in range(plain + 3):
            x = torch.randn(16, 6, requires_grad=True)
            out = call(x)
            loss = out.square().mean()
            if step >= plain:
                first, second = torch.autograd.grad(out.tanh().sum(), [x, weight], create_graph=True)
                loss = loss + 0.1 * (first.square().mean() + second.square().mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append(({key: value.clone() for key, value in module.state_dict().items()}, seen, x.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert backend.report.ort_runs > 0
    (note,) = backend.report.notes
    assert note.reason.type is ReasonType.SECOND_GRADIENT
    assert not backend.report.fallbacks
    assert not any(region.executor == "ort" for graph in backend.report.graphs for region in graph.regions)


def test_a_late_second_gradient_is_refused_and_not_left_out(monkeypatch):
    monkeypatch.setattr(backend_module, "PASSES", 1)
    call, backend = compiled(lambda x: x.sin().exp() * 2)
    call(torch.randn(5, requires_grad=True)).sum().backward()
    x = torch.randn(5, requires_grad=True)
    (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.square().sum().backward()
    assert backend.report.ort_runs > 0


def test_what_changed_before_a_second_gradient_is_an_error():
    call, backend = compiled(lambda x: x.sin().exp() * 2)
    x = torch.randn(5, requires_grad=True)
    out = call(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    assert backend.report.ort_runs > 0


@pytest.mark.parametrize("where", ["", BACKWARD])
def test_accumulated_gradients_and_hooks(where, monkeypatch):
    seen = {}
    results = []
    for name in ("ours", "stock"):
        torch.manual_seed(0)
        module = Net().eval()
        call = module
        if name == "ours":
            if where:
                inject(monkeypatch, where)
            call, backend = compiled(module)
        weight = module.layers[0].weight
        calls = seen.setdefault(name, [])
        weight.register_hook(lambda g, calls=calls: calls.append(g.clone()))
        for k in range(3):
            call(torch.full((4, 6), 1.0 + k)).square().sum().backward()
        results.append({key: p.grad for key, p in module.named_parameters()})
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen["ours"], seen["stock"], rtol=1e-4, atol=1e-5)
    assert len(seen["ours"]) == 3
    assert backend.report.ort_runs > 0


def test_autocast_is_as_it_was_when_eager_repeats_a_pass(monkeypatch):
    inject(monkeypatch, BACKWARD)
    module, x = nn.Linear(8, 8), torch.randn(4, 8)

    def f(x):
        x = module(x)
        return x.softmax(-1) * x.float().exp()

    call, backend = compiled(f)
    results = []
    for step in (f, call):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(x).square().sum()
        loss.backward()  # outside of autocast, as Lightning's
        results.append({key: p.grad for key, p in module.named_parameters()})
    assert len(backend.report.fallbacks) == 1
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_inputs_that_are_written_to_and_returned():
    def f(x, state):
        state.mul_(2)
        return x * state, x.view(-1), state

    call, backend = compiled(f, min_region_nodes=1)
    for _ in range(2):
        results = []
        for function in (f, call):
            x, state = torch.arange(4.0).requires_grad_(), torch.full((4,), 3.0)
            product, view, same = function(x, state)
            (product.sum() + view.sum()).backward()
            results.append((product.detach(), view.detach(), state, x.grad))
            assert same is state
        torch.testing.assert_close(results[0], results[1])
    assert backend.report.ort_runs > 0


@pytest.mark.parametrize("step_graph", ["split", "joint"])
def test_a_graph_on_which_only_a_detached_value_depends(step_graph):
    """As in a GAN: the discriminator's loss does not go back to the generator's graph, whose turn comes later."""

    def generate(nets, noise):
        return nets[0](noise)

    def judge(nets, fakes, images):
        judged = nets[1](images)
        return (nets[1](fakes.detach()) - judged).square().mean(), judged

    def please(nets, fakes):
        return nets[1](fakes).square().mean()

    backend = ORTBackend(ORTConfig(cache_dir=None, placement="always", debug={"step_graph": step_graph}))
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        nets = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 1)])
        parts = [generate, judge, please]
        if ours:
            parts = [torch.compile(part, backend=backend) for part in parts]
        for _ in range(2 * fallbacks.PASSES + 2):
            images, noise = torch.randn(8, 6), torch.randn(8, 4)
            fakes = parts[0](nets, noise)
            parts[1](nets, fakes, images)[0].backward()
            parts[2](nets, fakes).backward()
        results.append([parameter.grad for parameter in nets.parameters()])
    torch.testing.assert_close(results[1], results[0])
    assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks
    assert any(graph.name.startswith("step") for graph in backend.report.graphs) == (step_graph == "joint")
