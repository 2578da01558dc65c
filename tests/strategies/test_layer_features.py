"""Layers, losses and arithmetic of many fields: under ``ort`` each gives what it gives under the stock strategy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from features import Trainers, check_feature, feature, features_of, fit
from small_modules import Small
from torch import Tensor, distributions, nn

Step = Callable[[Any, Any], Tensor]


class Steps(Small):
    """A module whose layers and step are given."""

    def __init__(self, layers: Callable[[], dict[str, nn.Module]], step: Step) -> None:
        super().__init__()
        for name, layer in layers().items():
            self.add_module(name, layer)
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(self, batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def module(group: str, name: str, layers: Callable[[], dict[str, nn.Module]] = dict, how: Any = "step") -> Any:
    """Enter a step in the table; it is called with the module and a batch, in training and in validation."""

    def enter(step: Step) -> Step:
        def run(trainers: Trainers) -> Any:
            return fit(Steps(layers, step), trainers(limit_val_batches=1.0))

        run.__module__ = __name__
        feature(group, name, how)(run)
        return step

    return enter


# --- layers


@module("Layers", "`nn.EmbeddingBag`", lambda: {"bag": nn.EmbeddingBag(10, 8, mode="mean")})
def embedding_bag(self: Any, batch: Any) -> Tensor:
    x, y = batch
    indices = (x.abs() * 3).long().clamp(max=9)
    return self.loss((self.bag(indices) + x, y))


@module("Layers", "`nn.EmbeddingBag` with offsets and weights", lambda: {"bag": nn.EmbeddingBag(10, 8, mode="sum")})
def embedding_bag_offsets(self: Any, batch: Any) -> Tensor:
    x, y = batch
    indices = (x.abs() * 3).long().clamp(max=9).flatten()
    offsets = torch.arange(0, indices.numel(), 8)
    return self.loss((self.bag(indices, offsets, per_sample_weights=x.flatten()) + x, y))


@module("Layers", "attention with rows that are masked out", lambda: {"qkv": nn.Linear(8, 24)})
def masked_attention(self: Any, batch: Any) -> Tensor:
    x, y = batch
    q, k, v = self.qkv(x).chunk(3, -1)
    scores = (q @ k.T).masked_fill((y == 0)[:, None] | (y == 1)[None], -torch.inf)
    attended = scores.softmax(-1).nan_to_num(0.0) @ v  # a row of -inf is NaN
    return self.loss((x + attended, y))


@module(
    "Layers", "`nn.MultiheadAttention` with weights", lambda: {"attend": nn.MultiheadAttention(8, 2, batch_first=True)}
)
def attention_weights(self: Any, batch: Any) -> Tensor:
    x, y = batch
    sequence = x.reshape(2, -1, 8)
    padding = (y == 0).reshape(2, -1)
    padding = padding & (torch.arange(padding.shape[1]) > 0)
    out, weights = self.attend(sequence, sequence, sequence, key_padding_mask=padding, need_weights=True)
    return self.loss((out.reshape(-1, 8), y)) + weights.square().mean()


@module("Layers", "`scaled_dot_product_attention` with a bias", lambda: {"bias": nn.Linear(8, 1)})
def attention_bias(self: Any, batch: Any) -> Tensor:
    x, y = batch
    heads = x.reshape(1, -1, 2, 4).transpose(1, 2)
    bias = self.bias(x[:, None] - x[None]).squeeze(-1)
    out = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)
    causal = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return self.loss(((out + causal).transpose(1, 2).reshape(-1, 8), y))


@module(
    "Layers",
    "`nn.GroupNorm`, `nn.InstanceNorm1d`, `nn.LocalResponseNorm`",
    lambda: {
        "group": nn.GroupNorm(2, 4),
        "instance": nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        "local": nn.LocalResponseNorm(2),
    },
)
def norms(self: Any, batch: Any) -> Tensor:
    x, y = batch
    channels = torch.stack([x, x.sin(), x.cos(), x * 2], 1)
    return self.loss((self.local(self.instance(self.group(channels))).sum(1), y))


@module(
    "Layers",
    "`nn.PixelShuffle`, `nn.Upsample`, `nn.ConvTranspose2d`",
    lambda: {"first": nn.Conv2d(1, 8, 3, padding=1), "back": nn.ConvTranspose2d(2, 1, 4, stride=2, padding=1)},
)
def upsampling(self: Any, batch: Any) -> Tensor:
    image = batch[0].reshape(-1, 1, 2, 4)
    bigger = F.pixel_shuffle(self.first(image), 2)
    smaller = F.pixel_unshuffle(self.back(bigger), 4).mean(1, keepdim=True)
    smooth = F.interpolate(bigger, scale_factor=1.5, mode="bilinear", align_corners=False)
    nearest = F.interpolate(bigger, size=(3, 5), mode="nearest")
    return (smaller - image).square().mean() + smooth.square().mean() + nearest.abs().mean()


@module("Layers", "deformable sampling", lambda: {"offsets": nn.Linear(8, 8)})
def deformable(self: Any, batch: Any) -> Tensor:
    x, y = batch
    place = (torch.arange(8) + self.offsets(x).tanh() * 2).clamp(0, 6.999)
    left = place.floor().long()
    part = place - left
    sampled = x.gather(1, left) * (1 - part) + x.gather(1, (left + 1).clamp(max=7)) * part
    return self.loss((sampled, y))


@module("Layers", "stochastic depth", lambda: {"block": nn.Linear(8, 8)})
def stochastic_depth(self: Any, batch: Any) -> Tensor:
    x, y = batch
    branch = self.block(x).relu()
    if self.training:
        keep = torch.empty(len(x), 1).bernoulli_(0.7)
        branch = branch * keep / 0.7
    return self.loss((x + branch, y))


@module(
    "Layers",
    "mixture of experts",
    lambda: {"gate": nn.Linear(8, 3), "experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))},
)
def experts(self: Any, batch: Any) -> Tensor:
    x, y = batch
    weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for index, expert in enumerate(self.experts):
        out = out + expert(x) * (weights * (chosen == index)).sum(-1, keepdim=True)
    return self.loss((out, y))


@module("Layers", "int8 embedding table", lambda: {"scale": nn.Linear(1, 8)})
def int8_table(self: Any, batch: Any) -> Tensor:
    x, y = batch
    table = torch.arange(-12, 12, dtype=torch.int8).reshape(3, 8)
    return self.loss((x + table[y].float() / 127 * self.scale(torch.ones(1, 1)), y))


@module(
    "Layers", "float64 module", lambda: {"exact": nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).double()}
)
def float64(self: Any, batch: Any) -> Tensor:
    x, y = batch
    return self.loss((self.exact(x.double()).float(), y))


@module("Layers", "`uint8` images, normalised in the step", lambda: {"stem": nn.Conv2d(1, 3, 3)})
def uint8_images(self: Any, batch: Any) -> Tensor:
    x, y = batch
    image = (x.repeat(1, 2).reshape(-1, 1, 4, 4) * 40 + 128).clamp(0, 255).to(torch.uint8)
    normal = (image.float() / 255 - 0.45) / 0.22
    return F.cross_entropy(self.stem(normal).amax((2, 3)), y)


# --- losses


@module("Losses", "CTC", lambda: {"letters": nn.Linear(8, 5)})
def ctc(self: Any, batch: Any) -> Tensor:
    x, y = batch
    sequence = torch.stack([x, x.flip(1), x * 2, x.roll(1, 1), -x])
    log_probs = self.letters(sequence).log_softmax(-1)
    targets = torch.stack([y + 1, 3 - y], 1)
    return F.ctc_loss(log_probs, targets, torch.full((len(x),), 5), torch.full((len(x),), 2))


@module("Losses", "label smoothing, class weights, `ignore_index`")
def smoothing(self: Any, batch: Any) -> Tensor:
    x, y = batch
    weight = torch.tensor([0.2, 1.0, 3.0])
    labels = torch.where(x[:, 0] > 0, y, -100)
    return F.cross_entropy(self(x), labels, weight=weight, ignore_index=-100, label_smoothing=0.1)


@module("Losses", "mixup: soft labels")
def mixup(self: Any, batch: Any) -> Tensor:
    x, y = batch
    part = distributions.Beta(0.4, 0.4).sample()
    order = torch.randperm(len(x))
    labels = F.one_hot(y, 3).float()
    mixed = part * labels + (1 - part) * labels[order]
    return F.cross_entropy(self(part * x + (1 - part) * x[order]), mixed)


@module("Losses", "triplet, cosine and margin losses")
def triplet(self: Any, batch: Any) -> Tensor:
    x, y = batch
    a, b, c = self(x), self(x.flip(0)), self(x.roll(1, 0))
    sign = torch.where(y > 0, 1.0, -1.0)
    return (
        F.triplet_margin_loss(a, b, c)
        + F.cosine_embedding_loss(a, b, sign, margin=0.1)
        + F.margin_ranking_loss(a[:, 0], b[:, 0], sign)
        + F.hinge_embedding_loss(a[:, 1], sign)
        + (1 - F.cosine_similarity(a, c)).mean()
    )


@module("Losses", "regression losses")
def regression(self: Any, batch: Any) -> Tensor:
    x, y = batch
    out, target = self(x), F.one_hot(y, 3).float()
    return (
        F.smooth_l1_loss(out, target)
        + F.huber_loss(out, target, delta=0.3)
        + F.poisson_nll_loss(out, target, full=True)
        + F.gaussian_nll_loss(out, target, out.square() + 0.1)
        + F.kl_div(out.log_softmax(-1), target, reduction="batchmean")
        + F.binary_cross_entropy_with_logits(out, target, pos_weight=torch.tensor([1.0, 2.0, 3.0]))
        + F.binary_cross_entropy(out.sigmoid(), target)
        + F.multi_margin_loss(out, y)
        + F.soft_margin_loss(out, target * 2 - 1)
    )


@module("Losses", "contrastive loss of all pairs (CLIP)", lambda: {"other": nn.Linear(8, 3)})
def clip(self: Any, batch: Any) -> Tensor:
    x, _ = batch
    a, b = F.normalize(self(x), dim=-1), F.normalize(self.other(x), dim=-1)
    logits = a @ b.T * 10.0
    labels = torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


@module("Losses", "optimal transport (Sinkhorn)")
def sinkhorn(self: Any, batch: Any) -> Tensor:
    a = self(batch[0])
    cost = torch.cdist(a, a.detach().flip(0).contiguous() + 1)
    plan = -cost / 0.5
    for _ in range(3):
        plan = plan - plan.logsumexp(0, keepdim=True)
        plan = plan - plan.logsumexp(1, keepdim=True)
    return (plan.exp() * cost).sum()


@module("Losses", "a conditional random field", lambda: {"moves": nn.Linear(3, 3)})
def crf(self: Any, batch: Any) -> Tensor:
    x, y = batch
    scores = self(x)
    forward = scores[0]
    for step in scores[1:]:
        forward = torch.logsumexp(forward[:, None] + self.moves.weight + step[None], 0)
    gold = scores.gather(1, y[:, None]).sum() + self.moves.weight[y[:-1], y[1:]].sum()
    return (forward.logsumexp(0) - gold) / len(x)


# --- distributions


@module("Distributions", "variational autoencoder", lambda: {"encode": nn.Linear(8, 6), "decode": nn.Linear(3, 8)})
def vae(self: Any, batch: Any) -> Tensor:
    x, _ = batch
    mean, log_variance = self.encode(x).chunk(2, -1)
    z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
    return F.mse_loss(self.decode(z), x) + 0.1 * kl


@module("Distributions", "`Normal.rsample`, `kl_divergence`", lambda: {"encode": nn.Linear(8, 6)})
def normal(self: Any, batch: Any) -> Tensor:
    mean, scale = self.encode(batch[0]).chunk(2, -1)
    posterior = distributions.Normal(mean, F.softplus(scale) + 1e-3)
    prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    return distributions.kl_divergence(posterior, prior).mean() - prior.log_prob(posterior.rsample()).mean()


@module("Distributions", "policy gradient (`Categorical`, `Bernoulli`)")
def policy(self: Any, batch: Any) -> Tensor:
    x, y = batch
    out = self(x)
    actions = distributions.Categorical(logits=out)
    action = actions.sample()
    coin = distributions.Bernoulli(logits=out[:, 0])
    reward = (action == y).float()
    return (
        -(actions.log_prob(action) * (reward - reward.mean())).mean()
        - 0.01 * actions.entropy().mean()
        - coin.log_prob(coin.sample()).mean()
    )


@module("Distributions", "`F.gumbel_softmax`, hard", lambda: {"codes": nn.Linear(3, 8)})
def gumbel(self: Any, batch: Any) -> Tensor:
    x, _ = batch
    return F.mse_loss(self.codes(F.gumbel_softmax(self(x), tau=0.7, hard=True)), x)


@module("Distributions", "`MultivariateNormal`", lambda: {"factor": nn.Linear(8, 9)})
def multivariate(self: Any, batch: Any) -> Tensor:
    x, y = batch
    factor = self.factor(x).reshape(-1, 3, 3).tril(-1) + torch.eye(3) * 1.5
    target = F.one_hot(y, 3).float()
    return -distributions.MultivariateNormal(self(x), scale_tril=factor).log_prob(target).mean()


# --- arithmetic


@module("Arithmetic", "`cumsum`, `cumprod`, `cummax`, `diff`, `logcumsumexp`")
def cumulative(self: Any, batch: Any) -> Tensor:
    x, y = batch
    out = self(x)
    parts = out.cumsum(1), (out.tanh() + 2).cumprod(1), out.cummax(1).values, out.logcumsumexp(0), out.diff(dim=0)
    return sum((part.square().mean() for part in parts), self.loss(batch))


@module("Arithmetic", "`einsum` of many dimensions", lambda: {"core": nn.Linear(8, 8)})
def einsum(self: Any, batch: Any) -> Tensor:
    x = batch[0].reshape(-1, 2, 2, 2)
    core = self.core.weight.reshape(2, 2, 2, 2, 2, 2)
    out = torch.einsum("nabc,abcdef,mdef->nm", x, core, x)
    trace = torch.einsum("nabb->na", x @ core[0, 0, 0])
    return out.square().mean() + trace.square().mean() + torch.einsum("i,j->ij", out[0], out[:, 0]).mean()


@module(
    "Arithmetic", "complex numbers: `stft`, `view_as_complex`, rotary embedding", lambda: {"first": nn.Linear(8, 8)}
)
def complex_numbers(self: Any, batch: Any) -> Tensor:
    x, y = batch
    hidden = self.first(x)
    angles = torch.outer(torch.arange(len(x)).float(), torch.tensor([1.0, 0.5, 0.25, 0.1]))
    turned = torch.view_as_complex(hidden.reshape(-1, 4, 2)) * torch.polar(torch.ones_like(angles), angles)
    turned = torch.view_as_real(turned).flatten(1)
    spectrum = torch.stft(hidden, 4, 2, window=torch.hann_window(4), return_complex=True).abs()
    return self.loss((turned, y)) + (spectrum + 1e-3).log().square().mean() * 0.01


@module("Arithmetic", "`torch.where` with numbers, `sign`, `frac`, `fmod`, `round`")
def numbers(self: Any, batch: Any) -> Tensor:
    x, y = batch
    out = self(x)
    steps = torch.where(out > 0, out, 0.5) + torch.where(x[:, :3] > 0, 1, 0) * out.frac() + out.fmod(0.7)
    straight_through = out + (out.round() - out).detach()
    return steps.square().mean() + straight_through.square().mean() + (out * out.sign()).mean()


@module("Arithmetic", "linear algebra", lambda: {"first": nn.Linear(8, 4)})
def linear_algebra(self: Any, batch: Any) -> Tensor:
    x, _ = batch
    gram = self.first(x).T @ self.first(x) + torch.eye(4)
    solved = torch.linalg.solve(gram, torch.ones(4))
    factor = torch.linalg.cholesky(gram)
    return (
        solved.square().sum() + torch.logdet(gram) * 0.01 + torch.linalg.norm(factor, 2) * 0.01 + gram.inverse().trace()
    )


@module("Arithmetic", "in-place operations on inner values", lambda: {"first": nn.Linear(8, 8)})
def inplace(self: Any, batch: Any) -> Tensor:
    x, y = batch
    hidden = self.first(x)
    hidden[:, ::2] *= 2
    hidden[y > 0] = hidden[y > 0] + 1
    hidden[:, 3].add_(x[:, 0]).clamp_(-2, 2)
    other = torch.zeros(len(x), 8).scatter_(1, y[:, None], 1.0).index_add_(0, y, hidden)
    return self.loss((hidden.clone().relu_() + other, y))


@module("Arithmetic", "sorting and ranking", lambda: {"first": nn.Linear(8, 8)})
def sorting(self: Any, batch: Any) -> Tensor:
    x, y = batch
    hidden = self.first(x)
    order = hidden.argsort(1, descending=True)
    ranked = hidden.gather(1, order) * torch.linspace(1, 0, 8)
    kth = hidden.kthvalue(3, 1).values + hidden.median(1).values
    unique = torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])).float()
    return self.loss((ranked + unique + kth[:, None], y))


@module("Arithmetic", "`torch.func.vmap`, `jvp` and `grad`")
def functional(self: Any, batch: Any) -> Tensor:
    x, y = batch
    weights = {name: parameter.detach() for name, parameter in self.net.named_parameters()}

    def one(row: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(self.net, weights, (row,)), label)

    per_sample = torch.func.vmap(torch.func.grad(one))(x, y)
    return self.loss((x + 0.1 * per_sample, y))


@pytest.mark.parametrize("name", features_of(__name__))
def test_feature(name: str, tmp_path: Path) -> None:
    check_feature(name, tmp_path)
