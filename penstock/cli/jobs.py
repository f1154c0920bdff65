"""`penstock job`: apply, plan, show, compare, roll back, pause, stop and remove jobs."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Group, RenderableType

from penstock.cli import policies, tables
from penstock.cli import tables as change_tables
from penstock.cli.output import EXIT_CODES, FOLDER, Folder, Form, Output, connect, out, show
from penstock.cli.pipelines import check_state_kept
from penstock.cli.tables import new_table, text, when
from penstock.cli.watching import ChangeWait, until_ctrl_c, watch
from penstock.client.client import new_key
from penstock.core.errors import ConfigError
from penstock.jobs.config import NAME_PATTERN
from penstock.jobs.text_rules import shown

BYTES_MAX = 1024 * 1024
DEPTH_MAX = 32
VALUES_MAX = 50_000
INT_MAX = 2**63 - 1

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_NO_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: Mapping[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_FIX = "correct the file; nothing was sent"


def read_job_text(text: str, *, name: str) -> dict[str, Any]:
    """The map in a job file; `name` names the file in errors."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _refusal(name, f"it is not text: {error}") from error
    if size > BYTES_MAX:
        raise _refusal(name, f"it is larger than {BYTES_MAX} bytes")
    value = _read_json(text, name) if name.endswith(".json") else _read_yaml(text, name)
    if not isinstance(value, dict):
        raise _refusal(name, f"it holds {_kind(value)}, not a map of fields")
    return value


def split_name(config: Mapping[str, Any], given: str, *, name: str) -> tuple[str, dict[str, Any]]:
    """The job's name, from the file or the command line, and its provisioner fields."""
    job = config.get("name", given)
    if not isinstance(job, str) or not job:
        raise _refusal(name, "it has no `name:`, or one that is not text")
    if not re.fullmatch(NAME_PATTERN, job):
        raise _refusal(name, f"{shown(job)} is not a job name: letters, digits, `_`, `.` and `-` only")
    if given and job != given:
        raise _refusal(name, f"its `name:` is {job!r}, but {given!r} was requested")
    return job, dict(config)


