"""`penstock category`, `bus` and `inject`: show and create categories; read, publish and copy records.

Records do not pass through the control plane: these commands open the bus itself, which the folder or `--bus`
names. Categories are created by the control plane.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from penstock.cli.output import (
    EXIT_CODES,
    FOLDER,
    Folder,
    Form,
    Output,
    connect,
    err,
    show,
    show_line,
    show_unreadable,
)
from penstock.cli.tables import categories_table, low, new_table, number, printable, text
from penstock.cli.watching import until_ctrl_c
from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, CorruptData, EnvironmentProblem, NotFound, StoreUnavailable
from penstock.core.folder import endpoint_file
from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.settings import BUS_VARIABLE, Settings
from penstock.streams.bus import copy as bus_copy
from penstock.streams.bus.log import AHEAD_MAX_MS, LATENESS_MS, Category, Log
from penstock.streams.catalogue import (
    category_from_json,
    category_to_json,
    has_no_times,
    no_category,
    no_time_note,
)
from penstock.streams.dsl.file_injector import FileInjector, find_files
from penstock.streams.dsl.injector import Skew, SkewLimit, dismiss_injector, expect_injectors
from penstock.streams.inspect.record_lines import LineRules, Lines, lines_of
from penstock.streams.inspect.watermark_view import moment
from penstock.streams.places import kept_bus, open_log

app = typer.Typer(name="bus", help="Categories and their records.", no_args_is_help=True)
FOLLOW_MS: Millis = 300
SPOOL_BYTES = 64 * 2**20
FILES = (".ndjson", ".jsonl", ".json", ".parquet")

Bus = Annotated[
    str,
    typer.Option(
        "--bus",
        envvar=BUS_VARIABLE,
        help="The bus, e.g. kafka://host:port/prefix or embedded:.penstock/bus; default: the folder's.",
    ),
]
CategoryName = Annotated[str, typer.Argument(help="A category.")]


def find_bus(folder: Path, bus: str) -> Log:
    """The bus that `find_place` finds, opened."""
    return open_log(find_place(folder, bus))


def find_place(folder: Path, bus: str) -> str:
    """The place of the bus: as given, else from the control plane, else in the folder."""
    place = (
        bus or _control_plane_bus(folder) or kept_bus(folder) or Settings(folder=folder.absolute()).bus_place
    )
    kind, _, path = place.partition(":")
    if kind == "embedded" and not Path(path).is_dir():
        raise StoreUnavailable(
            f"there is no bus at {path}",
            why="the folder does not exist here",
            fix="name the folder of a `penstock up` with --folder, or the bus with --bus",
        )
    return place


def _control_plane_bus(folder: Path) -> str:
    if not os.environ.get("PENSTOCK_URL") and not endpoint_file(folder).exists():
        return ""
    # The bus can be used while its control plane is down.
    with contextlib.suppress(StoreUnavailable), connect(folder) as client:
        return str(client.installation()["bus"])
    return ""


def described(log: Log, name: str) -> Category:
    """Describe a category; NotFound has a suggestion."""
    try:
        return log.describe(name)
    except NotFound:
        raise no_category(name, log.names()) from None


@app.command(epilog=EXIT_CODES)
def ls(folder: Folder = FOLDER, bus: Bus = "", output: Output = Form.TABLE) -> None:
    """Every category of the bus."""
    log = find_bus(folder, bus)
    found, unreadable = [], dict[str, str]()
    for name in log.names():
        try:
            found.append(_view(log, log.describe(name)))
        except NotFound:
            continue  # its creation is not complete
        except (CorruptData, EnvironmentProblem, ConfigError) as error:
            unreadable[name] = f"{error.what}: {error.why}"
    show(found, output, lambda: categories_table(found))
    show_unreadable(unreadable)


@app.command(epilog=EXIT_CODES)
def describe(name: CategoryName, folder: Folder = FOLDER, bus: Bus = "", output: Output = Form.TABLE) -> None:
    """One category: columns, partitions with end offsets, watermark and producers."""
    log = find_bus(folder, bus)
    category = described(log, name)
    found = {**_view(log, category), "producers": dict(log.producers(name))}
    show(found, output, lambda: category_tables(found))


@app.command(epilog=EXIT_CODES)
def tail(
    name: CategoryName,
    folder: Folder = FOLDER,
    bus: Bus = "",
    lines: Annotated[int, typer.Option("--lines", "-n", help="The last N per partition.", min=0)] = 10,
    partition: Annotated[int | None, typer.Option(help="Only this partition.", min=0)] = None,
    start: Annotated[
        int | None, typer.Option("--from", help="From this offset, instead of the last N.", min=0)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until Ctrl-C.")] = False,
    output: Output = Form.TABLE,
) -> None:
    """The last records of a category, and with -f new ones."""
    log = find_bus(folder, bus)
    category = described(log, name)
    first, ends = log.start_offsets(name), log.end_offsets(name)
    wanted = range(len(ends)) if partition is None else [_existing(category, partition)]
    at = {
        one: _last_begin(log, name, one, first[one], ends[one], lines)
        if start is None
        else max(first[one], min(start, ends[one]))
        for one in wanted
    }
    show_record = _printer(category, output)
    with until_ctrl_c() if follow else contextlib.nullcontext():
        _print_new(log, name, at, ends, show_record)
        while follow:
            if not _print_new(log, name, at, log.end_offsets(name), show_record):
                sleep_ms(FOLLOW_MS)


@app.command(epilog=EXIT_CODES)
def publish(
    name: CategoryName,
    file: Annotated[Path, typer.Argument(help="Lines of JSON; - reads standard input.")] = Path("-"),
    folder: Folder = FOLDER,
    bus: Bus = "",
    form: Annotated[
        Lines, typer.Option(help="A line is a record's value, or a whole record as `tail` prints it.")
    ] = (Lines.VALUE),
    key: Annotated[str, typer.Option(help="The key column; default: no key.")] = "",
    ts: Annotated[
        str, typer.Option(help="The event time column in ms; default: the category's, else now.")
    ] = "",
    producer: Annotated[
        str, typer.Option(help="The producer's name: with it, a repeat of the same lines adds nothing.")
    ] = "",
    done: Annotated[
        bool, typer.Option("--done", help="Last input: advance the injectors' watermark to the end.")
    ] = False,
    output: Output = Form.TABLE,
) -> None:
    """Publish lines as records: all of them, or none if one is invalid."""
    log, clock = find_bus(folder, bus), SystemClock()
    category = described(log, name)
    rules = LineRules(spec=category.spec, form=form, key_column=key, ts_column=ts, now_ms=clock.now_ms())
    who, epoch = producer or f"cli:{secrets.token_hex(6)}", clock.now_ms()
    if done and category.spec.watermark != "injector":
        raise ConfigError(
            f"--done does not apply to category {name!r}",
            why=f"its watermark comes from {category.spec.watermark}, not from injectors",
            fix="omit --done",
        )
    with _opened(file) as source, _progress() as progress:
        found = bus_copy.publish_lines(
            log, source, rules, name=str(file), producer=who, epoch=epoch, progress=progress
        )
    if done:
        bus_copy.close_input(log, name, producer=who, epoch=epoch, now_ms=clock.now_ms())
    _show_copied(found, name, who, output)


@app.command(epilog=EXIT_CODES)
def copy(
    source: Annotated[str, typer.Argument(help="A category, or a file (.ndjson, .jsonl, .parquet).")],
    target: Annotated[str, typer.Argument(help="A category, or a file to write.")],
    folder: Folder = FOLDER,
    bus: Bus = "",
    producer: Annotated[
        str, typer.Option(help="From a file: the producer's name; default: the content's hash.")
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="To lines of JSON: append what the file does not have yet.")
    ] = False,
    output: Output = Form.TABLE,
) -> None:
    """Copy records between categories, or from or to a file. A repeat copies only new records."""
    log, epoch = find_bus(folder, bus), SystemClock().now_ms()
    from_file, to_file = _is_file(source), _is_file(target)
    if from_file and to_file:
        raise ConfigError("both are files", why="one of them must be a category", fix="use `cp`")
    who = ""
    with _progress() as progress:
        if to_file:
            described(log, source)
            path = Path(target)
            found = (
                bus_copy.export_parquet(log, source, path, progress=progress)
                if path.suffix == ".parquet"
                else bus_copy.export_lines(log, source, path, resume=resume, progress=progress)
            )
        elif from_file:
            category = described(log, target)
            with _opened(Path(source)) as file:
                who = producer or f"copy:{bus_copy.content_hash(file)}"
                if Path(source).suffix == ".parquet":
                    found = bus_copy.import_parquet(
                        log, Path(source), target, producer=who, epoch=epoch, progress=progress
                    )
                else:
                    rules = LineRules(spec=category.spec, form=Lines.RECORD, now_ms=epoch, checked=False)
                    found = bus_copy.publish_lines(
                        log, file, rules, name=source, producer=who, epoch=epoch, progress=progress
                    )
        else:
            described(log, source), described(log, target)
            found = bus_copy.copy_category(log, source, target, epoch=epoch, progress=progress)
    _show_copied(found, target, who, output)


def _view(log: Log, category: Category) -> dict[str, Any]:
    name = category.spec.name
    return {
        "spec": category_to_json(category.spec),
        "birth": category.birth,
        "end_offsets": list(log.end_offsets(name)),
        "watermark": log.watermark(name),
    }


def _last_begin(log: Log, name: str, partition: int, first: int, end: int, lines: int) -> int:
    """The offset of the last N records; on Kafka a range may have fewer records than offsets."""
    reach = lines
    while True:
        begin = max(first, end - reach)
        offsets = [int(offset) for run, _ in log.scan(name, partition, begin, end) for offset in run]
        if len(offsets) >= lines or begin == first:
            return offsets[-lines] if 0 < lines <= len(offsets) else begin
        reach *= 2


def _existing(category: Category, partition: int) -> int:
    if partition < category.spec.partitions:
        return partition
    raise NotFound(
        f"category {category.spec.name!r} has no partition {partition}",
        why=f"its partitions are 0 to {category.spec.partitions - 1}",
        fix="name one of them",
    )


def _printer(category: Category, output: Form) -> Callable[[bytes], None]:
    def print_record(line: bytes) -> None:
        if output is Form.TABLE:
            print(record_text(line), flush=True)
        elif output is Form.JSON:
            print(line.decode(), flush=True)
        else:
            show_line(record_of(line), output)

    return print_record


def _print_new(
    log: Log, name: str, at: dict[int, int], ends: tuple[int, ...], show_record: Callable[[bytes], None]
) -> bool:
    """Print the records up to `ends`; True if there were any."""
    spec, has_printed = log.describe(name).spec, False
    for partition, offset in at.items():
        for offsets, batch in log.scan(name, partition, offset, ends[partition]):
            for line in lines_of(batch, spec, partition=partition, offsets=offsets):
                show_record(line)
            has_printed = True
        at[partition] = max(offset, ends[partition])
    return has_printed


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file that can be read twice; standard input is spooled first."""
    if str(path) == "-":
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
            shutil.copyfileobj(sys.stdin.buffer, spool)
            spool.seek(0)
            yield spool  # type: ignore[misc]
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot read {path}", why=str(error), fix="check the path; - reads standard input"
        ) from error
    with file:
        yield file


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Shows the number of records so far, on a terminal only."""
    if not err.is_terminal:
        yield lambda done: None
        return
    with err.status("0 records") as status:
        yield lambda done: status.update(f"{done:,} records")


def _is_file(name: str) -> bool:
    return "/" in name or name.endswith(FILES)


def _show_copied(found: bus_copy.Copied, target: str, producer: str, output: Form) -> None:
    result = {"target": target, "appended": found.appended, "repeated": found.repeated}
    if producer:
        result["producer"] = producer
    repeated = f", {found.repeated:,} existed already" if found.repeated else ""
    show(result, output, lambda: f"{found.appended:,} records to {target}{repeated}")


__all__ = ["categories_table", "category_tables", "record_of", "record_text"]

VALUE_SHOWN_MAX = 1000


def category_tables(found: Mapping[str, Any]) -> RenderableType:
    """A category, its partitions, and the producers of its watermark."""
    partitions = new_table("partitions")
    for name in ("partition", "records"):
        partitions.add_column(name, justify="right", no_wrap=True)
    for partition, end in enumerate(found["end_offsets"]):
        partitions.add_row(str(partition), number(end))
    parts: list[RenderableType] = [categories_table([found]), partitions]
    if found["producers"]:
        parts.append(_producers_table(found["producers"]))
    return Group(*parts)


def _producers_table(producers: Mapping[str, int]) -> Table:
    table = new_table("producers")
    table.add_column("producer", overflow="fold")
    table.add_column("low watermark", no_wrap=True)
    for producer, at in sorted(producers.items()):
        table.add_row(text(producer), low(at))
    return table


def record_of(line: bytes) -> dict[str, Any]:
    """A record's line as a value."""
    found: dict[str, Any] = json.loads(line)
    return found


