"""One installation on this machine: a control plane, its API and its containers, run by `penstock up`."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.alarms.delivery import routes_of
from penstock.app import ControlPlane
from penstock.container.container import SECRET_VARIABLES, ContainerSettings
from penstock.container.host import ContainerHost, reap_container, write_token_file
from penstock.core.errors import ConfigError, EnvironmentProblem, PenstockError, Refused
from penstock.core.folder import (
    endpoint_file,
    folder_lock,
    prepare_folder,
    token_file,
    tokens_folder,
    write_endpoint,
    write_private,
)
from penstock.db.tokens import revoke_token
from penstock.fleet.container_store import ContainerState
from penstock.jobs.layer_writer import Actor
from penstock.server.serving import Listening, Tls, bind
from penstock.server.workers import ApiProcesses, tune_process
from penstock.settings import DATABASE_VARIABLE, ROWS_VARIABLE, Settings
from penstock.streams.places import settle_bus, settle_rows
from penstock.streams.spark.java import require_spark

LOCAL_ROLES = ("admin", "developer", "oncall", "reader")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The parts of a running installation."""

    settings: Settings  # with the addresses of bus and rows that the folder uses
    plane: ControlPlane
    server: ApiProcesses
    containers: tuple[ContainerSettings, ...]

    def ready(self) -> list[str]:
        """The names of the containers whose engines are ready."""
        try:
            rows = self.plane.fleet.containers()
        except PenstockError:  # the store is unavailable for a moment
            return []
        return [row.name for row in rows if row.engine_ready and row.state is ContainerState.LIVE]


def listening_of(settings: Settings) -> Listening:
    """The address to listen on, with its certificate."""
    cert, key = settings.tls_cert, settings.tls_key
    if (cert is None) != (key is None):
        raise ConfigError(
            "TLS needs a certificate and its key",
            why=f"--tls-{'cert' if cert is None else 'key'} is missing",
            fix="give both --tls-cert and --tls-key",
        )
    tls = None if cert is None or key is None else Tls(cert=cert, key=key)
    return Listening(host=settings.host, port=settings.port, tls=tls, name=next(iter(settings.name), ""))


def check(settings: Settings) -> None:
    """Check the settings before a process starts; raises what is wrong."""
    listening_of(settings).check()
    routes_of(webhook=settings.alarm_webhook, channels=settings.alarm_channels)
    if settings.containers and settings.engine == "spark":
        require_spark(settings.master)


@contextlib.contextmanager
def running(settings: Settings) -> Iterator[Installation]:
    """Run an installation until the block ends; leaves no process running. Checks everything before it
    starts.
    """
    folder, listening = settings.folder, listening_of(settings)
    prepare_folder(folder)
    with (
        folder_lock(folder, "a control plane"),
        bind(listening) as listener,
        bind(replace(listening, port=settings.control_port)) as control,
    ):
        tune_process()
        settled_bus, settled_rows = settle_bus(folder, settings.bus), settle_rows(folder, settings.rows)
        settings = settings.model_copy(update={"bus": settled_bus.place, "rows": settled_rows.place})
        plane = ControlPlane(settings)
        write_tokens(plane, folder)
        server = ApiProcesses(plane, listener, control, listening)
        for leftover in sorted((folder / "containers").glob("*/")):
            reap_container(leftover)
        containers = _containers(plane, server.url)
        host = ContainerHost(containers, environment_of(settings), plane.clock, plane.on_container_dead)
        # All checks have passed; from now on bus and rows may be written.
        settled_bus.keep()
        settled_rows.keep()
        with _running(plane, server, host):
            write_endpoint(folder, server.url, settings.verify_with)
            yield Installation(settings=settings, plane=plane, server=server, containers=containers)


@contextlib.contextmanager
def _running(plane: ControlPlane, server: ApiProcesses, host: ContainerHost) -> Iterator[None]:
    """Start all parts; stop them in reverse order, also after an error."""
    with contextlib.ExitStack() as parts:
        parts.callback(plane.stop)
        plane.start()
        parts.callback(server.stop)
        server.start()
        parts.callback(host.stop)
        host.start()
        parts.callback(endpoint_file(plane.settings.folder).unlink, missing_ok=True)
        yield


