"""What people see of where things run: tables of containers, shards and tasks. Pure: JSON in, Rich out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from penstock.cli.cells import lag, new_table, state_text, text, when
from penstock.tasks.failures import shortly

Rows = Sequence[Mapping[str, Any]]
BUSIEST_MAX = 20
DECISIONS_MAX = 6


def containers_table(containers: Rows, now_ms: int) -> Table:
    """One line per container, with what was asked of it."""
    table = new_table("containers")
    for name in ("container", "state", "takes"):
        table.add_column(name, no_wrap=True)
    for name in ("shards", "tasks", "last beat"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("region", "host", "size"):
        table.add_column(name, overflow="fold")
    for row in containers:
        table.add_row(
            text(row["name"], limit=40),
            state_text(container_state(row)),
            takes(row),
            str(row["shards"]),
            str(row["tasks"]),
            f"{max(0, now_ms - row['seen_ms']) / 1000:.1f} s ago",
            text(row["region"] or "–", limit=20),
            text(row["host"] or "–", limit=40),
            text(size_text(row["capacity"]), limit=60),
        )
    if not containers:
        table.caption = "no container ever registered"
    return table


def container_state(row: Mapping[str, Any]) -> str:
    """Its state in a word."""
    return "starting" if row["state"] == "live" and not row["ready"] else str(row["state"])


def takes(row: Mapping[str, Any]) -> str:
    """Whether it takes shards."""
    if row.get("lending", "").startswith("lent to"):
        return f"nothing, {row['lending']}"
    if row["draining"]:
        return "nothing, is drained" if not row["shards"] else "nothing, drains"
    said = "nothing, cordoned" if row["cordoned"] else "shards"
    return f"{said}; {row['lending']}" if row.get("lending") else said


def size_text(capacity: Mapping[str, float]) -> str:
    """What it said that it has."""
    return ", ".join(f"{value:g} {kind}" for kind, value in capacity.items() if value) or "not limited"


def shards_table(shards: Rows) -> Table:
    """One line per shard."""
    table = new_table("shards")
    table.add_column("shard", justify="right", no_wrap=True)
    for name in ("container", "state", "goes to"):
        table.add_column(name, no_wrap=True)
    for name in ("tasks", "epoch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("remark", overflow="fold")
    for row in shards:
        table.add_row(
            str(row["shard"]),
            text(row["container"] or "–", limit=40),
            state_text(row["state"]),
            text(row["target"] or "–", limit=40),
            str(row["tasks"]),
            str(row["epoch"]),
            text(_remark(row), "red"),
        )
    if not shards:
        table.caption = "no shards"
    return table


def _remark(row: Mapping[str, Any]) -> str:
    if row["quarantined"]:
        return f"quarantined: it cost {row['blame']} containers"
    return f"it cost {row['blame']} container" if row["blame"] else ""


def shard_tables(shard: Mapping[str, Any]) -> RenderableType:
    """One shard: where it is, why, and what would be done with it next."""
    facts = new_table(f"shard {shard['shard']}")
    facts.add_column("", no_wrap=True)
    facts.add_column("", overflow="fold")
    facts.show_header = False
    where = shard["container"] or "nobody"
    if shard["target"]:
        where += f", which drops it for {shard['target']}"
    facts.add_row("owned by", text(where))
    facts.add_row("epoch", str(shard["epoch"]))
    facts.add_row("tasks", text(", ".join(shard["task_ids"]) or "none", limit=2000))
    load = ", ".join(f"{value:g} {kind}" for kind, value in shard["load"].items() if value)
    facts.add_row("counts as", text(load or "nothing"))
    if _remark(shard):
        facts.add_row("remark", text(_remark(shard), "red"))
    facts.add_row("next", text(shard["outlook"], limit=500))
    history = new_table("how it came there")
    for name in ("when", "who", "decision"):
        history.add_column(name, no_wrap=True)
    history.add_column("why", overflow="fold")
    for moved in shard["history"]:
        history.add_row(
            when(moved["at_ms"]),
            text(moved["actor"], limit=30),
            text(moved["decision"]),
            text(moved["reason"]),
        )
    if not shard["history"]:
        history.caption = "nothing was decided about it, as far as the journal goes back"
    return Group(facts, history)


def tasks_table(tasks: Rows, title: str = "tasks") -> Table:
    """One line per task."""
    table = new_table(title)
    for name in ("task", "container", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("shard", "generation", "restarts", "lag", "cpu", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("error", overflow="fold")
    for task in tasks:
        metrics = task["metrics"]
        table.add_row(
            text(task["task_id"], limit=60),
            text(task["container"] or "–", limit=30),
            state_text(task["state"]),
            str(task["shard"]),
            str(task["generation"]),
            str(task["restarts"]),
            lag(metrics),
            f"{metrics['cpu']:.0%}" if "cpu" in metrics else "–",
            f"{metrics['memory_mb']:,.0f} MB" if "memory_mb" in metrics else "–",
            text(shortly(task["error"]), "red", 300),
        )
    if not tasks:
        table.caption = "no tasks"
    return table


def top_tables(found: Mapping[str, Any]) -> RenderableType:
    """What uses what, now: containers with the sum of their tasks, the busiest tasks, the last decisions."""
    tasks = found["tasks"]
    busiest = sorted(tasks, key=lambda task: (-task["metrics"].get("cpu", 0.0), task["task_id"]))
    rest = len(tasks) - BUSIEST_MAX
    title = "busiest tasks" + (f" ({rest} more)" if rest > 0 else "")
    decisions = new_table("last decisions")
    for name in ("when", "who", "what about", "decision", "why"):
        decisions.add_column(name, no_wrap=True, overflow="ellipsis")
    for entry in found["journal"][-DECISIONS_MAX:]:
        decisions.add_row(
            when(entry["at_ms"]),
            text(entry["actor"], limit=20),
            text(entry["subject"], limit=30),
            text(entry["decision"], limit=40),
            text(entry["reason"], limit=60),
        )
    return Group(
        text(_summary(found), "bold"),
        _use_table(found["containers"], tasks, found["now_ms"]),
        tasks_table(busiest[:BUSIEST_MAX], title),
        decisions,
    )


def _summary(found: Mapping[str, Any]) -> str:
    jobs, tasks, containers = found["jobs"], found["tasks"], found["containers"]
    running = sum(task["state"] == "running" for task in tasks)
    live = sum(row["state"] == "live" and row["ready"] for row in containers)
    settled = sum(job["state"] == "running" for job in jobs)
    return (
        f"{settled} of {len(jobs)} jobs running, {running} of {len(tasks)} tasks running, "
        f"{live} of {len(containers)} containers live"
    )


def _use_table(containers: Rows, tasks: Rows, now_ms: int) -> Table:
    table = new_table("containers")
    for name in ("container", "state", "takes"):
        table.add_column(name, no_wrap=True)
    for name in ("shards", "tasks", "cpu", "memory", "last beat"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in containers:
        mine = [task["metrics"] for task in tasks if task["container"] == row["name"]]
        cpu, memory = (sum(metrics.get(kind, 0.0) for metrics in mine) for kind in ("cpu", "memory_mb"))
        table.add_row(
            text(row["name"], limit=40),
            state_text(container_state(row)),
            takes(row),
            str(row["shards"]),
            str(row["tasks"]),
            _used(cpu, row["capacity"].get("cpu", 0.0), "{:.2f}"),
            _used(memory, row["capacity"].get("memory_mb", 0.0), "{:,.0f} MB"),
            f"{max(0, now_ms - row['seen_ms']) / 1000:.1f} s ago",
        )
    if not containers:
        table.caption = "no containers"
    return table


def _used(value: float, size: float, form: str) -> str:
    return form.format(value) + (f" of {size:g}" if size else "")
