"""The part of a report that a Trainer's run adds; :mod:`~lightning_ort.compiler.report.report` has the whole."""

from dataclasses import dataclass, field

from lightning_ort._busy import WHILE_BUSY, is_busy
from lightning_ort._text import duration


@dataclass(frozen=True)
class OptimizerReport:
    """What runs one optimizer.

    Args:
        configured: What ``configure_optimizers`` returned, such as ``torch.AdamW``.
        runs_as: What replaced it, such as ``torch.AdamW (fused)``.
        reason: Why it was not replaced, or a remark on the choice; may be empty.
    """

    configured: str
    runs_as: str
    reason: str = ""

    def __str__(self) -> str:
        runs = f"runs as {self.runs_as}" if self.runs_as != self.configured else "is not replaced"
        return f"{self.configured} {runs}" + (f": {self.reason}" if self.reason else "")


CAPTURED = "the captured step in PyTorch"


@dataclass(frozen=True)
class StepReport:
    """A step that was timed on several engines.

    Args:
        name: Such as ``training_step``.
        ms: Median time of the step with its backward pass in ms by engine: ``"ort"`` (captured, with ONNX Runtime's
            regions), ``"torch"`` (as the module defines it), and others (:mod:`~lightning_ort.compiler.engines`).
        kept: What runs the step since it was given up for another reason, such as the compile budget; "" before.
        slowdown: How many times as long other programs made the steps take while an engine was timed; the times are
            without that.
        in_torch: Whether PyTorch runs everything of the captured step, and ONNX Runtime nothing.
    """

    name: str
    ms: dict[str, float]
    kept: str = ""
    slowdown: dict[str, float] = field(default_factory=dict)
    in_torch: bool = False

    @property
    def engine(self) -> str:
        """What runs the step from then on: the fastest engine."""
        return self.kept or min(self.ms, key=self.ms.__getitem__)

    @property
    def runs(self) -> str:
        """What runs a captured step of which ONNX Runtime runs nothing; empty for others."""
        return CAPTURED if self.engine == "ort" and self.in_torch else ""

    def __str__(self) -> str:
        times = ", ".join(f"{duration(ms)} {engine}" for engine, ms in self.ms.items())
        return f"{self.name}: {times}; continues with {self.runs or self.engine}{self.while_busy}"

    @property
    def while_busy(self) -> str:
        """Says that other programs used the machine; empty if none did."""
        return WHILE_BUSY * any(map(is_busy, self.slowdown.values()))


STEP_PARTS = ("loader", "Trainer", "step", "optimizer")


@dataclass(frozen=True)
class StepTimeReport:
    """What the time of a training step is made of.

    Args:
        ms: Mean time of each of :data:`STEP_PARTS` in a few steps, in ms: the DataLoader; the training step with its
            backward pass; the optimizer's step with clipping and hooks; all else.
        advice: What would help; nothing while the machine was busy.
        slowdown: How many times as long other programs made these steps take.
    """

    ms: dict[str, float]
    advice: str = ""
    slowdown: float = 1.0

    @property
    def is_busy(self) -> bool:
        """Whether other programs used the machine, which makes some parts longer than others."""
        return is_busy(self.slowdown)

    def __str__(self) -> str:
        total = sum(self.ms.values())
        shares = ", ".join(f"{part} {ms / total:.0%}" for part, ms in self.ms.items())
        return f"{duration(total)}: {shares}" + WHILE_BUSY * self.is_busy + (f"; {self.advice}" if self.advice else "")


