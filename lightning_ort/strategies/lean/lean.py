"""Make a run of the Trainer lean, and undo it: :class:`Lean`."""

import functools
from typing import TYPE_CHECKING, Any

from lightning_ort._imports import LightningNamespace, namespace_of
from lightning_ort._shims import Shims
from lightning_ort.compat.lightning import precision_of
from lightning_ort.compat.lightning_loops import parts_of, stock_fetcher
from lightning_ort.config import TrainerLoop
from lightning_ort.strategies.lean.evaluation import LeanEvaluation, LeanPrediction
from lightning_ort.strategies.lean.fetching import LeanFetcher
from lightning_ort.strategies.lean.known import BARS, EVALUATION, FITS, LOG, PREDICTION, reason_against, unknown_parts
from lightning_ort.strategies.lean.log import lean_log
from lightning_ort.strategies.lean.metrics import LeanConnector
from lightning_ort.strategies.lean.optimization import LeanAutomatic, LeanClosure, LeanManual, LeanPrecision
from lightning_ort.strategies.lean.run import LeanRun
from lightning_ort.strategies.lean.training import LeanEpochLoop

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy

_EVALUATIONS = (LeanEvaluation,) * 3
# for what `parts_of` returns; the loop over epochs stays
_PARTS = (None, LeanEpochLoop, LeanAutomatic, LeanManual, *_EVALUATIONS, LeanPrediction, LeanConnector)
_OF = dict.fromkeys(_PARTS[1:4], FITS) | {LeanEvaluation: EVALUATION, LeanPrediction: PREDICTION}


class Lean:
    """The lean parts of a strategy's run: their classes are changed, their state stays where it is."""

    def __init__(self) -> None:
        self._changed: list[Any] = []
        self._shims = Shims()

    def setup(self, trainer: "pl.Trainer", strategy: "Strategy", setting: TrainerLoop) -> str:
        """Begin a run; return whether it is lean and, if it is not, why."""
        self.teardown()
        if setting == "stock":
            return "Lightning's own: trainer_loop='stock'"
        namespace = namespace_of(type(trainer))
        assert namespace is not None
        try:
            if reason := reason_against(namespace, trainer):
                return f"Lightning's own: {reason}"
            return self._start(namespace, trainer, strategy)
        except (AttributeError, ImportError) as error:  # of a Lightning in which something is called otherwise
            self.teardown()
            return f"Lightning's own: {error}"

    def _start(self, namespace: LightningNamespace, trainer: "pl.Trainer", strategy: "Strategy") -> str:
        run, stock = LeanRun(namespace, trainer, strategy), unknown_parts(namespace)
        run.closure_class = _subclass(namespace.submodule("loops.optimization.automatic").Closure, LeanClosure)
        run.watch = functools.partial(_watch, run, stock_fetcher(namespace)) if FITS not in stock else lambda _: None
        for thing, lean in zip(parts_of(trainer), _PARTS, strict=True):
            if lean is not None and _OF.get(lean) not in stock:
                self._change(run, thing, _subclass(type(thing), lean))
        if (plugin := precision_of(strategy)) is not None and FITS not in stock:
            self._change(run, plugin, _precision_class(namespace, type(plugin)))
        if LOG not in stock and run.hooks.is_stock(run.module, "log"):
            self._shims.put(run.module, "log", lean_log(run))
        if BARS in stock:
            run.bars.draws.clear()
        return "; ".join(["lean", *(f"Lightning's own for {part}, since {why}" for part, why in stock.items())])

    def _change(self, run: LeanRun, thing: Any, kind: type) -> None:
        _make_lean(run, thing, kind)
        self._changed.append(thing)

    def teardown(self) -> None:
        """Undo :meth:`setup`; a second call does nothing."""
        for thing in self._changed:
            if isinstance(thing, LeanConnector):
                thing.make()  # after an error, what the last batch has logged is still to be seen
                thing.__dict__["_lean"].results = None  # somebody may have kept the `log` of this run
            thing.__class__ = type(thing).stock_class
            del thing.__dict__["_lean"]
        self._changed.clear()
        self._shims.remove()
        self._shims = Shims()

    def __getstate__(self) -> dict[str, Any]:
        return vars(Lean())  # a copy is in no run


def _make_lean(run: LeanRun, thing: Any, kind: type) -> None:
    thing.__class__ = kind
    thing.__dict__["_lean"] = run


def _watch(run: LeanRun, stock: type, fetcher: Any) -> None:
    """Make a fetcher lean, for as long as Lightning has it: each time that data is loaded again there is another."""
    if type(fetcher) is stock:
        _make_lean(run, fetcher, _subclass(stock, LeanFetcher))


def _subclass(stock: type, lean: type) -> Any:
    """Return a class of Lightning's with the methods of a lean one."""
    return _named(stock, lean, stock)


def _precision_class(namespace: LightningNamespace, stock: type) -> Any:
    """Return the class of a precision plugin, with a lean one in place of the base of all."""
    base: type = namespace.submodule("plugins.precision").Precision
    lean = _subclass(base, LeanPrecision)
    return lean if stock is base else _named(stock, stock, lean)


@functools.cache
def _named(stock: Any, *bases: Any) -> Any:
    names = {name: getattr(stock, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(stock.__name__, bases, {**names, "stock_class": stock})
