"""`penstock state`: state and timers of jobs, also while they run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Group, RenderableType
from rich.table import Table

from penstock.cli.output import EXIT_CODES, FOLDER, Folder, Form, Output, connect, err, show
from penstock.cli.tables import low, new_table, number, text
from penstock.client.client import Client
from penstock.core.errors import ConfigError, EnvironmentProblem

app = typer.Typer(name="state", help="State of jobs per key, and their timers.", no_args_is_help=True)

LINES = (".jsonl", ".ndjson")
FILES = (*LINES, ".parquet")
STATE_SHOWN_MAX = 500
ROWS_PER_WRITE = 10_000
SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("version", pa.int64()),
        ("key", pa.string()),
        ("state", pa.string()),  # JSON
        ("problem", pa.string()),
    ]
)

Job = Annotated[str, typer.Argument(help="A stateful job.")]
After = Annotated[str, typer.Option("--after", help="The `next` of the previous page.")]
Limit = Annotated[int, typer.Option("--limit", "-n", help="At most N.", min=1, max=1000)]


@app.command(epilog=EXIT_CODES)
def get(
    job: Job,
    key: Annotated[str, typer.Argument(help="A key; several columns as a JSON list.")],
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """State and timers of one key."""
    with connect(folder, role="oncall") as client:
        found = client.state(job, key)
    show(found, output, lambda: key_tables(found))


@app.command(epilog=EXIT_CODES)
def scan(
    job: Job,
    prefix: Annotated[str, typer.Option("--prefix", help="Only keys with this prefix.")] = "",
    after: After = "",
    limit: Limit = 100,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """State of a job by interval and key, a page at a time."""
    with connect(folder, role="oncall", timeout_s=60) as client:
        found = client.states(job, prefix=prefix, after=after, limit=limit)
    show(found, output, lambda: paged(states_table(found["states"]), found))


@app.command(epilog=EXIT_CODES)
def timers(
    job: Job,
    key: Annotated[str, typer.Option("--key", help="Only those of this key.")] = "",
    after: After = "",
    limit: Limit = 100,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Pending timers of a job by interval, key and tag, a page at a time."""
    with connect(folder, role="oncall", timeout_s=60) as client:
        found = client.timers(job, key=key, after=after, limit=limit)
    show(found, output, lambda: paged(timers_table(found["timers"]), found))


@app.command(epilog=EXIT_CODES)
def export(
    job: Job,
    file: Annotated[Path, typer.Argument(help="A new file: .jsonl, .ndjson or .parquet.")],
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Write all state of a job to a file, which appears only when it is complete."""
    check_file(file)
    with connect(folder, role="oncall", timeout_s=60) as client:
        client.states(job, limit=1)  # fails early if the state cannot be read
        partitions = int(client.job(job)["running"]["config"]["partitions"])
        count = write_whole(file, every_state(client, job, partitions))
    result = {"job": job, "file": str(file), "states": count, "partitions": partitions}
    show(result, output, lambda: text(f"{number(count)} states of {job} are in {file}", limit=1000))


def every_state(client: Client, job: str, partitions: int) -> Iterator[dict[str, Any]]:
    """All state, interval by interval, each at one version; prints progress to stderr."""
    for partition in range(partitions):
        err.print(f"partition {partition + 1} of {partitions}", style="dim")
        yield from client.export_states(job, partition)


def check_file(file: Path) -> None:
    """ConfigError unless it can be a new file of a known format."""
    if file.suffix not in FILES:
        raise ConfigError(
            f"cannot write {file}",
            why=f"its extension is not a known format: {file.suffix or 'none'}",
            fix=f"use one of {', '.join(FILES)}",
        )
    if file.exists() or file.is_symlink():
        raise ConfigError(
            f"{file} exists already",
            why="existing files are not overwritten",
            fix="name another, or remove it",
        )
    if not file.absolute().parent.is_dir():
        raise ConfigError(
            f"cannot write {file}", why=f"there is no folder {file.parent}", fix="create it, or name another"
        )


def write_whole(file: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    """Write a temporary file beside it, then link it under its name. Returns the number of lines."""
    part = file.with_name(f".{file.name}.part-{os.getpid()}")
    try:
        count = _write_parquet(part, lines) if file.suffix == ".parquet" else _write_lines(part, lines)
        os.link(part, file)  # fails if the file exists; a rename would replace it
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write {file}", why=str(error), fix="name a writable place with enough space"
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return count


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    count = 0
    with path.open("x", encoding="utf-8") as out:
        for line in lines:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    return count


def _write_parquet(path: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    count, left = 0, iter(lines)
    with path.open("xb") as out, pq.ParquetWriter(out, SCHEMA) as writer:
        while some := list(islice(left, ROWS_PER_WRITE)):
            columns = {name: [line.get(name) for line in some] for name in SCHEMA.names}
            columns["state"] = [json.dumps(state, ensure_ascii=False) for state in columns["state"]]
            writer.write_table(pa.table(columns, SCHEMA))
            count += len(some)
    return count


def key_tables(found: Mapping[str, Any]) -> RenderableType:
    """State and timers of one key."""
    where = f"partition {found['partition']}, version {found['version']}"
    parts: list[RenderableType] = [text(f"{found['key']} ({where})", "bold", limit=1000)]
    for item in found["states"]:
        shown = json.dumps(item["state"], indent=2, ensure_ascii=False)
        parts += [text(line, limit=10_000) for line in shown.splitlines()]
        if item.get("problem"):
            parts.append(text(item["problem"], "red", limit=1000))
    if not found["states"]:
        parts.append(text("no state"))
    if found["timers"]:
        parts.append(timers_table(found["timers"]))
    return Group(*parts)


def states_table(states: Iterable[Mapping[str, Any]]) -> Table:
    """A line for each stored row."""
    table = new_table("states")
    for name, justify in (("partition", "right"), ("key", "left"), ("bytes", "right"), ("state", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    for item in states:
        shown = item.get("problem") or json.dumps(item["state"], ensure_ascii=False)
        style = "red" if item.get("problem") else ""
        size = number(item.get("bytes"))
        table.add_row(
            str(item["partition"]), text(item["key"]), size, text(shown, style, limit=STATE_SHOWN_MAX)
        )
    return table


def timers_table(timers: Iterable[Mapping[str, Any]]) -> Table:
    """A line for each timer."""
    table = new_table("timers")
    for name in ("partition", "key", "tag", "due", "by", "holds", ""):
        table.add_column(name, overflow="fold")
    for item in timers:
        place = (str(item["partition"]), text(item["key"]), text(item["tag"]))
        if "problem" in item:
            table.add_row(*place, "", "", "", text(item["problem"], "red"))
            continue
        by = "clock" if item["wall"] else "low watermark"
        holds = "–" if item["wall"] or item["late"] else low(item["hold_ms"])
        table.add_row(*place, low(item["at_ms"]), by, holds, "late" if item["late"] else "")
    return table


def paged(table: Table, found: Mapping[str, Any]) -> RenderableType:
    """A page, and the option for the next one."""
    if found["next"] is None:
        return table
    return Group(table, text(f"next page: --after '{found['next']}'", limit=30_000))
