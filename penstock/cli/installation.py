"""Commands that run an installation or a container on this machine: `up`, `container --join`, and the hidden
`container run`, which runs a warden or an engine.
"""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer
from pydantic import BaseModel
from rich.console import Console

from penstock.cli.output import Folder
from penstock.cli.watching import stop_on_signals
from penstock.container.sessions import last_failure
from penstock.core.errors import ConfigError, EnvironmentProblem
from penstock.core.folder import make_private_folder, tokens_folder
from penstock.jobs.config import NAME_PATTERN
from penstock.settings import FILE, FOLDER, JoinSettings, Settings

if TYPE_CHECKING:
    from penstock.installation import Installation


out = Console(highlight=False, soft_wrap=True)


def setting(name: str, *flags: str, of: type[BaseModel] = Settings) -> Any:
    """The option for a field of the settings: help, default and limits are those of the field."""
    field = of.model_fields[name]
    limits = {
        limit: getattr(rule, bound)
        for rule in field.metadata
        for limit, bound in (("min", "ge"), ("max", "le"))
        if hasattr(rule, bound)
    }
    default = str(field.default) if field.default or field.default == 0 else False
    return typer.Option(*flags, help=field.description, show_default=default, **limits)


Config = Annotated[
    Path | None,
    typer.Option(help=f"A TOML file with settings; default: {FILE} in the folder, if it exists."),
]


def up(
    context: typer.Context,
    folder: Folder = FOLDER,
    config: Config = None,
    containers: Annotated[int | None, setting("containers")] = None,
    port: Annotated[int | None, setting("port")] = None,
    host: Annotated[str | None, setting("host")] = None,
    tls_cert: Annotated[Path | None, setting("tls_cert")] = None,
    tls_key: Annotated[Path | None, setting("tls_key")] = None,
    tls_ca: Annotated[Path | None, setting("tls_ca")] = None,
    name: Annotated[list[str] | None, setting("name")] = None,
    database: Annotated[str | None, setting("database")] = None,
    bus: Annotated[str | None, setting("bus")] = None,
    rows: Annotated[str | None, setting("rows")] = None,
    engine: Annotated[str | None, setting("engine")] = None,
    cores: Annotated[int | None, setting("cores")] = None,
    master: Annotated[str | None, setting("master")] = None,
    profile: Annotated[str | None, setting("profile")] = None,
    workers: Annotated[int | None, setting("workers")] = None,
    control_port: Annotated[int | None, setting("control_port")] = None,
    control_url: Annotated[str | None, setting("control_url")] = None,
    alarm_webhook: Annotated[str | None, setting("alarm_webhook")] = None,
    alarm_channels: Annotated[str | None, setting("alarm_channels")] = None,
    rescales_max: Annotated[int | None, setting("rescales_max")] = None,
    advice_only: Annotated[bool | None, setting("advice_only", "--advice-only/--no-advice-only")] = None,
) -> None:
    """Run a control plane and its containers on this machine until Ctrl-C.

    Each option but --folder can also be given as PENSTOCK_<OPTION>, or in penstock.toml in the folder.
    """
    from penstock.installation import check, running
    from penstock.streams.places import hidden_password

    settings = Settings.of_up(_given(context), config=config)
    check(settings)
    _log_to_stderr()
    stop = stop_on_signals()
    with running(settings) as installation:
        url, place = installation.server.url, installation.settings
        out.print(f"the control plane listens at {url}")
        where = f"folder {place.folder}, bus {place.bus_place}, rows {hidden_password(place.rows_place)}"
        out.print(where, markup=False)
        out.print("`penstock dashboard` prints the dashboard's address; Ctrl-C stops everything")
        out.print(who_may_read(place.folder), style="yellow", markup=False)
        starting = Starting(installation)
        while not stop.wait(0.5):
            starting.check()
            if not installation.server.is_serving:
                raise EnvironmentProblem(
                    "the API ended unexpectedly", why="see the log above", fix="start `penstock up` again"
                )
        out.print("stopping …")
    out.print("stopped")


def _given(context: typer.Context) -> dict[str, Any]:
    """The options given on the command line."""
    return {
        name: value
        for name, value in context.params.items()
        if name != "config" and value not in (None, [], ())
    }