@dataclass
class RunReport:
    """What a Trainer run adds to the report.

    Args:
        optimizers: What runs each of the Trainer's optimizers.
        steps: Steps of a LightningModule that were timed on several engines.
        host_memory: ``"retained"`` or ``"default"``, and why; empty without a Trainer.
        peak_bytes: The most memory that the process has used so far, or reserved on a GPU; 0 if nobody knows.
        peak_bytes_before: The same before anything was compiled; 0 if nothing was.
        step_time: What the time of a training step is made of; ``None`` if a fit was too short, or there was none.
        dropout_masks: That a compiled function draws large masks of dropout, or why PyTorch does; empty otherwise.
        threads: On how many threads each step that is not compiled was tried, and runs, by its name.
        recorded: How many calls of each step were replays of a recording, and how many of these were repeated by the
            step itself as a check, by its name.
        startup_seconds: Wall clock that compiling and trying took, dynamo included.
        trial_seconds: Of these, what steps took longer while they took turns on several engines.
        saved_seconds: What the steps since then were faster by, as duels measured them.
        paid_after: The first step after which more was saved than start-up had taken; ``None`` if there was none.
        waiting: Why nothing has been compiled yet.
        trainer_loop: Whether the Trainer's loop is lean, and if not, why.
        audits: How many runs of captured graphs were compared with eager.
        audit_seconds: Wall clock of that.
        audit_difference: The largest relative difference of a result or gradient that audits found.
        facts: What the run was, such as ``{"model": "GPT", "precision": "32-true"}``, as a reader wants it.
    """

    optimizers: list[OptimizerReport] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)
    host_memory: str = ""
    peak_bytes: int = 0
    peak_bytes_before: int = 0
    step_time: StepTimeReport | None = None
    dropout_masks: str = ""
    threads: dict[str, str] = field(default_factory=dict)
    recorded: dict[str, str] = field(default_factory=dict)
    startup_seconds: float = 0.0
    trial_seconds: float = 0.0
    saved_seconds: float = 0.0
    paid_after: int | None = None
    waiting: str = ""
    trainer_loop: str = ""
    audits: int = 0
    audit_seconds: float = 0.0
    audit_difference: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def draws_masks_faster(self) -> bool:
        """Whether a compiled function draws large masks."""
        return self.dropout_masks.startswith("drawn by a compiled function")

    @property
    def uncompiled_text(self) -> str:
        """What is in use that makes steps faster without compiling them, in one line."""
        used = [each.runs_as for each in self.optimizers if each.runs_as != each.configured]
        used += ["retained memory"] * self.host_memory.startswith("retained")
        used += ["faster dropout masks"] * self.draws_masks_faster
        return ", ".join(dict.fromkeys(used))

    @property
    def peak_text(self) -> str:
        """What compiling added to the peak of memory, in one line; empty if that is nothing."""
        before, now = (round(each / 1e6) for each in (self.peak_bytes_before, self.peak_bytes))
        if not before or before == now:
            return ""
        return f"{now:,} MB, and {before:,} MB before anything was compiled"

    @property
    def audit_text(self) -> str:
        """What audits have found, in one line."""
        runs = "only 1 run of a graph was" if self.audits == 1 else f"{self.audits} runs of graphs were"
        return (
            f"{runs} repeated in eager in {self.audit_seconds:.1f} s; results and gradients differ by up to"
            f" {self.audit_difference:.1g} of their size"
        )

    @property
    def verdict(self) -> str:
        """Whether compiling was worth it, in one line; empty without a Trainer."""
        if self.startup_seconds == 0:
            return f"not compiled yet: {self.waiting}" if self.waiting else ""
        account = f"{self.startup_seconds:.1f} s to start up, {self.saved_seconds:.1f} s saved so far"
        account += next((step.while_busy for step in self.steps if step.while_busy), "").replace("; ", ", ")
        if self.paid_after is not None and self.saved_seconds >= self.startup_seconds:
            return f"paid for itself after step {self.paid_after}: {account}"
        latest = {step.name: step.engine for step in self.steps}
        if any(engine != "torch" for engine in latest.values()):
            return f"not paid for yet: {account}"
        if self.waiting:
            return f"not worth it: {account}; {self.waiting}"
        if latest:
            return (
                f"not worth it: {account}; {', '.join(latest)} {'is' if len(latest) == 1 else 'are'} faster uncompiled"
            )
        return f"not known whether it is worth it: {self.startup_seconds:.1f} s to start up, no step was timed"
