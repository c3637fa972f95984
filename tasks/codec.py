"""Records to JSON and back: pydantic models and plain dataclasses alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Plain JSON of records, dataclasses, mappings, sequences and numbers; a number that JSON lacks becomes None.

    Raises:
        TypeError: the value holds something else.
    """
    if hasattr(value, "to_json") and not isinstance(value, type):
        return to_json(value.to_json())
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(held) for key, held in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(held) for held in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "item"):  # a numpy scalar
        return to_json(value.item())
    raise TypeError(f"no JSON for {type(value).__name__}")


def from_json(kind: type[T], value: Any) -> T:
    """The record or dataclass that `to_json` was given.

    Raises:
        pydantic.ValidationError: the value does not fit.
    """
    return TypeAdapter(kind).validate_python(value)
