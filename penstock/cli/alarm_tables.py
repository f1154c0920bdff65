"""What people see of alarms and capacity. Pure: JSON in, Rich out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.cells import new_table, text, when

Rows = Sequence[Mapping[str, Any]]
_COLOURS = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
_UNITS = {"cpu": "", "memory_mb": " MB", "disk_mb": " MB", "network_mbps": " Mbit/s"}


def alarms_table(found: Mapping[str, Any]) -> RenderableType:
    """One line per alarm."""
    table = new_table("alarms")
    for name in ("id", "severity"):
        table.add_column(name, no_wrap=True)
    for name in ("job", "kind", "since", "state"):
        table.add_column(name, overflow="fold")
    table.add_column("what", overflow="fold")
    for alarm in found["alarms"]:
        table.add_row(
            text(alarm["id"]),
            text(alarm["severity"], _COLOURS[alarm["severity"]]),
            text(alarm["job"], limit=40),
            text(alarm["kind"], limit=30),
            when(alarm["first_ms"]),
            text(alarm_state(alarm), limit=40),
            text(alarm["text"]),
        )
    if not found["alarms"]:
        table.caption = "nothing fires"
    return Group(table, text(f"told through: {', '.join(found['routes'])}", "dim"))


def alarm_state(alarm: Mapping[str, Any]) -> str:
    """Whether it fires, and whether somebody looks after it."""
    if not alarm["is_firing"]:
        return "over"
    if alarm["acked_by"]:
        return f"seen by {alarm['acked_by']}"
    return "silenced" if alarm["is_silenced"] else "fires"


def alarm_table(alarm: Mapping[str, Any]) -> Table:
    """Everything about one alarm."""
    table = new_table(f"alarm {alarm['id']}")
    table.show_header = False
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    rows: list[tuple[str, Any]] = [
        ("what", alarm["text"]),
        ("job", alarm["job"]),
        ("kind", f"{alarm['kind']}, seen by {alarm['source']}"),
        ("severity", Text(alarm["severity"], _COLOURS[alarm["severity"]])),
        ("state", alarm_state(alarm)),
        ("since", when(alarm["first_ms"])),
        ("last seen", when(alarm["last_ms"])),
        ("began", f"{alarm['count']} times"),
        ("told", "nobody yet" if alarm["told_ms"] is None else when(alarm["told_ms"])),
    ]
    if alarm["acked_ms"] is not None:
        rows.append(("acknowledged", f"{when(alarm['acked_ms'])} by {alarm['acked_by']}"))
    if alarm["resolved_ms"] is not None:
        rows.append(("over", when(alarm["resolved_ms"])))
    rows += [(name, value) for name, value in alarm["evidence"].items()]
    rows.append(("what to do", alarm["what_to_do"] or "–"))
    for name, value in rows:
        table.add_row(text(name), value if isinstance(value, Text) else text(value, limit=1000))
    return table


def silences_table(silences: Rows) -> Table:
    """One line per silence that holds."""
    table = new_table("silences")
    for name in ("id", "job", "kind", "up to", "until", "by"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in silences:
        cells = (row["id"], row["job"], row["kind"], row["severity"])
        table.add_row(
            *(text(cell, limit=40) for cell in cells),
            when(row["until_ms"]),
            text(row["by"], limit=30),
            text(row["why"]),
        )
    if not silences:
        table.caption = "nothing is silent"
    return table


def answers_table(answers: Rows) -> Table:
    """What each route said to a test."""
    table = new_table("routes")
    table.add_column("route", no_wrap=True)
    table.add_column("answer", overflow="fold")
    for row in answers:
        said = text("took it", "green") if row["is_taken"] else text(row["answer"], "red")
        table.add_row(text(row["route"]), said)
    return table


def capacity_tables(found: Mapping[str, Any]) -> RenderableType:
    """What the cluster has, and who was stopped for it."""
    table = new_table("capacity")
    table.add_column("resource", no_wrap=True)
    for name in ("total", "reserved", "used", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["kinds"]:
        cells = (_amount(row[name], row["kind"]) for name in ("total", "reserved", "used", "remaining"))
        table.add_row(text(row["kind"]), *cells)
    parts: list[RenderableType] = [table, text(_summary(found), "dim")]
    for what, names in (("lent to others", found["lent"]), ("borrowed", found["borrowed"])):
        if names:
            parts.append(text(f"{what}: {', '.join(names)}", "dim"))
    if found["stopped"]:
        parts.append(_stopped_table(found["stopped"]))
    return Group(*parts)


def _summary(found: Mapping[str, Any]) -> str:
    said = f"{found['jobs']} jobs on {found['containers']} containers"
    if found["is_limited"]:
        return f"{said}; of what is left a tenth of all stays free for failures"
    if not found["containers"]:
        return f"{said}: nothing is known of what there is"
    some = ", ".join(found["boundless"][:5]) + (" …" if len(found["boundless"]) > 5 else "")
    return f"{said}; not limited: {some} declared no capacity"


def _stopped_table(stopped: Rows) -> Table:
    table = new_table("stopped so that others can run")
    table.add_column("job", no_wrap=True)
    table.add_column("priority", justify="right", no_wrap=True)
    table.add_column("would need", overflow="fold")
    table.add_column("why", overflow="fold")
    for row in stopped:
        needs = ", ".join(
            _amount(value, kind) + (" cpu" if kind == "cpu" else "")
            for kind, value in row["reserved"].items()
            if value
        )
        table.add_row(text(row["job"], limit=40), str(row["priority"]), text(needs), text(row["reason"]))
    return table


def _amount(value: float | None, kind: str) -> str:
    return "not limited" if value is None else f"{value:,.10g}{_UNITS.get(kind, '')}"
