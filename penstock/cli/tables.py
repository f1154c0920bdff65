"""Tables of jobs, containers, layers and decisions, and their cells. Pure: JSON in, Rich out.

All text from outside goes through `text`, which removes markup and control characters and limits the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.fleet.messages import summarize_error
from penstock.jobs.config import JobConfig
from penstock.jobs.tasks import PARTITION_TASKS, ignored_mapping_reason


def status_tables(status: Mapping[str, Any], problem: str = "") -> RenderableType:
    """Jobs, then containers; `problem`: why the data are not current."""
    jobs = status["jobs"]
    parts: list[RenderableType] = [jobs_table(jobs)]
    if any(job.get("counts") for job in jobs):
        parts.append(counts_table(jobs))
    if any(job["problem"] or job["plan"] or job["scaler"] for job in jobs):
        parts.append(remarks_table(jobs))
    parts.append(containers_table(status["containers"], status["now_ms"]))
    for row in status["containers"]:
        if row.get("error"):
            error = " ".join(row["error"].split())
            parts.append(text(f"{row['name']} cannot start: {error}", "red", 1000))
    if status.get("advice_only"):
        parts.append(
            text("advice only: scaler and policies report what they would do, but change nothing", "yellow")
        )
    if problem:
        parts.append(text(f"{problem}; showing the last known state", "bold red"))
    return Group(*parts)


def jobs_table(jobs: Sequence[Mapping[str, Any]]) -> Table:
    """One line per job: state, tasks, load, package."""
    table = new_table("jobs")
    # Long names are truncated, numbers never.
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
            # The step of a change is in the remarks.
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
    """One line per job whose tasks report: its record counts since its state was created."""
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
    """Remarks on jobs: a problem, the step of a change, or the scaler's last reason."""
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
    for name in ("shards", "tasks", "last heartbeat", "engine pid"):
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
    """One job: every field with the layer that sets it, the layers, the tasks."""
    parts: list[RenderableType] = []
    if job["problem"]:
        parts.append(text(job["problem"], "red", 1000))
    parts += ignored_text(job)
    parts.append(_settings_table(job))
    parts += [text(f"guarantee: {guarantee}", limit=200) for guarantee in job["guarantees"]]
    parts.append(_layers_table(job["layers"]))
    parts.append(_tasks_table(job["tasks"]))
    return Group(*parts)


