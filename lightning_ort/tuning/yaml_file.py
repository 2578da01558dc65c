"""A candidate as a LightningCLI configuration with comments: :func:`commented`."""

from collections.abc import Mapping
from typing import Any

import yaml

from lightning_ort._text import plain
from lightning_ort.tuning.candidate import Configured, Path

_WIDTH = 10_000  # characters: a line for a value, so that its comment is on it


def commented(made: Configured, comments: Mapping[str, str], head: list[str]) -> str:
    """Return the configuration as YAML, below ``head``, with a comment where each setting is: why it has its value."""
    text = yaml.safe_dump(made.config, sort_keys=False, width=_WIDTH, allow_unicode=True)
    lines = text.splitlines()
    places = _lines_of(yaml.compose(text, Loader=yaml.SafeLoader), ())
    for path, setting in made.paths.items():
        if setting in comments and path in places:
            lines[places[path]] += f"  # {_one_line(comments[setting])}"
    return "\n".join([*(f"# {_one_line(line)}" for line in head), *lines]) + "\n"


def _lines_of(node: Any, above: Path) -> dict[Path, int]:
    """Return the line of each value's key, or of the value itself in a list."""
    found: dict[Path, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*above, key.value)
            found[path] = key.start_mark.line
            found |= _lines_of(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            path = (*above, index)
            found[path] = value.start_mark.line
            found |= _lines_of(value, path)
    return found


def _one_line(text: str) -> str:
    return " ".join(plain(text, "utf-8").split())
