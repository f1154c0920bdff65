"""What is remembered of a job between rounds: what was done, whether it helped, what did not. Pure values.

It lies in the store, so that any instance of the control plane can serve any job. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.clock import Millis
from penstock.core.typed import make_known
from penstock.scaling.policies.policy import Action, ChangeLayer
from penstock.scaling.scaler.observation import ScalerMemory

CHANGES_MAX = 32  # of the past that are kept to see who fights whom


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One field that a policy changed."""

    policy: str
    path: str
    old: Any
    new: Any
    at_ms: Millis


class OpenAction(msgspec.Struct, frozen=True, kw_only=True):
    """An action whose outcome is still awaited."""

    policy: str
    priority: int
    symptom: str
    action: Action
    undo: dict[str, Any] | None  # what brings back the fields as they were; None: nothing to bring back
    at_ms: Millis
    check_ms: Millis


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one job."""

    acted: dict[str, Millis] = {}  # by policy: when it last did something
    open: OpenAction | None = None
    useless: dict[str, Millis] = {}  # by action: until when it is not tried again
    changes: tuple[Change, ...] = ()
    said: dict[str, str] = {}  # by policy: what the journal last heard, as a key: the same is not told twice
    scaler: ScalerMemory | None = None


def fingerprint(policy: str, symptom: str, action: Action) -> str:
    """Tells an action from others, by what it does and not by how it says so."""
    match action:
        case ChangeLayer(changes=changes):
            what: Any = sorted(flat(changes).items())
        case _:
            what = msgspec.to_builtins(action) | {"text": ""}
    return f"{policy} {symptom} {msgspec.json.encode(what, order='sorted').decode()}"


def flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A partial config by path."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def pick(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What `config` says of the fields that `changes` names: the way back. Absent ones are null."""
    return {
        name: pick(config.get(name) or {}, value) if isinstance(value, Mapping) else config.get(name)
        for name, value in changes.items()
    }


make_known(JobRecord)
