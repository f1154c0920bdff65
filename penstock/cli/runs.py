"""`penstock run --local` and `penstock backfill`: a pipeline over files or a bus, without a control plane."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from penstock.cli.bus import Bus, find_place
from penstock.cli.output import FOLDER, Folder, Form, Output, err, show
from penstock.cli.watching import stop_on_signals
from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, NotFound, PenstockError, StoreUnavailable
from penstock.core.folder import folder_lock
from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, Category, CategorySpec
from penstock.streams.catalogue import StaticCatalogue, category_from_json, no_category
from penstock.streams.compile.compiled import CompiledPipeline
from penstock.streams.compile.packages import build_package, load_pipeline, unpack_package
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.inspect.record_lines import TABLE, Lines
from penstock.streams.local_run import LocalFolder, LocalRun, notes_for
from penstock.streams.places import kept_bus, open_log, settle_bus
from penstock.streams.spark.java import require_spark
from penstock.streams.step.step import is_dead

PipelineFile = Annotated[Path, typer.Argument(help="A Python file that makes one Pipeline.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="category=file (.ndjson, .jsonl, .parquet) or category=table:name; repeatable.",
    ),
]
Specs = Annotated[
    list[Path] | None, typer.Option("--category", help="A JSON file that describes a category; repeatable.")
]
LineForm = Annotated[Lines, typer.Option(help="What a line of an input is: a value, or a whole record.")]
Cores = Annotated[int, typer.Option(help="Spark threads.", min=1)]


def backfill(
    pipeline: PipelineFile,
    target: Annotated[Path, typer.Option("--into", help="A new folder; one folder below it per category.")],
    start: Annotated[str, typer.Option("--from", help="Records from this event time on.")] = "",
    end: Annotated[str, typer.Option("--to", help="Records before this event time.")] = "",
    inputs: Inputs = None,
    specs: Specs = None,
    form: LineForm = Lines.VALUE,
    format_: Annotated[str, typer.Option("--format", help="parquet or ndjson.")] = "parquet",
    folder: Folder = FOLDER,
    bus: Bus = "",
    cores: Cores = 2,
    output: Output = Form.TABLE,
) -> None:
    """Run a pipeline over files, or over the records of its categories, as one Spark batch."""
    require_spark()  # before modules that import it
    from penstock.streams.spark.backfill import FORMATS, BatchJob, Code, Span, run_batch

    if format_ not in FORMATS:
        raise ConfigError(
            f"no such format: {format_!r}", why=f"the formats are {', '.join(FORMATS)}", fix="use one"
        )
    from_ms, to_ms = read_time(start), read_time(end)
    if from_ms is not None and to_ms is not None and from_ms >= to_ms:
        raise ConfigError("--from must be before --to", why=f"{start} is not before {end}", fix="swap them")
    files = read_inputs(inputs or ())
    place, known = _known(folder, bus, specs or [])
    found = load_pipeline(pipeline)
    package = build_package(pipeline, found.local_files, name=found.name)
    compiled = compile_pipeline(found, StaticCatalogue([item.spec for item in known]), package.ref())
    reads = categories_read(compiled, known)
    check_inputs(files, reads)
    for category in reads:
        if category.birth == "" and category.spec.name not in files:
            raise ConfigError(
                f"there are no records of {category.spec.name!r}",
                why="the category is described with --category only: no bus has it, and no file was given",
                fix=f"give --input {category.spec.name}=FILE",
            )
    for note in compiled.notes:
        err.print(f"note: {note}", markup=False)
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch, err.status("running …"):
        unpack_package(package.data, package.hash, Path(scratch) / "package")
        job = BatchJob(
            jobs=compiled.to_json()["jobs"],
            categories=reads,
            files=files,
            form=form,
            bus=place,
            span=Span(start=LOW_MIN if from_ms is None else from_ms, end=LOW_MAX if to_ms is None else to_ms),
            code=Code(folder=Path(scratch) / "package", entry=package.entry, hash=package.hash),
            target=target.absolute(),
            format=format_,
        )
        counts = run_batch(job, scratch=Path(scratch) / "spark", cores=cores)
    dead = {name: count for name, count in counts.items() if name in _dead_letters(compiled)}
    result = {
        "folder": str(target),
        "rows": counts,
        "dead_letters": sum(dead.values()),
        "late": 0,
        "waiting": 0,
    }
    lines = [f"{count:>12,} rows in {target / name}" for name, count in counts.items()]
    lines.append(f"{sum(dead.values()):,} dead letters; no record is late or waiting in a backfill")
    show(result, output, lambda: "\n".join(lines))


def _dead_letters(compiled: CompiledPipeline) -> set[str]:
    """The categories of dead letters."""
    return {output.category for job in compiled.jobs for output in job.outputs if is_dead(output.stream)}


def _known(folder: Path, bus: str, specs: list[Path]) -> tuple[str, list[Category]]:
    """The place of the bus, and the known categories: described ones first, then those of the bus."""
    described = [Category(spec=spec, birth="") for spec in read_specs(specs)]
    try:
        place = find_place(folder, bus)
    except StoreUnavailable:
        if not described:
            raise
        return "", described
    names = {category.spec.name for category in described}
    return place, described + [item for item in open_log(place).categories() if item.spec.name not in names]


CHECK_S = 0.25
STOP_S = 15


def run(
    pipeline: PipelineFile,
    local: Annotated[bool, typer.Option("--local", help="In this process, without a control plane.")] = False,
    inputs: Inputs = None,
    specs: Specs = None,
    form: LineForm = Lines.VALUE,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where everything is stored; default: a temporary folder.")
    ] = None,
    bus: Annotated[
        str, typer.Option("--bus", help="The bus, e.g. kafka://host:port/prefix; default: in the folder.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue after all files are read.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print the output records.")] = False,
    cores: Cores = 2,
) -> None:
    """Run a pipeline in this process; its output records are printed as lines of JSON."""
    if not local:
        raise ConfigError(
            "`penstock run` needs --local",
            why="it runs the pipeline in this process, not on a control plane",
            fix="add --local, or use `penstock submit` to run it on a control plane",
        )
    if bus and folder is None:
        raise ConfigError(
            "--bus needs --folder",
            why="the offsets are stored in the folder; without it the next run would publish all again",
            fix="name a folder with --folder, or omit --bus",
        )
    require_spark()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    files = read_inputs(inputs or ())
    with contextlib.ExitStack() as open_things:
        root = folder or Path(open_things.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        open_things.enter_context(folder_lock(root.absolute(), "a pipeline"))
        stop = stop_on_signals()
        settled = settle_bus(root.absolute(), bus) if bus else None
        place = kept_bus(root) if settled is None else settled.place
        work = LocalRun(
            LocalFolder(folder=root.absolute(), bus_place=place), SystemClock(), is_kept=folder is not None
        )
        work.create(read_specs(specs or ()))
        compiled = work.compile(pipeline)
        check_inputs(files, categories_read(compiled, work.log.categories()))
        if settled is not None:
            settled.keep()
        for note in compiled.notes:
            err.print(f"note: {note}", markup=False)
        for category, paths in files.items():
            count = work.publish(category, paths, form, close=not follow)
            err.print(f"{category}: {count:,} new records", markup=False)
        with _session(root.absolute(), cores) as spark:
            if not stop.is_set():
                counts = _until_done(work, spark, stop, follow=follow or not files, quiet=quiet)
                for category, count in sorted(counts.items()):
                    err.print(f"{category}: {count:,} records", markup=False)
                _summarize(work, is_kept=folder is not None)


def _until_done(work: LocalRun, spark: Any, stop: Any, *, follow: bool, quiet: bool) -> dict[str, int]:
    counts: dict[str, int] = {}

    def print_new() -> None:
        for category, line in work.new_records():
            counts[category] = counts.get(category, 0) + 1
            if not quiet:
                print(f'{{"category":"{category}",{line.decode()[1:]}')
        sys.stdout.flush()

    work.start(spark)
    with err.status("starting …") as status:
        try:
            while not stop.wait(CHECK_S):
                runs = work.poll()
                print_new()
                lag = sum(run.metrics.get("lag_records", 0) for run in runs)
                rate = sum(run.metrics.get("processed_rate", 0) for run in runs)
                status.update(
                    f"{len(runs)} tasks, {rate:,.0f} records/s, {lag:,.0f} waiting; stop with Ctrl-C"
                )
                if not follow and work.is_done(runs):
                    break
        finally:
            _end(work)
    with contextlib.suppress(PenstockError):
        print_new()
    return counts


def _summarize(work: LocalRun, *, is_kept: bool) -> None:
    """Print each job's counts, lost records, and records that still wait."""
    jobs = work.summary()
    for job in jobs:
        err.print(job.line, markup=False)
    for remark in notes_for(jobs, work.open_inputs(), is_kept=is_kept):
        err.print(f"note: {remark}", markup=False)


