"""What is compiled for a step, called where there is nothing else to do: :class:`SettledCall`."""

from typing import Any

from lightning_ort._shims import Shims
from lightning_ort.compat.dynamo import WithoutWrapper
from lightning_ort.strategies.capture.shims import StepShims


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

    def __call__(self, args: tuple[Any, ...]) -> tuple[Any] | None:
        """Return the output, or ``None`` if the step is to be run in another way."""
        shims, call = self._shims, self._call
        try:
            if not shims.install() or (run := call.find(args)) is None:
                return None
            output = run(call.owner, *args)
        finally:
            shims.remove()
        self._logger.end_step()
        if not self._needed:
            self._shims, self._needed = shims.needed(lambda: call.find(args) is run), True
        return (output,)
