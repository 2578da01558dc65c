"""Tensors that do not lie in memory as they were traced to, or are not what their memory says."""

import threading

import pytest
import torch
import torch.nn.functional as F
from ort_settings import config_of
from torch import fx, nn

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.regions.region import RegionModule

CHANNELS = 16
TRANSPOSED = {
    "batch_norm": lambda: nn.BatchNorm1d(CHANNELS),
    "layer_norm": lambda: nn.LayerNorm(5),
    "group_norm": lambda: nn.GroupNorm(4, CHANNELS),
    "instance_norm": lambda: nn.InstanceNorm1d(CHANNELS, affine=True),
    "log_softmax": lambda: nn.LogSoftmax(1),
    "elu": lambda: nn.ELU(),
    "two": lambda: nn.Sequential(nn.BatchNorm1d(CHANNELS), nn.GELU(), nn.BatchNorm1d(CHANNELS)),
    "log_sigmoid": lambda: nn.LogSigmoid(),
    "dropout": lambda: nn.Sequential(nn.BatchNorm1d(CHANNELS), nn.Dropout(0.5), nn.LayerNorm(5)),
}


class Transposed(nn.Module):
    """A layer between two transposes, as in PatchTST and TSMixer."""

    def __init__(self, make):
        super().__init__()
        self.a, self.between, self.b = nn.Linear(8, CHANNELS), make(), nn.Linear(CHANNELS, 4)

    def forward(self, x):
        return self.b(self.between(self.a(x).transpose(1, 2)).transpose(1, 2))


LOSSES = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "kl_div": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="none").sum(),
}


class TransposedLoss(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.a, self.loss = nn.Linear(8, CHANNELS), loss

    def forward(self, x):
        return self.loss(self.a(x).transpose(1, 2), x.new_ones(x.shape[0], CHANNELS, x.shape[1]))


def cases():
    return [pytest.param(Transposed, make, id=name) for name, make in TRANSPOSED.items()] + [
        pytest.param(TransposedLoss, loss, id=name) for name, loss in LOSSES.items()
    ]


@pytest.mark.parametrize(
    ("placement", "dynamic"),
    [
        ("measured", False),
        ("always", True),
        ("torch", False),
        pytest.param("measured", True, marks=pytest.mark.slow),
        pytest.param("always", False, marks=pytest.mark.slow),
        pytest.param("torch", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("module", "make"), cases())
def test_layers_of_a_transposed_tensor(module, make, placement, dynamic):
    # "torch": what relies on the traced layout runs in torch, between two ORT regions
    in_torch = [f"aten.{op}" for op in ("native_batch_norm_backward", "native_layer_norm_backward", "elu_backward")]
    in_torch += ["aten._log_softmax_backward_data", "aten.native_group_norm_backward", "aten.mse_loss_backward"]
    in_torch += ["aten.smooth_l1_loss_backward", "aten.huber_loss_backward"]
    options = (
        {"placement": "always", "debug": {"torch_ops": in_torch}} if placement == "torch" else {"placement": placement}
    )
    backend = ORTBackend(config_of(**{"cache_dir": None, "fallback": "raise", **options}))
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = module(make)
        call = torch.compile(net, backend=backend, dynamic=dynamic) if compiled else net
        for length in (3, 7, 7):
            call(torch.randn(length if dynamic else 4, 5, 8)).square().mean().backward()
        results.append({key: p.grad for key, p in net.named_parameters()} | dict(net.named_buffers()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
    if placement != "measured":
        assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks


def test_a_result_is_brought_to_the_traced_layout_once(monkeypatch):
    # group norm refuses a tensor that does not lie as it did when traced
    regions = []
    original = RegionModule.__init__
    monkeypatch.setattr(RegionModule, "__init__", lambda self, *args: (original(self, *args), regions.append(self))[0])
    torch.manual_seed(0)
    net = Transposed(TRANSPOSED["layer_norm"])
    config = ORTConfig(placement="always", cache_dir=None, debug={"torch_ops": ("aten.native_layer_norm_backward",)})
    backend = ORTBackend(config)
    for _ in range(2):
        torch.compile(net, backend=backend)(torch.randn(4, 5, 8)).sum().backward()
    names = [name for region in regions if region._run is not None for name in region._run.__code__.co_names]
    assert len([name for name in names if name.endswith("_in_order")]) == 1
    assert backend.report.ort_runs > 0


@torch.library.custom_op("lightning_ort_tests::wrong_dtype", mutates_args=())
def wrong_dtype(x: torch.Tensor) -> torch.Tensor:
    """Its fake kernel promises another dtype."""
    return x.double()


@wrong_dtype.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize("rows", [3, 0])
def test_a_custom_op_with_a_wrong_fake_kernel_is_left_to_eager(rows):
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None))

    def f(x):
        return wrong_dtype(x.exp() * 2) * 3 + 1

    x = torch.randn(rows, 4)
    torch.testing.assert_close(torch.compile(f, backend=backend)(x), f(x))
    (fallback,) = backend.report.fallbacks
    text = f"wrong_dtype.default gave torch.float64 [{rows}, 4], and torch.float32 [{rows}, 4] when traced"
    assert text in str(fallback.reason)


def test_a_result_of_a_narrower_dtype_is_converted_in_each_run():
    graph = fx.Graph()
    x = graph.placeholder("x")
    square = graph.call_function(torch.ops.aten.mul.Tensor, (x, x))
    square.meta["val"] = torch.empty(3)  # of a fake kernel
    graph.output((square,))
    module = RegionModule(graph, "region")
    for _ in range(2):
        (found,) = module(torch.ones(3, dtype=torch.bfloat16))
        assert found.dtype is torch.float32


def test_dropout_of_nothing():
    """Its mask has another dtype than the one that is traced (torch 2.13)."""
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None))
    compiled = torch.compile(lambda x: F.dropout(x.exp().flatten(1) * 3).sin() * 2, backend=backend)
    for size in ((5, 4, 3), (0, 6, 3)):
        x = torch.randn(size, requires_grad=True)
        compiled(x).sum().backward()
        assert x.grad.shape == size
    assert not backend.report.fallbacks
    assert backend.report.ort_runs > 0


def jvp_of_a_product(x, v, w):
    out, tangent = torch.func.jvp(lambda z: z @ w, (x,), (v,))
    return out + tangent


def spectrum(x, v, w):
    z = torch.fft.rfft(x).conj()
    return torch.stack([z.real, z.imag], -1).relu() * 2 + v.sum() * w.sum()


def negative_view(x, v, w):
    return (torch.complex(x, v).conj().imag * 2).exp() + w.sum()


def complex_gradient(x, v, w):
    return (torch.complex(x.sin() * 2, v.cos() * 2) * (1 - 2j)).abs().square() + w.sum() * 2


@pytest.mark.parametrize("kernels", ["auto", "standard"])
@pytest.mark.parametrize("f", [jvp_of_a_product, spectrum, negative_view, complex_gradient])
def test_lazy_tensors(f, kernels):
    leaves = [torch.randn(6, 6) for _ in range(3)]
    backend = ORTBackend(
        ORTConfig(placement="always", cache_dir=None, debug={"min_region_nodes": 1, "kernels": kernels})
    )
    results = []
    for call in (f, torch.compile(f, backend=backend)):
        for _ in range(2):
            given = [leaf.clone().requires_grad_() for leaf in leaves]
            out = call(*given)
            out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in given)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert backend.report.ort_runs > 0
    assert not [entry for entry in backend.report.fallbacks if entry.reason.type.is_failure]