def _end(work: LocalRun) -> None:
    clock = SystemClock()
    patience_ms = clock.boot_ms() + STOP_S * 1000
    while not work.stop() and clock.boot_ms() < patience_ms:
        sleep_ms(100)


@contextlib.contextmanager
def _session(folder: Path, cores: int) -> Iterator[Any]:
    from penstock.streams.spark.session import build_session, end_session

    # Spark installs its own handler of SIGINT, which would stop it in the middle of a batch.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with err.status("starting Spark …"):
        spark = build_session("penstock run", cores, folder / "scratch")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield spark
    finally:
        end_session(spark)


def read_specs(paths: Iterable[Path]) -> list[CategorySpec]:
    """Category specs from JSON files; a file has one spec or a list of them."""
    found = []
    for path in paths:
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not a description of a category",
                why=str(error),
                fix="give a JSON file with name, partitions, columns",
            ) from error
        for item in content if isinstance(content, list) else [content]:
            if not isinstance(item, Mapping):
                raise ConfigError(
                    f"{path} is not a description of a category",
                    why="it has an item that is not a JSON object",
                    fix="give objects with name, partitions, columns",
                )
            found.append(category_from_json({"format": "json", "watermark": "event_time", **item}))
    return found


def read_inputs(given: Iterable[str]) -> dict[str, list[str]]:
    """Parse `category=file` or `category=table:name`, by category."""
    found: dict[str, list[str]] = {}
    for text in given:
        category, equals, path = text.partition("=")
        if not (category and equals and path):
            raise ConfigError(
                f"not an input: {text!r}",
                why="it must be category=file or category=table:name",
                fix="e.g. --input queries=queries.ndjson",
            )
        if path.startswith(TABLE):
            found.setdefault(category, []).append(path)
            continue
        if not Path(path).exists():
            raise NotFound(
                f"there is no file {path!r}", why=f"it was named for {category!r}", fix="check the path"
            )
        found.setdefault(category, []).append(str(Path(path).absolute()))
    return found


