"""Whole networks: a training step equals eager's, and nearly all of its compute nodes run on ONNX Runtime."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.report import CompileReport

# stay in torch by design: no ONNX operator computes them from what torch's forward saved
IN_TORCH = (
    "aten.convolution_backward.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
)

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {}


def model(make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]) -> Callable[..., Any]:
    MODELS[make.__name__] = make
    return make


class Classifier(nn.Module):
    """A network that returns its loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y, label_smoothing=0.1)


class LanguageModel(nn.Module):
    """A network of transformers that returns its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.train()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.network(input_ids=tokens, labels=tokens).loss


@model
def activations() -> tuple[nn.Module, tuple[Tensor, ...]]:
    functions = (
        nn.ReLU(),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.SiLU(),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.LeakyReLU(),
        nn.ELU(),
        nn.Softplus(),
        nn.Hardswish(),
    )
    norms = (nn.LayerNorm(16), nn.RMSNorm(16), nn.BatchNorm1d(16), nn.GroupNorm(4, 16))
    layers: list[nn.Module] = []
    for index, function in enumerate(functions):
        layers += [nn.Linear(16, 16), function, copy.deepcopy(norms[index % len(norms)])]
    inputs = torch.randn(8, 16), torch.randint(0, 4, (8,))
    return Classifier(*layers, nn.Dropout(0.1), nn.Linear(16, 4)), inputs


@model
def cnn() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = (
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return Classifier(*layers), (torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4,)))


@model
def cnn_1d() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = (
        nn.Conv1d(3, 8, 5, stride=2, dilation=2),
        nn.BatchNorm1d(8),
        nn.GELU(),
        nn.MaxPool1d(2),
        nn.Conv1d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return Classifier(*layers), (torch.randn(4, 3, 40), torch.randint(0, 4, (4,)))


@model
def multihead_attention() -> tuple[nn.Module, tuple[Tensor, ...]]:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(16, 32), nn.LayerNorm(32)
            self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 16)
            self.dropout = nn.Dropout(0.1)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
            weights = self.dropout(((q @ k.mT) / 8**0.5).softmax(-1))
            x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
            return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten(), ignore_index=3)

    return Attention(), (torch.randint(0, 16, (2, 10)),)


@model
def bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=40, max_position_embeddings=16, attn_implementation="eager", **sizes)
    return LanguageModel(BertForMaskedLM(config)), (torch.randint(0, 40, (2, 10)),)


@model
def gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=32, n_layer=1, n_head=2, use_cache=False, attn_implementation="eager"
    )
    return LanguageModel(GPT2LMHeadModel(config)), (torch.randint(0, 40, (2, 10)),)


@model
def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    # torch's own attention, with grouped queries
    config = LlamaConfig(vocab_size=40, num_key_value_heads=2, use_cache=False, **sizes)
    return LanguageModel(LlamaForCausalLM(config)), (torch.randint(0, 40, (2, 10)),)


def share_on_ort(report: CompileReport) -> float:
    """Of the compute nodes but those that stay in torch by design."""
    counts = {"ort": 0, "torch": 0}
    for graph in report.graphs:
        for region in graph.regions:
            counts[region.executor] += sum(n for op, n in region.ops.items() if op not in IN_TORCH)
    return counts["ort"] / (counts["ort"] + counts["torch"])


# the longest ones; BERT stands for their kind
SLOW = [pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW if n in ("gpt2", "llama") else []) for n in MODELS])
def test_training_step(name: str) -> None:
    if name in ("bert", "gpt2", "llama"):
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    reference, inputs = MODELS[name]()
    compiled = copy.deepcopy(reference)
    backend = ORTBackend(ORTConfig(placement="always"))
    torch.manual_seed(1)
    expected = reference(*inputs)
    expected.backward()
    torch.manual_seed(1)
    loss = torch.compile(compiled, backend=backend)(*inputs)
    loss.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    gradients = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    assert gradients.keys() == {key for key, p in compiled.named_parameters() if p.grad is not None}
    for key, parameter in compiled.named_parameters():
        if key in gradients:
            torch.testing.assert_close(
                parameter.grad, gradients[key], rtol=1e-4, atol=1e-5, msg=lambda m, key=key: key + m
            )
    report = backend.report
    assert report.ort_runs > 0
    assert not report.fallbacks, report.to_text()
    for kind in ("forward", "backward"):
        graphs = [graph for graph in report.graphs if graph.name.startswith(kind)]
        assert share_on_ort(CompileReport(graphs)) >= 0.9, report.to_text()
