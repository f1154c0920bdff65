"""`penstock run --local`: a pipeline in this process alone, until its files are read or Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from penstock.cli.backfill import Cores, Inputs, LineForm, PipelineFile, Specs
from penstock.cli.output import err
from penstock.cli.sources import categories_read, check_inputs, read_inputs, read_specs
from penstock.cli.stopping import stop_on_signals
from penstock.container import folder_lock
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.streams.engine.java import require_spark
from penstock.streams.local_run import LocalPlace, LocalRun, remarks_on
from penstock.streams.places import kept_bus, settle_bus
from penstock.streams.record_lines import Lines

LOOK_S = 0.25
STOP_S = 15


def run(
    pipeline: PipelineFile,
    local: Annotated[bool, typer.Option("--local", help="In this process, without a control plane.")] = False,
    inputs: Inputs = None,
    specs: Specs = None,
    form: LineForm = Lines.VALUE,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Keep everything here; none: in a folder that goes away.")
    ] = None,
    bus: Annotated[
        str, typer.Option("--bus", help="Streams are here, e.g. kafka://host:port/prefix; none: the folder.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on when all files are read.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print what the sinks get.")] = False,
    cores: Cores = 2,
) -> None:
    """Run a pipeline here and now; what its sinks get is printed as lines of JSON."""
    if not local:
        raise ConfigError(
            "where should it run?",
            why="`penstock run` runs a pipeline in this process, and wants that said",
            fix="add --local; `penstock submit` runs it on a control plane",
        )
    if bus and folder is None:
        raise ConfigError(
            "a run on a bus that stays needs a folder that stays",
            why="how far it is lies in the folder: without it the next run would publish everything again",
            fix="name one with --folder, or leave --bus out",
        )
    require_spark()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    files = read_inputs(inputs or ())
    with contextlib.ExitStack() as open_things:
        kept = folder or Path(open_things.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        open_things.enter_context(folder_lock(kept.absolute(), "a pipeline"))
        stop = stop_on_signals()
        settled = settle_bus(kept.absolute(), bus) if bus else None
        place = kept_bus(kept) if settled is None else settled.place
        work = LocalRun(
            LocalPlace(folder=kept.absolute(), bus_place=place), SystemClock(), is_kept=folder is not None
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
        with _session(kept.absolute(), cores) as spark:
            if not stop.is_set():
                counts = _until_done(work, spark, stop, follow=follow or not files, quiet=quiet)
                for category, count in sorted(counts.items()):
                    err.print(f"{category}: {count:,} records", markup=False)
                _tell(work, is_kept=folder is not None)


def _until_done(work: LocalRun, spark: Any, stop: Any, *, follow: bool, quiet: bool) -> dict[str, int]:
    counts: dict[str, int] = {}

    def say() -> None:
        for category, line in work.new_records():
            counts[category] = counts.get(category, 0) + 1
            if not quiet:
                print(f'{{"category":"{category}",{line.decode()[1:]}')
        sys.stdout.flush()

    work.start(spark)
    with err.status("starting …") as status:
        try:
            while not stop.wait(LOOK_S):
                views = work.look()
                say()
                lag = sum(view.metrics.get("lag_records", 0) for view in views)
                rate = sum(view.metrics.get("processed_rate", 0) for view in views)
                status.update(
                    f"{len(views)} tasks, {rate:,.0f} records/s, {lag:,.0f} waiting; stop with Ctrl-C"
                )
                if not follow and work.is_done(views):
                    break
        finally:
            _end(work)
    with contextlib.suppress(PenstockError):
        say()
    return counts


def _tell(work: LocalRun, *, is_kept: bool) -> None:
    """What each job did, what it lost on the way, and what has yet to come."""
    jobs = work.summary()
    for job in jobs:
        err.print(job.line, markup=False)
    for remark in remarks_on(jobs, work.open_inputs(), is_kept=is_kept):
        err.print(f"note: {remark}", markup=False)


def _end(work: LocalRun) -> None:
    clock = SystemClock()
    patience_ms = clock.boot_ms() + STOP_S * 1000
    while not work.stop() and clock.boot_ms() < patience_ms:
        sleep_ms(100)


@contextlib.contextmanager
def _session(folder: Path, cores: int) -> Iterator[Any]:
    from penstock.streams.engine.session import build_session, end_session

    # Spark takes Ctrl-C for itself, and would end in the middle of a batch.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with err.status("starting Spark …"):
        spark = build_session("penstock run", cores, folder / "scratch")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield spark
    finally:
        end_session(spark)
