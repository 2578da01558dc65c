"""A step as one graph: forward pass, loss and gradients at once, and nothing that a user sees changes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from ort_settings import config_of
from torch import nn

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.request import CompileRequest
from lightning_ort.compiler.running.step_graph import WaitingGradients

OPTIONS = {"placement": "always", "cache_dir": None, "debug": {"step_graph": "joint"}}


class Net(nn.Module):
    """Dropout shows the random numbers, the batch norm its running statistics, the last layer ties its weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 6))
        self.unused = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return F.linear(self.layers(x), self.layers[0].weight) * self.scale


def batch(seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, 6, generator=generator), torch.randint(8, (12,), generator=generator)


def loss_step(module, x, y):
    return F.cross_entropy(module(x), y)


class Pair:
    """A module in eager and its copy compiled, each called from the same seed."""

    def __init__(self, step=loss_step, module=None, direct=False, leave=lambda make: False, one_graph=True, **options):
        torch.manual_seed(0)
        self.eager = Net() if module is None else module
        self.module = copy.deepcopy(self.eager)
        self.misfits = []
        request = CompileRequest(writes_gradients=lambda: direct, leave_gradients=leave, split=self.misfits.append)
        self.backend = ORTBackend(config_of(**{**OPTIONS, **options}), lambda: request)
        self._one_graph = one_graph
        self._step = step
        self._compiled = torch.compile(step, backend=self.backend)

    def run(self, use=lambda result, module: result.backward(), seed=1, scale=1.0):
        """Run both, do something with the result, and compare all gradients and buffers."""
        used = []
        for module, step in ((self.eager, self._step), (self.module, self._compiled)):
            torch.manual_seed(seed)
            result = step(module, *batch(seed))
            used.append(use(result, module))
        self.compare(scale)
        torch.testing.assert_close(used[1], used[0])
        return used[1]

    def compare(self, scale=1.0):
        for (name, expected), got in zip(self.eager.named_parameters(), self.module.parameters(), strict=True):
            assert (got.grad is None) == (expected.grad is None), name
            if got.grad is not None:
                torch.testing.assert_close(
                    got.grad, expected.grad, rtol=1e-4, atol=1e-6 * scale, msg=lambda m, n=name: f"{n}: {m}"
                )
                assert got.grad.stride() == expected.grad.stride(), name
        torch.testing.assert_close(dict(self.module.named_buffers()), dict(self.eager.named_buffers()))
        assert self.backend.report.ort_runs > 0
        names = [graph.name for graph in self.backend.report.graphs]
        assert any(name.startswith("step") for name in names) == self._one_graph, names
        assert not self.backend.report.fallbacks


@pytest.mark.parametrize("direct", [False, True])
def test_gradients_accumulate_as_in_eager(direct):
    pair = Pair(direct=direct)
    for seed in range(4):
        pair.run(seed=seed)
    assert pair.misfits == []
    assert len(pair.backend.report.graphs) == 1
    assert pair.backend.report.graphs[0].num_ort_nodes > 10


def test_gradients_are_added_to_sparse_ones():
    pair = Pair(direct=True)
    for module in (pair.eager, pair.module):
        module.scale.grad = torch.ones_like(module.scale).to_sparse()
    pair.run()


@pytest.mark.parametrize("direct", [False, True])
def test_gradients_belong_to_the_user(direct):
    pair = Pair(direct=direct)
    pair.run()
    kept = {name: p.grad for name, p in pair.module.named_parameters() if p.grad is not None}
    values = {name: gradient.clone() for name, gradient in kept.items()}
    addresses = {gradient.untyped_storage().data_ptr() for gradient in kept.values()}
    assert len(addresses) == len(kept)
    for module in (pair.module, pair.eager):
        module.zero_grad(set_to_none=True)
    pair.run(seed=2)
    torch.testing.assert_close(kept, values, rtol=0, atol=0)
    for parameter in pair.module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0)  # writable, and nobody else's
    torch.testing.assert_close(kept, values, rtol=0, atol=0)


