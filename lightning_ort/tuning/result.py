"""What ``tune`` found: :class:`TuneResult`, as a table and as files."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_ort._text import PlainTable, digits
from lightning_ort.tuning.project import built
from lightning_ort.tuning.trials import not_measured

_COLUMNS = ("ms a sample", "samples/s", "speed-up", "(90 %)", "peak MB", "start s", "pays after", "loss differs")


@dataclass(frozen=True)
class TuneResult:
    """What was tried, and the fastest of it. The first of ``trials`` is the module as the user has it.

    Args:
        trials: What was tried, each with ``candidate``, ``settings``, ``reason``, ``verdict``, ``why``, ``speed`` (over
            the user's own: median and interval), ``seconds_per_example``, ``startup_seconds``, ``break_even_steps``,
            ``peak_bytes``, ``loss_difference`` and ``losses``.
        chosen: The place of the fastest among them; 0 if nothing was clearly faster.
        yaml: A LightningCLI configuration that trains so, with the reasons above it.
        module: Class of the module.
        notes: What else there is to say.
        settings: What was asked for.
        machine: What the measurements depend on.
    """

    trials: list[dict[str, Any]]
    chosen: int
    yaml: str
    module: str
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
        trainer = (yaml.safe_load(self.yaml) or {}).get("trainer") or {}
        return {name: built(value) for name, value in trainer.items()}

    def table(self) -> PlainTable:
        """Return the trials as a table."""
        table = PlainTable("", "tried", title=f"{self.module}: {len(self.trials)} candidates")
        for column in _COLUMNS:
            table.add_column(column, justify="right")
        for place, trial in enumerate(self.trials):
            table.add_row("->" if place == self.chosen else "", *_row(trial, is_own=place == 0))
        return table

    @property
    def not_measured(self) -> list[str]:
        """Why candidates have no figures, or were refused in spite of them."""
        return not_measured(
            (trial["candidate"], trial["verdict"], trial["why"])
            for trial in self.trials
            if trial["seconds_per_example"] is None or trial["verdict"] == "refused"
        )

    @property
    def conclusion(self) -> str:
        """What was chosen, or why nothing was."""
        if self.chosen:
            return f"{self.best['candidate']}: {self.speed_up:.2f}x as fast as what you have."
        if any(trial["speed"] for trial in self.trials[1:]):
            return "Nothing was clearly faster than what you have."
        return (
            "Nothing but what you have was measured: there was no time, or nothing else could run; --time allows more."
        )

    def save(self, path: Path) -> list[Path]:
        """Write ``path`` (YAML), and beside it the same name with ``.json``, which has every measurement.

        Raises:
            FileExistsError: If one of them is there: nothing is overwritten.
            ValueError: If ``path`` ends with ``.json``.
        """
        paths = files_of(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        for one, text in zip(paths, (self.yaml, json.dumps(dataclasses.asdict(self), indent=2)), strict=True):
            with one.open("x", encoding="utf-8") as file:
                file.write(text)
        return paths


def _row(trial: Mapping[str, Any], is_own: bool) -> list[str]:
    seconds, peak, found = trial["seconds_per_example"], trial["peak_bytes"], trial["speed"]
    if seconds is None:
        return [trial["candidate"], trial["verdict"]]
    steps, differs = trial["break_even_steps"], trial["loss_difference"]
    return [
        trial["candidate"] + (" (refused)" if trial["verdict"] == "refused" else ""),
        digits(1000 * seconds),
        digits(1 / seconds),
        f"{found[0]:.2f}x" if found else "-",
        f"{found[1]:.2f}-{found[2]:.2f}" if found and found[1] > 0 and not is_own else "-",
        "-" if peak is None else f"{peak / 1e6:,.0f}",
        "-" if trial["startup_seconds"] is None else f"{trial['startup_seconds']:.1f}",
        "-" if is_own else "never" if steps is None else f"{steps:,}",
        "-" if differs is None else f"{differs:.1e}",
    ]


def files_of(path: Path) -> list[Path]:
    """Return the files that :meth:`TuneResult.save` writes; an error if one is there, or two have one name."""
    if path.suffix == ".json":
        raise ValueError(f"-o {path}: .json is written beside the configuration: call that {path.stem}.yaml.")
    paths = [path, path.with_suffix(".json")]
    if there := next((one for one in paths if one.exists()), None):
        raise FileExistsError(
            f"{there} is there already, and nothing is overwritten: give another -o, or move it away."
        )
    return paths
