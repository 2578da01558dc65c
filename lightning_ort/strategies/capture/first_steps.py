"""What a step is seen to do while it still runs unchanged: :class:`FirstSteps`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_ort.compat.autograd import WatchedCalls, next_number
from lightning_ort.compat.torch import is_wrapped
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.running.fallbacks import SECOND_GRADIENT
from lightning_ort.recording.calls import Recorder
from lightning_ort.strategies.capture.shims import given_iterator
from lightning_ort.strategies.race.failures import OWN_GRADIENT
from lightning_ort.strategies.race.race import FIRST
from lightning_ort.strategies.race.run_facts import TRAINING
from lightning_ort.strategies.race.terms import Way
from lightning_ort.strategies.race.turn import NO_CONTEXT
from lightning_ort.strategies.race.view import STAYS
from lightning_ort.strategies.recording.effects import Effects
from lightning_ort.world import World

WATCHED = 16  # steps: what happens in later ones only is found out when it is captured
LOOKED_AT = 2  # of these, for what they read: the first may import or warn as no later one does
UNTIMED = "no time may tell whether compiling pays; ORTConfig(start='now') compiles at once, by a fixed rule"
LATE_SECOND_GRADIENT = (
    "The gradient of a gradient was asked for (`create_graph=True`), and a graph on ONNX Runtime or another"
    " torch.compile backend has none. A step that needs one from the beginning stays in PyTorch; this one took other"
    " gradients before. Pass ORTConfig(engine='torch') to the strategy, or put @torch.compiler.disable in front of the"
    " method that computes what is differentiated twice."
)


class FirstSteps:
    """Runs the first steps unchanged and watches them, which takes microseconds.

    ``operations``: how many operations with a gradient a step calls, the most of any; 0 where gradients are disabled.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.seen = self.operations = 0
        self._step = step
        self._own = self._second = self._reads_callers = False  # what was seen

    @property
    def is_over(self) -> bool:
        """Whether steps are watched no more."""
        return self.seen >= WATCHED

    def stop(self) -> None:
        """Watch no more."""
        self.seen = WATCHED

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step."""
        return self._run(NO_CONTEXT, args, kwargs)

    def look(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, str]:
        """Run a step of a module as where it is recorded; return its output, and why its world is open, if it is."""
        world, recorder = World(self._step, args), Recorder(())  # kept: what is freed within the block is seen

        @contextmanager
        def watched() -> Iterator[None]:
            with Effects(module, None).watched(), world.watched(), recorder:
                yield

        output = self._run(watched(), args, {})
        world.close()
        return output, str(world.openings[0]) if world.openings else ""

    def _run(self, around: AbstractContextManager[None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seen += 1
        before = next_number()
        with WatchedCalls() as calls, around:
            output = self._step(*args, **kwargs)
        self.operations = max(self.operations, next_number() - before)
        self._own |= calls.own
        self._second |= calls.second
        self._reads_callers |= calls.reads_callers
        return output

    def unfit(self, whole_step: bool) -> Reason | None:
        """Return why it cannot be captured, as a whole or by its child modules."""
        if self._reads_callers:
            return Reason(ReasonType.PYTHON_STATE, "a function that it calls reads variables of its callers")
        if whole_step and self._own:
            return Reason(ReasonType.SECOND_GRADIENT, OWN_GRADIENT)
        return Reason(ReasonType.SECOND_GRADIENT, SECOND_GRADIENT) if self._second else None


class UserStep(NamedTuple):
    """The step that a user wrote, bound; who watches its first calls; and what replaces it."""

    call: Any
    first: FirstSteps
    replacement: Any

    @property
    def function(self) -> Any:
        """It without its object, if it is a method."""
        return getattr(self.call, "__func__", self.call)

    def first_way(self, module: Any, name: str, batch: Any) -> Way | None:
        """Return how the step of a :class:`~.module.CapturedModule` is captured at first, if it can be."""
        part = module.part
        if part is None:
            return None
        if part == "step":
            if is_wrapped(self.call):
                module.record_choice(name, ReasonType.ALREADY_COMPILED, STAYS)
                return None
            if not isinstance(self.function, FunctionType):  # a mock, a partial: nothing that dynamo could trace
                part = "modules"
            elif given_iterator(batch[0]):
                module.record_choice(name, ReasonType.GIVEN_ITERATOR, "its child modules are captured instead")
                part = "modules"
        if module.stays_unchanged(name) and not (part == "step" and module.may_replay_calls):
            module.record_choice(name, ReasonType.STATIC_RULE, UNTIMED)
            return None
        return Way("ort", part, 1 if name == TRAINING and part == "step" else 2)

    def unchanged_steps(self, module: Any, name: str) -> int:
        """How many steps run unchanged in any case: one of several shows the user's errors before anything compiles."""
        if any(map(is_lazy, module.module.parameters())):
            return 1  # traced, what makes them would take nothing of the random numbers
        if module.saves_memory(name):
            return 0  # which may be all that there is no memory for
        if module.is_amortized:
            return FIRST
        if self.first.seen:
            return 0
        left = module.steps_left(name, 0)
        return int(left is None or left > 1 or module.takes_gradients)
