"""Sequences of several lengths: CTC, and packed sequences, as operations on padded ones."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ort.compiler.executors.ort.conversion.registry import in_parts

aten = torch.ops.aten
_NEVER = -1e30  # the logarithm of a chance that there is not: infinities have no gradients


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """The loss of connectionist temporal classification, by its forward variables."""
    if log_probs.dim() == 2:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
        loss = ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)
        return loss.squeeze(0) if reduction == 0 else loss.sum()
    if targets.dim() != 2:  # the size depends on the values of the lengths: no other batch can be made to compare with
        raise NotImplementedError("ctc_loss of targets that are one row: pass them as [batch, longest]")
    inputs, lengths = (
        torch.as_tensor(each, device=log_probs.device, dtype=torch.int64).reshape(-1)
        for each in (input_lengths, target_lengths)
    )
    loss = _nll(log_probs.transpose(0, 1), targets.to(torch.int64), inputs, lengths, blank)
    if zero_infinity:
        loss = torch.where(loss.isinf(), 0.0, loss)
    if reduction == 1:
        return (loss / lengths.clamp(min=1)).mean()
    return loss.sum() if reduction == 2 else loss


def _nll(scores: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int) -> Tensor:
    rows, times, classes = scores.shape
    # blanks between the labels and around them
    labels = torch.stack([torch.full_like(targets, blank), targets.clamp(0, classes - 1)], 2).flatten(1)
    labels = torch.cat([labels, torch.full_like(labels[:, :1], blank)], 1)
    skips = F.pad((labels[:, 2:] != blank) & (labels[:, 2:] != labels[:, :-2]), (2, 0), value=False)
    picked = scores.gather(2, labels.unsqueeze(1).expand(-1, times, -1))
    places = torch.arange(labels.shape[1], device=scores.device)
    alpha = torch.where(places < 2, picked[:, 0], _NEVER)
    for time in range(1, times):
        one, two = F.pad(alpha[:, :-1], (1, 0), value=_NEVER), F.pad(alpha[:, :-2], (2, 0), value=_NEVER)
        new = torch.stack([alpha, one, torch.where(skips, two, _NEVER)]).logsumexp(0) + picked[:, time]
        alpha = torch.where((time < inputs).unsqueeze(1), new, alpha)
    ends = (places == 2 * lengths.unsqueeze(1)) | (places == 2 * lengths.unsqueeze(1) - 1)
    found = torch.where(ends, alpha, _NEVER).logsumexp(1)
    # torch takes the scores for those of a softmax, so that its gradient has a part that is that of their sum
    chances = scores.exp() * (torch.arange(times, device=scores.device) < inputs.unsqueeze(1)).unsqueeze(2)
    loss = -found + (chances - chances.detach()).sum((1, 2))
    return torch.where(found > _NEVER / 2, loss, torch.inf)


in_parts(aten.ctc_loss.Tensor, above_autograd=True)(ctc_loss)
in_parts(aten.ctc_loss.IntList, above_autograd=True)(ctc_loss)


# packed sequences: their data are padded ones, times first; ``batch_sizes`` says how many rows go on at each time


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    x = x.transpose(0, 1) if batch_first else x
    times = torch.arange(x.shape[0], device=lengths.device)
    return x * 1, (lengths.unsqueeze(0) > times.unsqueeze(1)).sum(1)


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    mask = going_on(data, batch_sizes)
    if total_length <= 0 and bool(batch_sizes[-1] == 0):
        raise ValueError("the longest sequence is shorter than what was padded: pass total_length")
    data = torch.where(mask.reshape(*mask.shape, *(1,) * (data.dim() - 2)), data, padding_value)
    return (data.transpose(0, 1) if batch_first else data), mask.sum(0)


def going_on(data: Tensor, batch_sizes: Tensor) -> Tensor:
    """Which rows go on at each time: they are sorted by length."""
    return torch.arange(data.shape[1], device=data.device).unsqueeze(0) < batch_sizes.to(data.device).unsqueeze(1)


in_parts(aten._pack_padded_sequence.default, above_autograd=True)(_pack)
in_parts(aten._pad_packed_sequence.default, above_autograd=True)(_pad)


def recur(module: nn.RNNBase, packed: Any, hidden: Any = None) -> Any:
    """What a recurrent layer returns for a packed sequence whose data are padded."""
    x, batch_sizes, order, back = packed
    mask, directions = going_on(x, batch_sizes).unsqueeze(2), 1 + module.bidirectional
    is_lstm = isinstance(module, nn.LSTM)
    if hidden is None:
        width = module.proj_size or module.hidden_size
        zeros = x.new_zeros(module.num_layers * directions, x.shape[1], width)
        hidden = (zeros, x.new_zeros(*zeros.shape[:2], module.hidden_size)) if is_lstm else zeros
    elif order is not None:
        hidden = tuple(each[:, order] for each in hidden) if is_lstm else hidden[:, order]
    states: Sequence[Tensor] = hidden if is_lstm else (hidden,)
    last: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        x, outs = F.dropout(x, module.dropout, module.training) if layer and module.dropout else x, []
        for direction in range(directions):
            weights = module.all_weights[layer * directions + direction]
            state = tuple(each[layer * directions + direction] for each in states)
            steps: list[Any] = [None] * x.shape[0]
            for time in reversed(range(x.shape[0])) if direction else range(x.shape[0]):
                new = _cell(module, x[time], state, weights)
                state = tuple(torch.where(mask[time], a, b) for a, b in zip(new, state, strict=True))
                steps[time] = torch.where(mask[time], new[0], 0.0)
            outs.append(torch.stack(steps))
            last.append(state)
        x = torch.cat(outs, 2)
    ends = tuple(torch.stack(each) if back is None else torch.stack(each)[:, back] for each in zip(*last, strict=True))
    return nn.utils.rnn.PackedSequence(x, batch_sizes, order, back), (ends if is_lstm else ends[0])


def _cell(module: nn.RNNBase, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    of_x, of_h, *rest = weights
    biases = (rest[0], rest[1]) if module.bias else (None, None)
    first, second = F.linear(x, of_x, biases[0]), F.linear(state[0], of_h, biases[1])
    if isinstance(module, nn.GRU):
        (r1, z1, n1), (r2, z2, n2) = first.chunk(3, 1), second.chunk(3, 1)
        update = torch.sigmoid(z1 + z2)
        return ((1 - update) * torch.tanh(n1 + torch.sigmoid(r1 + r2) * n2) + update * state[0],)
    if not isinstance(module, nn.LSTM):
        return ((torch.relu if module.nonlinearity == "relu" else torch.tanh)(first + second),)
    i, f, g, o = (first + second).chunk(4, 1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    out = torch.sigmoid(o) * torch.tanh(cell)
    return (F.linear(out, weights[-1]) if module.proj_size else out), cell
