"""What people see of changes: plans, differences, history, audit, tokens. Pure: JSON in, Rich out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.cells import flat, ignored_text, layer_text, new_table, text, value_text, when

Row = Mapping[str, Any]
# What a change costs: a plan, a restart in place, nothing.
_COSTS = {"complex": "bold red", "restart": "yellow", "live": "green"}
# What a submit does to a job, and how.
_WORDS = {
    "unchanged": "kept",
    "simple": "replaced in place",
    "complex": "replaced by a plan",
}
_CHANGES = {"new": "green", "unchanged": "dim", "simple": "yellow", "complex": "bold red", "removed": "red"}
# What a submit did to a job.
_DONE = {"unchanged": "dim", "reset": "yellow", "stopped": "red"}
PIECES_MAX = 12


def changes_tables(planned: Row) -> RenderableType:
    """What a submit would do: the changes, and what it would ask before it does them."""
    parts: list[RenderableType] = [changes_table(planned["changes"])]
    stops = [change["job"] for change in planned["changes"] if change["change"] == "removed"]
    if stops:
        parts.append(text(f"a submit would stop {', '.join(stops)}: it asks first, or give --yes", "yellow"))
    if planned["replaces"]:
        before = planned["replaces"]
        said = f"the pipeline was submitted from {before} before: a submit asks first, or give --yes"
        parts.append(text(said, "yellow"))
    return Group(*parts)


def submitted_text(answer: Row) -> Text:
    """What a submit did to each job."""
    lines = Text()
    for job, version in answer["jobs"].items():
        done = answer["done"].get(job, "submitted")
        lines.append_text(text(done, _DONE.get(done, "green")))
        lines.append(f" {job}, expected version {version}\n")
    return lines.append("follow it with `penstock status --watch`")


def changes_table(changes: Sequence[Row]) -> Table:
    """What a submit or an apply would do, a line per job."""
    table = new_table("what will change")
    table.add_column("job", overflow="fold")
    table.add_column("change", overflow="fold")
    for name in ("why", "fields", "restarts"):
        table.add_column(name, overflow="fold")
    table.add_column("state", overflow="fold")
    for change in changes:
        fields = ", ".join(
            f"{item['path']}: {value_text(item['old'])} → {value_text(item['new'])}"
            for item in change["changed"]
        )
        table.add_row(
            text(change["job"]),
            text(_WORDS.get(change["change"], change["change"]), _CHANGES.get(change["change"], "")),
            text(change["reason"]),
            text(fields or "–"),
            text(", ".join(change["restarts"]) or "none"),
            _state(change),
        )
    return table


def _state(change: Row) -> Text:
    if change.get("conflict"):
        return text(f"refused: {change['conflict']}", "bold red")
    return Text("kept") if change["state_kept"] else Text("new", style="yellow")


def plan_tables(change: Row) -> RenderableType:
    """What applying one job would do: each field with its cost, which tasks restart, whether state stays."""
    restarts = change["restarts"]
    shown = ", ".join(restarts[:PIECES_MAX]) + (
        f" and {len(restarts) - PIECES_MAX} more" * (len(restarts) > PIECES_MAX)
    )
    line = Text.assemble(
        text(change["job"], "bold"),
        ": ",
        text(change["change"], _CHANGES.get(change["change"], "")),
        text(f" ({change['reason']})", "dim"),
    )
    parts: list[RenderableType] = [line]
    if change["changed"]:
        parts.append(diff_table(change["changed"]))
    parts.append(
        Text.assemble(
            "restarts: ",
            text(shown or "none", "yellow" if restarts else "green"),
            f"; tasks after: {change['tasks_after']}; state: ",
            _state(change),
        )
    )
    return Group(*parts)


def diff_table(changes: Sequence[Row], title: str = "") -> Table:
    """What differs, and what each difference costs."""
    table = new_table(title)
    table.add_column("field", overflow="fold")
    table.add_column("old", overflow="fold", style="red")
    table.add_column("new", overflow="fold", style="green")
    table.add_column("cost", no_wrap=True)
    for item in changes:
        cost = {"complex": "a plan", "restart": "a restart", "live": "nothing"}.get(
            item["sync"], item["sync"]
        )
        table.add_row(
            text(item["path"]),
            text(value_text(item["old"])),
            text(value_text(item["new"])),
            text(cost, _COSTS.get(item["sync"], "")),
        )
    if not changes:
        table.caption = "no difference"
    return table


def history_table(rows: Sequence[Row]) -> Table:
    """Writes of a job's layers, newest first."""
    table = new_table("history")
    for name in ("version", "layer", "who", "when"):
        table.add_column(name, no_wrap=True)
    for name in ("why", "says"):
        table.add_column(name, overflow="fold")
    for row in rows:
        said = [pair for pair in flat(row["body"]) if pair[0]]
        says = ", ".join(f"{path}={value_text(value)}" for path, value in said)
        table.add_row(
            str(row["version"]),
            layer_text(row),
            text(row["actor"], limit=30),
            when(row["at_ms"]),
            text(row["reason"]),
            text(f"{len(said)} fields" if len(said) > PIECES_MAX else says or "nothing"),
        )
    return table


