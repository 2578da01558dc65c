"""Regions recorded as CUDA graphs: without a GPU, what surrounds the recording, with sessions that record nothing.

On a GPU: ``tests/strategies/test_gpu.py``.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ort import ORTConfig
from lightning_ort.compiler import timing
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.ort import cuda_graphs
from lightning_ort.compiler.executors.ort.cuda_graphs import RecordedSession
from lightning_ort.compiler.regions import Region
from lightning_ort.compiler.report import ReasonType

MEASURE = timing.measure


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, recordings_win: None) -> list[RecordedSession]:
    """Pretend that the CPU can record, and that a recording is always faster; the sessions that were made."""
    made: list[RecordedSession] = []
    init = RecordedSession.__init__

    def note(self: RecordedSession, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(RecordedSession, "__init__", note)
    monkeypatch.setattr(cuda_graphs, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(cuda_graphs, "can_record", lambda region: True)
    monkeypatch.setattr(cuda_graphs, "stream_of", lambda device: None)
    return made


def backend_of(**settings: Any) -> ORTBackend:
    return ORTBackend(
        ORTConfig(placement="always", cuda_graphs=True, cache_dir=None, **settings, debug={"intra_op_threads": 1})
    )


class Block(nn.Module):
    """A product, an activation, and a result in another memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x)).unsqueeze(1)
        return self.conv(y.to(memory_format=torch.channels_last)).relu()


