"""What all strategies with several processes have in common: :class:`ORTParallelMixin`; DDP: :class:`ORTDDPMixin`.

:class:`ShardOptimizersMixin` splits the states of the optimizers.
"""

import dataclasses
import inspect
import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ort._arguments import check_choice, check_type
from lightning_ort.compat import lightning_bases
from lightning_ort.compat.lightning import hand_over, wrap_start_of_scripts
from lightning_ort.compat.torch import default_store
from lightning_ort.compiler.report import CompileReport
from lightning_ort.strategies.distributed import relaunch
from lightning_ort.strategies.distributed.ending import Ending, launching
from lightning_ort.strategies.mixin import ORTMixin

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ParallelStrategy

log = logging.getLogger(__name__)

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ORTParallelMixin(ORTMixin, lightning_bases.ParallelStrategy):
    """Places regions alike in all processes, and ends all of them when one ends.

    If a process fails or is killed, the others end too, and say which one it was. SIGTERM to any process, which cluster
    schedulers send before they kill, ends the run in all processes after the same batch. If the Trainer is fitting and
    has checkpointing enabled, ``sigterm.ckpt`` is saved in its ``default_root_dir``. The process that was started
    first, or each process if something else than Lightning starts them, then ends with status 143.
    """

    _store: "torch.distributed.Store | None" = None
    _ending: Ending | None = None  # while a run lasts

    @property
    @override
    def launcher(self) -> Any:
        launcher = super().launcher
        wrap_start_of_scripts(launcher, _starting)
        hand_over(launcher, "report", _report_of, _set_report)
        return launcher

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        self._ending = Ending(self.lightning_module.trainer)
        self._ending.start()  # first, as the process that has started this one may be killed at any time
        super().setup_environment()
        self._store = open_run_store(self)
        self._ending.open(self._store)

    @property
    def agree(self) -> Callable[[str, dict[str, Any]], dict[str, Any]] | None:
        """What makes the processes of a run decide alike."""
        return None if self._store is None else partial(agree, self._store)

    @override
    def teardown(self) -> None:
        if self._ending is not None:
            self._ending.close()
        self._ending = self._store = None
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._ending is not None:
            self._ending.on_exception(exception)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._ending is not None:
            self._ending.on_train_batch_start()

    @override
    def _evaluation_step(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._ending is not None and self._ending.on_evaluation_step():
            # not after the batch: Lightning resumes a validation that was left within a batch, and skips the rest of
            # one that was left between two batches
            raise self.namespace.submodule("utilities.exceptions").SIGTERMException
        return super()._evaluation_step(name, step, *args, **kwargs)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._ending is not None:  # here begins what callbacks save together
            self._ending.before_collective()
        return super().lightning_module_state_dict()

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._ending is not None:
            self._ending.before_collective()
        super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_store": None, "_ending": None}


def _report_of(trainer: Any) -> dict[str, Any]:
    plain: dict[str, Any] = trainer.strategy.report.to_dict()  # Lightning takes no dataclasses
    return plain


def _set_report(trainer: Any, report: dict[str, Any]) -> None:
    trainer.strategy.report = CompileReport.from_dict(report)


@contextmanager
def _starting(launcher: Any) -> Iterator[None]:
    with relaunch.as_started(), launching(launcher):
        yield


class ORTDDPMixin(ORTParallelMixin):
    """Checks the arguments of a strategy on Lightning's ``DDPStrategy``."""

    wrapper: ClassVar[type | None] = DistributedDataParallel

    @classmethod
    @override
    def _check_arguments(cls, given: Mapping[str, Any]) -> None:
        super()._check_arguments(given)
        if "start_method" in given:
            check_choice("start_method", given["start_method"], get_args(StartMethod), cls.__name__)
        for name, parameter in inspect.signature(DistributedDataParallel.__init__).parameters.items():
            if name in given and isinstance(parameter.default, bool):  # the others it checks itself
                check_type(name, given[name], bool, "True or False", cls.__name__)


def open_run_store(strategy: "ParallelStrategy") -> "torch.distributed.Store | None":
    """Return a part of the process group's store for one run of the Trainer; ``None`` for a single process.

    The process group and its store outlive a run. All processes agree on a new random prefix for each run, so that
    values of an earlier run, with another model or configuration, are not seen. Call it in all processes.
    """
    if strategy.world_size == 1 or not torch.distributed.is_initialized():
        return None
    name = strategy.broadcast(uuid.uuid4().hex)
    store = default_store()
    return None if store is None else torch.distributed.PrefixStore(f"lightning_ort/{name}", store)


def agree(store: "torch.distributed.Store", key: str, measured: dict[str, Any]) -> dict[str, Any]:
    """Publish the timings of a region or step, or return those that another process has published under the same key.

    Processes that compute the same thing with different kernels drift apart in the last bits. So all use the timings of
    the first, for which none waits: one that compiles a graph which the others never see does not hang. Only the part
    that was measured here too is returned: a process must not use timings of something that it does not have, such as
    an engine that failed in it.
    """
    try:
        published = json.loads(store.compare_set(f"placement/{key}", "", json.dumps(measured)))
    except RuntimeError:  # the process that hosts the store has ended, maybe as its part of the work was done
        return measured
    common = {name: published[name] for name in measured if name in published}
    if common.keys() != measured.keys():
        log.debug("%s: measured %s here, published is %s", key, measured, published)
    return common or measured


class ShardOptimizersMixin(ORTParallelMixin):
    """Splits the states of the optimizers, which must be torch's own, when they are set up."""

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        # torch's, whose import takes 0.2 s, which every strategy's start would pay
        from lightning_ort.optim.sharded import shard

        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            shard(optimizer)
        self.optimizers = self.optimizers  # Lightning's wrappers copy the class of what they wrap
        note = f"states split over {self.world_size} processes"
        self.report.optimizers = [dataclasses.replace(entry, reason=note) for entry in self.report.optimizers]