def _log_to_stderr() -> None:
    """Write the log to stderr, apart from the command's own output."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


class Starting:
    """Prints when containers become ready, and why one cannot start; each message once."""

    def __init__(self, installation: Installation) -> None:
        self._installation, self._clock = installation, installation.plane.clock
        self._began_ms = self._clock.boot_ms()
        containers = installation.containers
        self._waiting = {settings.name: settings for settings in containers}
        self._all, self._is_up = len(containers), False
        self._failures: dict[str, str] = {}
        if containers:
            out.print(f"{self._count(self._all)} ({containers[0].engine}): starting …")
        self.check()

    def check(self) -> None:
        """Check the containers that are not ready yet, and print what changed."""
        if self._is_up and not self._waiting:
            return
        ready = [name for name in self._installation.ready() if self._waiting.pop(name, None) is not None]
        took_s = (self._clock.boot_ms() - self._began_ms) / 1000
        if not self._is_up and (ready or not self._all):
            self._is_up = True
            detail = f": {ready[0]} is ready after {took_s:.0f} s" if ready else ", without containers"
            out.print(f"[green]penstock is up[/] at {self._installation.server.url}{detail}")
        if ready and not self._waiting and self._all > 1:
            out.print(f"all {self._count(self._all)} are ready after {took_s:.0f} s")
        for name, settings in self._waiting.items():
            failure = last_failure(settings.folder)
            if failure and failure != self._failures.get(name):
                self._failures[name] = failure
                out.print(f"[bold red]container {name} cannot start[/]; it retries, Ctrl-C stops it")
                out.print(failure, markup=False)

    @staticmethod
    def _count(number: int) -> str:
        return f"{number} container{'s' * (number != 1)}"


def who_may_read(folder: Path) -> str:
    """A warning: code of jobs runs as the user who owns the tokens."""
    return (
        f"code of jobs and policies runs as this user and can read its files, including the tokens in "
        f"{tokens_folder(folder)}; for code that you do not trust see `penstock up` in docs/cli.md"
    )


def join(
    context: typer.Context,
    url: Annotated[str, typer.Option("--join", metavar="URL", help="The control plane to join.")] = "",
    token: Annotated[
        str,
        typer.Option(
            envvar="PENSTOCK_TOKEN", help="This container's own token; better given as PENSTOCK_TOKEN."
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="The container's name; default: the machine's.")] = "",
    engine: Annotated[str | None, setting("engine", of=JoinSettings)] = None,
    cores: Annotated[int | None, setting("cores", of=JoinSettings)] = None,
    capacity: Annotated[str | None, setting("capacity", of=JoinSettings)] = None,
    region: Annotated[str | None, setting("region", of=JoinSettings)] = None,
    bus: Annotated[str | None, setting("bus", of=JoinSettings)] = None,
    rows: Annotated[str | None, setting("rows", of=JoinSettings)] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Its folder; default: .penstock-joined/<name>.")
    ] = None,
    config: Config = None,
) -> None:
    """Containers: list, drain, cordon and uncordon them; with --join run one on this machine."""
    if context.invoked_subcommand is not None:
        if url:
            raise ConfigError(
                "--join and a command exclude each other",
                why=f"{context.invoked_subcommand!r} was given too",
                fix="give one of the two",
            )
        return
    if not url or not token:
        raise ConfigError(
            "a container needs a URL and a token to join",
            why=f"there is no {'--token, and PENSTOCK_TOKEN is not set' if url else '--join URL'}",
            fix="penstock container --join https://host:7337 --name NAME --token TOKEN; "
            "`penstock token new NAME --role container --why …` issues one for that name",
        )
    from penstock.container.container import join_settings
    from penstock.container.host import run_joined, write_token_file

    name = name or re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:200]
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise ConfigError(
            f"{name[:100]!r} is not a valid container name",
            why="the name becomes part of URLs and file names",
            fix="use letters, digits, `_`, `.` and `-`",
        )
    folder = (directory or Path(".penstock-joined") / name).absolute()
    named = {"url", "token", "name", "directory"}  # options that are no settings
    given = {option: value for option, value in _given(context).items() if option not in named}
    asked = JoinSettings.of_join(given, folder=folder, config=config)
    try:
        make_private_folder(folder)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot use the folder {folder}", why=str(error), fix="name another one with --dir"
        ) from error
    settings = join_settings(
        name, url=url, token_file=write_token_file(folder, token), folder=folder, **asked.model_dump()
    )
    out.print(f"[green]joining[/] {url} as {name} ({asked.engine}); logs in {folder}; stop it with Ctrl-C")
    _log_to_stderr()
    run_joined(settings, stop_on_signals())
    out.print("stopped")


def run(
    name: Annotated[str, typer.Option()],
    folder: Annotated[Path, typer.Option()],
    url: Annotated[str, typer.Option()],
    token_file: Annotated[Path, typer.Option()],
    bus: Annotated[str, typer.Option()],
    rows: Annotated[str, typer.Option()],
    store: Annotated[str, typer.Option()],
    profile: Annotated[str, typer.Option()],
    cores: Annotated[int, typer.Option()],
    master: Annotated[str, typer.Option()],
    engine: Annotated[str, typer.Option()],
    capacity: Annotated[str, typer.Option()],
    region: Annotated[str, typer.Option()],
    incarnation: Annotated[
        str, typer.Option(help="Run the engine of this incarnation, not the warden.")
    ] = "",
) -> None:
    """Run a container's warden, as its host does; with --incarnation the warden's engine."""
    from penstock.container.container import ContainerSettings, run_warden
    from penstock.container.engine import Engine

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