@pytest.mark.parametrize("factor", [0.25, 1 / 3, 1024.0, 0.0, -1.0])
def test_another_gradient_of_the_loss_than_expected(factor):
    pair = Pair()
    for seed in range(3):
        pair.run(lambda loss, module: (loss * factor).backward(), seed=seed, scale=max(1, factor))
    pair.run(lambda loss, module: (loss + loss.square()).backward(), seed=4, scale=max(1, factor))


def test_an_expected_gradient_of_the_loss_gives_the_same_bits():
    pair = Pair(step=lambda module, x, y: module(x).square().mean(), module=nn.Sequential(nn.Linear(6, 8)))
    scaled = []
    for seed in (1, 1, 1):
        pair.module.zero_grad(set_to_none=True)
        pair.eager.zero_grad(set_to_none=True)
        pair.run(lambda loss, module: (loss / 3).backward(), seed=seed)
        scaled.append(pair.module[0].weight.grad)
    assert torch.equal(scaled[1], scaled[2])


def test_infinite_scale_then_a_finite_one():
    pair = Pair()
    for module, step in ((pair.eager, pair._step), (pair.module, pair._compiled)):
        torch.manual_seed(0)
        (step(module, *batch()) * torch.tensor(float("inf"))).backward()
        assert not any(p.grad.isfinite().any() for p in module.parameters() if p.grad is not None)
        module.zero_grad(set_to_none=True)
    pair.run(lambda loss, module: (loss * 2).backward())
    assert all(p.grad.isfinite().all() for p in pair.module.parameters() if p.grad is not None)


def test_the_loss_looks_like_a_loss():
    pair = Pair()

    def look(loss, module):
        assert loss.requires_grad
        assert loss.grad_fn is not None
        assert not loss.is_leaf
        detached = loss.detach()
        loss.backward()
        return detached

    pair.run(look)


def test_retained_graphs_and_second_passes():
    pair = Pair()

    def twice(loss, module):
        loss.backward(retain_graph=True)
        loss.backward()

    pair.run(twice)
    pair.run(twice, seed=2)
    loss = pair._compiled(pair.module, *batch())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_asked_for_without_accumulating():
    pair = Pair()

    def grad(loss, module):
        return torch.autograd.grad(loss, list(module.layers.parameters()))

    pair.run(grad)
    assert all(p.grad is None for p in pair.module.parameters())
    pair.run(lambda loss, module: loss.backward(inputs=[module.scale]))


def curvature(loss, module):
    """As optimizers that look at curvature do."""
    loss.backward(create_graph=True)
    parameters = [p for p in module.parameters() if p.grad is not None and p.grad.requires_grad]
    assert parameters
    gradients = [p.grad for p in parameters]
    products = torch.autograd.grad(gradients, parameters, [gradient.detach().sign() for gradient in gradients])
    for parameter, product in zip(parameters, products, strict=True):
        parameter.grad = product


@pytest.mark.parametrize("direct", [False, True])
def test_gradients_of_gradients(direct):
    pair = Pair(direct=direct)
    for seed in range(3):
        pair.run(curvature, seed=seed)
        for module in (pair.module, pair.eager):
            module.zero_grad()


def test_gradients_that_wait_are_added_to_differentiable_ones():
    waiting = []
    pair = Pair(direct=True, leave=lambda make: not waiting.append(make()))
    pair.run()
    for module in (pair.eager, pair.module):
        for parameter in module.layers.parameters():
            parameter.grad = torch.ones_like(parameter, requires_grad=True)
    pair.run(lambda loss, module: waiting.pop().hand_over() if module is pair.module else loss.backward())
    assert waiting == []


