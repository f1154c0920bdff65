"""The `penstock` command. Exit codes: 0 done, 1 refused or failed (the message says why), 2 wrong usage."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from penstock.cli import tables
from penstock.cli.connection import FOLDER, connect
from penstock.client import Client
from penstock.core.errors import ConfigError, PenstockError, StoreUnavailable

EXIT_CODES = "Exit codes: 0 done, 1 refused or failed (stderr says what, why and what to do), 2 wrong usage."
WATCH_S = 1.0

app = typer.Typer(
    name="penstock",
    help="Stream processing on Spark, managed: what runs, where it runs, how much it gets.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
out, err = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)

Folder = Annotated[Path, typer.Option("--folder", "-f", help="The folder of `penstock up`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Why = Annotated[str, typer.Option("--why", help="The reason, kept with the change.")]
PipelineFile = Annotated[Path, typer.Argument(help="A Python file that makes one Pipeline.")]


@app.command(epilog="Exit codes: 0 stopped by SIGINT or SIGTERM, 1 could not start, 2 wrong usage.")
def up(
    folder: Annotated[Path, typer.Option("--folder", "-f", help="Where everything is kept.")] = FOLDER,
    containers: Annotated[int, typer.Option(help="How many containers to run.", min=0, max=64)] = 2,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1 (0: any free one).", min=0, max=65535)] = 7337,
    cores: Annotated[int, typer.Option(help="Spark threads per container.", min=1)] = 2,
    profile: Annotated[
        str, typer.Option(help="Heartbeat times: fast (8 s / 12 s) or paper (40 s / 60 s).")
    ] = "fast",
) -> None:
    """Run a control plane and its containers on this machine until Ctrl-C."""
    from penstock.cli.up import UpSettings, run_up

    run_up(UpSettings(folder=folder, containers=containers, port=port, cores=cores, profile=profile))


@app.command(epilog=EXIT_CODES)
def plan(pipeline: PipelineFile, folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """Draw a pipeline and its jobs, and say what submitting it would change."""
    from penstock.cli.compiling import compile_file
    from penstock.streams.drawing import draw_plan

    with connect(folder, role="developer") as client:
        compiled, _ = compile_file(pipeline, client)
        changes = client.plan_pipeline(compiled.to_json())
    if as_json:
        _print_json({"compiled": compiled.to_json(), "changes": changes})
        return
    out.print(draw_plan(compiled), markup=False)
    out.print(tables.changes_table(changes))


@app.command(epilog=EXIT_CODES)
def submit(
    pipeline: PipelineFile,
    folder: Folder = FOLDER,
    why: Why = "submitted",
    version: Annotated[
        str, typer.Option(help="The package's version for people; its hash is its identity.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Package a pipeline's code and make its jobs what runs."""
    from penstock.cli.compiling import compile_file

    with connect(folder, role="developer", timeout_s=60) as client:
        compiled, package = compile_file(pipeline, client, version=version)
        client.put_package(package.hash, package.data)
        answer = client.submit_pipeline(compiled.to_json(), why=why, key=secrets.token_hex(8))
    if as_json:
        _print_json(answer)
        return
    for job, at in answer["jobs"].items():
        out.print(f"[green]submitted[/] {job}, expected version {at}")
    out.print("follow it with `penstock status --watch`")


