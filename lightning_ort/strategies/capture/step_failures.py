"""Why ways of a step cannot go on, until its race is told: :class:`StepFailures`."""

from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.strategies.capture.module import CapturedModule
from lightning_ort.strategies.race import failures
from lightning_ort.strategies.race.race import Race
from lightning_ort.strategies.race.terms import Failure, Way


class StepFailures(dict[Way, Failure]):
    """What the race of a step is to be told of: of each way the last failure, or a final one."""

    def __init__(self, module: CapturedModule, name: str) -> None:
        super().__init__()
        self._module, self._name = module, name

    def add(self, way: Way, failure: Failure) -> None:
        """Report that a way cannot go on; raise what our compiler has failed with under ``fallback="raise"``."""
        cause: failures.Cause = failure.why
        if way in self and self[way].final and not cause.warns:
            return  # which says it already
        module, kind = self._module, cause.reason.type
        if failure.instead != way:
            self[way] = failure
        if failure.final and kind is ReasonType.SECOND_GRADIENT:
            module.saw_second_gradient()
        if cause.error is not None and module.config.fallback == "raise":
            raise cause.error  # from our compiler, which has reported it
        race = module.races.get(self._name)
        reason = Reason(kind, failures.describe(way, failure, race is not None and race.champion == way))
        if cause.warns:
            module.backend.fall_back(self._name, reason)
        else:
            module.record_choice(self._name, kind, reason.text)

    def tell(self, race: Race) -> None:
        """Tell the race, between two steps."""
        while self:
            race.fail(*self.popitem())
