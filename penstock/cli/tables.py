"""What people see: tables of jobs, containers, layers and decisions. Pure: JSON in, Rich out.

Everything that came from somebody goes through `_text`: no markup, no control characters, not too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_COLOURS = {
    "running": "green",
    "live": "green",
    "stopped": "dim",
    "new": "yellow",
    "behind": "yellow",
    "starting": "yellow",
    "backoff": "yellow",
    "quarantined": "bold red",
    "invalid": "bold red",
    "dead": "red",
    "gone": "red",
    "withheld": "red",
    "fenced": "red",
}
_LAYERS = {"base": "dim", "provisioner": "", "scaler": "cyan", "oncall": "bold magenta", "default": "dim"}
_LOW_MAX = 2**62
TEXT_MAX = 200


def status_tables(status: Mapping[str, Any], problem: str = "") -> RenderableType:
    """Jobs above, containers below; `problem`: why this is not the newest."""
    jobs = status["jobs"]
    parts: list[RenderableType] = [jobs_table(jobs)]
    if any(job["problem"] or job["plan"] or job["scaler"] for job in jobs):
        parts.append(remarks_table(jobs))
    parts.append(containers_table(status["containers"], status["now_ms"]))
    if problem:
        parts.append(_text(f"{problem}; this is what was seen last", "bold red"))
    return Group(*parts)


def jobs_table(jobs: Sequence[Mapping[str, Any]]) -> Table:
    """One line per job: what it does and how it fares."""
    table = _table("jobs")
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
            _text(job["name"], limit=40),
            # The step of a change is among the remarks.
            _state(job["state"].partition(" ")[0]),
            _tasks(job),
            _number(load.get("input_rate")),
            _number(load.get("processed_rate")),
            _span(load["lag_s"]) if load else "–",
            f"{load['busy']:.0%}" if load else "–",
            _package(job.get("package") or {}),
        )
    if not jobs:
        table.caption = "no jobs: submit a pipeline with `penstock submit`"
    return table


def remarks_table(jobs: Sequence[Mapping[str, Any]]) -> Table:
    """What there is to say about each job: what is wrong with it, or what the scaler last thought."""
    table = _table("remarks")
    table.add_column("job", no_wrap=True, max_width=30)
    table.add_column("from", no_wrap=True)
    table.add_column("remark", overflow="fold")
    for job in jobs:
        name = _text(job["name"], limit=40)
        if job["problem"]:
            table.add_row(name, "config", _text(_first_line(job["problem"]), "red"))
        elif job["plan"]:
            table.add_row(name, "syncer", _text(f"changing, at step {job['plan']}", "cyan"))
        elif job["scaler"]:
            table.add_row(name, "scaler", _text(job["scaler"], "dim"))
    return table


def containers_table(containers: Sequence[Mapping[str, Any]], now_ms: int) -> Table:
    """One line per container."""
    table = _table("containers")
    for name in ("container", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("shards", "tasks", "last beat", "engine pid"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in containers:
        state = "starting" if row["state"] == "live" and not row["ready"] else row["state"]
        table.add_row(
            _text(row["name"], limit=40),
            _state(state),
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
        parts.append(_text(job["problem"], "red", 1000))
    parts.append(_settings_table(job))
    parts.append(_layers_table(job["layers"]))
    parts.append(_tasks_table(job["tasks"]))
    return Group(*parts)


def _settings_table(job: Mapping[str, Any]) -> Table:
    table = _table("")
    table.title = _text(f"{job['name']}  (expected version {job['expected_version']})")
    table.add_column("field", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("decided by", no_wrap=True)
    for path, value in _flat(job["config"]):
        layer = job["provenance"].get(path, "default")
        table.add_row(path, _text(_value(value)), Text(layer, style=_LAYERS.get(layer, "")))
    return table


def _layers_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("layers")
    for name in ("layer", "version", "who", "when"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", overflow="fold")
    table.add_column("says", overflow="fold")
    for row in layers:
        # The provisioner says nearly everything; the table above has it.
        said = [pair for pair in _flat(row["body"]) if pair[0]]
        says = ", ".join(f"{path}={_value(value)}" for path, value in said)
        if len(said) > 6:
            says = f"{len(said)} fields"
        table.add_row(
            Text(row["layer"], style=_LAYERS.get(row["layer"], "")),
            str(row["version"]),
            _text(row["actor"], limit=30),
            _when(row["at_ms"]),
            _text(row["reason"], limit=120),
            _text(says),
        )
    return table


def _tasks_table(tasks: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("tasks")
    for name in ("task", "container", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("shard", "generation", "restarts", "lag"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("error", overflow="fold")
    for task in tasks:
        table.add_row(
            _text(task["task_id"], limit=60),
            _text(task["container"], limit=30),
            _state(task["state"]),
            str(task["shard"]),
            str(task["generation"]),
            str(task["restarts"]),
            _number(task["metrics"].get("lag_records")),
            _text(_first_line(task["error"]), "red", 120),
        )
    if not tasks:
        table.caption = "no tasks reported"
    return table


def changes_table(changes: Sequence[Mapping[str, Any]]) -> Table:
    """What a submit would do."""
    table = _table("what will change")
    table.add_column("job", overflow="fold")
    table.add_column("change", no_wrap=True)
    for name in ("fields", "restarts"):
        table.add_column(name, overflow="fold")
    table.add_column("state", no_wrap=True)
    for change in changes:
        fields = ", ".join(
            f"{item['path']}: {_value(item['old'])} → {_value(item['new'])}" for item in change["changed"]
        )
        table.add_row(
            _text(change["job"]),
            _text(change["change"]),
            _text(fields or "–"),
            _text(", ".join(change["restarts"]) or "none"),
            "kept" if change["state_kept"] else Text("new", style="yellow"),
        )
    return table


def categories_table(categories: Sequence[Mapping[str, Any]]) -> Table:
    """One line per category of the bus."""
    table = _table("categories")
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
            _text(spec["name"]),
            _text(spec["format"]),
            _text(f"from {spec['watermark']}"),
            str(spec["partitions"]),
            _number(sum(found["end_offsets"])),
            _low(found["watermark"]),
            _text(", ".join(f"{name} {kind}" for name, kind in spec["columns"])),
        )
    if not categories:
        table.caption = "no categories"
    return table


def journal_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Decisions and their reasons, oldest first."""
    table = _table("decisions")
    for name in ("when", "who"):
        table.add_column(name, no_wrap=True)
    for name in ("what about", "decision", "why"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        table.add_row(
            _when(entry["at_ms"]),
            _text(entry["actor"], limit=30),
            _text(entry["subject"], limit=80),
            _text(entry["decision"]),
            _text(entry["reason"]),
        )
    if not entries:
        table.caption = "nothing was decided yet"
    return table


def error_text(what: str, why: str, fix: str) -> Text:
    """The three parts of an error, one under the other."""
    text = Text()
    for label, part, style in (("", what, "bold red"), ("why", why, ""), ("what to do", fix, "")):
        if part:
            lines = [_printable(line) for line in part.splitlines()]
            indent = "" if not label else f"  {label:<12}"
            text.append(("\n" if text else "") + indent)
            text.append(("\n" + " " * len(indent)).join(lines), style=style)
    return text


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _text(value: Any, style: str = "", limit: int = TEXT_MAX) -> Text:
    shown = " ".join(_printable(line) for line in str(value).splitlines())
    return Text(shown if len(shown) <= limit else shown[: limit - 1] + "…", style=style)


def _printable(line: str) -> str:
    # A reason or an error is somebody's text: it must not be able to steer a terminal.
    return "".join(letter if letter.isprintable() else "�" for letter in line)


def _state(state: str) -> Text:
    return _text(state, _COLOURS.get(state.split(" ")[0], "cyan"), 24)


def _tasks(job: Mapping[str, Any]) -> Text:
    up = sum(1 for task in job["tasks"] if task["state"] == "running")
    wanted, there = job["task_count"], job["running_task_count"]
    text = Text(f"{up}/{there}", style="" if up >= there else "yellow")
    return text if wanted == there else text.append(f" → {wanted}", style="cyan")


def _package(package: Mapping[str, Any]) -> Text:
    return _text(package.get("version") or str(package.get("hash", ""))[:8], limit=8)


def _value(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return "none" if not value else ", ".join(_item(item) for item in _items(value))
    return "none" if value is None else str(value)


def _items(value: Any) -> list[Any]:
    return (
        [f"{key}: {_value(item)}" for key, item in value.items()]
        if isinstance(value, Mapping)
        else list(value)
    )


def _item(item: Any) -> str:
    """An input, an output or a stage by what tells it from the others."""
    if not isinstance(item, Mapping):
        return _value(item)
    for name in ("category", "op"):
        if name in item:
            rest = {key: item[key] for key in ("stream", "start", "partitions", "expr") if key in item}
            return (
                f"{item[name]} ({', '.join(str(value) for value in rest.values())})"
                if rest
                else str(item[name])
            )
    return _value(item)


def _flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [pair for key in value for pair in _flat(value[key], f"{path}.{key}" if path else str(key))]
    return [(path, value)]


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _span(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s"


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%m-%d %H:%M:%S") if at_ms else "–"


def _low(low_ms: int) -> str:
    if abs(low_ms) >= _LOW_MAX:
        return "–" if low_ms < 0 else "end"
    return _when(low_ms)