def read_time(text: str) -> Millis | None:
    """Parse milliseconds since 1970, or an ISO 8601 date or time (default: UTC)."""
    if not text:
        return None
    if text.removeprefix("-").isdigit():
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"not a time: {text[:60]!r}",
            why=str(error),
            fix="e.g. 2026-11-16, 2026-11-16T12:00:00Z, or milliseconds",
        ) from error
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)


def categories_read(compiled: CompiledPipeline, known: Sequence[Category]) -> list[Category]:
    """The categories that a pipeline reads and does not write itself."""
    by_name = {category.spec.name: category for category in known}
    made = {output.category for job in compiled.jobs for output in job.outputs}
    wanted = sorted({item.category for job in compiled.jobs for item in job.inputs} - made)
    for name in wanted:
        if name not in by_name:
            raise no_category(name, by_name)
    return [by_name[name] for name in wanted]


def check_inputs(inputs: Mapping[str, Sequence[str]], read: Sequence[Category]) -> None:
    """Refuse files for a category that the pipeline does not read."""
    for name in inputs:
        if name not in {category.spec.name for category in read}:
            error = no_category(name, [category.spec.name for category in read])
            raise ConfigError(
                f"the pipeline does not read {name!r}",
                why=f"it reads {', '.join(category.spec.name for category in read)}",
                fix=error.fix,
            )
