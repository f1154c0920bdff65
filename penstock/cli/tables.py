"""What people see: tables of jobs, containers, layers and decisions. Pure: JSON in, Rich out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.cells import (
    first_line,
    flat,
    ignored_text,
    lag,
    layer_text,
    low,
    new_table,
    number,
    package_text,
    printable,
    span,
    state_text,
    task_text,
    text,
    value_text,
    when,
)
from penstock.tasks.failures import shortly


def status_tables(status: Mapping[str, Any], problem: str = "") -> RenderableType:
    """Jobs above, containers below; `problem`: why this is not the newest."""
    jobs = status["jobs"]
    parts: list[RenderableType] = [jobs_table(jobs)]
    if any(job.get("counts") for job in jobs):
        parts.append(counts_table(jobs))
    if any(job["problem"] or job["plan"] or job["scaler"] for job in jobs):
        parts.append(remarks_table(jobs))
    parts.append(containers_table(status["containers"], status["now_ms"]))
    for row in status["containers"]:
        if row.get("error"):
            said = " ".join(row["error"].split())
            parts.append(text(f"{row['name']} cannot start: {said}", "red", 1000))
    if status.get("advice_only"):
        parts.append(
            text("advice only: scaler and policies say what they would do, and do nothing", "yellow")
        )
    if problem:
        parts.append(text(f"{problem}; this is what was seen last", "bold red"))
    return Group(*parts)


def jobs_table(jobs: Sequence[Mapping[str, Any]]) -> Table:
    """One line per job: what it does and how it fares."""
    table = new_table("jobs")
    # A long name gives way; a number that is cut is a wrong number.
    table.add_column("job", overflow="ellipsis", min_width=16)
    table.add_column("state", no_wrap=True, min_width=11)
    table.add_column("tasks", no_wrap=True, min_width=8)
    for name, width in (("in/s", 9), ("done/s", 9), ("lag", 8), ("busy", 4)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    table.add_column("package", no_wrap=True, min_width=8)
    for job in jobs:
        load = job.get("load") or {}
        table.add_row(
            text(job["name"], limit=40),
            # The step of a change is among the remarks.
            state_text(job["state"].partition(" ")[0]),
            task_text(job),
            number(load.get("input_rate")),
            number(load.get("processed_rate")),
            span(load["lag_s"]) if load else "–",
            f"{load['busy']:.0%}" if load else "–",
            package_text(job.get("package") or {}),
        )
    if not jobs:
        table.caption = "no jobs: submit a pipeline with `penstock submit`"
    return table


def counts_table(jobs: Sequence[Mapping[str, Any]]) -> Table:
    """One line per job whose tasks report: its records since its state began, and what became of them."""
    table = new_table("records")
    table.add_column("job", overflow="ellipsis", min_width=16)
    for name in ("read", "late", "dropped", "dead letters", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    for job in jobs:
        if counts := job.get("counts"):
            lost = [(counts[name], "yellow") for name in ("dropped", "dead_letters")]
            table.add_row(
                text(job["name"], limit=40),
                f"{counts['records']:,}",
                f"{counts['late']:,}",
                *(text(f"{count:,}", style if count else "") for count, style in lost),
                f"{counts['waiting']:,}",
            )
    return table


def remarks_table(jobs: Sequence[Mapping[str, Any]]) -> Table:
    """What there is to say about each job: what is wrong with it, or what the scaler last thought."""
    table = new_table("remarks")
    table.add_column("job", no_wrap=True, max_width=30)
    table.add_column("from", no_wrap=True)
    table.add_column("remark", overflow="fold")
    for job in jobs:
        name = text(job["name"], limit=40)
        if job["problem"]:
            table.add_row(name, "config", text(first_line(job["problem"]), "red"))
        elif job["plan"]:
            table.add_row(name, "syncer", text(f"changing, at step {job['plan']}", "cyan"))
        elif job["scaler"]:
            table.add_row(name, "scaler", text(job["scaler"], "dim"))
    return table


def containers_table(containers: Sequence[Mapping[str, Any]], now_ms: int) -> Table:
    """One line per container."""
    table = new_table("containers")
    for name in ("container", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("shards", "tasks", "last beat", "engine pid"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in containers:
        state = "starting" if row["state"] == "live" and not row["ready"] else row["state"]
        table.add_row(
            text(row["name"], limit=40),
            state_text(state),
            str(row["shards"]),
            str(row["tasks"]),
            f"{max(0, now_ms - row['seen_ms']) / 1000:.1f} s ago",
            str(row["pid"] or "–"),
        )
    if not containers:
        table.caption = "no containers"
    return table


def job_tables(job: Mapping[str, Any]) -> RenderableType:
    """One job: every field with the layer that decided it, who wrote the layers, its tasks."""
    parts: list[RenderableType] = []
    if job["problem"]:
        parts.append(text(job["problem"], "red", 1000))
    parts += ignored_text(job)
    parts.append(_settings_table(job))
    parts += [text(f"promise: {said}", limit=200) for said in job["guarantees"]]
    parts.append(_layers_table(job["layers"]))
    parts.append(_tasks_table(job["tasks"]))
    return Group(*parts)


def _settings_table(job: Mapping[str, Any]) -> Table:
    table = new_table("")
    table.title = text(f"{job['name']}  (expected version {job['expected_version']})")
    table.add_column("field", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("decided by", no_wrap=True)
    for path, value in flat(job["config"]):
        table.add_row(text(path), text(value_text(value)), layer_text(job["provenance"].get(path)))
    return table


def _layers_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table("layers")
    for name in ("layer", "version", "who", "when"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", overflow="fold")
    table.add_column("says", overflow="fold")
    for row in layers:
        # The provisioner says nearly everything; the table above has it.
        said = [pair for pair in flat(row["body"]) if pair[0]]
        says = ", ".join(f"{path}={value_text(value)}" for path, value in said)
        if len(said) > 6:
            says = f"{len(said)} fields"
        table.add_row(
            layer_text(row),
            str(row["version"]),
            text(row["actor"], limit=30),
            when(row["at_ms"]),
            text(row["reason"], limit=120),
            text(says),
        )
    return table


def _tasks_table(tasks: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table("tasks")
    for name in ("task", "container", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("shard", "generation", "restarts", "lag"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("error", overflow="fold")
    for task in tasks:
        table.add_row(
            text(task["task_id"], limit=60),
            text(task["container"], limit=30),
            state_text(task["state"]),
            str(task["shard"]),
            str(task["generation"]),
            str(task["restarts"]),
            lag(task["metrics"]),
            text(shortly(task["error"]), "red", 300),
        )
    if not tasks:
        table.caption = "no tasks reported"
    return table


def categories_table(categories: Sequence[Mapping[str, Any]]) -> Table:
    """One line per category of the bus."""
    table = new_table("categories")
    table.add_column("category", overflow="fold")
    for name in ("format", "watermark is"):
        table.add_column(name, no_wrap=True)
    for name in ("partitions", "records"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("watermark", no_wrap=True)
    table.add_column("columns", overflow="fold")
    for found in categories:
        spec = found["spec"]
        table.add_row(
            text(spec["name"]),
            text(spec["format"]),
            text(f"from {spec['watermark']}"),
            str(spec["partitions"]),
            number(sum(found["end_offsets"])),
            low(found["watermark"]),
            text(", ".join(f"{name} {kind}" for name, kind in spec["columns"])),
        )
    if not categories:
        table.caption = "no categories"
    return table


def journal_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Decisions and their reasons, oldest first."""
    table = new_table("decisions")
    for name in ("when", "who"):
        table.add_column(name, no_wrap=True)
    for name in ("what about", "decision", "why"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        table.add_row(
            when(entry["at_ms"]),
            text(entry["actor"], limit=30),
            text(entry["subject"], limit=80),
            text(entry["decision"]),
            text(entry["reason"]),
        )
    if not entries:
        table.caption = "nothing was decided yet"
    return table


def error_text(what: str, why: str, fix: str) -> Text:
    """The three parts of an error, one under the other."""
    parts = Text()
    for label, part, style in (("", what, "bold red"), ("why", why, ""), ("what to do", fix, "")):
        if part:
            lines = [printable(line) for line in part.splitlines()]
            indent = "" if not label else f"  {label:<12}"
            parts.append(("\n" if parts else "") + indent)
            parts.append(("\n" + " " * len(indent)).join(lines), style=style)
    return parts
