"""Dataclasses as the types of JSON, and back; fields with ``metadata={"json": False}`` are left out."""

import dataclasses
import enum
import typing
from typing import Any


def _json_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [each for each in dataclasses.fields(kind) if each.metadata.get("json", True)]


def to_plain(value: Any) -> Any:
    """A value as the types of JSON."""
    if dataclasses.is_dataclass(value):
        return {each.name: to_plain(getattr(value, each.name)) for each in _json_fields(value)}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(kind: Any, data: Any) -> Any:
    """The value of a type that :func:`to_plain` made the data from; KeyError or TypeError if it is other data."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        values = {each.name: from_plain(each.type, data[each.name]) for each in _json_fields(kind)}
        return kind(**values)  # type: ignore[operator]
    if type(None) in arguments:
        return None if data is None else from_plain(arguments[0], data)
    if origin is dict and isinstance(data, dict):
        return {from_plain(arguments[0], key): from_plain(arguments[1], item) for key, item in data.items()}
    if origin is list and isinstance(data, list):
        return [from_plain(arguments[0], item) for item in data]
    if isinstance(kind, enum.EnumMeta):
        return kind[data]
    if type(data) is kind or (kind is float and type(data) is int):
        return kind(data)
    raise TypeError(f"{data!r} is not {kind}")
