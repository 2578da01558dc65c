"""What is compiled for a step, called where there is nothing else to do: :class:`SettledCall`."""

from collections.abc import Callable
from typing import Any

from lightning_ort.compat.dynamo import WithoutWrapper
from lightning_ort.strategies.capture.shims import Shims, StepShims


class SettledCall:
    """Calls what dynamo has compiled, if that fits the call, so that nothing compiles and nobody has to watch.

    Args:
        call: What dynamo has compiled for its step.
        shims: What it may need installed.

    """

    def __init__(self, call: WithoutWrapper, shims: StepShims) -> None:
        self._call, self._logger = call, shims.logger
        self._shims: Shims = shims
        self._needed = False  # whether only the needed ones are left

    def __call__(self, args: tuple[Any, ...], may_run: Callable[[], bool]) -> tuple[Any] | None:
        """Return the output, or ``None`` if the step is to be run in another way; ``may_run`` is asked last."""
        shims, call = self._shims, self._call
        try:
            if not shims.install() or (run := call.find(args)) is None or not may_run():
                return None
            output = run(call.owner, *args)
        finally:
            shims.remove()
        self._logger.end_step()
        if not self._needed:
            self._shims, self._needed = shims.needed(lambda: call.find(args) is run), True
        return (output,)
