"""Lightning's dictionaries of metrics, made when somebody reads them: :class:`LeanConnector`."""

import sys
from typing import Any

from typing_extensions import override

from lightning_ort.compat import lightning_bases
from lightning_ort.compat.lightning_loops import DICTIONARIES, OF_BAR, OF_CALLBACKS, OF_LOGGERS, shown, step_values
from lightning_ort.strategies.lean.run import LeanObject

_OWNERS = 2  # references to a dictionary that nobody else holds: the connector's, and that of whoever counts


class LeanConnector(LeanObject, lightning_bases.LoggerConnector):
    """Keeps what a batch has logged, and updates Lightning's dictionaries when anybody reads them."""

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        self.make()
        return super().__reduce_ex__(protocol)

    def begin_batch(self, results: Any, batch: Any, dataloader_idx: int | None) -> None:
        """Do what ``on_batch_start`` does."""
        if self._first_loop_iter is not False:
            self._first_loop_iter = self._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, dataloader_idx
        self._lean.results = results

    @property
    def knows_names(self) -> bool:
        """Whether the first batch of the loop is over, which makes what is logged."""
        return self._first_loop_iter is False

    def logs_again(self, hook: str) -> bool:
        """Note that a hook logs; return whether it does no more in this batch than to log values again."""
        if self._first_loop_iter is not False:
            return False
        self._current_fx = hook
        return True

    @override
    def on_batch_end(self) -> None:
        lean, own = self._lean, self.__dict__
        results, lean.results, lean.values_of_bar = lean.results, None, None
        now = None if results is None else step_values(results)
        lean.logged = now is None or bool(now[0])
        if (before := lean.values) is not None and (now is None or now[0][: len(before[0])] != before[0]):
            self.make()  # it has names that this batch has not
        if (
            now is None
            or self._first_loop_iter is None
            or sys.getrefcount(own[OF_CALLBACKS]) > _OWNERS
            or sys.getrefcount(own[OF_LOGGERS]) > _OWNERS
            or sys.getrefcount(own[OF_BAR]) > _OWNERS
        ):
            self.make()
            return super().on_batch_end()
        lean.values = now if now[0] else None
        results.batch = results.batch_size = None
        return None

    def make(self) -> None:
        """Show the values of the last batch, and in a bar's dictionary those of this one that a bar has asked for."""
        lean = self._lean
        if (kept := lean.values) is not None:
            lean.values = None
            metrics = shown(kept)
            for name, kind in DICTIONARIES.items():
                vars(self)[name].update(metrics[kind])
        if (kept := lean.values_of_bar) is not None:
            lean.values_of_bar = None
            vars(self)[OF_BAR].update(shown(kept)["pbar"])

    def seen(self) -> "tuple[dict[str, Any], list[Any]] | None":
        """Return what a bar shows now: metrics, and values that come on top; ``None`` if only Lightning knows."""
        lean = self._lean
        kept = [] if lean.values is None else [lean.values]
        if lean.results is not None:
            if (now := step_values(lean.results)) is None:
                return None
            kept.append(now)
            lean.values_of_bar = now
        return dict(vars(self)[OF_BAR]), kept

    @property
    @override
    def progress_bar_metrics(self) -> Any:
        late = self._lean.bars.late
        return super().progress_bar_metrics if late is None else late

    @override
    def update_eval_step_metrics(self, step: int) -> None:
        if not self._lean.on or (self._lean.logged and self.trainer.loggers):
            super().update_eval_step_metrics(step)


def _made(name: str) -> property:
    """Return the attribute of a connector that is one of its dictionaries."""

    def read(connector: LeanConnector) -> Any:
        connector.make()
        return vars(connector)[name]

    def replace(connector: LeanConnector, metrics: Any) -> None:
        connector.make()  # for the others
        vars(connector)[name] = metrics

    return property(read, replace)


for _name in DICTIONARIES:
    setattr(LeanConnector, _name, _made(_name))