def _settings_table(job: Mapping[str, Any]) -> Table:
    table = new_table("")
    table.title = text(f"{job['name']}  (expected version {job['expected_version']})")
    table.add_column("field", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("layer", no_wrap=True)
    for path, value in flat(job["config"]):
        table.add_row(text(path), text(value_text(value)), layer_text(job["provenance"].get(path)))
    return table


def _layers_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table("layers")
    for name in ("layer", "version", "who", "when"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", overflow="fold")
    table.add_column("values", overflow="fold")
    for row in layers:
        # The provisioner sets most fields; they are in the table above.
        pairs = [pair for pair in flat(row["body"]) if pair[0]]
        values = ", ".join(f"{path}={value_text(value)}" for path, value in pairs)
        if len(pairs) > 6:
            values = f"{len(pairs)} fields"
        table.add_row(
            layer_text(row),
            str(row["version"]),
            text(row["actor"], limit=30),
            when(row["at_ms"]),
            text(row["reason"], limit=120),
            text(values),
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
            text(summarize_error(task["error"]), "red", 300),
        )
    if not tasks:
        table.caption = "no tasks reported"
    return table


def categories_table(categories: Sequence[Mapping[str, Any]]) -> Table:
    """One line per category of the bus."""
    table = new_table("categories")
    table.add_column("category", overflow="fold")
    for name in ("format", "watermark type"):
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
            text(spec["watermark"]),
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
        table.caption = "no decisions yet"
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


def new_table(title: str) -> Table:
    """An empty table in the common style."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def text(value: Any, style: str = "", limit: int = TEXT_MAX) -> Text:
    """Text from outside: without markup and control characters, and truncated."""
    shown = " ".join(printable(line) for line in str(value).splitlines())
    return Text(shown if len(shown) <= limit else shown[: limit - 1] + "…", style=style)


def printable(line: str) -> str:
    """A line without control characters."""
    return "".join(letter if letter.isprintable() else "�" for letter in line)


def state_text(state: str) -> Text:
    """A state in its colour."""
    return text(state, _COLOURS.get(state.split(" ")[0], "cyan"), 24)


def task_text(job: Mapping[str, Any]) -> Text:
    """Running tasks of all tasks, and the expected number if it differs."""
    up = sum(1 for task in job["tasks"] if task["state"] == "running")
    wanted, there = job["task_count"], job["running_task_count"]
    text = Text(f"{up}/{there}", style="" if up >= there else "yellow")
    return text if wanted == there else text.append(f" → {wanted}", style="cyan")


def package_text(package: Mapping[str, Any]) -> Text:
    """A package's version label, or the beginning of its hash."""
    return text(package.get("version") or str(package.get("hash", ""))[:8], limit=8)


def value_text(value: Any) -> str:
    """A setting's value in short form."""
    if isinstance(value, Mapping | list | tuple):
        return "none" if not value else ", ".join(_item(item) for item in _items(value))
    return "none" if value is None else str(value)


def _items(value: Any) -> list[Any]:
    return (
        [f"{key}: {value_text(item)}" for key, item in value.items()]
        if isinstance(value, Mapping)
        else list(value)
    )


def _item(item: Any) -> str:
    """An input, an output or a stage by its distinguishing fields."""
    if not isinstance(item, Mapping):
        return value_text(item)
    for name in ("category", "op"):
        if name in item:
            rest = {key: item[key] for key in ("stream", "start", "partitions", "expr") if key in item}
            return (
                f"{item[name]} ({', '.join(str(value) for value in rest.values())})"
                if rest
                else str(item[name])
            )
    return value_text(item)


def flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every dotted path of a value."""
    if isinstance(value, Mapping) and value:
        return [pair for key in value for pair in flat(value[key], f"{path}.{key}" if path else str(key))]
    return [(path, value)]


def first_line(text: str) -> str:
    """The first line of an error."""
    return text.splitlines()[0] if text else ""


def number(value: float | None) -> str:
    """A number with thousands separators."""
    return "–" if value is None else f"{value:,.0f}"


def span(seconds: float) -> str:
    """A duration in a suitable unit."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s"


def lag(metrics: Mapping[str, Any]) -> str:
    """Records that wait to be read, and the age of the oldest; – if unknown."""
    if "lag_records" not in metrics:
        return "–"
    waiting = f" ({span(metrics['lag_s'])})" if metrics["lag_records"] and "lag_s" in metrics else ""
    return f"{number(metrics['lag_records'])}{waiting}"


def when(at_ms: int, *, with_year: bool = False) -> str:
    """A time in UTC."""
    form = "%Y-%m-%d" if with_year else "%m-%d %H:%M:%S"
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime(form) if at_ms else "–"


def low(low_ms: int) -> str:
    """A watermark as a time."""
    if abs(low_ms) >= _LOW_MAX:
        return "–" if low_ms < 0 else "end"
    return when(low_ms)


def layer_text(decided: Mapping[str, Any] | None) -> Text:
    """A layer's name in its colour; None: the default."""
    name = "default" if decided is None else str(decided["layer"])
    return text(name, _LAYERS.get(name, ""), 30)


def ignored_text(job: Mapping[str, Any]) -> list[Text]:
    """A line for each setting that is ignored because it conflicts with others."""
    why = "" if job.get("problem") else ignored_mapping_reason(JobConfig.from_stored(job["config"]))
    return (
        [text(f"{PARTITION_TASKS} is ignored: {why}; partitions are assigned evenly", "yellow")]
        if why
        else []
    )


Row = Mapping[str, Any]
# Colours of how a change is synchronized: a plan, a restart in place, live.
_COSTS = {"complex": "bold red", "restart": "yellow", "live": "green"}
# How a submit changes a job.
_WORDS = {
    "unchanged": "kept",
    "simple": "replaced in place",
    "complex": "replaced by a plan",
}
_CHANGES = {"new": "green", "unchanged": "dim", "simple": "yellow", "complex": "bold red", "removed": "red"}
# Colours of what a submit did to a job.
_DONE = {"unchanged": "dim", "reset": "yellow", "stopped": "red"}
PIECES_MAX = 12


def changes_tables(planned: Row) -> RenderableType:
    """The changes of a submit, and the questions that it would ask first."""
    parts: list[RenderableType] = [changes_table(planned["changes"])]
    stops = [change["job"] for change in planned["changes"] if change["change"] == "removed"]
    if stops:
        parts.append(text(f"a submit would stop {', '.join(stops)}: it asks first, or give --yes", "yellow"))
    if planned["replaces"]:
        before = planned["replaces"]
        line = f"the pipeline was submitted from {before} before: a submit asks first, or give --yes"
        parts.append(text(line, "yellow"))
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
    """The changes of a submit or an apply, a line per job."""
    table = new_table("changes")
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
    """The changes of applying one job: fields, restarts of tasks, and whether state is kept."""
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
    """Differences, and how each would be synchronized."""
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
    for name in ("why", "values"):
        table.add_column(name, overflow="fold")
    for row in rows:
        pairs = [pair for pair in flat(row["body"]) if pair[0]]
        values = ", ".join(f"{path}={value_text(value)}" for path, value in pairs)
        table.add_row(
            str(row["version"]),
            layer_text(row),
            text(row["actor"], limit=30),
            when(row["at_ms"]),
            text(row["reason"]),
            text(f"{len(pairs)} fields" if len(pairs) > PIECES_MAX else values or "empty"),
        )
    return table


def config_tables(job: Row, *, with_layers: bool) -> RenderableType:
    """Every setting of a job with layer, actor, time and reason; then the values of each layer."""
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
        layer = new_table("")
        layer.title = Text.assemble("layer ", layer_text(row), f" at version {row['version']}")
        for name in ("field", "value"):
            layer.add_column(name, overflow="fold")
        for path, value in flat(row["body"]):
            if path:
                layer.add_row(text(path), text(value_text(value)))
        layer.caption = None if row["body"] else "empty"
        parts.append(layer)
    return Group(*parts)


def audit_table(entries: Sequence[Row]) -> Table:
    """The audit log, newest first."""
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
        table.caption = "no changes yet"
    return table


def layer_kinds_table(kinds: Sequence[Row]) -> Table:
    """All kinds of layers; the last wins."""
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
    """Every token, without its secret."""
    table = new_table("tokens")
    for name in ("id", "name", "role", "issued", "by", "expires", "state"):
        table.add_column(name, no_wrap=True)
    for row in tokens:
        # A container's token has the container's name, except tokens of an older version.
        role, bound = row["role"], row.get("container", "")
        role = f"{role} {bound}" if bound not in ("", row["name"]) else role
        if row["revoked_ms"]:
            state = Text("revoked", style="red")
        elif row["expires_ms"] <= now_ms:
            state = Text("expired", style="yellow")
        else:
            state = Text("valid", style="green")
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
