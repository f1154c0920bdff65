"""Control settings: how a policy treats one job (StreamOps 4.1). Typed, from the job's layers, checked. Pure.

They lie in `policies.<policy>` of the job's config, so that every layer may say something of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from penstock.core.errors import ConfigError
from penstock.core.near_names import did_you_mean, some_of

Seconds = Annotated[float, Meta(ge=0, le=30 * 24 * 3600)]
Share = Annotated[float, Meta(ge=0, le=1)]
Minutes = Annotated[int, Meta(ge=1, le=14 * 24 * 60)]
Hour = Annotated[int, Meta(ge=0, le=23)]
Code = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}/[A-Za-z_][A-Za-z0-9_./]*\.py:[A-Za-z_][A-Za-z0-9_]*$")]


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every policy has. A policy adds its own by subclassing."""

    enabled: bool = True
    advice_only: bool = False  # it says what it would do, and does nothing
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None  # None: as the policy says
    minutes: Minutes | None = None  # how many it is shown, complete; None: as the policy says
    every_s: Annotated[float, Meta(ge=1, le=7 * 24 * 3600)] = 60.0
    when_lag_s: Seconds | None = None  # look only while the job lags so far,
    when_busy: Share | None = None  # or a task is so busy that it holds back what is before it
    from_hour: Hour | None = None  # look only in these hours, UTC; 22 to 6 is the night
    to_hour: Hour | None = None
    cooldown_s: Seconds = 600.0  # between two actions of this policy on this job
    check_after_s: Seconds = 300.0  # then it is looked whether an action helped
    code: Code | None = None  # of a user's own policy: package hash/file:class

    def __post_init__(self) -> None:
        if (self.from_hour is None) != (self.to_hour is None):
            raise ValueError("from_hour and to_hour need each other")


EVERYBODYS = frozenset(ControlSettings.__struct_fields__)
S = TypeVar("S", bound=ControlSettings)


def read_settings(kind: type[S], policy: str, given: Mapping[str, Any]) -> S:
    """Settings from a job's config; ConfigError says which of them cannot be."""
    for name in given:
        if name not in kind.__struct_fields__:
            known = kind.__struct_fields__
            raise ConfigError(
                f"policies.{policy}.{name} is no setting",
                why=f"{policy} has {some_of(known)}",
                fix=did_you_mean(name, known, otherwise="take it out, or correct its name"),
            )
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        path, _, _ = str(error).partition(" - at `$.")[2].partition("`")
        raise ConfigError(
            f"policies.{policy}{'.' + path if path else ''} cannot be: {str(error).partition(' - at ')[0]}",
            why=f"given is {given.get(path)!r}" if path else f"given is {dict(given)!r}",
            fix=f"set it within its range: penstock oncall set JOB policies.{policy}.{path or 'NAME'}=VALUE "
            '--why "…"',
        ) from error


def split_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(those that every policy has, the rest): of a user's own policy only its code knows the rest."""
    common = {name: value for name, value in given.items() if name in EVERYBODYS}
    return common, {name: value for name, value in given.items() if name not in EVERYBODYS}