@pytest.mark.parametrize("dynamic", [False, True])
def test_lazy_inputs_and_gradients(dynamic):
    def f(x):
        return (x * 2).exp()

    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, debug={"min_region_nodes": 1}))
    call = torch.compile(f, backend=backend, dynamic=dynamic)
    z = torch.randn(8, dtype=torch.complex64)
    plain, negative = z.imag.clone(), z.conj().imag
    assert negative.is_neg()
    for x in (plain, negative, torch._neg_view(plain), plain):
        torch.testing.assert_close(call(x), f(x))
    leaf = plain.clone().requires_grad_()
    for gradient in (plain, negative, torch._efficientzerotensor(8), torch._neg_view(plain)):
        (got,) = torch.autograd.grad(call(leaf), leaf, gradient)
        (expected,) = torch.autograd.grad(f(leaf), leaf, gradient)
        torch.testing.assert_close(got, expected)
    assert backend.report.ort_runs > 8
    assert not backend.report.fallbacks


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_function_transforms_of_a_compiled_function(transform):
    def f(x):
        return (x * 2).exp().sum()

    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, debug={"min_region_nodes": 1}))
    x = torch.randn(5, 3)
    torch.testing.assert_close(transform(torch.compile(f, backend=backend))(x), transform(f)(x))


def test_threads_share_a_compiled_module():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, debug={"intra_op_threads": 1}))
    call = torch.compile(net, backend=backend)
    inputs = [torch.randn(8, 16) for _ in range(3)]
    parameters = list(net.parameters())

    def step(function, x):
        out = function(x)
        return out.detach(), torch.autograd.grad(out.square().sum(), parameters)

    expected = [step(net, x) for x in inputs]
    step(call, inputs[0])
    wrong, errors = [], []

    def work(index):
        try:
            for _ in range(300):
                out, gradients = step(call, inputs[index])
                same = zip(gradients, expected[index][1], strict=True)
                if not (
                    torch.allclose(out, expected[index][0], atol=1e-5)
                    and all(torch.allclose(got, want, rtol=1e-3, atol=1e-3) for got, want in same)
                ):
                    wrong.append(index)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not wrong
    assert backend.report.ort_runs >= 1800
