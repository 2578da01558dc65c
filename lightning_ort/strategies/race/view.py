"""What people read of a race, made from its events: :class:`RaceView`.

The console has one line when a step starts to be compiled, and one with the verdict. They go where the progress bar is,
by its own ``print``, so that neither breaks the other. A run without a progress bar, and a process that is not the
first, says nothing. The report has the times of the step, what was spent and saved, and a note for each choice.
"""

import dataclasses
import os
import sys

from lightning_ort._busy import differ, is_busy
from lightning_ort._memory import peak_bytes
from lightning_ort._text import duration, plain
from lightning_ort.compiler.engines import ENGINES, RECORDED, step_label
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.run_part import CAPTURED, StepReport
from lightning_ort.strategies.race.race import Race
from lightning_ort.strategies.race.run_facts import TRAINING, RunFacts, is_announced
from lightning_ort.strategies.race.terms import UNCHANGED, Event, Verdict, Waiting, Way
from lightning_ort.strategies.race.threads import Threads

_GREEN, _YELLOW, _DIM, _RESET = "\x1b[32m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
STAYS = "the step stays uncompiled"
WHILE_BUSY = "; other programs used the machine, so it is timed again later"


class RaceView:
    """Shows one race: console lines as things happen, and the part of the report about a step."""

    def __init__(self, module: RunFacts, name: str) -> None:
        self._module, self._name = module, name
        self._shown = 0  # events
        self._counted = (0.0, 0.0, 0.0)  # of this run: spent, tried, saved
        self._excluded = False  # whether it was said that times do not count

    def begin_run(self) -> None:
        """Begin a run of the Trainer: what was said of the last one about waiting is over."""
        self._counted, self._excluded = (0.0, 0.0, 0.0), False
        self._take_back(ReasonType.NOT_COMPILED, ReasonType.NOT_TRIED)
        self._waits_no_more()

    def update(self, race: Race) -> None:
        """Show what has happened since the last time."""
        new, self._shown = race.events[self._shown :], len(race.events)
        for event in new:
            self._show(race, event)
        figures = race.spent, race.tried, race.saved
        spent, tried, saved = (now - before for now, before in zip(figures, self._counted, strict=True))
        self._counted, run = figures, self._module.backend.report.run
        run.startup_seconds += spent
        run.trial_seconds += tried
        run.saved_seconds += saved
        if run.saved_seconds < run.startup_seconds:
            run.paid_after = None
        elif run.paid_after is None and run.startup_seconds > 0:
            since = int((run.saved_seconds - run.startup_seconds) / race.saving) if race.saving else 0
            run.paid_after = self._module.batches_done(self._name, race.steps) - since

    def show_threads(self, threads: Threads, has_changed: bool) -> None:
        """Show what a duel of all threads and one has found."""
        self._module.backend.report.run.threads[self._name] = str(threads)
        if has_changed:
            self._print(f"{self._name} runs on {threads}", _GREEN)

    def end_run(self, race: Race) -> None:
        """Say what was not compiled or not timed."""
        self.update(race)
        self._module.backend.report.run.peak_bytes = peak_bytes(self._module.device) or 0
        waiting = race.waiting
        started = [event.way for event in race.of_run if event.what == "starts"]
        run = self._module.backend.report.run
        if race.champion is UNCHANGED and not started and race.has_challengers and race.steps > 0:
            why = _why_waiting(waiting) if waiting else f"too few steps to decide ({race.steps})"
            # a line on the console is enough
            self._note(
                ReasonType.NOT_COMPILED, why, announced=self._name != TRAINING and TRAINING in self._module.races
            )
            run.waiting = run.waiting or f"{self._name}: {why}"
        elif waiting and waiting.way not in started:
            text = f"{step_label(waiting.way.engine)}: {_why_waiting(waiting, advises=False)}"
            self._note(ReasonType.NOT_TRIED, text, announced=True)
        if race.trying is not None:
            why = "the run ended before it could be timed"
            self._print(f"{self._compiled_in(race, race.trying)}: {why}", _DIM)

    def _show(self, race: Race, event: Event) -> None:
        if event.what == "waits":
            run, first = self._module.backend.report.run, race.waiting
            if first is not None and first.way != event.way:
                return
            if run.startup_seconds == 0 and (self._name == TRAINING or TRAINING not in run.waiting):
                run.waiting = f"{self._name}: {_why_waiting(event)}"
        elif event.what == "starts":
            self._waits_no_more()
            run = self._module.backend.report.run
            run.peak_bytes_before = run.peak_bytes_before or peak_bytes(self._module.device) or 0
            label = step_label(event.way.engine)
            if event.way.engine != RECORDED:  # which takes no time to speak of
                self._print(f"compiling {self._name} for {label}; the first batches take longer ...", _DIM)
        elif event.what == "compiles" and not race.measured and not self._excluded:
            self._excluded = True
            if event.way == race.champion and ENGINES[event.way.engine].backend is not None:
                self._note(ReasonType.INDUCTOR_WON, "memory is the aim, so nothing was timed", announced=True)
            self._print(f"{self._compiled_in(race, event.way)}: the settings exclude timing it", _DIM)
        elif event.what in ("wins", "loses"):
            self._show_verdict(race, event)
        elif event.what == "costs too much":
            assert isinstance(event.why, Waiting)
            cost, allowed = (duration(1000 * each) for each in (event.why.cost, event.why.allowed))
            text = f"compiling takes {cost}, more than the {allowed} allowed{_busy(event.why)}"
            after = f"{step_label(event.way.engine)} is given up" if race.champion is not UNCHANGED else STAYS
            self._note(ReasonType.BUDGET, f"{text}; raise ORTConfig(compile_budget=...) or pass start='now'; {after}")
            if race.champion is UNCHANGED:
                self._module.backend.report.run.waiting = f"{self._name} used up its compile budget"
            self._keep(race.champion)
        elif event.what in ("fails", "refused"):
            if ENGINES[race.champion.engine].backend is None:
                self._take_back(ReasonType.INDUCTOR_WON)
            self._keep(race.champion)

    def _show_verdict(self, race: Race, event: Event) -> None:
        steps = self._module.backend.report.steps
        times: dict[str, float] = {way.engine: 1000 * seconds for way, seconds in event.seconds.items()}
        before = next((step for step in steps if step.name == self._name), None)
        assert isinstance(event.why, Verdict)
        slowdown = {way.engine: slowed for way, slowed in event.why.slowdown.items()}
        if before is not None:
            times, slowdown = {**before.ms, **times}, {**before.slowdown, **slowdown}
        report = StepReport(self._name, times, slowdown=slowdown, in_torch=self._in_torch())
        if before is None:
            steps.append(report)
        else:
            steps[steps.index(before)] = report
        (other,) = event.seconds.keys() - {event.way}
        winner, loser = (event.way, other) if event.what == "wins" else (other, event.way)
        self._keep(winner)
        took = f"{_took(loser, times)}, {_took(winner, times)}{WHILE_BUSY * event.why.is_busy}"
        again = f"again after {event.why.after} steps" if event.why.after else ""
        if again and winner is not UNCHANGED:
            return  # as before
        if again:
            self._print(f"timed {again}: {took}", _YELLOW)
        else:
            self._print(
                self._verdict(race, event, event.why, winner, loser), _GREEN if winner is not UNCHANGED else _YELLOW
            )
        if winner is UNCHANGED:
            text = f"timed {again}: {took}" if again else took
            self._note(ReasonType.SLOWER, f"{text}; {STAYS}", announced=True)
        elif ENGINES[winner.engine].backend is not None:
            self._note(ReasonType.INDUCTOR_WON, took, announced=True)

    def _verdict(self, race: Race, event: Event, found: Verdict, winner: Way, loser: Way) -> str:
        times = {way: 1000 * seconds for way, seconds in event.seconds.items()}
        outcome = "wins"
        if found.more_memory:
            larger = f"{found.more_memory:.0%} more memory"
            outcome = f"goes on, since {step_label(loser.engine)} is hardly faster and takes {larger}"
        elif not found.is_clear:
            outcome = "goes on, without a clear difference"
        rival = f"{duration(times[loser])} in {step_label(loser.engine)}"
        runs = CAPTURED if winner.engine == "ort" and self._in_torch() else step_label(winner.engine)
        text = f"{runs} {outcome}, {duration(times[winner])} a step ({rival})"
        if winner is UNCHANGED:
            text += f"; {STAYS}"
        elif found.is_clear and loser is UNCHANGED and not differ(found.slowdown.values()):
            text += f", {times[loser] / times[winner]:.2f}x as fast"
        if found.is_busy:
            text += WHILE_BUSY
        return f"{self._compiled_in(race, event.way)}: {text}"

    def _in_torch(self) -> bool:
        graphs = self._module.backend.report.graphs
        own = [graph for graph in graphs if graph.name.partition("/")[0] == self._name]
        return bool(own) and not any(graph.num_ort_nodes for graph in own)

    def _compiled_in(self, race: Race, way: Way) -> str:
        # all ways of the engine: as child modules or two graphs, if it could not be compiled as it was
        events = [one for one in race.of_run if one.what == "compiles" and one.way.engine == way.engine]
        found = [event.seconds.values() for event in events]
        made = "recorded" if way.engine == RECORDED else "compiled"
        return f"{self._name} {made} in {duration(1000 * sum(map(sum, found)))}"

    def _keep(self, way: Way) -> None:
        """Note in the report what runs from now on, whatever the last duel has found."""
        steps = self._module.backend.report.steps
        for index, step in enumerate(steps):
            if step.name == self._name and step.engine != way.engine:
                steps[index] = dataclasses.replace(step, kept=way.engine)

    def _waits_no_more(self) -> None:
        run = self._module.backend.report.run
        if run.waiting.startswith(f"{self._name}: "):
            run.waiting = ""

    def _take_back(self, *kinds: ReasonType) -> None:
        report = self._module.backend.report
        report.notes = [note for note in report.notes if note.where != self._name or note.reason.type not in kinds]

    def _note(self, kind: ReasonType, text: str, announced: bool = False) -> None:
        self._module.record_choice(self._name, kind, text, announced)

    def _print(self, text: str, colour: str) -> None:
        trainer = self._module.module.trainer
        if is_announced(trainer):
            bar = trainer.progress_bar_callback
            assert bar is not None
            shows_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
            line = plain(f"lightning-ort: {text}")
            bar.print(f"{colour}{line}{_RESET}" if shows_colour else line)


def _why_waiting(event: Event, advises: bool = True) -> str:
    if not isinstance(event.why, Waiting):
        return str(event.why)
    why, origin = event.why, ", by an earlier run" * event.why.earlier
    limit = "compile_budget allows" if why.by_budget else "it is worth at most"
    cost, allowed = (duration(1000 * each) for each in (why.cost, why.allowed))
    if event.way.engine == RECORDED:
        return f"about {cost} to record; {limit} {allowed}{_busy(why)}"
    text = f"about {cost} to compile{origin}; {limit} {allowed}{_busy(why)}"
    return text + "; ORTConfig(start='now') compiles at once" * advises


def _busy(why: Waiting) -> str:
    if not is_busy(why.slowdown):
        return ""
    return f" (both on an idle machine; this one is busy, {why.slowdown:.1f} times as slow)"


def _took(way: Way, ms: dict[str, float]) -> str:
    how = "uncompiled" if way == UNCHANGED else f"with {step_label(way.engine)}"
    return f"{duration(ms[way.engine])} {how}"
