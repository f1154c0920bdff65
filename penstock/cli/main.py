"""The `penstock` command: every command and group, each in the file of its noun."""

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
    bus,
    fleet,
    installation,
    jobs,
    pipelines,
    policies,
    runs,
    state,
    status,
)
from penstock.cli import bus as inject
from penstock.cli import status as watermarks
from penstock.cli.output import EXIT_CODES, fail
from penstock.core.errors import PenstockError

app = typer.Typer(
    name="penstock",
    help="Managed stream processing on Spark: jobs, containers, scaling.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
fleet.container.callback(invoke_without_command=True, epilog=EXIT_CODES)(installation.join)
fleet.container.command("run", hidden=True, epilog=EXIT_CODES)(installation.run)
groups = (jobs.app, bus.app, admin.oncall, admin.config, fleet.container, fleet.shard, fleet.task)
for group in (*groups, state.app, alarms.alarm, admin.layer, admin.token):
    app.add_typer(group)
app.command(epilog="Exit codes: 0 stopped by SIGINT or SIGTERM, 1 could not start, 2 wrong usage.")(
    installation.up
)
app.command(epilog=EXIT_CODES)(fleet.top)
app.command(epilog=EXIT_CODES)(fleet.capacity)
app.command(epilog=EXIT_CODES)(fleet.lend)
app.command(epilog=EXIT_CODES)(admin.audit)
app.command(epilog=EXIT_CODES)(runs.backfill)
app.command(epilog=EXIT_CODES)(pipelines.plan)
app.command(epilog=EXIT_CODES)(pipelines.submit)
app.command(epilog=EXIT_CODES)(pipelines.package)
app.command(epilog=EXIT_CODES)(status.status)
app.command(epilog=EXIT_CODES)(status.journal)
app.command(epilog=EXIT_CODES)(status.logs)
app.command(epilog=EXIT_CODES)(bus.category)
app.command(epilog=EXIT_CODES)(watermarks.watermark)
app.command(epilog=EXIT_CODES)(status.dashboard)
app.command(epilog=EXIT_CODES)(policies.doctor)
app.command(epilog=EXIT_CODES)(policies.explain)
app.command(epilog=EXIT_CODES)(inject.inject)
app.command(epilog=f"{EXIT_CODES} Ctrl-C ends it in order, with 0.")(runs.run)


@app.callback()
def everywhere(
    ca: Annotated[
        Path | None,
        typer.Option("--ca", envvar="PENSTOCK_CA", help="PEM file of the certificate authority."),
    ] = None,
) -> None:
    """Managed stream processing on Spark: jobs, containers, scaling."""
    if ca is not None:
        os.environ["PENSTOCK_CA"] = str(ca)


@cache
def program() -> Callable[..., Any]:
    """All commands with their options; cached, because building them is slow."""
    return get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a PenstockError is printed as a message in three parts, not as a traceback."""
    try:
        program()(arguments, prog_name="penstock")
    except PenstockError as error:
        fail(error)


if __name__ == "__main__":
    main()
