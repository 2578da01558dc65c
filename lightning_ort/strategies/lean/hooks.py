"""Call a hook if somebody has overridden it: :class:`Hooks`.

People replace methods while they train: so each hook is looked up when it is due, and compared with what does nothing.
"""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from lightning_ort._imports import LightningNamespace
from lightning_ort.compat.lightning_loops import CURRENT_HOOK, MODULE_INTERNALS, idle_hooks
from lightning_ort.strategies.lean.bars import Bars

OF_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
OF_TRANSFERS = (*OF_BATCHES, *MODULE_INTERNALS)
OF_CLIPPING = ("configure_gradient_clipping", "clip_gradients")
_functions_of_batches = operator.attrgetter(*(f"{name}.__func__" for name in OF_BATCHES))
_KNOWN_PACKAGES = ("lightning", "pytorch_lightning", "lightning_ort")
_OF_STEPS = ("optimizer_zero_grad", "optimizer_step", "lr_scheduler_step")
_OF_MODULES = ("log", *OF_CLIPPING, *_OF_STEPS, *MODULE_INTERNALS)


class Hooks:
    """Calls hooks in Lightning's order, with ``_current_fx_name`` as Lightning sets it, also where one raises."""

    def __init__(self, namespace: LightningNamespace, bars: Bars) -> None:
        self._bars, self._draws = bars, bars.draws
        module: Any = namespace.submodule("core.module").LightningModule
        hooks: Any = namespace.submodule("core.hooks")
        # the functions, not where they are, and of the classes that define them: people patch all of those classes
        self._of_callback = dict(_hooks(namespace.submodule("callbacks.callback").Callback))
        self._of_module = {name: getattr(hooks.ModelHooks, name, None) for name in self._of_callback}
        self._of_module |= {name: getattr(module, name) for name in _OF_MODULES}
        self._idle = idle_hooks(namespace)
        self._of_batches = tuple(getattr(hooks.DataHooks, name) for name in OF_BATCHES)

    def run(self, trainer: Any, module: Any, name: str, *args: Any) -> Any:
        """Call the hook of the callbacks and then that of the module, whose result is returned."""
        own, nothing = module.__dict__, self._of_callback[name]
        for callback in trainer.callbacks:
            method = getattr(callback, name)
            try:
                function = method.__func__
            except AttributeError:
                function = None
                if not callable(method):
                    continue
            if function is nothing or (function in self._draws and self._bars.waits(callback, method, trainer, args)):
                continue
            before, own[CURRENT_HOOK] = own[CURRENT_HOOK], name
            method(trainer, module, *args)
            own[CURRENT_HOOK] = before
        method = getattr(module, name)
        try:
            if method.__func__ is self._of_module[name]:
                return None
        except AttributeError:
            if not callable(method):
                return None
        before, own[CURRENT_HOOK] = own[CURRENT_HOOK], name
        result = method(*args)
        own[CURRENT_HOOK] = before
        return result

    def idle(self, trainer: Any, module: Any, names: Iterable[str], batches: int) -> tuple[float, float, str]:
        """Return in how many batches after so many, and seconds, no hook of these acts, and which one leaves none."""
        steps, seconds = math.inf, math.inf
        for name in names:
            for callback in trainer.callbacks:
                function = getattr(getattr(callback, name), "__func__", None)
                if function is self._of_callback[name]:
                    continue
                found = None
                if function in self._draws:
                    found = self._bars.idle(callback, batches)
                elif (idle := self._idle.get((type(callback), function))) is not None:
                    found = idle(callback, trainer)
                if found is None:
                    return 0, 0.0, f"{type(callback).__name__}.{name}"
                steps, seconds = min(steps, found[0]), min(seconds, found[1])
            if not self.is_stock(module, name):
                return 0, 0.0, f"{type(module).__name__}.{name}"
        return steps, seconds, ""

    def is_stock(self, module: Any, name: str) -> bool:
        """Return whether a method of a module is Lightning's."""
        return getattr(getattr(module, name), "__func__", None) is self._of_module[name]

    def clips_as_asked(self, module: Any, precision: Any) -> bool:
        """Return whether only the Trainer's arguments say how gradients are clipped."""
        return (
            all(self.is_stock(module, name) for name in OF_CLIPPING)
            and precision.clip_gradients.__module__.partition(".")[0] in _KNOWN_PACKAGES
        )

    def only_is_moved(self, module: Any) -> bool:
        """Return whether nothing of a module is overridden that is called when a batch is moved."""
        return self.only_moves(module) and all(self.is_stock(module, name) for name in MODULE_INTERNALS)

    def only_moves(self, owner: Any) -> bool:
        """Return whether a module or datamodule has no hook of its own for that."""
        try:
            return _functions_of_batches(owner) == self._of_batches
        except AttributeError:
            return False


def _hooks(kind: type) -> "list[tuple[str, Callable[..., Any]]]":
    return [(name, value) for name, value in vars(kind).items() if name.startswith("on_")]
