"""The `penstock` command: its own commands here, its groups in files of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from penstock.cli import (
    admin,
    alarms,
    backfill,
    bus,
    change_tables,
    dashboard,
    doctoring,
    fleet,
    inject,
    jobs,
    joining,
    lending,
    overrides,
    packaging,
    policies,
    run_local,
    state,
    tables,
    watermarks,
)
from penstock.cli.connection import FOLDER, Folder, connect
from penstock.cli.output import EXIT_CODES, Form, Output, err, fail, out, show, tell_unreadable
from penstock.cli.stopping import until_ctrl_c
from penstock.cli.up_options import AdviceOnly, AlarmChannels, AlarmWebhook, RescalesMax
from penstock.cli.watching import News, watch
from penstock.core.errors import ConfigError, PenstockError
from penstock.settings import (
    BUS_VARIABLE,
    ROWS_VARIABLE,
)
from penstock.streams.bus.log import AHEAD_MAX_MS, LATENESS_MS

app = typer.Typer(
    name="penstock",
    help="Stream processing on Spark, managed: what runs, where it runs, how much it gets.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
fleet.container.callback(invoke_without_command=True, epilog=EXIT_CODES)(joining.join)
fleet.container.command("run", hidden=True, epilog=EXIT_CODES)(joining.run)
groups = (jobs.app, bus.app, overrides.oncall, overrides.config, fleet.container, fleet.shard, fleet.task)
for group in (*groups, state.app, alarms.alarm, admin.layer, admin.token):
    app.add_typer(group)
app.command(epilog=EXIT_CODES)(fleet.top)
app.command(epilog=EXIT_CODES)(alarms.capacity)
app.command(epilog=EXIT_CODES)(lending.lend)
app.command(epilog=EXIT_CODES)(admin.audit)
app.command(epilog=EXIT_CODES)(backfill.backfill)
app.command(epilog=EXIT_CODES)(packaging.package)
app.command(epilog=EXIT_CODES)(watermarks.watermark)
app.command(epilog=EXIT_CODES)(dashboard.dashboard)
app.command(epilog=EXIT_CODES)(doctoring.doctor)
app.command(epilog=EXIT_CODES)(policies.explain)
app.command(epilog=EXIT_CODES)(inject.inject)
app.command(epilog=f"{EXIT_CODES} Ctrl-C ends it in order, with 0.")(run_local.run)

Why = Annotated[str, typer.Option("--why", help="The reason, kept with the change.")]
Reset = Annotated[
    list[str] | None,
    typer.Option("--reset-state", help="A job that starts again from empty state; repeat it for more."),
]
PipelineFile = Annotated[
    Path, typer.Argument(help="A Python file that makes one Pipeline, or INSERT statements in a file .sql.")
]


@app.callback()
def everywhere(
    ca: Annotated[
        Path | None,
        typer.Option("--ca", envvar="PENSTOCK_CA", help="Certificates that prove the control plane, in PEM."),
    ] = None,
) -> None:
    """Stream processing on Spark, managed: what runs, where it runs, how much it gets."""
    if ca is not None:
        os.environ["PENSTOCK_CA"] = str(ca)


@app.command(epilog="Exit codes: 0 stopped by SIGINT or SIGTERM, 1 could not start, 2 wrong usage.")
def up(
    folder: Annotated[Path, typer.Option("--folder", help="Where everything is kept.")] = FOLDER,
    containers: Annotated[int, typer.Option(help="How many containers to run.", min=0, max=64)] = 2,
    port: Annotated[int, typer.Option(help="Port to listen on (0: any free one).", min=0, max=65535)] = 7337,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback only with TLS.")
    ] = "127.0.0.1",
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate in PEM, with its chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key in PEM, unencrypted.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="What this machine's callers verify it with; none: itself.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="A host name in the certificate that callers use; several: repeat it."),
    ] = None,
    database: Annotated[
        str,
        typer.Option(envvar="PENSTOCK_DATABASE", help="URL of a PostgreSQL database; none: a SQLite file."),
    ] = "",
    bus: Annotated[
        str,
        typer.Option(
            envvar=BUS_VARIABLE, help="Where streams are: kafka://host:port/prefix; none: the disk."
        ),
    ] = "",
    rows: Annotated[
        str,
        typer.Option(envvar=ROWS_VARIABLE, help="Where state is: postgresql://…; none: the folder's disk."),
    ] = "",
    engine: Annotated[
        str, typer.Option(help="What containers run: spark (and processes), or process (no Java).")
    ] = "spark",
    cores: Annotated[int, typer.Option(help="Spark threads per container.", min=1)] = 2,
    master: Annotated[
        str, typer.Option(help="Another Spark for tasks, e.g. spark://host:7077; none: in each container.")
    ] = "",
    profile: Annotated[
        str, typer.Option(help="Heartbeat times: fast (8 s / 12 s) or paper (40 s / 60 s).")
    ] = "fast",
    alarm_webhook: AlarmWebhook = "",
    alarm_channels: AlarmChannels = "",
    rescales_max: RescalesMax = 10,
    advice_only: AdviceOnly = False,
) -> None:
    """Run a control plane and its containers on this machine until Ctrl-C."""
    from penstock.cli.up import UpSettings, run_up, tls_of
    from penstock.web.server import Listening

    names = tuple(name or ())
    listening = Listening(host=host, port=port, tls=tls_of(tls_cert, tls_key), name=names[0] if names else "")
    run_up(
        UpSettings(
            folder=folder,
            containers=containers,
            listening=listening,
            names=names,
            ca=tls_ca,
            database=database,
            bus=bus,
            rows=rows,
            engine=engine,
            cores=cores,
            master=master,
            profile=profile,
            alarm_webhook=alarm_webhook,
            alarm_channels=alarm_channels,
            rescales_max=rescales_max,
            advice_only=advice_only,
        )
    )


@app.command(epilog=EXIT_CODES)
def plan(
    pipeline: PipelineFile, folder: Folder = FOLDER, reset_state: Reset = None, output: Output = Form.TABLE
) -> None:
    """Draw a pipeline and its jobs, and say what submitting it would change, or why it would be refused."""
    from penstock.cli.compiling import check_can_run, check_state_kept, compile_file, origin_of
    from penstock.streams.drawing import draw_plan

    with connect(folder, role="developer") as client:
        compiled, _ = compile_file(pipeline, client)
        asked = {**compiled.to_json(), "reset_state": reset_state or [], "origin": origin_of(pipeline)}
        planned = client.plan_submit(asked)
    if output is Form.TABLE:
        out.print(draw_plan(compiled), markup=False)
    said = {"compiled": compiled.to_json(), **planned, "notes": list(compiled.notes)}
    show(said, output, lambda: change_tables.changes_tables(planned))
    check_can_run(compiled)
    check_state_kept(planned["changes"])


@app.command(epilog=EXIT_CODES)
def submit(
    pipeline: PipelineFile,
    folder: Folder = FOLDER,
    why: Why = "submitted",
    version: Annotated[
        str, typer.Option(help="The package's version for people; its hash is its identity.")
    ] = "",
    reset_state: Reset = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Stop the jobs that this file no longer has, and replace another file's."),
    ] = False,
    output: Output = Form.TABLE,
) -> None:
    """Package a pipeline's code and make its jobs what runs.

    If running jobs would stop, or the pipeline came from another file before, it asks first; without a
    terminal it refuses, unless --yes is given.
    """
    from penstock.cli.compiling import check_can_run, compile_file, origin_of, submit_compiled

    with connect(folder, role="developer", timeout_s=60) as client:
        compiled, package = compile_file(pipeline, client, version=version)
        check_can_run(compiled)
        client.put_package(package.hash, package.data)
        asked = {**compiled.to_json(), "reset_state": reset_state or [], "origin": origin_of(pipeline)}
        answer = submit_compiled(client, asked, why=why, yes=yes)
    show(answer, output, lambda: change_tables.submitted_text(answer))


@app.command(epilog=EXIT_CODES)
def status(
    folder: Folder = FOLDER,
    look_again: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Show it again every second and with each change, until Ctrl-C."),
    ] = False,
    output: Output = Form.TABLE,
) -> None:
    """Jobs, their tasks and lag, and containers."""
    with connect(folder, role="reader") as client:
        if look_again:
            with until_ctrl_c():
                watch(client.status, tables.status_tables, News(client).wait, form=output)
            return
        found = client.status()
    show(found, output, lambda: tables.status_tables(found))


@app.command(epilog=EXIT_CODES)
def journal(
    subject: Annotated[str, typer.Argument(help="A job, container or category; none: everything.")] = "",
    folder: Folder = FOLDER,
    limit: Annotated[int, typer.Option("--limit", "-n", help="The newest so many.", min=1, max=1000)] = 50,
    output: Output = Form.TABLE,
) -> None:
    """What was decided, by whom, and why."""
    with connect(folder, role="reader") as client:
        entries = client.journal(subject=subject or None, limit=limit)
    show(entries, output, lambda: tables.journal_table(entries))


@app.command(epilog=EXIT_CODES)
def logs(
    container: Annotated[str, typer.Argument(help="A container, e.g. c1.")],
    folder: Folder = FOLDER,
    lines: Annotated[int, typer.Option("--lines", "-n", help="The last so many.", min=1, max=10_000)] = 100,
    output: Output = Form.TABLE,
) -> None:
    """The end of a container's log."""
    with connect(folder, role="oncall") as client:
        text = client.container_log(container, lines=lines)
    if output is Form.TABLE:
        print(text)
    else:
        show({"container": container, "text": text}, output, lambda: "")


