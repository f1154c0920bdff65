"""Whether a job's new code can go on with the state that its old code left. Pure.

A job that keeps state says in its plan by what it is keyed and which values it keeps
(`plan.computation`: `keys`, `state`). Values may be added: a key that has none yet starts from the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATEFUL = "stateful"


def state_conflict(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Why the state of `old`, a running config, cannot be kept by `new`; "" if it can, or is given up."""
    if old.get("kind") != STATEFUL or old.get("lineage", 0) != new.get("lineage", 0):
        return ""
    if new.get("kind") != STATEFUL:
        return f"it keeps state, and a job of kind {new.get('kind')} does not"
    if old.get("partitions") != new.get("partitions"):
        return (
            f"its keys are spread over {old.get('partitions')} partitions, not {new.get('partitions')}: "
            "the state of most of them would not be found"
        )
    before, after = _computation(old), _computation(new)
    if "keys" in before and "keys" in after and before["keys"] != after["keys"]:
        return f"its state is kept by {_listed(before['keys'])}, not by {_listed(after['keys'])}"
    if before.get("operator") != after.get("operator"):
        return f"its state is that of {_named(before)}, not of {_named(after)}"
    return _value_conflict(before.get("state"), after.get("state"))


def _value_conflict(before: Any, after: Any) -> str:
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return ""  # compiled by a version that did not say: the state says itself, when it is read
    for name, kind in before.items():
        if name not in after:
            return f"it keeps a value {name!r}, which the new code does not declare"
        if after[name] != kind:
            return f"its value {name!r} is {kind}, not {after[name]}"
    return ""


def _computation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    plan = config.get("plan")
    found = plan.get("computation") if isinstance(plan, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _listed(keys: Any) -> str:
    return ", ".join(map(str, keys)) if isinstance(keys, list | tuple) and keys else "no key"


def _named(computation: Mapping[str, Any]) -> str:
    operator = computation.get("operator")
    return "a computation" if operator is None else f"the operator {operator!r}"
