"""Writes through views that AOTAutograd takes back otherwise than eager stay eager's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.config import ORTConfig

View = Callable[[Tensor], Tensor]
INEXACT: dict[str, View] = {
    "unfold with gaps": lambda x: x.unfold(0, 1, 3),
    "unfold with a rest": lambda x: x.unfold(0, 4, 4),
    "overlapping unfold": lambda x: x.unfold(0, 3, 1),
    "a part of an unfold": lambda x: x.unfold(0, 2, 3)[:, 0],
    "unfold of a part": lambda x: x[1:].unfold(0, 1, 2),
    "overlapping as_strided": lambda x: x.as_strided((3, 2), (1, 1)),
    "as_strided in one place": lambda x: x.as_strided((3, 2), (2, 0)),
    "expand": lambda x: x.expand(2, 6),
    "expand_as": lambda x: x.expand_as(torch.empty(3, 6)),
    "broadcast_to": lambda x: torch.broadcast_to(x[:1], (3,)),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2)[0],
    "unsafe_split": lambda x: x.unsafe_split(2)[1],
}
EXACT: dict[str, View] = {
    "slice": lambda x: x[::2],
    "as_strided with gaps": lambda x: x.as_strided((2,), (3,)),
    "diagonal": lambda x: x.view(2, 3).diagonal(),
    "real": lambda x: torch.view_as_complex(x.view(3, 2)).real,
    "part of expand": lambda x: x.view(6, 1).expand(6, 1)[:, 0],
    "chunk": lambda x: x.chunk(4)[1],
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda view: view.add_(1),
    "fill": lambda view: view.fill_(7),
    "setitem": lambda view: view.__setitem__(slice(None), 3),
}


def outcome(function: Callable[[Tensor], Tensor]) -> Any:
    x = torch.arange(1.0, 7.0)
    try:
        return function(x).tolist(), x.tolist()
    except RuntimeError as error:
        return str(error).partition(".")[0]


@pytest.mark.parametrize("of_input", [True, False], ids=["input", "result"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(("view", "is_exact"), [(view, view in EXACT.values()) for view in (INEXACT | EXACT).values()])
def test_writes_through_views(view: View, is_exact: bool, write: Any, of_input: bool) -> None:
    def function(x: Tensor) -> Tensor:
        x = x if of_input else x * 1
        write(view(x))
        return x * 2 + x

    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None))
    compiled = outcome(torch.compile(function, backend=backend))
    assert compiled == outcome(function)
    assert bool(backend.report.graphs) == is_exact