@app.command(epilog=EXIT_CODES)
def category(
    name: Annotated[str, typer.Argument(help="A category; none: list them.")] = "",
    folder: Folder = FOLDER,
    create: Annotated[bool, typer.Option("--create", help="Create it for records from outside.")] = False,
    columns: Annotated[str, typer.Option(help="For --create: name:type,name:type …")] = "",
    partitions: Annotated[int, typer.Option(help="For --create.", min=1, max=4096)] = 4,
    ts: Annotated[str, typer.Option(help="For --create: the column with the event time in ms.")] = "",
    watermark: Annotated[str, typer.Option(help="For --create: event_time or injector.")] = "event_time",
    lateness_ms: Annotated[
        int, typer.Option(help="For --create: how late records may come.", min=0)
    ] = LATENESS_MS,
    retention_ms: Annotated[
        int, typer.Option(help="For --create: how long records stay; 0: until they are truncated.", min=0)
    ] = 0,
    headers: Annotated[
        bool, typer.Option("--headers", help="For --create: records may have headers.")
    ] = False,
    idle_after_ms: Annotated[
        int,
        typer.Option(
            help="For --create: a partition without records for so long follows the others; 0: it holds.",
            min=0,
        ),
    ] = 0,
    ahead_max_ms: Annotated[
        int,
        typer.Option(
            help="For --create: records further in the future are dead letters; 0: none are.", min=0
        ),
    ] = AHEAD_MAX_MS,
    output: Output = Form.TABLE,
) -> None:
    """Show the categories of the bus, or create one of JSON records."""
    unreadable: dict[str, str] = {}
    if create:
        from penstock.streams.catalogue import category_from_json
        from penstock.streams.plan_notes import has_no_times, no_time_note

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
    show(found[0] if name else found, output, lambda: tables.categories_table(found))
    tell_unreadable(unreadable)


def _columns(text: str) -> list[tuple[str, str]]:
    pairs = [part.partition(":") for part in text.split(",") if part]
    if not pairs or any(not (name and kind) for name, _, kind in pairs):
        raise ConfigError(
            "no columns", why=f"{text!r} is not name:type,name:type …", fix="--columns query:string,ts:bigint"
        )
    return [(name.strip(), kind.strip()) for name, _, kind in pairs]


@cache
def program() -> Callable[..., Any]:
    """All commands with their options, made once: to make them takes longer than most commands."""
    return get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an error we know is a message in three parts, not a traceback."""
    try:
        program()(arguments, prog_name="penstock")
    except PenstockError as error:
        fail(error)


if __name__ == "__main__":
    main()