@app.command(epilog=EXIT_CODES)
def status(
    folder: Folder = FOLDER,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Jobs, their tasks and lag, and containers."""
    with connect(folder, role="reader") as client:
        if watch:
            # Ctrl-C is how one stops looking, not a failure.
            with contextlib.suppress(KeyboardInterrupt):
                watch_status(client.status, as_json=as_json)
            return
        found = client.status()
    _print_json(found) if as_json else out.print(tables.status_tables(found))


@app.command(epilog=EXIT_CODES)
def job(
    name: Annotated[str, typer.Argument(help="A job; none: list them.")] = "",
    folder: Folder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """One job: every setting with the layer that decided it, its layers, its tasks."""
    with connect(folder, role="reader") as client:
        if not name:
            jobs = client.jobs()
            _print_json(jobs) if as_json else out.print(tables.jobs_table(jobs))
            return
        found = client.job(name)
    _print_json(found) if as_json else out.print(tables.job_tables(found))


@app.command(epilog=EXIT_CODES)
def oncall(
    name: Annotated[str, typer.Argument(help="The job.")],
    settings: Annotated[list[str] | None, typer.Argument(help="field=value …; field= takes one back")] = None,
    folder: Folder = FOLDER,
    why: Why = "",
    version: Annotated[int | None, typer.Option(help="Only if the job is still at this version.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take back everything oncall says.")] = False,
    as_json: AsJson = False,
) -> None:
    """Override settings of one job above everybody else, or take that back."""
    given = dict(_setting(text) for text in settings or [])
    if not given and not clear:
        raise ConfigError(
            "nothing to change", why="no field=value was given", fix=f"penstock oncall {name} task_count=4"
        )
    if given and not why:
        raise ConfigError(
            "an override needs a reason", why="whoever is on call next will ask for it", fix='add --why "…"'
        )
    with connect(folder, role="oncall") as client:
        changes = {**(_everything_oncall_says(client, name) if clear else {}), **given}
        if not changes:
            out.print(f"oncall says nothing about {name}: nothing to take back")
            return
        key = secrets.token_hex(8)
        at = client.patch_layer(
            name, "oncall", changes, why=why or "cleared", key=key, expected_version=version
        )
    if as_json:
        _print_json({"job": name, "version": at, "changes": changes})
        return
    out.print(f"[green]written[/] {name} is at expected version {at}")


@app.command(epilog=EXIT_CODES)
def journal(
    subject: Annotated[str, typer.Argument(help="A job, container or category; none: everything.")] = "",
    folder: Folder = FOLDER,
    limit: Annotated[int, typer.Option("--limit", "-n", help="The newest so many.", min=1, max=1000)] = 50,
    as_json: AsJson = False,
) -> None:
    """What was decided, by whom, and why."""
    with connect(folder, role="reader") as client:
        entries = client.journal(subject=subject or None, limit=limit)
    _print_json(entries) if as_json else out.print(tables.journal_table(entries))


@app.command(epilog=EXIT_CODES)
def logs(
    container: Annotated[str, typer.Argument(help="A container, e.g. c1.")],
    folder: Folder = FOLDER,
    lines: Annotated[int, typer.Option("--lines", "-n", help="The last so many.", min=1, max=10_000)] = 100,
) -> None:
    """The end of a container's log."""
    with connect(folder, role="oncall") as client:
        print(client.container_log(container, lines=lines))


@app.command(epilog=EXIT_CODES)
def category(
    name: Annotated[str, typer.Argument(help="A category; none: list them.")] = "",
    folder: Folder = FOLDER,
    create: Annotated[bool, typer.Option("--create", help="Create it for records from outside.")] = False,
    columns: Annotated[str, typer.Option(help="For --create: name:type,name:type …")] = "",
    partitions: Annotated[int, typer.Option(help="For --create.", min=1, max=4096)] = 4,
    ts: Annotated[str, typer.Option(help="For --create: the column with the event time in ms.")] = "",
    watermark: Annotated[str, typer.Option(help="For --create: event_time or injector.")] = "event_time",
    lateness_ms: Annotated[int, typer.Option(help="For --create: how late records may come.", min=0)] = 1000,
    as_json: AsJson = False,
) -> None:
    """Show the categories of the bus, or create one of JSON records."""
    if create:
        spec = {
            "name": name,
            "columns": _columns(columns),
            "partitions": partitions,
            "ts_column": ts,
            "watermark": watermark,
            "lateness_ms": lateness_ms,
        }
        with connect(folder, role="developer") as client:
            found = [client.create_category(spec)]
    else:
        with connect(folder, role="reader") as client:
            found = [client.category(name)] if name else client.categories()
    if as_json:
        _print_json(found[0] if name else found)
        return
    out.print(tables.categories_table(found))


@app.command(hidden=True, epilog=EXIT_CODES)
def container(
    name: Annotated[str, typer.Option()],
    folder: Annotated[Path, typer.Option()],
    url: Annotated[str, typer.Option()],
    token_file: Annotated[Path, typer.Option()],
    bus: Annotated[str, typer.Option()],
    rows: Annotated[str, typer.Option()],
    profile: Annotated[str, typer.Option()] = "fast",
    cores: Annotated[int, typer.Option()] = 2,
    incarnation: Annotated[str, typer.Option(help="Be the engine of this life, not the warden.")] = "",
) -> None:
    """A container: its warden, started by `penstock up`, or with --incarnation the warden's engine."""
    from penstock.container import ContainerSettings, Engine, run_warden

    settings = ContainerSettings(
        name=name,
        folder=folder,
        url=url,
        token_file=token_file,
        bus=bus,
        rows=rows,
        profile=profile,
        cores=cores,
    )
    if incarnation:
        raise SystemExit(Engine(settings).run())
    run_warden(settings)


def watch_status(
    look: Callable[[], dict[str, Any]], *, as_json: bool, pause: Callable[[float], None] = time.sleep
) -> None:
    """Look again and again, until interrupted; a control plane that is away for a moment is waited for."""
    last: dict[str, Any] | None = None
    with Live(console=out, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            problem = ""
            try:
                last = look()
            except StoreUnavailable as error:
                if last is None:
                    raise
                problem = error.what
            if not as_json:
                live.update(tables.status_tables(last, problem), refresh=True)
            elif not problem:
                print(json.dumps(last, default=str), flush=True)
            pause(WATCH_S)


def _everything_oncall_says(client: Client, job: str) -> dict[str, None]:
    rows = client.job(job)["layers"]
    return {field: None for row in rows if row["layer"] == "oncall" for field in row["body"]}


def _setting(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"not a setting: {text!r}", why="it must be field=value", fix="e.g. task_count=4")
    if not value:
        return path, None
    try:
        return path, json.loads(value, parse_constant=str)
    except (ValueError, RecursionError):
        return path, value


def _columns(text: str) -> list[tuple[str, str]]:
    pairs = [part.partition(":") for part in text.split(",") if part]
    if not pairs or any(not (name and kind) for name, _, kind in pairs):
        raise ConfigError(
            "no columns", why=f"{text!r} is not name:type,name:type …", fix="--columns query:string,ts:bigint"
        )
    return [(name.strip(), kind.strip()) for name, _, kind in pairs]


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an error we know is a message in three parts, not a traceback."""
    try:
        app(arguments, prog_name="penstock")
    except PenstockError as error:
        err.print(tables.error_text(error.what, error.why, error.fix))
        sys.exit(1)


if __name__ == "__main__":
    main()