def _containers(plane: ControlPlane, url: str) -> tuple[ContainerSettings, ...]:
    settings, folder = plane.settings, plane.settings.folder
    return tuple(
        ContainerSettings(
            name=name,
            folder=folder / "containers" / name,
            url=url,
            token_file=_container_token(plane, folder / "containers" / name, name),
            bus=settings.bus_place,
            rows=settings.rows_argument,
            store=settings.store,
            profile=settings.profile,
            engine=settings.engine,
            cores=settings.cores,
            master=settings.master,
        )
        for name in (f"c{number}" for number in range(1, settings.containers + 1))
    )


def environment_of(settings: Settings) -> dict[str, str]:
    """The environment of wardens: with the addresses of database and rows, without other credentials."""
    variables = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    if settings.verify_with is not None:
        variables["PENSTOCK_CA"] = str(settings.verify_with)
    if settings.database:
        variables[DATABASE_VARIABLE] = settings.database
    variables.pop(ROWS_VARIABLE, None)
    if settings.rows and not settings.rows.startswith("sqlite:"):
        variables[ROWS_VARIABLE] = settings.rows
    return variables


def write_tokens(plane: ControlPlane, folder: Path) -> None:
    """Issue the tokens of this machine once, in files that only this user can read."""
    now_ms = plane.clock.now_ms()
    _revoke_old_tokens(plane, folder / "tokens")
    _make_tokens_folder(folder)
    for role in LOCAL_ROLES:
        path = token_file(folder, role)
        try:
            plane.tokens.caller(path.read_text(), now_ms=now_ms)
        except (FileNotFoundError, ValueError, Refused):
            # There is none yet, or it expired, or it is of another store.
            write_private(path, plane.tokens.issue(f"local-{role}", role, now_ms=now_ms))
    _retire_shared_token(plane, folder / "tokens" / "container")


def _retire_shared_token(plane: ControlPlane, path: Path) -> None:
    """Revoke the token that all containers of this folder shared in an earlier version."""
    now_ms = plane.clock.now_ms()
    with contextlib.suppress(FileNotFoundError, ValueError, Refused):
        token_id = plane.tokens.caller(path.read_text(), now_ms=now_ms).token_id
        with plane.database.transaction() as connection:
            revoke_token(connection, token_id, now_ms=now_ms)
        plane.tokens.revoked()
    path.unlink(missing_ok=True)


def _container_token(plane: ControlPlane, folder: Path, name: str) -> Path:
    """The file with a container's own token; issues one if there is no valid one."""
    path, now_ms = folder / "token", plane.clock.now_ms()
    try:
        if plane.tokens.caller(path.read_text(), now_ms=now_ms).container == name:
            return path
    except (FileNotFoundError, ValueError, Refused):
        pass  # there is none yet, or it expired, or it is of another store
    return write_token_file(folder, plane.tokens.issue(name, "container", now_ms=now_ms, container=name))


def _make_tokens_folder(folder: Path) -> None:
    """Create the folder for tokens, with the path it belongs to; deletes tokens of folders that no longer
    exist.
    """
    place = tokens_folder(folder)
    try:
        (folder / "tokens").mkdir(mode=0o700, exist_ok=True)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in place.parent.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if not Path((other / "folder").read_text(encoding="utf-8")).exists():
                    shutil.rmtree(other)
        place.chmod(0o700)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot store tokens in {place}",
            why=str(error),
            fix="set XDG_CONFIG_HOME to a folder of this user, for `penstock up` and for other commands",
        ) from error
    write_private(place / "folder", str(folder.resolve()))


def _revoke_old_tokens(plane: ControlPlane, old: Path) -> None:
    """Revoke the tokens that an earlier version stored where code of jobs could read them."""
    for role in LOCAL_ROLES:
        path = old / role
        if not path.exists():
            continue
        now_ms = plane.clock.now_ms()
        with contextlib.suppress(ValueError, Refused):
            token = plane.tokens.caller(path.read_text(encoding="ascii"), now_ms=now_ms)
            plane.token_service.revoke(
                token.token_id,
                actor=Actor(name="penstock up", role="admin"),
                reason="it was stored where code of jobs could read it",
                idempotency_key=None,
                now_ms=now_ms,
            )
        path.unlink()
