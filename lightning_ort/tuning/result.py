"""What ``tune`` found: :class:`TuneResult`, as a table, as text with the reasons, and as JSON."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from lightning_ort._text import PlainTable, digits, plain
from lightning_ort.tuning.picture import draw, installed
from lightning_ort.tuning.trials import in_words, not_measured, nothing_faster, sketch

_VERSION = 1
_COLUMNS = ("ms a sample", "samples/s", "speed-up", "(90 %)", "peak MB", "start s", "pays after", "loss differs")
_NAMES = {"measured": "slower, or not clearly faster", "won": "won its stage"}


@dataclass(frozen=True)
class TuneResult:
    """What was tried, and the fastest of it. The first of ``trials`` is the module as the user has it.

    Args:
        trials: What was tried, each with ``candidate``, ``settings``, ``reason``, ``verdict``, ``why``, ``speed`` (over
            the user's own: median and interval), ``seconds_per_example``, ``startup_seconds``, ``break_even_steps``,
            ``peak_bytes``, ``predicted_peak_bytes``, ``loss_difference`` and ``losses``.
        chosen: The place of the fastest among them; 0 if nothing was clearly faster.
        yaml: A LightningCLI configuration that trains so, with comments.
        module: Class of the module.
        memory: Bytes of a step as measured, with your own settings: parameters, gradients, states, activations, peak.
        notes: What else there is to say.
        settings: What was asked for.
        machine: What the measurements depend on.
    """

    trials: list[dict[str, Any]]
    chosen: int
    yaml: str
    module: str
    memory: dict[str, dict[str, int] | None]
    notes: list[str]
    settings: dict[str, Any]
    machine: dict[str, str]

    @property
    def best(self) -> dict[str, Any]:
        """The trial that was chosen."""
        return self.trials[self.chosen]

    @property
    def speed_up(self) -> float:
        """How many times as fast the chosen one is as the user's own."""
        return self.best["speed"][0] if self.best["speed"] else 1.0

    def trainer_arguments(self) -> dict[str, Any]:
        """Return the arguments of a Trainer that trains so: ``Trainer(max_epochs=3, **result.trainer_arguments())``.

        A batch size that the data takes as an argument is not among them: it is in ``best["settings"]``.
        """
        import yaml

        from lightning_ort.tuning.project import built

        trainer = (yaml.safe_load(self.yaml) or {}).get("trainer") or {}
        return {name: built(value) for name, value in trainer.items()}

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({"version": _VERSION, **dataclasses.asdict(self)}, indent=2, default=str)

    @classmethod
    def from_json(cls, text: str) -> "TuneResult":
        """Read what :meth:`to_json` wrote, or raise ``ValueError``."""
        try:
            found = json.loads(text)
            assert isinstance(found, dict)
            if found.pop("version") != _VERSION:
                raise ValueError("another version of lightning-ort wrote it")
            return cls(**found)
        except (AssertionError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is not what lightning-ort tune writes: {type(error).__name__}: {error}") from None

    def table(self) -> RenderableType:
        """Return the trials as a table, and the memory of a step."""
        table = PlainTable("", "tried", title=f"{self.module}: {len(self.trials)} candidates")
        for column in _COLUMNS:
            table.add_column(column, justify="right")
        for place, trial in enumerate(self.trials):
            table.add_row(*self._row(place, trial))
        parts: list[RenderableType] = [table]
        if self.memory.get("measured"):
            parts.append(self._memory_table())
        return Group(*parts)

    def _row(self, place: int, trial: Mapping[str, Any]) -> list[str]:
        mark = "->" if place == self.chosen else ""
        seconds, peak, found = trial["seconds_per_example"], trial["peak_bytes"], trial["speed"]
        if seconds is None:
            return [mark, trial["candidate"], trial["verdict"]]
        steps, differs = trial["break_even_steps"], trial["loss_difference"]
        return [
            mark,
            trial["candidate"] + (" (refused)" if trial["verdict"] == "refused" else ""),
            digits(1000 * seconds),
            digits(1 / seconds),
            f"{found[0]:.2f}x" if found else "-",
            f"{found[1]:.2f}-{found[2]:.2f}" if found and found[1] > 0 and place else "-",
            "-" if peak is None else f"{peak / 1e6:,.0f}",
            "-" if trial["startup_seconds"] is None else f"{trial['startup_seconds']:.1f}",
            ("never" if steps is None else f"{steps:,}") if place else "-",
            "-" if differs is None else f"{differs:.1e}",
        ]

    @property
    def not_measured(self) -> list[str]:
        """Why candidates have no figures, or were refused in spite of them."""
        return not_measured(
            (trial["candidate"], trial["verdict"], trial["why"])
            for trial in self.trials
            if trial["seconds_per_example"] is None or trial["verdict"] == "refused"
        )

    def _memory_table(self) -> PlainTable:
        parts = ("parameters", "gradients", "states", "activations", "peak")
        table = PlainTable("MB of a step, float32", title="memory of the tensors with your own settings")
        for part in parts:
            table.add_column(part, justify="right")
        for name, found in self.memory.items():
            if found is not None:
                table.add_row(name, *(digits(found[part] / 1e6) for part in parts))
        return table

    def explanation(self) -> str:
        """Return what was tried, in its order, with the reason and what came of it."""
        lines = [f"{self.module}, {in_words(self.machine)}"]
        stage = ""
        for place, trial in enumerate(self.trials):
            if trial["stage"] != stage:
                stage = trial["stage"]
                lines.append(f"\n{stage}")
            lines.append(f"  {trial['candidate']}: {trial['reason']}")
            verdict = _NAMES.get(trial["verdict"], trial["verdict"]) if place else "what all are compared with"
            lines.append(f"    {verdict}{': ' if trial['why'] else ''}{trial['why']}")
            if trial["losses"] and trial["loss_difference"] is not None:
                lines.append(
                    f"    loss {sketch(trial['losses'])}, {trial['loss_difference']:.1e} from float32's at the end"
                )
        lines += ["", *self.notes, self._conclusion()]
        return plain("\n".join(lines), "utf-8")

    @property
    def nothing_faster(self) -> str:
        """Why nothing else was chosen, if nothing was."""
        return nothing_faster(any(trial["speed"] is not None for trial in self.trials[1:]))

    def _conclusion(self) -> str:
        if self.chosen == 0:
            return self.nothing_faster
        low, high = self.best["speed"][1:]
        return f"Chosen: {self.best['candidate']}, {self.speed_up:.2f}x as fast as yours ({low:.2f} to {high:.2f})."

    def save(self, path: Path) -> list[Path]:
        """Write ``path`` (YAML), and beside it the same name with ``.json`` and, with matplotlib, ``.png``.

        Raises:
            FileExistsError: If one of them is there: nothing is overwritten.
            ValueError: If ``path`` ends with ``.json`` or ``.png``.
        """
        paths = files_of(path)
        if not installed():
            paths = [one for one in paths if one.suffix != ".png"]
        path.parent.mkdir(parents=True, exist_ok=True)
        for one in paths:
            check_absent(one)
        for one, text in ((paths[0], self.yaml), (paths[1], self.to_json())):
            with one.open("x", encoding="utf-8") as file:
                file.write(text)
        if len(paths) > 2:
            draw(self.trials, self.chosen, f"{self.module}: {self.speed_up:.2f}x", in_words(self.machine), paths[2])
        return paths


def files_of(path: Path) -> list[Path]:
    """Return the files that :meth:`TuneResult.save` writes; ``ValueError`` if two of them have one name."""
    if path.suffix in (".json", ".png"):
        raise ValueError(f"-o {path}: {path.suffix} is written beside the configuration: call that {path.stem}.yaml.")
    return [path, path.with_suffix(".json"), path.with_suffix(".png")]


def check_absent(path: Path) -> None:
    """Raise ``FileExistsError`` if a file is there."""
    if path.exists():
        raise FileExistsError(f"{path} is there already, and nothing is overwritten: give another -o, or move it away.")
