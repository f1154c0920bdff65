"""`penstock container --join`: this machine as a container of a control plane elsewhere; and the hidden
command that wardens and engines are started with.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.lendable import keep_token
from penstock.cli.output import out
from penstock.core.errors import ConfigError, EnvironmentProblem
from penstock.jobs.config import NAME_PATTERN
from penstock.settings import BUS_VARIABLE, ROWS_VARIABLE

ENGINE = "What it runs: process (no Java), or spark (where bus and rows are in reach; processes too)."


def join(
    context: typer.Context,
    url: Annotated[str, typer.Option("--join", metavar="URL", help="The control plane to join.")] = "",
    token: Annotated[
        str,
        typer.Option(
            envvar="PENSTOCK_TOKEN", help="This container's own token; better given as PENSTOCK_TOKEN."
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="What it is called; none: as this machine.")] = "",
    engine: Annotated[str, typer.Option(help=ENGINE)] = "process",
    capacity: Annotated[
        str, typer.Option(help="cpu,memory_mb,disk_mb,network_mbps; none: not limited.")
    ] = "",
    region: Annotated[str, typer.Option(help="Where it is, for placement.")] = "",
    bus: Annotated[
        str,
        typer.Option(envvar=BUS_VARIABLE, help="The bus as this machine reaches it; none: as it is told."),
    ] = "",
    rows: Annotated[
        str,
        typer.Option(
            envvar=ROWS_VARIABLE, help="The row store's address, if it is not on the disk; for Spark tasks."
        ),
    ] = "",
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Its own folder; none: .penstock-joined/<name>.")
    ] = None,
) -> None:
    """Containers: list them, take work away from them, give it back; or with --join be one."""
    if context.invoked_subcommand is not None:
        if url:
            raise ConfigError(
                "--join takes no further command",
                why=f"{context.invoked_subcommand!r} was given",
                fix="give one of the two",
            )
        return
    if not url or not token:
        raise ConfigError(
            "a container joins with a URL and a token",
            why=f"there is no {'--token, and PENSTOCK_TOKEN is not set' if url else '--join URL'}",
            fix="penstock container --join https://host:7337 --name NAME --token TOKEN; "
            "`penstock token new NAME --role container --why …` issues one for that name",
        )
    from penstock.cli.up import run_joined
    from penstock.container import join_settings, own_folder

    name = name or re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:200]
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise ConfigError(
            f"no container may be called {name[:100]!r}",
            why="the name becomes part of addresses and file names",
            fix="use letters, digits, `_`, `.` and `-`",
        )
    folder = (directory or Path(".penstock-joined") / name).absolute()
    try:
        own_folder(folder)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot use the folder {folder}", why=str(error), fix="name another one with --dir"
        ) from error
    settings = join_settings(
        name,
        url=url,
        token_file=keep_token(folder, token),
        folder=folder,
        engine=engine,
        capacity=capacity,
        region=region,
        bus=bus,
        rows=rows,
    )
    out.print(f"[green]joining[/] {url} as {name} ({engine}); logs in {folder}; stop it with Ctrl-C")
    run_joined(settings)
    out.print("stopped")


def run(
    name: Annotated[str, typer.Option()],
    folder: Annotated[Path, typer.Option()],
    url: Annotated[str, typer.Option()],
    token_file: Annotated[Path, typer.Option()],
    bus: Annotated[str, typer.Option()],
    rows: Annotated[str, typer.Option()],
    store: Annotated[str, typer.Option()] = "",
    profile: Annotated[str, typer.Option()] = "fast",
    cores: Annotated[int, typer.Option()] = 2,
    master: Annotated[str, typer.Option()] = "",
    engine: Annotated[str, typer.Option()] = "spark",
    capacity: Annotated[str, typer.Option()] = "",
    region: Annotated[str, typer.Option()] = "",
    incarnation: Annotated[str, typer.Option(help="Be the engine of this life, not the warden.")] = "",
) -> None:
    """A container's warden, started by `penstock up`, or with --incarnation the warden's engine."""
    from penstock.container import ContainerSettings, Engine, run_warden

    settings = ContainerSettings(
        name=name,
        folder=folder,
        url=url,
        token_file=token_file,
        bus=bus,
        rows=rows,
        store=store,
        engine=engine,
        capacity=capacity,
        region=region,
        profile=profile,
        cores=cores,
        master=master,
    )
    if incarnation:
        raise SystemExit(Engine(settings).run())
    run_warden(settings)
