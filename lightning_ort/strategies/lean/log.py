"""``self.log`` that knows the calls that it has seen: :class:`LeanLog`."""

import copy
import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from lightning_ort.compat.lightning import logger_connector
from lightning_ort.compat.lightning_loops import CURRENT_HOOK, KnownMetric, known_metric
from lightning_ort.compat.torch import is_wrapped
from lightning_ort.strategies.lean.run import LeanRun
from lightning_ort.strategies.race.run_facts import STEPS

_BATCH_SIZE, _AFTER = "batch_size", 9  # arguments that are passed by place between the value and that
_LOGGER, _LOADER = ("logger", 1), ("add_dataloader_idx", 8)  # keywords, and where they are after name and value


class LeanLog:
    """Its ``log`` is an attribute of the LightningModule while a run lasts.

    What Lightning checks and makes for a call depends on the hook and on the arguments, but not on the value: so for a
    call that it has seen, the value alone is kept. The first batch of a loop, where values are reset, is Lightning's.
    """

    def __init__(self, lean: LeanRun) -> None:
        self._lean: Any = lean
        self._module, self._stock = lean.module, lean.module.log
        self._of_class = lean.module.__class__.log
        self._known: dict[Any, KnownMetric] = {}
        self.timed: Callable[..., None] | None = None  # called in its place while times are measured

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`~lightning.pytorch.core.LightningModule.log`."""
        if self.timed is not None:
            return self.timed(name, value, *args, **kwargs)
        if self._module.__class__.log is not self._of_class:  # somebody has replaced it since
            return self._module.__class__.log(self._module, name, value, *args, **kwargs)
        lean = self._lean
        if (results := lean.results) is None or len(args) > _AFTER:  # not within a batch, or with its size by place
            return self._stock(name, value, *args, **kwargs)
        hook = self._module.__dict__[CURRENT_HOOK]
        size = kwargs.pop(_BATCH_SIZE, None)
        place = hook, name, results.dataloader_idx, args, *kwargs.items()
        try:
            known = self._known.get(place)
        except TypeError:  # an argument without a hash
            return self._stock(name, value, *args, **kwargs, batch_size=size)
        connector = logger_connector(lean.trainer)
        if known is not None and known.is_in(results) and connector.logs_again(hook):
            plain = self._plain(value, known)
            if plain is not None:
                return known.update(plain, size)
        if size is not None:
            kwargs[_BATCH_SIZE] = size
        self._stock(name, value, *args, **kwargs)
        if not _given(_LOGGER, args, kwargs, False) or lean.trainer.loggers:  # else each call warns
            known = known_metric(results, hook, name, value, _given(_LOADER, args, kwargs, True))
            if known is not None:
                self._known[place] = known
        return None

    log.__qualname__ = "LightningModule.log"  # which Python's errors name

    def _plain(self, value: Any, known: KnownMetric) -> Any:
        """Return a value as Lightning keeps it, or ``None`` if it is to look at it."""
        kind = value.__class__
        if known.metric is not None:
            return value if value is known.metric else None
        if kind is torch.Tensor:
            if value.device != known.device or value.numel() != 1:
                return None
            value = value.detach() if value.requires_grad else value  # whoever keeps it copies it
            return value.squeeze() if value.ndim else value
        if kind is float or kind is int:
            default = torch.get_default_dtype()
            dtype = default if default is torch.float64 else torch.float32
            return torch.tensor(value, device=known.device, dtype=dtype)
        return None

    def __deepcopy__(self, memo: Any) -> "LeanLog":
        twin = object.__new__(LeanLog)
        module = copy.deepcopy(self._module, memo)
        twin._lean, twin._module, twin._known, twin.timed = SimpleNamespace(results=None), module, {}, None
        twin._stock = functools.partial(type(module).log, module)
        twin._of_class = type(module).log
        return twin

    def __reduce__(self) -> Any:
        # pickle takes `log` of what this makes, which is the module
        return operator.itemgetter(0), ((self._module,),)


class LogOutsideGraphs(LeanLog):
    """For steps that the user compiles: dynamo would trace it, and fails on Lightning's (2.6)."""

    log = torch.compiler.disable(LeanLog.log)


def lean_log(lean: LeanRun) -> Callable[..., None]:
    """Return the ``log`` of a run."""
    kind = LogOutsideGraphs if any(is_wrapped(getattr(lean.module, name)) for name in STEPS) else LeanLog
    return kind(lean).log


def is_lean(method: Any) -> bool:
    """Return whether an attribute of a module is the ``log`` of a run."""
    return isinstance(getattr(method, "__self__", None), LeanLog)


def _given(parameter: tuple[str, int], args: tuple[Any, ...], kwargs: dict[str, Any], default: Any) -> Any:
    name, position = parameter
    return args[position] if len(args) > position else kwargs.get(name, default)
