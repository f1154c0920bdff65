"""What may come in over HTTP: every body and name, with its bounds. Anything else goes no further."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from penstock.core.errors import ConfigError
from penstock.jobs.config import NAME_PATTERN
from penstock.tasks.messages import Heartbeat

# What a database column holds.
INT_MAX = 2**63 - 1

# A name in a path: it may become a file's name, so it can neither climb nor hide.
Name = Annotated[str, Path(pattern=NAME_PATTERN)]
Count = Annotated[int, Field(ge=0, le=INT_MAX)]
Word = Annotated[str, Field(max_length=200)]
Text = Annotated[str, Field(max_length=100_000)]
PROBLEMS_SHOWN_MAX = 5


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Submit(_Body):
    """A compiled pipeline and why it is submitted."""

    compiled: dict[str, Any]
    why: str = Field(default="", max_length=2000)


class Plan(_Body):
    """A compiled pipeline to compare with what runs."""

    compiled: dict[str, Any]


class PatchLayer(_Body):
    """Dotted paths to set in one layer; null removes one."""

    changes: dict[str, Any]
    why: str = Field(default="", max_length=2000)


class NewCategory(_Body):
    """A category to create."""

    name: Word
    partitions: int = Field(ge=1, le=4096)
    columns: list[tuple[Word, Word]] = Field(min_length=1, max_length=1000)
    format: Word = "json"
    watermark: Word = "event_time"
    lateness_ms: Count = 0
    ts_column: Word = ""


class Register(_Body):
    """A container's new life."""

    incarnation: Word
    folder_id: Word


def read_heartbeat(data: dict[str, Any]) -> Heartbeat:
    """A heartbeat, exactly as its class declares it: anything else is a damaged or foreign message."""
    try:
        body = _BEAT.model_validate(data)
    except ValidationError as error:
        shown = error.errors()[:PROBLEMS_SHOWN_MAX]
        raise ConfigError(
            "this is not a heartbeat",
            why="; ".join(f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in shown),
            fix="run the same version on both sides",
        ) from None
    return Heartbeat.from_json(body.model_dump())


def _mirror(kind: type) -> type[BaseModel]:
    """A strict model with the fields of a message's class, so that the two cannot drift apart."""
    hints = get_type_hints(kind)
    declared: dict[str, Any] = {}
    for item in fields(kind):
        default: Any = item.default
        if item.default_factory is not MISSING:
            default = Field(default_factory=item.default_factory)
        elif isinstance(default, tuple):
            default = Field(default_factory=list)
        declared[item.name] = (_at_the_edge(hints[item.name]), ... if default is MISSING else default)
    return create_model(f"{kind.__name__}Body", __base__=_Strict, **declared)


def _at_the_edge(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return list[_at_the_edge(get_args(hint)[0])]  # type: ignore[misc]
    if isinstance(hint, type) and is_dataclass(hint):
        return _mirror(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Literal[tuple(item.value for item in hint)]
    return {int: Count, str: Text}.get(hint, hint)


class _Strict(_Body):
    model_config = ConfigDict(strict=True)


_BEAT = _mirror(Heartbeat)