def gradients(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    result = call(x)
    result.square().sum().backward()
    return [result.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def test_same_numbers_on_addresses_that_stay(recorded: list[RecordedSession]) -> None:
    torch.manual_seed(0)
    module, backend = Block(), backend_of()
    compiled = torch.compile(module.forward, backend=backend)
    for step in range(4):
        x = torch.randn(2, 3, 5)
        expected = gradients(module, module, x)
        torch.testing.assert_close(gradients(compiled, module, x), expected, rtol=1e-4, atol=1e-5)
        with torch.no_grad():  # what is learned in place is read by the next step
            for parameter in module.parameters():
                parameter.add_(0.1 * step)
    regions = [region for graph in backend.report.graphs for region in graph.regions if region.executor == "ort"]
    assert len(regions) == 2
    assert all(region.cuda_graph and region.runs == 4 for region in regions)
    # one recording of the samples that were timed, one of the parameters, which this backward pass does not read
    assert [session._recordings for session in recorded] == [2, 1]
    read = {id(place) for session in recorded for place in session._places}
    assert read.issuperset(id(module.get_parameter(name)) for name in ("first.weight", "first.bias", "conv.weight"))


def test_results_outlive_the_next_run(recorded: list[RecordedSession]) -> None:
    torch.manual_seed(0)
    module = Block()
    compiled = torch.compile(module.forward, backend=backend_of())
    first, second = torch.randn(2, 2, 3, 5)
    expected = [gradients(module, module, x) for x in (first, second)]
    module.zero_grad()
    # both forward passes before the backward passes: what the first saved must still be there
    results = [compiled(x) for x in (first, second)]
    for result, numbers in zip(reversed(results), reversed(expected), strict=True):
        module.zero_grad()
        result.square().sum().backward()
        got = [result.detach(), *(p.grad for p in module.parameters())]
        torch.testing.assert_close(got, numbers, rtol=1e-4, atol=1e-5)
    assert recorded


def test_a_parameter_that_moves(recorded: list[RecordedSession]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(module.forward, backend=backend_of())
    x = torch.randn(3, 4)
    recordings = []
    for _ in range(5):
        torch.testing.assert_close(gradients(compiled, module, x), gradients(module, module, x), rtol=1e-4, atol=1e-5)
        recordings.append(max(session._recordings for session in recorded))
        module[0].weight.data = torch.randn(4, 4)
    # copied from its first move on: no recording for each place
    assert recordings[1] == recordings[-1] == recordings[0] + 1


def test_what_cannot_be_recorded_runs_as_ever(monkeypatch: pytest.MonkeyPatch, recorded: list[RecordedSession]) -> None:
    monkeypatch.setattr(timing, "measure", MEASURE)
    monkeypatch.setattr(
        RecordedSession, "__call__", lambda self, *args: (_ for _ in ()).throw(RuntimeError("operation not permitted"))
    )
    module, backend = Block(), backend_of()
    x = torch.randn(2, 3, 5)
    compiled = torch.compile(module.forward, backend=backend)
    torch.testing.assert_close(gradients(compiled, module, x), gradients(module, module, x), rtol=1e-4, atol=1e-5)
    assert backend.report.ort_runs == 2
    assert not backend.report.fallbacks
    assert {note.reason.type for note in backend.report.notes} == {ReasonType.NOT_RECORDED}
    assert "operation not permitted" in backend.report.to_text()
    assert not any(region.cuda_graph for graph in backend.report.graphs for region in graph.regions)


def test_on_the_cpu_the_report_says_that_nothing_is_recorded() -> None:
    module, backend = Block(), backend_of()
    x = torch.randn(2, 3, 5)
    compiled = torch.compile(module.forward, backend=backend)
    torch.testing.assert_close(gradients(compiled, module, x), gradients(module, module, x), rtol=1e-4, atol=1e-5)
    assert backend.report.ort_runs == 2
    (note,) = backend.report.notes
    assert (note.where, note.reason.type) == ("cuda_graphs", ReasonType.NOT_RECORDED)
    assert "cpu" in note.reason.text


def test_sizes_that_vary_are_not_recorded() -> None:
    from torch import fx

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = 3
    assert not cuda_graphs.can_record(Region("ort", 1, inputs=[x]))
    x.meta["val"] = torch.empty(3)
    assert not cuda_graphs.can_record(Region("ort", 1, inputs=[x]))
    x.meta["val"] = torch.empty(3, device="meta")
    assert not cuda_graphs.can_record(Region("ort", 1, inputs=[x]))


def options_of_runs(recorded: list[RecordedSession], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of the recording of each run from now on; -1 for none."""
    made: list[int] = []
    (session,) = recorded
    numbers = {id(session._plain_options): -1}
    options = cuda_graphs.run_options

    def note(device: torch.device, number: int | None = None) -> Any:
        made_options = options(device, number)
        numbers[id(made_options)] = number or 0
        kept.append(made_options)
        return made_options

    kept: list[Any] = []
    run = session._run
    monkeypatch.setattr(cuda_graphs, "run_options", note)

    def noted(binding: Any, run_options: Any) -> None:
        made.append(numbers.get(id(run_options), 0))
        run(binding, run_options)

    session._run = noted
    return made


def test_nothing_is_recorded_while_a_loader_pins_memory(
    recorded: list[RecordedSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False), torch.randn(3, 4)
    compiled = torch.compile(module.forward, backend=backend_of())
    torch.testing.assert_close(compiled(x), module(x))
    runs = options_of_runs(recorded, monkeypatch)
    module[0].weight.data = torch.randn(4, 4)  # what moved is recorded anew
    monkeypatch.setattr(cuda_graphs, "pins_memory", lambda: True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), module(x))
    monkeypatch.setattr(cuda_graphs, "pins_memory", lambda: False)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), module(x))
    assert runs[:2] == [-1, -1]
    assert runs[2] == runs[3] > 0


def test_each_thread_has_its_own_recording(recorded: list[RecordedSession], monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False), torch.randn(3, 4)
    compiled = torch.compile(module.forward, backend=backend_of())
    torch.testing.assert_close(compiled(x), module(x))
    runs = options_of_runs(recorded, monkeypatch)
    with ThreadPoolExecutor(1) as other:
        for _ in range(2):
            torch.testing.assert_close(other.submit(compiled, x).result(), module(x))
    assert runs[0] == runs[1] > 0
