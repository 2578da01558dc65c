"""Passes over graphs: what they remove, what they leave, and that values stay the same bits."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.lowering import passes
from tests.conversion.harness import compile_function

aten = torch.ops.aten


def after_drop_casts(function, *args):
    """The traced function without needless casts; it computes the same."""
    gm = make_fx(function, tracing_mode="fake")(*args)
    passes.drop_casts(gm)
    gm.graph.lint()
    gm.recompile()
    got, expected = gm(*args), function(*args)
    for ours, theirs in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, expected)), strict=True):
        assert ours.dtype is theirs.dtype
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)
    return gm, got


def casts(gm):
    return len(gm.graph.find_nodes(op="call_function", target=aten._to_copy.default))


def test_same_cast_is_made_once():
    gm, _ = after_drop_casts(
        lambda x: (x.bfloat16() + 1) * x.bfloat16() - x.half().bfloat16() * x.bfloat16(), torch.randn(4, 6)
    )
    assert casts(gm) == 3  # to bfloat16, to half, and that to bfloat16


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_widening_and_back_is_nothing(narrow):
    x = torch.cat([torch.randn(100), torch.tensor([0.0, -0.0, float("inf"), 1e-7])]).to(narrow)
    gm, _ = after_drop_casts(lambda x: (x * 2).float().to(narrow) + 1, x)
    assert casts(gm) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.bfloat16().float() + 1,  # rounds
        lambda x: x.half().bfloat16().half() + 1,  # neither holds the other
        lambda x: (100 * x).long().float().long() + 1,  # large integers are no floats
        lambda x: x.half()[:, :1].expand(4, 6).float().half().view(24),  # the layout is another
    ],
)
def test_what_changes_something_stays(function):
    x = torch.randn(4, 6)
    before = make_fx(function, tracing_mode="fake")(x)
    gm, _ = after_drop_casts(function, x)
    assert casts(gm) == casts(before) > 0


def test_outputs_stay_tensors_of_their_own():
    x = torch.randn(4).half()
    _, (once, again, back) = after_drop_casts(lambda x: (x.float(), x.float(), x.float().half()), x)
    assert len({tensor.data_ptr() for tensor in (once, again, back, x)}) == 4


def views_of_casts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    once, again, back, narrow = x.float(), x.float(), x.float().half(), (x * 2).float()
    return once.view(-1), again.t(), back[0].view(2, 3), narrow.half().float() + 1


def test_views_that_are_outputs_keep_memory_of_their_own():
    x = torch.randn(4, 6).half()
    after_drop_casts(views_of_casts, x)
    compiled, report = compile_function(views_of_casts, [x], 4)
    outputs = compiled(x)
    assert report.ort_runs == 1
    assert len({tensor.untyped_storage().data_ptr() for tensor in (x, *outputs)}) == 5
    for got, expected in zip(outputs, views_of_casts(x), strict=True):
        assert torch.equal(got, expected)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = F.layer_norm(x, (16,))
        return torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)


def test_autocast_attention_casts_its_input_once():
    """Forward and backward, and with the values and gradients of eager."""
    torch.manual_seed(0)
    module, x = Attention(), torch.randn(2, 8, 16)
    reference = copy.deepcopy(module)
    backend = ORTBackend({"placement": "always", "debug": {"min_region_nodes": 1}})
    results = []
    for run, owner in ((torch.compile(module, backend=backend), module), (reference, reference)):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        y.float().square().sum().backward()
        results.append([y, *(parameter.grad for parameter in owner.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    forward = backend.report.graphs[0]
    made = sum(region.ops.get("aten._to_copy.default", 0) for region in forward.regions)
    # the input once, six parameters, the softmax's argument and its result
    assert made <= 9
    assert backend.report.ort_runs > 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.3)


def test_a_budget_saves_memory_and_no_more():
    torch.manual_seed(0)
    net, x = nn.Sequential(Block(), Block(), Block()), torch.randn(8, 16)

    def step(forward):
        saved = {}

        def pack(tensor):
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        torch.manual_seed(1)
        net.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward(x).square().mean()
        loss.backward()
        return loss, [parameter.grad.clone() for parameter in net.parameters()], sum(saved.values())

    expected, gradients, eager = step(net)
    kept = [eager]
    for budget in (1.0, 0.5, 0.1):
        torch._dynamo.reset()
        backend = ORTBackend({"placement": "always", "activation_memory_budget": budget})
        loss, found, saved = step(torch.compile(net.forward, backend=backend))
        assert backend.report.ort_runs == 2
        assert not backend.report.fallbacks
        torch.testing.assert_close(loss, expected)
        for ours, theirs in zip(found, gradients, strict=True):  # the dropout masks are the same ones
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        kept.append(saved)
    assert kept[0] >= kept[1] > kept[2] > kept[3]


@pytest.mark.parametrize(
    ("order", "sizes", "dim", "stacks"),
    [
        ((0, 1, 2), [3, 4, 5], 0, True),
        ((2, 0, 1), [3, 4, 5], 0, True),
        ((2, -3, 1), [3, 4, 5], -3, True),
        ((1, 0, 2), [4, 3, 5], 1, True),
        ((0, 1), [3, 4, 5], 0, False),  # one is missing
        ((0, 1, 1), [3, 4, 5], 0, False),  # one comes twice
    ],
)
def test_selections_of_all_parts_are_stacked(order, sizes, dim, stacks):
    def function(*gradients):
        padded = [aten.select_backward(x, sizes, dim, index) for x, index in zip(gradients, order, strict=True)]
        return functools.reduce(torch.add, padded) * 2

    gradients = [torch.randn([size for at, size in enumerate(sizes) if at != dim % 3]) for _ in order]
    gm = make_fx(function, tracing_mode="fake")(*gradients)
    passes.stack_selections(gm)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(*gradients), function(*gradients))
    assert len(gm.graph.find_nodes(op="call_function", target=aten.stack.default)) == stacks
    assert len(gm.graph.find_nodes(op="call_function", target=aten.select_backward.default)) == (
        0 if stacks else len(order)
    )


def test_selections_that_something_else_needs_stay():
    def function(a, b):
        first = aten.select_backward(a, [2, 4], 0, 0)
        both = first + aten.select_backward(b, [2, 4], 0, 1)
        return both * 2, first, torch.add(aten.select_backward(a, [2, 4], 0, 0), both, alpha=3)

    args = torch.randn(4), torch.randn(4)
    gm = make_fx(function, tracing_mode="fake")(*args)
    passes.stack_selections(gm)
    gm.recompile()
    for got, expected in zip(gm(*args), function(*args), strict=True):
        assert torch.equal(got, expected)
    assert not gm.graph.find_nodes(op="call_function", target=aten.stack.default)


def test_attention_stacks_its_gradients():
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    backend = ORTBackend({"placement": "always", "cache_dir": None})
    x = torch.randn(3, 5, 16)
    wanted = torch.autograd.grad(attention(x, x, x)[0].square().sum(), list(attention.parameters()))
    got = torch.compile(lambda x: attention(x, x, x)[0].square().sum(), backend=backend)(x)
    for ours, theirs in zip(torch.autograd.grad(got, list(attention.parameters())), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert backend.report.ort_runs == 2
    ops = backend.report.graphs[1].regions[0].ops
    assert "aten.stack.default" in ops
    assert "aten.select_backward.default" not in ops


def saved_layouts(monkeypatch, function, *args, torch_ops=()):
    """How the tensors that are saved between the passes of a compiled function lie in memory."""
    halves = []
    save_contiguous = passes.save_contiguous

    def note(forward, backward, num_fwd_outputs, converted):
        save_contiguous(forward, backward, num_fwd_outputs, converted)
        placeholders = backward.graph.find_nodes(op="placeholder")
        results = forward.graph.output_node().args[0][num_fwd_outputs:]
        halves.append(
            [(a.meta["val"].stride(), b.meta["val"].stride()) for a, b in zip(results, placeholders, strict=False)]
        )

    monkeypatch.setattr(passes, "save_contiguous", note)
    backend = ORTBackend(
        {"placement": "always", "cache_dir": None, "debug": {"min_region_nodes": 1, "torch_ops": torch_ops}}
    )
    expected = torch.autograd.grad(function(*args).sum(), args)
    for _ in range(2):
        got = torch.autograd.grad(torch.compile(function, backend=backend)(*args).sum(), args)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks
    assert all(forward == backward for forward, backward in halves[0])
    return [forward for forward, _ in halves[0]]


@pytest.mark.parametrize("torch_ops", [(), ("aten.bmm", "aten.exp")])
def test_what_is_computed_of_a_transposed_tensor_is_saved_contiguous(monkeypatch, torch_ops):
    def function(x, w):
        heads = torch.exp(x.transpose(1, 2)) * 2
        return (torch.tanh(heads @ w)).square()

    x, w = (torch.randn(3, 5, size, dtype=torch.float64, requires_grad=True) for size in (4, 6))
    strides = saved_layouts(monkeypatch, function, x, w, torch_ops=torch_ops)
    assert (20, 1, 4) not in strides
    assert strides.count((20, 5, 1)) >= 1


@pytest.mark.parametrize("torch_ops", [(), ("aten.mul", "aten.exp")])
def test_what_relies_on_its_layout_gets_it_back(monkeypatch, torch_ops):
    def function(x, w):
        y = torch.exp(x.t())
        return torch.tanh(y).t().reshape(-1) * torch.sigmoid(y.t().view(-1) * w)

    x, w = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((5, 4), (20,)))
    strides = saved_layouts(monkeypatch, function, x, w, torch_ops=torch_ops)
    assert (1, 4) not in strides


@pytest.mark.parametrize("torch_ops", [(), ("aten.native_group_norm_backward",)])
def test_group_norm_of_channels_last_images(torch_ops):
    # torch's kernel takes its gradient to lie as its input does
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8))
    net = net.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    backend = ORTBackend(
        {"placement": "always", "cache_dir": None, "debug": {"min_region_nodes": 1, "torch_ops": torch_ops}}
    )
    gradients = []
    for call in (net, torch.compile(net, backend=backend)):
        y = (call(x + 1) * 2).exp()
        gradients.append(torch.autograd.grad(y.mean(), list(net.parameters())))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
    assert backend.report.ort_runs > 0


def test_what_torch_makes_and_reads_is_saved_as_it_is(monkeypatch):
    def function(q, k):
        q, k = (x.unflatten(2, (2, 8)).transpose(1, 2) for x in (q, k))
        return torch.tanh(F.scaled_dot_product_attention(q, k, k))

    q, k = (torch.randn(3, 5, 16, requires_grad=True) for _ in range(2))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        strides = saved_layouts(monkeypatch, function, q, k)
    assert (80, 8, 16, 1) in strides


def restride(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.as_strided_((2, 2), (1, 2), 1)
    return x * 2, x


def test_a_view_of_an_input_that_is_written_back_keeps_its_offset() -> None:
    x = torch.arange(9.0).view(3, 3)
    compiled, report = compile_function(restride, [x.clone()], 2)
    given, expected = x.clone(), x.clone()
    for got, want in zip(compiled(given), restride(expected), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(given, expected)
    assert report.ort_runs == 1


def direction(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.view_as_real(torch.complex(x * 2, y * 2).sgn()), x.sgn()


def test_the_direction_of_a_denormal_complex_number_is_eagers() -> None:
    x, y = torch.full((16,), 1e-40), torch.full((16,), -2e-40)
    compiled, report = compile_function(direction, [x, y], 2)
    for got, want in zip(compiled(x, y), direction(x, y), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    assert report.ort_runs > 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_result_that_is_not_differentiated_spoils_no_gradient(dynamic: bool) -> None:
    """Zero times the slope of a mean over nothing is NaN."""
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)])

    def step(x, mask):
        hidden = torch.tanh(layers[0](x))
        p = layers[1](hidden)
        return p.square().mean(), (p * mask).sum() / mask.sum(), layers[2](hidden).exp()

    def gradients(function, mask, which):
        layers.zero_grad()
        sum(function(torch.ones(4, 8), mask)[index].sum() for index in which).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in layers.parameters()]

    backend = ORTBackend({"placement": "always", "cache_dir": None})
    compiled = torch.compile(step, backend=backend, dynamic=dynamic)
    for mask in (torch.ones(4, 1), torch.zeros(4, 1)):
        for which in ([0], [2], [0, 2], [0, 1]):
            found, expected = (gradients(function, mask, which) for function in (compiled, step))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    assert backend.report.ort_runs > 0
