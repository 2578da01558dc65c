"""The calls of lightning_ort in one settled training step, in order, with the time that each takes itself.

Of a module of five small layers, whose kernels take next to nothing. Times are the least of ten means of
ten steps under cProfile, without torch's and onnxruntime's operations. It makes calls dearer than they are, those with
many calls of C functions most: time what you change without it.
``--source`` also prints each function, and the docstring and ``__init__`` of its class: the path, to read at one go.
``python benchmarks/settled_step.py [--unchanged] [--source]``
"""

import argparse
import ast
import cProfile
import inspect
import math
import os
import pstats
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from harness import console, table_of
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

import lightning_ort

PACKAGE = str(Path(lightning_ort.__file__).parent) + os.sep
FIRST, LAST, EACH = 150, 250, 10  # steps under a profiler, none of which is audited, and of each profiler
LISTED = 3  # steps after them, of which the one with the fewest calls counts: on a busy machine one may be audited
STEPS = LAST + 10


class Layers(LightningModule):
    """Five layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.ReLU())), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        """Return batches of 8."""
        return torch.utils.data.DataLoader(torch.randn(8 * STEPS, 16), batch_size=8)


class Watch(Callback):
    """Profiles some steps, and then lists the calls of others."""

    def __init__(self) -> None:
        self.profiles: list[cProfile.Profile] = []
        self._lists: list[list[tuple[int, CodeType]]] = []
        self._depth = 0

    @property
    def calls(self) -> list[tuple[int, CodeType]]:
        """Each with how many calls of ours it is within."""
        return min(self._lists, key=len)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if FIRST <= batch_idx <= LAST and batch_idx % EACH == 0:
            if self.profiles:
                self.profiles[-1].disable()
            if batch_idx < LAST:
                self.profiles.append(cProfile.Profile())
                self.profiles[-1].enable()
        elif batch_idx > LAST + LISTED:
            sys.setprofile(None)
        elif batch_idx > LAST:
            self._lists.append([])
            self._depth = 0
            sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            self._lists[-1].append((self._depth, frame.f_code))
        self._depth += {"call": 1, "return": -1}.get(event, 0)


def watch(unchanged: bool = False) -> Watch:
    """Return what a fit has shown."""
    settings = {"engine": "torch"} if unchanged else {"start": "now", "placement": "always"}
    watched = Watch()
    trainer = Trainer(
        strategy=lightning_ort.ORTStrategy(config={"cache_dir": None, **settings}),
        callbacks=[watched],
        accelerator="cpu",
        max_epochs=1,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    trainer.fit(Layers())
    sys.setprofile(None)
    return watched


def sources(codes: Iterable[CodeType]) -> Iterator[str]:
    """Return each function once, and before the first of a class the class's docstring and ``__init__``."""
    seen = set()
    for code in dict.fromkeys(codes):
        text = Path(code.co_filename).read_text(encoding="utf-8")
        shown: list[tuple[int, Any]] = [(code.co_firstlineno, inspect.getsource(code))]
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.lineno <= code.co_firstlineno <= (node.end_lineno or 0):
                inits = [one for one in node.body if getattr(one, "name", "") == "__init__"]
                spans = [(node.lineno, node.body[0].end_lineno), *((one.lineno, one.end_lineno) for one in inits)]
                about = ["\n".join([*text.splitlines()[first - 1 : last], ""]) for first, last in spans]
                shown = [(node.lineno, "\n".join(about)), *shown]
        for line, source in shown:
            if (code.co_filename, line) not in seen:
                yield f"\n# {code.co_filename.removeprefix(PACKAGE)}:{line}\n{source}"
        seen.update((code.co_filename, line) for line, _ in shown)


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unchanged", action="store_true", help="a step that nothing is compiled for")
    parser.add_argument("--source", action="store_true", help="print the functions too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found = watch(arguments.unchanged)
    times: dict[tuple[str, int, str], float] = {}
    for profile in found.profiles:
        for place, (_, count, seconds, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
            times[place] = min(times.get(place, math.inf), seconds / count)
    table = table_of(f"{len(found.calls)} calls in a step", ("call", "at"), ("us",))
    for depth, code in found.calls:
        seconds = times.get((code.co_filename, code.co_firstlineno, code.co_name), math.nan)
        name = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
        at = f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno}"
        table.add_row(f"{'  ' * depth}{name}", at, f"{1e6 * seconds:.1f}")
    out = console()
    out.print(table)
    if arguments.source:
        for text in sources(code for _, code in found.calls):
            out.print(text, highlight=False, markup=False, soft_wrap=True, end="")


if __name__ == "__main__":
    main()
