"""Memory as the aim: ``ORTConfig(activation_memory_budget=...)``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from small_modules import Small
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch.utils.data import DataLoader

from lightning_ort import ORTStrategy
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.request import CompileRequest

CLASSES = 2048
needs_compiler = pytest.mark.skipif(inductor.cpp_compiler() is None, reason="inductor needs a C++ compiler")


class Language(Small):
    """As Hugging Face's models compute their loss: logits of three dimensions are cast, and then viewed as two."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(CLASSES, 32), nn.Linear(32, CLASSES, bias=False))
        self.unchanged = 0  # steps in eager

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch).float()
        return F.cross_entropy(logits.view(-1, CLASSES), batch.view(-1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not torch.compiler.is_compiling():
            self.unchanged += 1
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        sizes = (8, 8, 3)  # a last batch that is smaller
        return DataLoader([torch.randint(CLASSES, (n, 128), generator=generator) for n in sizes], batch_size=None)


def gradients_and_kept(module: nn.Module, step: Callable[[], Tensor]) -> tuple[list[Tensor], int]:
    """Return the gradients of a step, and the bytes of other tensors than parameters that it keeps for them."""
    own, kept = {one.data_ptr() for one in module.parameters()}, dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(1)
    module.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step()
    loss.backward()
    found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    return found, sum(size for address, size in kept.items() if address not in own)


def compiled(step: Callable[[], Tensor], budget: float | None) -> Callable[[], Tensor]:
    torch._dynamo.reset()
    backend = inductor.backend_for("exact", request=lambda: CompileRequest(activation_memory_budget=budget))
    return torch.compile(step, backend=backend, fullgraph=True)


@needs_compiler
def test_a_loss_over_many_classes_is_computed_in_pieces() -> None:
    module = Language()
    batch = torch.randint(CLASSES, (8, 128))

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module.loss(batch)

    expected, eager = gradients_and_kept(module, step)
    metrics.reset()
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        found, kept = gradients_and_kept(module, compiled(step, 1.0))
    assert metrics.num_auto_chunking == ("auto_chunker.enable" in inductor_config.get_config_copy())
    assert kept < eager / 4
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()


class Deep(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [(nn.Linear(16, 16), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)]
        self.net = nn.Sequential(*[one for layer in layers for one in layer])

    def step(self) -> Tensor:
        return self.net(torch.ones(64, 16)).square().mean()


@needs_compiler
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_budget_holds_where_nothing_is_drawn(dropout: float) -> None:
    """With random numbers torch would draw other masks in the backward pass (pytorch #190758)."""
    module = Deep(dropout)
    expected, _ = gradients_and_kept(module, module.step)
    kept = []
    for budget in (1.0, 0.1):
        found, bytes_kept = gradients_and_kept(module, compiled(module.step, budget))
        kept.append(bytes_kept)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert kept[1] == kept[0] if dropout else kept[1] < kept[0] / 2
    assert functorch_config.activation_memory_budget == 1.0


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What stands for inductor compiles nothing; the list has the options of each graph."""
    found: list[Any] = []

    def compile_fx(gm: Any, inputs: Any, config_patches: Any, **kwargs: Any) -> Any:
        found.append(config_patches)
        return gm.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    monkeypatch.setattr(inductor, "cpp_compiler", lambda: "/usr/bin/g++")
    return found


def fit(module: Small, make_trainer: Callable[..., Any], strategy: Any, **settings: Any) -> Any:
    make_trainer(strategy=strategy, max_epochs=2, limit_val_batches=0, **settings).fit(module)
    return getattr(strategy, "report", None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_step_is_compiled_before_it_runs(
    deterministic: bool, make_trainer: Callable[..., Any], graphs: list[Any]
) -> None:
    settings: Any = {"deterministic": deterministic}
    stock, ours = Language(), Language()
    fit(stock, make_trainer, "auto", **settings)
    config = {"activation_memory_budget": 0.5, "audit": "off"}  # which finds that the module counts unchanged steps
    report = fit(ours, make_trainer, ORTStrategy(config=config), **settings)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert len(graphs) == 2  # one for each size, which is fixed
    assert (stock.unchanged, ours.unchanged) == (6, 0)
    assert not report.ort_runs
    assert not report.steps  # that were timed
    assert ReasonType.INDUCTOR_WON in [note.reason.type for note in report.notes]  # which says what runs it
    assert all(options.get("auto_chunker.enable", True) for options in graphs)


@pytest.mark.parametrize("fails_in_run", [1, 3])
def test_a_step_that_goes_back_to_pytorch_is_not_said_to_be_compiled(
    fails_in_run: int, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0

    def compile_fx(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        def run(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == fails_in_run:
                raise NotImplementedError
            return gm.forward(*args)

        return run

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    monkeypatch.setattr(inductor, "cpp_compiler", lambda: "/usr/bin/g++")
    stock, ours = Small(), Small()
    fit(stock, make_trainer, "auto")
    report = fit(ours, make_trainer, ORTStrategy(config={"activation_memory_budget": 0.5}))
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert runs == fails_in_run
    found = [note.reason.type for note in report.notes]
    assert ReasonType.INDUCTOR_FAILED in found
    assert ReasonType.INDUCTOR_WON not in found


def test_what_cannot_compile_is_said(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then ONNX Runtime's graphs keep less."""
    monkeypatch.setattr(inductor, "cpp_compiler", lambda: None)
    stock, ours = Small(), Small()
    fit(stock, make_trainer, "auto")
    report = fit(ours, make_trainer, ORTStrategy(config={"activation_memory_budget": 0.5}))
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert report.ort_runs > 0
    asked = ORTStrategy(config={"activation_memory_budget": 0.5, "engine": "auto"})
    report = fit(Small(), make_trainer, asked)
    assert [note.reason.type for note in report.notes].count(ReasonType.NO_EFFECT) == 1
