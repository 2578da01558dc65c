"""Settings from environment variables, for programs that build the Trainer themselves and take a strategy's name.

They stand below what is passed to a strategy. A field of an ``ORTConfig`` that has its default value counts as not
passed, since a configuration file passes all fields; in a mapping each key counts as passed. ``optim="auto"`` counts as
not passed, too.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ort.config import ORTConfig
from lightning_ort.optim import registry

CONFIG = "LIGHTNING_ORT_CONFIG"
OPTIM = "LIGHTNING_ORT_OPTIM"
_HOW = f"""Set {CONFIG} to JSON or YAML, such as '{{"placement": "always"}}', or to the path of such a file"""


@dataclass(frozen=True)
class Environment:
    """What the environment variables set; empty if there are none."""

    config: dict[str, Any] = field(default_factory=dict)
    optim: str | None = None

    def complete(self, config: ORTConfig | Mapping[str, Any] | None) -> ORTConfig:
        """Return the config that a user passed, with the fields of the environment that were not passed."""
        passed = ORTConfig.parse(config)
        used = {name: value for name, value in self.config.items() if not _is_passed(name, config, passed)}
        if "debug" in self.config and "debug" not in used:  # each of its fields stands for itself
            default = vars(ORTConfig().debug)
            own = {key: value for key, value in vars(passed.debug).items() if value != default[key]}
            used["debug"] = {**self.config["debug"], **own}
        if not used:
            return passed
        try:
            return dataclasses.replace(passed, **used)
        except (TypeError, ValueError) as error:  # two settings that exclude each other
            raise ValueError(f"{CONFIG} and the strategy's config together: {error}") from None

    def describe(self) -> list[str]:
        """Return a sentence for each variable that is set."""
        fields = ", ".join(f"{name}={value!r}" for name, value in self.config.items())
        sentences = [f"{CONFIG} sets {fields}"] if fields else []
        return sentences + ([f"{OPTIM} sets optim={self.optim!r}"] if self.optim is not None else [])


def _is_passed(name: str, config: ORTConfig | Mapping[str, Any] | None, passed: ORTConfig) -> bool:
    return name in config if isinstance(config, Mapping) else getattr(passed, name) != getattr(ORTConfig(), name)


def read_environment() -> Environment:
    """Read the environment variables; ``ValueError`` if one is not allowed, with its name and what is."""
    optim = os.environ.get(OPTIM, "").strip() or None
    if optim is not None:
        registry.check_name(optim, OPTIM)
    text = os.environ.get(CONFIG, "").strip()
    return Environment(_parse(text) if text else {}, optim)


def _parse(text: str) -> dict[str, Any]:
    import yaml  # Lightning's

    where = CONFIG
    if text.lower().endswith((".json", ".yaml", ".yml")):
        where = f"{CONFIG}, the file {text!r}"
        try:
            text = Path(text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{where}, cannot be read: {error}. {_HOW}.") from None
    try:
        fields = yaml.safe_load(text)  # JSON too
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: this is no YAML: {' '.join(str(error).split())}. {_HOW}.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: {fields!r} has no fields. {_HOW} whose name ends with .json, .yaml or .yml.")
    try:
        ORTConfig.parse(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    return fields
