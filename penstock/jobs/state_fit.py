"""Whether a job's new code can go on with the state that its old code left. Pure.

A job that keeps state says in its plan by what it is keyed and what its stored rows depend on
(`plan.computation`: `keys`, `state`). A computation names its values: some may be added, since a key that has
none yet starts from the default. One over tables keeps its columns by their places: some may be added behind
the others. An operator of our own says in words what its rows mean, and all of it must stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.jobs.config import JobConfig

STATEFUL = "stateful"
KEPT_FIELDS = frozenset({"kind", "lineage", "partitions", "plan", "inputs"})  # what is compared here
# Of these functions a value's type does not show the type of what is kept for it.
_UNTOLD = ("avg", "approx_count_distinct")


def state_conflict(old: JobConfig, new: JobConfig) -> str:
    """Why the state of `old`, a running config, cannot be kept by `new`; "" if it can, or is given up."""
    if old.kind != STATEFUL or old.lineage != new.lineage:
        return ""
    if new.kind != STATEFUL:
        return f"it keeps state, and a job of kind {new.kind} does not"
    if old.partitions != new.partitions:
        return (
            f"its keys are spread over {old.partitions} partitions, not {new.partitions}: "
            "the state of most of them would not be found"
        )
    before, after = old.computation, new.computation
    if "keys" in before and "keys" in after and before["keys"] != after["keys"]:
        return f"its state is kept by {_listed(before['keys'])}, not by {_listed(after['keys'])}"
    if _named(before) != _named(after):
        return f"its state is that of {_named(before)}, not of {_named(after)}"
    if before.get("operator") is not None:
        return _rows_conflict(old, new)
    kept = _column_conflict if before.get("vectorised") else _value_conflict
    return _ids_conflict(before, after) or kept(before.get("state"), after.get("state"))


def _rows_conflict(old: JobConfig, new: JobConfig) -> str:
    """Of an operator of our own: everything that its rows depend on must be as it was."""
    before, after = old.computation, new.computation
    told, wanted = _told(before), _told(after)
    for name in told:
        if name in wanted and told[name] != wanted[name]:
            return f"its {name} are {told[name]}, not {wanted[name]}"
    if told and told.keys() == wanted.keys():
        return ""
    # One of the two was compiled by a version that says less: nothing that may matter may have changed.
    differs = [name for name in sorted({*before, *after} - {"state"}) if before.get(name) != after.get(name)]
    # Partial results that are on their way belong to it as its rows do.
    is_second = before.get("operator") == "combine"
    if (is_second or _has_untold_types(before)) and _way(old) != _way(new):
        differs.append("inputs or stages")
    if not differs:
        return ""
    return (
        "it was compiled by a version that does not say all that its state depends on, and the new plan "
        f"differs in {', '.join(differs)}; submit it once as it was, and then with the change"
    )


def _column_conflict(before: Any, after: Any) -> str:
    """Of a computation over tables: a row has its values in the order in which they are declared."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return ""
    if changed := _value_conflict(before, after):
        return changed
    if list(after)[: len(before)] == list(before):
        return ""
    return (
        f"its columns are stored in the order {_listed(list(before))}, which {_listed(list(after))} changes: "
        "new ones can only come behind the others"
    )


def _value_conflict(before: Any, after: Any) -> str:
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return ""  # compiled by a version that did not say: the state says itself, when it is read
    for name, kind in before.items():
        if name not in after:
            return f"it keeps a value {name!r}, which the new code does not declare"
        if after[name] != kind:
            return f"its value {name!r} is {kind}, not {after[name]}"
    return ""


def _ids_conflict(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Ids of another column are other ids: a new one may read like one that came before."""
    old, new = before.get("ids"), after.get("ids")
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or old.get("column") == new.get("column"):
        return ""
    return f"it keeps the ids of records of column {old.get('column')!r}, not of {new.get('column')!r}"


def _told(computation: Mapping[str, Any]) -> Mapping[str, Any]:
    found = computation.get("state")
    return found if isinstance(found, Mapping) else {}


def _has_untold_types(computation: Mapping[str, Any]) -> bool:
    values = computation.get("columns")
    return isinstance(values, list | tuple) and any(
        isinstance(value, Mapping) and value.get("function") in _UNTOLD for value in values
    )


def _way(config: JobConfig) -> Any:
    """What records are before an operator gets them."""
    return [item.category for item in config.inputs], config.plan.reads, config.plan.stages


def _listed(keys: Any) -> str:
    return ", ".join(map(str, keys)) if isinstance(keys, list | tuple) and keys else "no key"


def _named(computation: Mapping[str, Any]) -> str:
    operator = computation.get("operator")
    if operator is not None:
        return f"the operator {operator!r}"
    return "a computation over tables" if computation.get("vectorised") else "a computation"
