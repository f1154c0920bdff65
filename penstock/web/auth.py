"""Which role may do what over HTTP. Deny by default: a verb that is not in the table is nobody's. Pure.

Layers have a table of their own, which the Job Service checks.
"""

from __future__ import annotations

from penstock.core.errors import Refused

EVERYBODY = frozenset({"reader", "developer", "oncall", "scaler", "admin"})
VERBS: dict[str, frozenset[str]] = {
    "schema.read": EVERYBODY | {"container"},
    "status.read": EVERYBODY,
    "journal.read": EVERYBODY,
    "event.read": EVERYBODY,
    "audit.read": frozenset({"developer", "oncall", "admin"}),
    "job.read": EVERYBODY,
    "job.plan": frozenset({"developer", "oncall", "admin"}),
    "job.apply": frozenset({"developer", "admin"}),
    "job.remove": frozenset({"developer", "admin"}),
    "job.state": frozenset({"developer", "oncall", "admin"}),
    "job.manage": frozenset({"developer", "oncall", "admin"}),
    "job.write": frozenset({"developer", "oncall", "scaler", "admin"}),
    "layer.read": EVERYBODY,
    "layer.create": frozenset({"admin"}),
    "pipeline.plan": frozenset({"developer", "admin"}),
    "pipeline.submit": frozenset({"developer", "admin"}),
    "category.read": EVERYBODY | {"container"},
    "category.create": frozenset({"developer", "admin"}),
    "package.read": frozenset({"developer", "container", "admin"}),
    "package.write": frozenset({"developer", "admin"}),
    "log.read": frozenset({"developer", "oncall", "admin"}),
    "state.read": frozenset({"developer", "oncall", "admin"}),
    "task.read": EVERYBODY | {"container"},
    "task.restart": frozenset({"developer", "oncall", "admin"}),
    "container.beat": frozenset({"container", "admin"}),
    "container.read": EVERYBODY,
    "container.write": frozenset({"oncall", "admin"}),
    "container.lend": frozenset({"admin"}),
    "shard.read": EVERYBODY,
    "shard.write": frozenset({"oncall", "admin"}),
    "alarm.read": EVERYBODY,
    "alarm.write": frozenset({"oncall", "admin"}),
    "token.read": frozenset({"admin"}),
    "token.write": frozenset({"admin"}),
}


def require(role: str, verb: str) -> None:
    """Refused unless the table says yes."""
    allowed = VERBS.get(verb, frozenset())
    if role not in allowed:
        raise Refused(
            f"the role {role!r} may not {verb}",
            why=f"that needs one of: {', '.join(sorted(allowed)) or 'nobody'}",
            fix="use a token of such a role",
        )
