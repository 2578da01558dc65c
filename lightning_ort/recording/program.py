"""What of a step's calls is to be replayed: :class:`Program`."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_ort.compat.torchscript import Graph, below_autograd, call_with, written_by
from lightning_ort.recording.calls import MAX_CONSTANT, Call, Recorder, Value, is_view

aten = torch.ops.aten


@dataclass
class Program:
    """The calls that results, or tensors that were there before, depend on, in their order.

    ``inputs`` are all values that no call makes. A run of it takes their tensors and returns the ``results``, and after
    these what Python has read, which has to be as recorded.
    """

    calls: list[Call]
    inputs: list[Value]
    results: list[Value]
    constants: dict[Value, Tensor]
    written: list[Value]  # inputs that a run writes to
    reads: list[Any] = field(default_factory=list)  # what Python has read
    unused: list[Value] = field(default_factory=list)  # random numbers: the interpreter leaves out what nobody gets
    draws: bool = False  # whether it draws random numbers
    shares_memory: bool = False  # whether results, or an input that is written to, share memory with others

    @classmethod
    def of(cls, recorder: Recorder, results: Sequence[Value]) -> "Program":
        """Return that of a recording, whose results these are."""
        storage = recorder.storage_of
        made = {value for call in recorder.calls for value in _values(call.results)}
        known = [*recorder.arguments, *recorder.found]
        needed = {storage[value] for value in results} | {storage[value] for value in known}
        kept: list[Call] = []
        for call in reversed(recorder.calls):
            own = {storage[value] for value in (*_values(call.results), *_written(call))}
            if own & needed or _is_random(call) or _reads(call):
                kept.append(call)
                needed |= own | {storage[value] for value in _values(call.arguments)}
        kept.reverse()
        written = {storage[value] for call in kept for value in _written(call)}
        kept, folded = _fold(kept, recorder, written, {storage[value] for value in results})
        used = {value for call in kept for value in _values(call.arguments)} | set(results)
        folded |= recorder.constants
        inputs = [value for value in (*known, *folded) if value in used]
        assert used <= made | set(inputs)
        of_inputs = Counter(storage[value] for value in inputs)
        of_results = [storage[value] for value in dict.fromkeys(results)]
        constants = {value: folded[value] for value in inputs if value in folded}
        for value in [value for value in constants if storage[value] in written]:  # each run begins with a copy
            original = Value(len(storage) + len(constants))
            kept.insert(0, Call(aten.clone.default, (original, None), (value,)))
            inputs[inputs.index(value)], constants[original] = original, constants.pop(value)
        return cls(
            calls=kept,
            inputs=inputs,
            results=list(results),
            constants=constants,
            written=[value for value in inputs if value in known and storage[value] in written],
            reads=[one for call in kept for one in _reads(call)],
            unused=[value for call in kept if _is_random(call) for value in _values(call.results) if value not in used],
            draws=any(map(_is_random, kept)),
            shares_memory=len({*of_results}) < len(of_results)
            or any(of_inputs[one] > 1 for one in written)
            or any(of_inputs[one] > 0 for one in of_results),
        )

    def build(self) -> Callable[..., Sequence[Any]]:
        """Return a function that runs it, in C++: of the tensors of the inputs, in their order."""
        graph = Graph()
        nodes: dict[Value, Any] = {value: graph.add_input() for value in self.inputs}
        reads: list[Any] = []

        for call in self.calls:
            lists = [len(one) if isinstance(one, list) else None for one in call.results]
            found = graph.call(call.op, given(call.arguments, nodes), lists)
            for result, one in zip(call.results, found, strict=True):
                for value, part in zip(result, one, strict=True) if isinstance(result, list) else ((result, one),):
                    if isinstance(value, Value):
                        nodes[value] = part
                    elif value is not None:
                        reads.append(part)
            reads += [graph.sizes(part) for part, _ in zip(found, call.sizes, strict=False)]
        unused = [nodes[value] for value in self.unused]
        return graph.build([*(nodes[value] for value in self.results), *reads, *unused])


def _fold(
    calls: list[Call], recorder: Recorder, written: set[int], returned: set[int]
) -> tuple[list[Call], dict[Value, Tensor]]:
    """Return the calls that each run has to make, and the results of the others: views of what stays where it is.

    Of tensors that nobody writes to, and that are not handed out, small ones that always hold the same are made once.
    """
    storage, inplace = recorder.storage_of, any(torch.Tag.inplace_view in call.op.tags for call in calls)
    placed = {} if inplace else {value: one for value, one in recorder.found.items() if storage[value] not in written}
    same = {value: one for value, one in recorder.constants.items() if storage[value] not in written}
    left: list[Call] = []
    for call in calls:
        if len(call.results) != 1 or not isinstance(value := call.results[0], Value) or storage[value] in written:
            left.append(call)
            continue
        needed = _values(call.arguments)
        if value in recorder.fills and storage[value] not in returned:
            same[value] = recorder.fills[value]
        elif is_view(call.op) and (needed[0] in same or needed[0] in placed):
            (same if needed[0] in same else placed)[value] = _run(call, same | placed)
        elif needed and storage[value] not in returned and all(one in same for one in needed) and _is_pure(call):
            if (result := _run(call, same)).numel() <= MAX_CONSTANT:
                same[value] = result
            else:
                left.append(call)
        else:
            left.append(call)
    made = {value for call in calls for value in _values(call.results)}
    return left, {value: one for value, one in (same | placed).items() if value in made}


def _run(call: Call, tensors: dict[Value, Tensor]) -> Tensor:
    with below_autograd():
        result: Tensor = call_with(call.op, given(call.arguments, tensors))
    return result


def given(arguments: Sequence[Any], values: Mapping[Value, Any]) -> list[Any]:
    """Return arguments with what values stand for."""

    def of(one: Any) -> Any:
        if isinstance(one, Value):
            return values[one]
        return [*map(of, one)] if isinstance(one, list) else one

    return [*map(of, arguments)]


def _is_pure(call: Call) -> bool:
    return not (_is_random(call) or _reads(call) or _written(call) or is_view(call.op))


def _values(part: Any) -> list[Value]:
    if isinstance(part, Value):
        return [part]
    return [value for one in part for value in _values(one)] if isinstance(part, (list, tuple)) else []


def _written(call: Call) -> list[Value]:
    return [value for index in written_by(call.op) for value in _values(call.arguments[index])]


def _is_random(call: Call) -> bool:
    return torch.Tag.nondeterministic_seeded in call.op.tags


def _reads(call: Call) -> list[Any]:
    """What Python got to read of a call: numbers, and sizes that depend on values."""
    plain = [one for one in call.results if one is not None and not isinstance(one, (Value, list))]
    return [*plain, *map(list, call.sizes)]
