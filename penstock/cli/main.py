"""The `penstock` command. Exit codes: 0 done, 1 refused or failed (the message says why), 2 wrong usage."""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from penstock.cli import tables
from penstock.cli.connection import FOLDER, connect
from penstock.core.errors import ConfigError, PenstockError

app = typer.Typer(
    name="penstock",
    help="Stream processing on Spark, managed: what runs, where it runs, how much it gets.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
out, err = Console(), Console(stderr=True)

Folder = Annotated[Path, typer.Option("--folder", "-f", help="The folder of `penstock up`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Why = Annotated[str, typer.Option("--why", help="The reason, kept with the change.")]


@app.command()
def up(
    folder: Folder = FOLDER,
    containers: Annotated[int, typer.Option(help="How many containers to run.", min=0, max=64)] = 2,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1 (0: any free one).", min=0, max=65535)] = 7337,
    cores: Annotated[int, typer.Option(help="Spark threads per container.", min=1)] = 2,
    profile: Annotated[str, typer.Option(help="Heartbeat times: fast (8 s / 12 s) or paper (40 s / 60 s).")] = "fast",
) -> None:
    """Run a control plane and its containers on this machine until Ctrl-C."""
    from penstock.cli.up import UpSettings, run_up

    run_up(UpSettings(folder=folder, containers=containers, port=port, cores=cores, profile=profile))


@app.command()
def plan(pipeline: Path, folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """Draw a pipeline and its jobs, and say what submitting it would change."""
    from penstock.cli.compiling import compile_file
    from penstock.streams.drawing import draw_plan

    client = connect(folder)
    compiled, _ = compile_file(pipeline, client)
    changes = client.plan_pipeline(compiled.to_json())
    if as_json:
        _print_json({"compiled": compiled.to_json(), "changes": changes})
        return
    out.print(draw_plan(compiled), markup=False, highlight=False)
    out.print(tables.changes_table(changes))


@app.command()
def submit(
    pipeline: Path,
    folder: Folder = FOLDER,
    why: Why = "submitted",
    version: Annotated[str, typer.Option(help="The package's version for people; its hash is its identity.")] = "",
    as_json: AsJson = False,
) -> None:
    """Package a pipeline's code and make its jobs what runs."""
    from penstock.cli.compiling import compile_file

    client = connect(folder, timeout_s=60)
    compiled, package = compile_file(pipeline, client, version=version)
    client.put_package(package.hash, package.data)
    answer = client.submit_pipeline(compiled.to_json(), why=why, key=secrets.token_hex(8))
    if as_json:
        _print_json(answer)
        return
    for job, at in answer["jobs"].items():
        out.print(f"[green]submitted[/] {job}  expected version {at}")
    out.print("follow it with `penstock status --watch`")


@app.command()
def status(
    folder: Folder = FOLDER,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Jobs, their tasks and lag, and containers."""
    client = connect(folder)
    if not watch:
        found = client.status()
        _print_json(found) if as_json else out.print(tables.status_tables(found))
        return
    with Live(console=out, screen=False, auto_refresh=False) as live:
        while True:
            live.update(tables.status_tables(client.status()), refresh=True)
            time.sleep(1)


@app.command()
def job(
    name: Annotated[str, typer.Argument(help="A job; none: list them.")] = "",
    folder: Folder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """One job: every setting with the layer that decided it, its layers, its tasks."""
    client = connect(folder)
    if not name:
        jobs = client.jobs()
        _print_json(jobs) if as_json else out.print(tables.jobs_table(jobs))
        return
    found = client.job(name)
    _print_json(found) if as_json else out.print(tables.job_tables(found))


@app.command()
def oncall(
    name: Annotated[str, typer.Argument(help="The job.")],
    settings: Annotated[list[str] | None, typer.Argument(help="field=value …; field= takes one back")] = None,
    folder: Folder = FOLDER,
    why: Why = "",
    version: Annotated[int | None, typer.Option(help="Only if the job is still at this version.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take back everything oncall says.")] = False,
) -> None:
    """Override settings of one job above everybody else, or take that back."""
    client = connect(folder)
    changes: dict[str, Any] = {}
    if clear:
        body = next((row["body"] for row in client.job(name)["layers"] if row["layer"] == "oncall"), {})
        changes = dict.fromkeys(body)
    for setting in settings or []:
        path, equals, value = setting.partition("=")
        if not equals or not path:
            raise ConfigError(f"not a setting: {setting!r}", why="it must be field=value", fix="e.g. task_count=4")
        changes[path] = _value(value)
    if not changes and not clear:
        raise ConfigError("nothing to change", why="no field=value was given", fix=f"penstock oncall {name} task_count=4")
    if not why and not clear:
        raise ConfigError("an override needs a reason", why="the next oncall will ask", fix='add --why "…"')
    at = client.patch_layer(
        name, "oncall", changes, why=why or "cleared", key=secrets.token_hex(8), expected_version=version
    )
    out.print(f"[green]written[/] {name} is at expected version {at}")


@app.command()
def journal(
    subject: Annotated[str, typer.Argument(help="A job, container or category; none: everything.")] = "",
    folder: Folder = FOLDER,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 50,
    as_json: AsJson = False,
) -> None:
    """What was decided, by whom, and why."""
    entries = connect(folder).journal(subject=subject or None, limit=limit)
    _print_json(entries) if as_json else out.print(tables.journal_table(entries))


@app.command()
def logs(
    container: Annotated[str, typer.Argument(help="A container, e.g. c1.")],
    folder: Folder = FOLDER,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=10_000)] = 100,
) -> None:
    """The end of a container's log."""
    print(connect(folder).container_log(container, lines=lines))


@app.command()
def category(
    name: Annotated[str, typer.Argument(help="A category; none: list them.")] = "",
    folder: Folder = FOLDER,
    create: Annotated[bool, typer.Option("--create", help="Create it for records from outside.")] = False,
    columns: Annotated[str, typer.Option(help="For --create: name:type,name:type …")] = "",
    partitions: Annotated[int, typer.Option(help="For --create.", min=1)] = 4,
    ts: Annotated[str, typer.Option(help="For --create: the column with the event time in ms.")] = "",
    watermark: Annotated[str, typer.Option(help="For --create: event_time or injector.")] = "event_time",
    lateness_ms: Annotated[int, typer.Option(help="For --create: how late records may come.", min=0)] = 1000,
) -> None:
    """Show the categories of the bus, or create one of JSON records."""
    client = connect(folder)
    if create:
        pairs = [tuple(part.split(":", 1)) for part in columns.split(",") if part]
        if any(len(pair) != 2 for pair in pairs) or not pairs:
            raise ConfigError("no columns", why=f"{columns!r} is not name:type,…", fix="--columns query:string,ts:bigint")
        spec = {"name": name, "partitions": partitions, "columns": pairs, "ts_column": ts, "watermark": watermark}
        _print_json(client.create_category({**spec, "lateness_ms": lateness_ms}))
        return
    _print_json(client.category(name) if name else client.categories())


@app.command(hidden=True)
def container(
    name: Annotated[str, typer.Option()],
    folder: Annotated[Path, typer.Option()],
    url: Annotated[str, typer.Option()],
    token_file: Annotated[Path, typer.Option()],
    bus: Annotated[str, typer.Option()],
    rows: Annotated[str, typer.Option()],
    profile: Annotated[str, typer.Option()] = "fast",
    cores: Annotated[int, typer.Option()] = 2,
) -> None:
    """A container's warden."""
    from penstock.container import ContainerSettings, run_warden

    run_warden(
        ContainerSettings(
            name=name, folder=folder, url=url, token_file=token_file, bus=bus, rows=rows, profile=profile, cores=cores
        )
    )


@app.command(hidden=True)
def engine(
    name: Annotated[str, typer.Option()],
    folder: Annotated[Path, typer.Option()],
    url: Annotated[str, typer.Option()],
    token_file: Annotated[Path, typer.Option()],
    bus: Annotated[str, typer.Option()],
    rows: Annotated[str, typer.Option()],
    incarnation: Annotated[str, typer.Option()],
    profile: Annotated[str, typer.Option()] = "fast",
    cores: Annotated[int, typer.Option()] = 2,
) -> None:
    """A container's engine; started by its warden."""
    from penstock.container import ContainerSettings, Engine

    settings = ContainerSettings(
        name=name, folder=folder, url=url, token_file=token_file, bus=bus, rows=rows, profile=profile, cores=cores
    )
    raise SystemExit(Engine(settings, incarnation).run())


def _value(text: str) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def main() -> None:
    """Run a command; an error we know is a message in three parts, not a traceback."""
    try:
        app()
    except PenstockError as error:
        err.print(f"[bold red]{_escape(error.what)}[/]")
        if error.why:
            err.print(f"  why         {_escape(error.why)}", highlight=False)
        if error.fix:
            err.print(f"  what to do  {_escape(error.fix)}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


if __name__ == "__main__":
    main()
