"""Whether a run may be lean: only where all that is replaced is as it was when this was written.

:func:`reason_against` is asked when a run begins. :class:`Unreplaced` sees what people replace while it lasts.
"""

from collections.abc import Callable, Iterator
from typing import Any

from lightning_ort._imports import LightningNamespace
from lightning_ort.compat.lightning import SIGTERM_BROADCAST
from lightning_ort.compat.lightning_loops import parts_of, stock_parts
from lightning_ort.compat.lightning_sources import functions, of_fabric, owner_of, unknown_functions
from lightning_ort.strategies.lean.remembered import Remembered

FITS, EVALUATION, PREDICTION, LOG, BARS = "fits", "validation and test", "prediction", "self.log", "progress bars"
# what alone relies on some of Lightning's functions, by how their names begin; on all others everything does
_RELIES = {
    "loops.training_epoch_loop.": FITS,
    "loops.optimization.": FITS,
    "loops.fetchers.": FITS,
    "utilities.combined_loader.": FITS,
    "core.optimizer.": FITS,
    "plugins.precision.": FITS,
    "loops.evaluation_loop.": EVALUATION,
    "loops.prediction_loop.": PREDICTION,
    "core.module.LightningModule.log": LOG,
    "callbacks.progress.": BARS,
}
# what is asked about where it is left out
_ASKED_ELSEWHERE = ("core.hooks.", "core.module.", "callbacks.callback.", "strategies.strategy.Strategy.")
_ASKED_IN_LOOPS = ("loops.evaluation_loop.", "loops.prediction_loop.", "callbacks.progress.")


def unknown_parts(namespace: LightningNamespace) -> dict[str, str]:
    """Return which parts of runs may not be lean, "" for all of them, and why."""
    found: dict[str, str] = {}
    for name in unknown_functions(namespace):
        part = next((part for start, part in _RELIES.items() if name.startswith(start)), "")
        found.setdefault(part, f"{namespace.package}.{name} is not as in the releases 2.5.0 to 2.6.6")
    return found


def reason_against(namespace: LightningNamespace, trainer: Any) -> str:
    """Return why a run is Lightning's own, or nothing."""
    return next(_reasons(namespace, trainer), "")


def _reasons(namespace: LightningNamespace, trainer: Any) -> Iterator[str]:
    if type(trainer.profiler) is not namespace.submodule("profilers").PassThroughProfiler:
        yield "a profiler sees each call"
    base = namespace.submodule("trainer.trainer").Trainer
    for name, value in vars(base).items():
        if isinstance(value, property) and getattr(type(trainer), name) is not value:
            yield f"{type(trainer).__name__} overrides {name}"
    for part, stock in zip(parts_of(trainer), stock_parts(namespace), strict=True):
        if type(part) is not stock:
            yield f"{type(part).__name__} is a class of its own"
    if (release := unknown_parts(namespace).get("")) is not None:
        yield release
    for name, function in of_fabric(namespace):
        if function is None:
            yield f"{namespace.package}.{name} is replaced"


class Unreplaced:
    """Looks whether functions of Lightning's are those that they were when a run began, by which they were known.

    Attributes:
        known: The functions, by name.
    """

    def __init__(self, namespace: LightningNamespace, trainer: Any, tell: Callable[[str], None]) -> None:
        self.known = {**dict(functions(namespace)), **dict(of_fabric(namespace))}
        self._namespace, self._trainer, self._tell = namespace, trainer, tell
        in_batches, elsewhere = list[str](), list[str]()
        for name in self.known:
            if self.known[name] is not None and not name.startswith(_ASKED_ELSEWHERE):
                (elsewhere if name.startswith(_ASKED_IN_LOOPS) else in_batches).append(name)
        self.in_batches = self._remembered(in_batches)
        self._elsewhere = self._remembered(elsewhere)

    def _remembered(self, names: list[str]) -> Remembered[bool]:
        """Return what says whether all functions of these names are as they were."""
        owners: dict[Any, dict[str, Any]] = {}
        for name in names:
            owner, own_name = owner_of(self._namespace, name)
            owners.setdefault(owner, {})[own_name] = getattr(owner, own_name)

        def ask() -> bool:
            for owner, before in owners.items():
                for name, function in before.items():
                    if getattr(owner, name) != function:  # a class method is another object each time
                        self._tell(f"{owner.__name__}.{name}")
                        return False
            return True

        return Remembered(ask, *owners.items())

    def in_loop(self) -> bool:
        """Return whether the loop that begins is Lightning's, and each of its objects."""
        for part in parts_of(self._trainer):
            for name in vars(part):
                if name != SIGTERM_BROADCAST and callable(getattr(type(part), name, None)):
                    self._tell(f"{type(part).__name__}.{name}")
                    return False
        return self._elsewhere()
