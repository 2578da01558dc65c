"""Dataclasses as the types of JSON, and back; fields with ``metadata={"json": False}`` are left out."""

import dataclasses
import enum
import typing
from typing import Any


def _json_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [each for each in dataclasses.fields(kind) if each.metadata.get("json", True)]


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return not field.default is field.default_factory is dataclasses.MISSING


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
    """The value of a type that :func:`to_plain` made the data from; KeyError or TypeError if it is other data.

    A field that is missing has its default, and what is no field is left out: the data may be of an older version.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise TypeError(f"{data!r} is not {kind}")
        wanted = [each for each in _json_fields(kind) if each.name in data or not _has_default(each)]
        return kind(**{each.name: from_plain(each.type, data[each.name]) for each in wanted})  # type: ignore[operator]
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
