"""What people see: tables of jobs, containers, layers and decisions. Pure: JSON in, Rich out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_COLOURS = {"running": "green", "stopped": "dim", "quarantined": "red", "invalid": "red", "new": "yellow"}
_LOW_MAX = 2**62


def status_tables(status: Mapping[str, Any]) -> RenderableType:
    """Jobs above, containers below."""
    return Group(jobs_table(status["jobs"]), containers_table(status["containers"], status["now_ms"]))


def jobs_table(jobs: Sequence[Mapping[str, Any]]) -> Table:
    """One line per job: what it does and what was last decided about it."""
    table = Table(title="jobs", title_justify="left", expand=True)
    for name in ("job", "state", "tasks", "in/s", "done/s", "lag", "busy", "package"):
        table.add_column(name, justify="right" if name in ("in/s", "done/s", "lag", "busy") else "left", no_wrap=True)
    table.add_column("scaler", ratio=1)
    for job in jobs:
        load = job.get("load") or {}
        up = sum(1 for task in job["tasks"] if task["state"] == "running")
        tasks = f"{up}/{job['running_task_count']}"
        if job["task_count"] != job["running_task_count"]:
            tasks += f" → {job['task_count']}"
        state = job["state"]
        table.add_row(
            job["name"],
            Text(state, style=_COLOURS.get(state, "cyan")),
            tasks,
            _rate(load.get("input_rate")),
            _rate(load.get("processed_rate")),
            f"{load['lag_s']:.1f} s" if load else "–",
            f"{load['busy']:.0%}" if load else "–",
            str(job.get("package", {}).get("version", "")),
            job["problem"].splitlines()[0] if job["problem"] else job["scaler"],
        )
    return table


def containers_table(containers: Sequence[Mapping[str, Any]], now_ms: int) -> Table:
    """One line per container."""
    table = Table(title="containers", title_justify="left")
    for name in ("container", "state", "shards", "tasks", "last beat", "engine pid"):
        table.add_column(name)
    for row in containers:
        alive = row["state"] == "live"
        table.add_row(
            row["name"],
            Text(row["state"] if row["ready"] or not alive else "starting", style="green" if alive else "red"),
            str(row["shards"]),
            str(row["tasks"]),
            f"{max(0, now_ms - row['seen_ms']) / 1000:.1f} s ago",
            str(row["pid"]),
        )
    return table


def job_tables(job: Mapping[str, Any]) -> RenderableType:
    """One job: every field with the layer that decided it, then its tasks."""
    config = Table(title=f"{job['name']}  (version {job['expected_version']})", title_justify="left")
    for name in ("field", "value", "layer"):
        config.add_column(name)
    for path, value in _flat(job["config"]):
        if path.startswith(("plan.", "outputs", "inputs")):
            continue
        config.add_row(path, str(value), job["provenance"].get(path, "default"))
    layers = Table(title="layers", title_justify="left")
    for name in ("layer", "who", "when", "why", "says"):
        layers.add_column(name)
    for row in job["layers"]:
        says = ", ".join(f"{path}={value}" for path, value in _flat(row["body"]) if not path.startswith("plan."))
        layers.add_row(row["layer"], row["actor"], _when(row["at_ms"]), row["reason"], Text(says[:200]))
    tasks = Table(title="tasks", title_justify="left")
    for name in ("task", "container", "shard", "generation", "state", "restarts", "lag", "error"):
        tasks.add_column(name)
    for task in job["tasks"]:
        lag = task["metrics"].get("lag_records")
        tasks.add_row(
            task["task_id"],
            task["container"],
            str(task["shard"]),
            str(task["generation"]),
            task["state"],
            str(task["restarts"]),
            "–" if lag is None else f"{lag:.0f}",
            task["error"].splitlines()[0] if task["error"] else "",
        )
    return Group(config, layers, tasks)


def changes_table(changes: Sequence[Mapping[str, Any]]) -> Table:
    """What a submit would do."""
    table = Table(title="what will change", title_justify="left")
    for name in ("job", "change", "fields", "restarts", "state"):
        table.add_column(name)
    for change in changes:
        fields = ", ".join(_change_text(item) for item in change.get("changed", ())) or "–"
        table.add_row(
            change["job"],
            change["change"],
            fields,
            ", ".join(change.get("restarts", ())) or "none",
            "kept" if change.get("state_kept", True) else "new",
        )
    return table


def journal_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Decisions and their reasons."""
    table = Table(title="decisions", title_justify="left")
    for name in ("when", "who", "what about", "decision", "why"):
        table.add_column(name)
    for entry in entries:
        table.add_row(_when(entry["at_ms"]), entry["actor"], entry["subject"], entry["decision"], entry["reason"])
    return table


def _change_text(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"{item.get('path')}: {item.get('old')} → {item.get('new')}"
    return str(item)


def _flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [pair for key in value for pair in _flat(value[key], f"{path}.{key}" if path else str(key))]
    return [(path, value)]


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S") if at_ms else "–"