def _read_json(text: str, name: str) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in found]
        if len(set(keys)) < len(keys):
            twice = next(key for number, key in enumerate(keys) if key in keys[:number])
            raise _refusal(name, f"the key {twice[:100]!r} appears twice")
        return dict(found)

    try:
        value = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_constant=lambda word: _no_number(name, word, ""),
            parse_int=lambda digits: _integer(name, digits, ""),
            parse_float=lambda digits: _float(name, digits, ""),
        )
    except json.JSONDecodeError as error:
        raise _refusal(name, f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise _refusal(name, f"it is nested deeper than {DEPTH_MAX} levels") from error
    _check_depth(value, name)
    return value


def _check_depth(value: Any, name: str) -> None:
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [
            below
            for item in level
            if isinstance(item, dict | list)
            for below in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise _refusal(name, f"it is nested deeper than {DEPTH_MAX} levels")


def _read_yaml(text: str, name: str) -> Any:
    try:
        return _Reader(name).read(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{_place(mark)}: " if mark else ""
        raise _refusal(name, f"{place}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise _refusal(name, " ".join(str(error).split())) from error


class _Reader:
    """Builds values from YAML events, and refuses everything that is not plain data."""

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0

    def read(self, text: str) -> Any:
        events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        documents = [
            self._value(event, events, 0)
            for event in events
            if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent | yaml.AliasEvent)
        ]
        if len(documents) != 1:
            raise _refusal(self._name, f"it holds {len(documents)} documents, not one")
        return documents[0]

    def _value(self, event: Any, events: Any, depth: int) -> Any:
        self._check(event, depth)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(below := next(events), yaml.SequenceEndEvent):
                items.append(self._value(below, events, depth + 1))
            return items
        found: dict[str, Any] = {}
        while not isinstance(key := next(events), yaml.MappingEndEvent):
            self._check(key, depth + 1)
            if not isinstance(key, yaml.ScalarEvent):
                raise self._wrong(key, "a key must be text")
            if key.value == "<<" and not key.style:
                raise self._wrong(key, "merge keys (`<<`) are not allowed")
            if key.value in found:
                raise self._wrong(key, f"the key {key.value[:100]!r} appears twice")
            found[key.value] = self._value(next(events), events, depth + 1)
        return found

    def _check(self, event: Any, depth: int) -> None:
        self._count += 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise self._wrong(event, "anchors and aliases (`&`, `*`) are not allowed")
        if getattr(event, "tag", None):
            raise self._wrong(event, f"tags are not allowed: {event.tag[:100]}")
        if depth > DEPTH_MAX:
            raise self._wrong(event, f"it is nested deeper than {DEPTH_MAX} levels")
        if self._count > VALUES_MAX:
            raise self._wrong(event, f"there are more than {VALUES_MAX} values")

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        if event.style:  # quoted or a block: always text
            return text
        if text in _WORDS:
            return _WORDS[text]
        place = f"{_place(event.start_mark)}: "
        if _INT.fullmatch(text):
            return _integer(self._name, text, place)
        if _FLOAT.fullmatch(text):
            return _float(self._name, text, place)
        if _NO_NUMBER.fullmatch(text):
            return _no_number(self._name, text, place)
        return text

    def _wrong(self, event: Any, why: str) -> ConfigError:
        return _refusal(self._name, f"{_place(event.start_mark)}: {why}")


def _integer(name: str, text: str, place: str) -> int:
    if len(text) > 20 or not -INT_MAX - 1 <= int(text) <= INT_MAX:
        raise _refusal(name, f"{place}the number {text[:40]} does not fit into 64 bits")
    return int(text)


def _float(name: str, text: str, place: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(name, text[:40], place)


def _no_number(name: str, text: str, place: str) -> float:
    raise _refusal(name, f"{place}{text} is not a finite number")


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "nothing"}.get(type(value), "a single value")


def _refusal(name: str, why: str) -> ConfigError:
    return ConfigError(f"{name} is not a job file", why=why, fix=_FIX)


app = typer.Typer(
    name="job",
    help="Jobs: apply, plan, show, compare, roll back, pause, stop, remove.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)

JobName = Annotated[str, typer.Argument(help="The job.")]
File = Annotated[
    str,
    typer.Option("--file", "-f", help="A job file: .yaml, .yml or .json; - reads YAML from standard input."),
]
Why = Annotated[str, typer.Option("--why", help="The reason, stored with the change.")]
Version = Annotated[
    int | None, typer.Option("--version", help="Only if the job is still at this version.", min=0)
]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh after each change, until Ctrl-C.")]
LayerOption = Annotated[str, typer.Option("--layer", help="The layer to write; default: your own.")]
# The role whose token writes a layer, if PENSTOCK_TOKEN is not set.
WRITERS = {"provisioner": "developer", "oncall": "oncall"}
app.command(epilog=EXIT_CODES)(policies.manage)
app.command(epilog=EXIT_CODES)(policies.readmit)


@app.command(epilog=EXIT_CODES)
def apply(
    file: File,
    why: Why,
    version: Version = None,
    new: Annotated[bool, typer.Option("--new", help="Only if the job does not exist yet.")] = False,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Write a file as the provisioner layer of its job; creates the job if it does not exist."""
    if new and version is not None:
        raise ConfigError(
            "--new and --version exclude each other",
            why="--new requires that the job does not exist, --version that it does",
            fix="give one of the two",
        )
    name, config = read_file(file)
    with connect(folder, role="developer") as client:
        done = client.apply_job(name, config, why=why, key=new_key(), expected_version=version, only_new=new)
    verb = "created" if done["created"] else "written"
    show(
        {"job": name, **done}, output, lambda: f"[green]{verb}[/] {name}, expected version {done['version']}"
    )


@app.command(epilog=EXIT_CODES)
def plan(file: File, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Show what applying a file would change: simple or complex, restarts of tasks, whether state is kept."""

    name, config = read_file(file)
    with connect(folder, role="developer") as client:
        change = client.plan_job(name, config)
    show(change, output, lambda: change_tables.plan_tables(change))
    check_state_kept([change])


@app.command(epilog=EXIT_CODES)
def get(
    name: JobName, is_watching: Watch = False, folder: Folder = FOLDER, output: Output = Form.TABLE
) -> None:
    """One job: every setting with the layer that sets it, its layers, its tasks."""
    with connect(folder, role="reader") as client:
        if is_watching:
            news = ChangeWait(client, subject=name, every_s=2)
            with until_ctrl_c():
                watch(lambda: client.job(name), tables.job_tables, news.wait, form=output)
            return
        found = client.job(name)
    show(found, output, lambda: tables.job_tables(found))


@app.command(epilog=EXIT_CODES)
def ls(
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", help="name=value; repeatable, all must match.")
    ] = None,
    state: Annotated[str, typer.Option(help="Only jobs in this state: running, paused, behind …")] = "",
    pipeline: Annotated[str, typer.Option(help="Only jobs of this pipeline.")] = "",
    removed: Annotated[bool, typer.Option("--removed", help="Also removed jobs.")] = False,
    is_watching: Watch = False,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """List jobs."""
    wanted: dict[str, Any] = {
        "labels": dict(_label(text) for text in label or []),
        "state": state or None,
        "pipeline": pipeline or None,
        "removed": removed,
    }
    with connect(folder, role="reader") as client:
        if is_watching:
            news = ChangeWait(client, every_s=2)
            with until_ctrl_c():
                watch(lambda: client.jobs(**wanted), tables.jobs_table, news.wait, form=output)
            return
        jobs = client.jobs(**wanted)
    show(jobs, output, lambda: tables.jobs_table(jobs))


@app.command(epilog=EXIT_CODES)
def diff(
    name: JobName,
    old: Annotated[int | None, typer.Option(help="A version; default: the running config.", min=0)] = None,
    new: Annotated[int | None, typer.Option(help="A version; default: the expected config.", min=0)] = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Differences of two versions of a job's config, and how each would be synchronized."""
    with connect(folder, role="reader") as client:
        changes = client.diff(name, old=old, new=new)
    old_name = "running" if old is None else f"version {old}"
    new_name = "expected" if new is None else f"version {new}"
    show(changes, output, lambda: change_tables.diff_table(changes, f"{old_name} → {new_name}"))


@app.command(epilog=EXIT_CODES)
def history(
    name: JobName,
    layer: Annotated[str, typer.Option(help="Only this layer.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", help="The newest N.", min=1, max=1000)] = 20,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Every write of a job's layers with actor, time and reason, newest first."""
    with connect(folder, role="reader") as client:
        rows = client.history(name, layer=layer or None, limit=limit)
    show(rows, output, lambda: change_tables.history_table(rows))


@app.command(epilog=EXIT_CODES)
def rollback(
    name: JobName,
    layer: Annotated[str, typer.Argument(help="The layer, e.g. provisioner.")],
    to: Annotated[int, typer.Option("--to", help="The version to restore.", min=0)],
    why: Why,
    version: Version = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Write one layer as it was at an earlier version of the job."""
    with connect(folder, role=WRITERS.get(layer, "admin")) as client:
        at = client.rollback(name, layer, to_version=to, why=why, key=new_key(), expected_version=version)
    result = {"job": name, "layer": layer, "version": at}
    show(result, output, lambda: f"[green]written[/] {name}: {layer} is as at version {to}, now version {at}")


@app.command(epilog=EXIT_CODES)
def pause(
    name: JobName,
    why: Why,
    layer: LayerOption = "",
    version: Version = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Pause a job: its tasks end; its state and its offsets are kept."""
    _set_state(name, "paused", why, layer, version, folder, output)


@app.command(epilog=EXIT_CODES)
def resume(
    name: JobName,
    why: Why,
    layer: LayerOption = "",
    version: Version = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Run a paused or stopped job."""
    _set_state(name, "running", why, layer, version, folder, output)


@app.command(epilog=EXIT_CODES)
def stop(
    name: JobName,
    why: Why,
    layer: LayerOption = "",
    version: Version = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Stop a job: its tasks end."""
    _set_state(name, "stopped", why, layer, version, folder, output)


@app.command(epilog=EXIT_CODES)
def rm(
    name: JobName, why: Why, version: Version = None, folder: Folder = FOLDER, output: Output = Form.TABLE
) -> None:
    """Remove a job. Its layers, history and state are kept, and `restore` brings it back."""
    with connect(folder, role="developer") as client:
        at = client.remove_job(name, why=why, key=new_key(), expected_version=version)
    show({"job": name, "version": at}, output, lambda: f"[green]removed[/] {name}, version {at}")


@app.command(epilog=EXIT_CODES)
def restore(
    name: JobName, why: Why, version: Version = None, folder: Folder = FOLDER, output: Output = Form.TABLE
) -> None:
    """Restore a removed job with its layers and its state."""
    with connect(folder, role="developer") as client:
        at = client.restore_job(name, why=why, key=new_key(), expected_version=version)
    show({"job": name, "version": at}, output, lambda: f"[green]restored[/] {name}, version {at}")


def read_file(file: str) -> tuple[str, dict[str, Any]]:
    """A job's name and its provisioner fields, from a file or standard input."""
    try:
        if file == "-":
            text = sys.stdin.read(BYTES_MAX + 1)
        else:
            with Path(file).open(encoding="utf-8") as source:
                text = source.read(BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {file}", why=str(error), fix="name a readable file in UTF-8"
        ) from error
    return split_name(read_job_text(text, name=file), "", name=file)


def _set_state(
    name: str, state: str, why: str, layer: str, version: int | None, folder: Path, output: Form
) -> None:
    with connect(folder, role=WRITERS.get(layer or "oncall", "admin")) as client:
        done = client.set_state(
            name, state, why=why, key=new_key(), layer=layer or None, expected_version=version
        )
    line = f"[green]written[/] {name}: layer {done['layer']} sets {state}, version {done['version']}"
    if done["effective"] != state:
        line += f"\n[yellow]no effect[/]: a higher layer sets {done['effective']}"
    show({"job": name, **done}, output, lambda: line)
    out.file.flush()


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"not a label: {text!r}", why="it must be name=value", fix="e.g. --label team=ads")
    return name, value


BARS = "▁▂▃▄▅▆▇█"
GAP = "·"
WIDTH = 24


@app.command(epilog=EXIT_CODES)
def metrics(
    name: Annotated[str, typer.Argument(help="The job.")],
    minutes: Annotated[
        int, typer.Option("--minutes", "-n", help="The newest N; 14 days are stored.", min=1, max=20_160)
    ] = 60,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="Only this one; repeatable.")
    ] = None,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Metrics of a job by minute: rates, lag, busy time, memory, failures. A dot: unknown."""
    with connect(folder, role="reader") as client:
        found = client.job_metrics(name, metrics=",".join(metric) if metric else None, minutes=minutes)
    show(found, output, lambda: metrics_table(found))


def metrics_table(found: Mapping[str, Any]) -> RenderableType:
    """A line per metric: newest value, minimum, mean, maximum, and a sparkline."""
    table = new_table("")
    table.title = text(f"{found['job']}, {found['minutes']} min from {when(found['first_ms'])} UTC")
    table.add_column("metric", no_wrap=True, min_width=15)
    for name in ("now", "min", "mean", "max"):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)  # never truncated
    table.add_column("", no_wrap=True)
    for name, line in found["metrics"].items():
        values = line["values"]
        known = [value for value in values if value is not None]
        spread = (min(known), sum(known) / len(known), max(known)) if known else (None, None, None)
        cells = [short(value) for value in (values[-1] if values else None, *spread)]
        table.add_row(text(name), *cells, sparkline(values))
    if not found["metrics"]:
        return Group(table, text("no metrics yet: a minute is shown when it is complete"))
    return table


def short(value: float | None) -> str:
    """A number with three significant digits; – if it is unknown."""
    if value is None:
        return "–"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def sparkline(values: Sequence[float | None], width: int = WIDTH) -> str:
    """A bar per minute or range of minutes, from zero to the maximum; a dot where it is unknown."""
    ranges = [
        values[len(values) * place // width : len(values) * (place + 1) // width] for place in range(width)
    ]
    if len(values) <= width:
        ranges = [[value] for value in values]
    means = [_mean([value for value in stretch if value is not None]) for stretch in ranges]
    most = max((mean for mean in means if mean is not None), default=0.0)
    return "".join(
        GAP if mean is None else BARS[0] if most <= 0 else BARS[min(7, int(mean / most * 7.999))]
        for mean in means
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
