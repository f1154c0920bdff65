"""`penstock backfill`: a pipeline over what has been, as one Spark batch, into a folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.bus import Bus, find_place
from penstock.cli.connection import FOLDER, Folder
from penstock.cli.output import Form, Output, err, show
from penstock.cli.sources import categories_read, check_inputs, read_inputs, read_specs, read_time
from penstock.core.errors import ConfigError, StoreUnavailable
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, Category
from penstock.streams.catalogue import StaticCatalogue
from penstock.streams.compiled import CompiledPipeline
from penstock.streams.engine.java import require_spark
from penstock.streams.packages import build_package, load_pipeline, unpack_package
from penstock.streams.places import open_log
from penstock.streams.plan import compile_pipeline
from penstock.streams.record_lines import Lines
from penstock.streams.step import is_dead

PipelineFile = Annotated[Path, typer.Argument(help="A Python file that makes one Pipeline.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="category=file (.ndjson, .jsonl, .parquet) or category=table:name; repeat it for more.",
    ),
]
Specs = Annotated[
    list[Path] | None, typer.Option("--category", help="A JSON file that describes a category; repeat it.")
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
    """Run a pipeline over files, or over what its categories hold, as one Spark batch."""
    require_spark()  # before what imports it
    from penstock.streams.engine.backfill import Code, Span
    from penstock.streams.engine.batch_job import FORMATS, BatchJob, run_batch

    if format_ not in FORMATS:
        raise ConfigError(f"no such format: {format_!r}", why=f"known: {', '.join(FORMATS)}", fix="use one")
    from_ms, to_ms = read_time(start), read_time(end)
    if from_ms is not None and to_ms is not None and from_ms >= to_ms:
        raise ConfigError(
            "there is no time between --from and --to", why=f"{start} is not before {end}", fix="swap them"
        )
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
                f"there is nothing to read for {category.spec.name!r}",
                why="it is only described: no bus has it, and no file was given",
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
    said = {
        "folder": str(target),
        "rows": counts,
        "dead_letters": sum(dead.values()),
        "late": 0,
        "waiting": 0,
    }
    lines = [f"{count:>12,} rows in {target / name}" for name, count in counts.items()]
    lines.append(f"{sum(dead.values()):,} dead letters; no record is late or waiting in a backfill")
    show(said, output, lambda: "\n".join(lines))


def _dead_letters(compiled: CompiledPipeline) -> set[str]:
    """The categories of what could not be worked on."""
    return {output.category for job in compiled.jobs for output in job.outputs if is_dead(output.stream)}


def _known(folder: Path, bus: str, specs: list[Path]) -> tuple[str, list[Category]]:
    """Described categories first, then those of the bus, if there is one."""
    described = [Category(spec=spec, birth="") for spec in read_specs(specs)]
    try:
        place = find_place(folder, bus)
    except StoreUnavailable:
        if not described:
            raise
        return "", described
    names = {category.spec.name for category in described}
    return place, described + [item for item in open_log(place).categories() if item.spec.name not in names]
