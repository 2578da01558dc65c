"""Settings by name, wherever they are: :func:`config_of`."""

import dataclasses
from typing import Any

from lightning_ort.config import DebugSettings, ORTConfig

_DEBUG = {field.name for field in dataclasses.fields(DebugSettings)}


def config_of(**settings: Any) -> ORTConfig:
    """Return a config with these settings, those for finding faults among them."""
    debug = {name: settings.pop(name) for name in _DEBUG & settings.keys()}
    return ORTConfig(**settings | {"debug": {**settings.get("debug", {}), **debug}})