@pytest.mark.parametrize("direct", [False, True])
def test_gradients_of_gradients_are_refused_after_plain_ones(direct):
    pair = Pair(direct=direct)
    pair.run()
    (gradient,) = torch.autograd.grad(pair._compiled(pair.module, *batch()), [pair.module.scale], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.backward()
    pair._compiled(pair.module, *batch()).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        pair.module.scale.grad.backward()


@pytest.mark.parametrize("direct", [False, True])
def test_hooks_of_parameters_run(direct):
    pair = Pair(direct=direct)
    pair.run()
    seen = {"eager": [], "compiled": []}
    for name, module in (("eager", pair.eager), ("compiled", pair.module)):
        module.scale.register_hook(lambda gradient: gradient * 2)
        module.layers[4].bias.register_post_accumulate_grad_hook(
            lambda parameter, name=name: seen[name].append(parameter.grad.clone())
        )
    pair.run(seed=2)
    pair.run(seed=3)
    assert len(seen["compiled"]) == 2
    torch.testing.assert_close(seen["compiled"], seen["eager"], rtol=1e-4, atol=1e-6)


def test_parameters_that_are_frozen_later():
    pair = Pair()
    pair.run()
    for frozen in (True, False):
        for module in (pair.module, pair.eager):
            module.zero_grad(set_to_none=True)
            module.layers[0].weight.requires_grad_(not frozen)
        pair.run(seed=2)


def test_further_results_that_are_not_differentiated():
    def step(module, x, y):
        logits = module(x)
        loss = F.cross_entropy(logits, y)
        penalty = logits.square().mean()
        return {
            "loss": loss + 0.1 * penalty,
            "part": loss,
            "penalty": penalty,
            "logits": logits,
            "right": logits.argmax(1) == y,
        }

    def use(result, module):
        result["loss"].backward()
        assert result["logits"].requires_grad
        return {name: value.detach() for name, value in result.items()}

    pair = Pair(step)
    for seed in range(3):
        pair.run(use, seed=seed)
    assert pair.misfits == []


def test_another_result_that_is_differentiated_after_all():
    def step(module, x, y):
        logits = module(x)
        return F.cross_entropy(logits, y), logits

    def both(result, module):
        loss, logits = result
        (loss + logits.square().mean()).backward()
        return logits.detach()

    pair = Pair(step)
    pair.run(lambda result, module: result[0].backward())
    pair.run(both, seed=2)
    assert pair.misfits == ["a result beside its loss is differentiated"]
    pair.run(both, seed=3)  # in eager


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("uses", ["the loss", "both", "the other"])
def test_a_result_that_depends_on_more_than_the_loss(uses, direct):
    """As the layers of a normalizing flow, which return what they computed and a sum of their scales."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
            self.first = nn.Linear(6, 6)

    def step(module, x, y):
        z = module.first(x)
        torch._dynamo.graph_break()
        return (z - module.shift) * torch.exp(-module.scale), -module.scale.sum()

    def use(results, module):
        z, log_det = results
        total = {"the loss": log_det, "the other": z.square().mean(), "both": z.square().mean() + log_det}[uses]
        total.backward()

    pair = Pair(step, Scale(), direct, one_graph=False)  # in eager each result has a backward pass of its own
    for seed in range(3):
        pair.run(use, seed=seed)


def test_a_loss_that_nobody_differentiates():
    pair = Pair()
    pair.run(lambda loss, module: loss.detach())
    pair.run(seed=2)
    assert pair.misfits == ["no gradient of its loss was asked for"]
    pair.run(seed=3)


def test_a_batch_that_needs_a_gradient():
    pair = Pair(direct=True)

    def through(leaf):
        def use(module, step):
            x = leaf.clone().requires_grad_()
            torch.manual_seed(5)
            step(module, x * 2, batch()[1]).backward()
            return x.grad

        return use

    run = through(batch()[0])
    torch.testing.assert_close(run(pair.module, pair._compiled), run(pair.eager, pair._step), rtol=1e-4, atol=1e-6)
    pair.compare()


def test_parameters_whose_gradients_are_the_same_tensor():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.randn(6)) for _ in range(3))

        def forward(self, x):
            return (x + self.a + self.b).sum() + self.c.sum() + (x * x).mean()

    for direct in (False, True):
        pair = Pair(lambda module, x, y: module(x), Sum(), direct=direct)
        for seed in range(3):
            pair.run(seed=seed)
        assert len({p.grad.data_ptr() for p in pair.module.parameters()}) == 3


def test_layouts_of_convolutions():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)

    def step(module, x, y):
        images = x.reshape(2, 3, 3, 4).to(memory_format=torch.channels_last)
        return module(images).square().mean()

    for direct in (False, True):
        pair = Pair(step, copy.deepcopy(module), direct=direct)
        for seed in range(3):
            pair.run(seed=seed)


def test_sizes_that_change():
    pair = Pair()
    for rows in (12, 5, 9):
        for module, step in ((pair.eager, pair._step), (pair.module, pair._compiled)):
            torch.manual_seed(rows)
            x, y = torch.randn(rows, 6), torch.randint(8, (rows,))
            step(module, x, y).backward()
        pair.compare()


def test_autocast():
    def step(module, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(module(x).float(), y)

    pair = Pair(step, module=nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8)))
    used = []
    for module, call in ((pair.eager, step), (pair.module, pair._compiled)):
        loss = call(module, *batch())
        loss.backward()
        used.append(loss.detach())
    torch.testing.assert_close(used[1], used[0], rtol=2e-2, atol=1e-2)
    for expected, got in zip(pair.eager.parameters(), pair.module.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=5e-2, atol=1e-2)
    assert [graph.name for graph in pair.backend.report.graphs] == ["step_0"]
    assert pair.backend.report.ort_runs > 0


def test_float16_with_a_gradient_scaler():
    """Without its scale the gradients would underflow; the first step shows what it is."""

    def step(module, x, y):
        with torch.autocast("cpu", torch.float16):
            return (module(x).float().square().mean() * 1e-6).float()

    scale = 2.0**16
    pair = Pair(step, module=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)))
    for seed in range(3):
        for module, call in ((pair.eager, step), (pair.module, pair._compiled)):
            module.zero_grad(set_to_none=True)
            (call(module, *batch(seed)) * scale).backward()
        for expected, got in zip(pair.eager.parameters(), pair.module.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-2, atol=1e-2 * float(expected.grad.abs().max()))
    assert [graph.name for graph in pair.backend.report.graphs] == ["step_0"]
    assert sum(region.runs for region in pair.backend.report.graphs[0].regions) >= 2


def test_double_precision():
    pair = Pair(lambda module, x, y: F.cross_entropy(module(x.double()), y), module=Net().double())
    pair.run()


def test_detect_anomaly():
    pair = Pair(direct=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        pair.run()


def test_errors_of_the_user():
    pair = Pair()
    pair.run()
    x, y = batch()
    for module, step in ((pair.eager, pair._step), (pair.module, pair._compiled)):
        with pytest.raises(IndexError, match="out of bounds"):
            step(module, x, y + 100)
    pair.run(seed=2)


def checkpointed(module, x, y):
    hidden = torch.utils.checkpoint.checkpoint(module.layers[0], x, use_reentrant=False)
    return F.cross_entropy(module.layers[2:](hidden), y % 6)


def spectral(module, x, y):
    logits = module(x)
    return F.cross_entropy(logits, y), logits


@pytest.mark.parametrize(
    ("step", "module"),
    [
        (checkpointed, None),  # what is to be computed again would be kept
        # the step could not be done again: its result depends on what a buffer was before
        (spectral, nn.utils.spectral_norm(nn.Linear(6, 8))),
        (lambda module, x, y: module(x), None),  # no loss
        (lambda module, x, y: (module(x).mean(), module(x).square().mean()), None),  # two
    ],
    ids=["checkpoint", "spectral_norm", "no_loss", "two_losses"],
)
@pytest.mark.usefixtures("torchs_checkpoint")
def test_steps_that_need_two_graphs(step, module):
    pair = Pair(step, module, one_graph=False)

    def use(result, module):
        result = result[0] if isinstance(result, tuple) else result
        result.sum().backward()

    pair.run(use)


def test_the_setting():
    for options in (
        {"debug": {"step_graph": "split"}},
        {"debug": {"step_graph": "auto"}},
        {"activation_memory_budget": 0.5},
    ):
        Pair(one_graph=False, **options).run()
    with pytest.raises(ValueError, match="step_graph='whole'"):
        ORTConfig(debug={"step_graph": "whole"})


def test_gradients_of_a_loss_whose_gradient_is_on_a_gpu_are_scaled_once():
    """Nobody knows there what number was expected, which is a tensor that stays on the device."""
    weight, loss = nn.Parameter(torch.zeros(2)), torch.ones(())
    waiting = WaitingGradients(loss, (math.nan, torch.tensor(0.5)), [weight], [torch.full((2,), 0.5)], lambda _: None)
    assert not waiting.are_of(loss)
    (loss / 4).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.25, 0.25]