def record_text(line: bytes) -> str:
    """partition:offset, event time, key, value: one line without control characters."""
    record = record_of(line)
    value = record.get("value_base64", None)
    shown = json.dumps(record["value"], ensure_ascii=False) if "value" in record else f"base64 {value}"
    if len(shown) > VALUE_SHOWN_MAX:
        shown = f"{shown[:VALUE_SHOWN_MAX]}… ({len(shown):,} characters)"
    late = " late" if record.get("late") else ""
    key = "-" if record["key"] is None else record["key"]
    return printable(f"{record['partition']}:{record['offset']} {_when(record['ts'])}{late} {key} {shown}")


def _when(at_ms: int) -> str:
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return f"{at_ms}ms"


def category(
    name: Annotated[str, typer.Argument(help="A category; default: list all.")] = "",
    folder: Folder = FOLDER,
    create: Annotated[bool, typer.Option("--create", help="Create it for external records.")] = False,
    columns: Annotated[str, typer.Option(help="For --create: name:type,name:type …")] = "",
    partitions: Annotated[int, typer.Option(help="For --create.", min=1, max=4096)] = 4,
    ts: Annotated[str, typer.Option(help="For --create: the column with the event time in ms.")] = "",
    watermark: Annotated[str, typer.Option(help="For --create: event_time or injector.")] = "event_time",
    lateness_ms: Annotated[
        int, typer.Option(help="For --create: allowed lateness of records.", min=0)
    ] = LATENESS_MS,
    retention_ms: Annotated[
        int, typer.Option(help="For --create: retention of records; 0: until they are truncated.", min=0)
    ] = 0,
    headers: Annotated[
        bool, typer.Option("--headers", help="For --create: records may have headers.")
    ] = False,
    idle_after_ms: Annotated[
        int,
        typer.Option(
            help="For --create: after so long without records a partition is idle; 0: never.",
            min=0,
        ),
    ] = 0,
    ahead_max_ms: Annotated[
        int,
        typer.Option(
            help="For --create: records further in the future are dead letters; 0: no limit.", min=0
        ),
    ] = AHEAD_MAX_MS,
    output: Output = Form.TABLE,
) -> None:
    """Show the categories of the bus, or create one of JSON records."""
    unreadable: dict[str, str] = {}
    if create:
        spec = {
            "name": name,
            "columns": _columns(columns),
            "partitions": partitions,
            "ts_column": ts,
            "watermark": watermark,
            "lateness_ms": lateness_ms,
            "retention_ms": retention_ms,
            "headers": headers,
            "idle_after_ms": idle_after_ms,
            "ahead_max_ms": ahead_max_ms,
        }
        with connect(folder, role="developer") as client:
            found = [client.create_category(spec)]
        if has_no_times(created := category_from_json({**spec, "format": "json"})):
            err.print(f"note: {no_time_note(created)}", markup=False)
    else:
        with connect(folder, role="reader") as client:
            found = [client.category(name)] if name else client.categories()
            unreadable = {} if name else client.unreadable_categories()
    show(found[0] if name else found, output, lambda: categories_table(found))
    show_unreadable(unreadable)