def config_tables(job: Row, *, with_layers: bool) -> RenderableType:
    """Every setting of a job, with who decided it, when and why; then what each layer says."""
    table = new_table("")
    table.title = text(f"{job['name']}  (expected version {job['expected_version']})")
    for name in ("field", "value"):
        table.add_column(name, overflow="fold")
    for name in ("layer", "who", "when"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", overflow="fold")
    for path, value in flat(job["config"]):
        decided = job["provenance"].get(path)
        who = (
            (text(decided["actor"], limit=30), when(decided["at_ms"]), text(decided["reason"]))
            if decided
            else ()
        )
        table.add_row(text(path), text(value_text(value)), layer_text(decided), *who)
    parts: list[RenderableType] = [*ignored_text(job), table]
    for row in job["layers"] if with_layers else ():
        said = new_table("")
        said.title = Text.assemble("layer ", layer_text(row), f" at version {row['version']}")
        for name in ("field", "value"):
            said.add_column(name, overflow="fold")
        for path, value in flat(row["body"]):
            if path:
                said.add_row(text(path), text(value_text(value)))
        said.caption = None if row["body"] else "says nothing"
        parts.append(said)
    return Group(*parts)


def audit_table(entries: Sequence[Row]) -> Table:
    """Who changed what, newest first."""
    table = new_table("audit")
    for name in ("id", "when", "who", "role", "action"):
        table.add_column(name, no_wrap=True)
    for name in ("what", "why"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        table.add_row(
            str(entry["id"]),
            when(entry["at_ms"]),
            text(entry["actor"], limit=30),
            text(entry["role"], limit=20),
            text(entry["action"], limit=30),
            text(entry["subject"], limit=80),
            text(entry["reason"]),
        )
    if not entries:
        table.caption = "nothing was changed yet"
    return table


def layer_kinds_table(kinds: Sequence[Row]) -> Table:
    """The layers there are; the last wins."""
    table = new_table("layers, the last wins")
    for name in ("layer", "precedence", "written by", "fields", "waits for a plan"):
        table.add_column(name, no_wrap=True)
    for kind in kinds:
        table.add_row(
            layer_text({"layer": kind["name"]}),
            str(kind["precedence"]),
            text(", ".join(kind["writers"])),
            text(", ".join(kind.get("fields", ())) or "any its writers may set"),
            "no" if kind["replaces_plan"] else "yes",
        )
    return table


def tokens_table(tokens: Sequence[Row], now_ms: int) -> Table:
    """Every token, without the tokens."""
    table = new_table("tokens")
    for name in ("id", "name", "role", "issued", "by", "ends", "state"):
        table.add_column(name, no_wrap=True)
    for row in tokens:
        # Of a container's token its name says for whom it speaks, but for those of a former version.
        role, speaks_for = row["role"], row.get("container", "")
        role = f"{role} {speaks_for}" if speaks_for not in ("", row["name"]) else role
        if row["revoked_ms"]:
            state = Text("revoked", style="red")
        elif row["expires_ms"] <= now_ms:
            state = Text("expired", style="yellow")
        else:
            state = Text("good", style="green")
        table.add_row(
            text(row["id"]),
            text(row["name"], limit=40),
            text(role, limit=40),
            when(row["issued_ms"]),
            text(row["issued_by"] or "penstock up", limit=30),
            when(row["expires_ms"], with_year=True),
            state,
        )
    return table