def _columns(text: str) -> list[tuple[str, str]]:
    pairs = [part.partition(":") for part in text.split(",") if part]
    if not pairs or any(not (name and kind) for name, _, kind in pairs):
        raise ConfigError(
            "the category has no columns",
            why=f"--columns must be name:type,name:type …, not {text!r}",
            fix="e.g. --columns query:string,ts:bigint",
        )
    return [(name.strip(), kind.strip()) for name, _, kind in pairs]


def inject(
    category: Annotated[str, typer.Option("--category", help="The target category.")],
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of lines, or folders of such files.", exists=True)
    ] = None,
    folder: Folder = FOLDER,
    bus: Bus = "",
    name: Annotated[str, typer.Option(help="The name of this injector of the category.")] = "files",
    key: Annotated[str, typer.Option(help="The key column; default: no key.")] = "",
    ts: Annotated[
        str, typer.Option(help="The event time column in ms; default: the category's, else now.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until Ctrl-C.")] = False,
    done: Annotated[
        bool, typer.Option("--done", help="Last input of this injector: advance its watermark to the end.")
    ] = False,
    expect: Annotated[str, typer.Option(help="All injectors that the watermark waits for: name,name …")] = "",
    dismiss: Annotated[
        str, typer.Option(help="Remove this injector: the watermark no longer waits for it; injects nothing.")
    ] = "",
    skew_max_ms: Annotated[
        int, typer.Option(help="Pause while the lines are so far ahead of --paced-by; 0: never.", min=0)
    ] = 0,
    paced_by: Annotated[
        str, typer.Option(help="Output categories of the consumers: category,category …")
    ] = "",
    output: Output = Form.TABLE,
) -> None:
    """Publish the lines of files exactly once, also after a crash; with -f also lines appended later."""
    log, clock = find_bus(folder, bus), SystemClock()
    spec = described(log, category).spec
    if dismiss:
        dismiss_injector(log, category, dismiss, now_ms=clock.now_ms())
        show({"dismissed": dismiss}, output, lambda: f"{category} no longer waits for {dismiss}")
        return
    if not files:
        raise ConfigError("there are no files to inject", why="none is given", fix="name files or folders")
    if follow and done:
        raise ConfigError(
            "--done and --follow exclude each other",
            why="--done declares the last input, --follow waits for more",
            fix="give one of them",
        )
    if expect:
        expect_injectors(log, category, [item.strip() for item in expect.split(",") if item.strip()])
    limit = None
    if skew_max_ms or paced_by:
        others = [item.strip() for item in paced_by.split(",") if item.strip()]
        for other in others:
            described(log, other)
        limit = SkewLimit(log, skew_max_ms=skew_max_ms, paced_by=others, on_wait=_WaitNotice().show)
    rules = LineRules(spec=spec, key_column=key, ts_column=ts)
    injector = FileInjector(log, rules, name, epoch=clock.now_ms(), limit=limit)
    sent = 0
    # Ctrl-C ends --follow; the watermark is held until an injector of this name runs again.
    with until_ctrl_c() if follow else contextlib.nullcontext():
        while follow:
            found = injector.round(find_files(files), now_ms=clock.now_ms())
            sent += found
            if not found:
                sleep_ms(FOLLOW_MS)
        sent = injector.round(find_files(files), now_ms=clock.now_ms(), is_last=True)
    if done:
        injector.close(now_ms=clock.now_ms())
    show({"category": category, "sent": sent}, output, lambda: f"{sent:,} lines to {category}")


class _WaitNotice:
    """Prints that the injector waits, once per wait."""

    def __init__(self) -> None:
        self._shown: Millis | None = None

    def show(self, skew: Skew) -> None:
        if self._shown != skew.low:
            self._shown = skew.low
            err.print(
                f"waiting: {skew.spread_ms / 1000:,.1f} s ahead of {skew.category}, which is at "
                f"{moment(skew.slowest)}",
                markup=False,
            )
