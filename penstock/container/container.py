"""A container: its settings, how it joins a control plane, and its warden's process. The engine that the
warden starts is `container/engine.py`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.client.client import Client
from penstock.container.warden import Renewal, Warden
from penstock.core.errors import ConfigError, EnvironmentProblem, Refused
from penstock.core.folder import folder_lock
from penstock.core.system_clock import SystemClock
from penstock.db.database import Database
from penstock.db.journal_store import JournalStore
from penstock.fleet.messages import PROFILES, Heartbeat, HeartbeatReply
from penstock.fleet.shard_load import KINDS
from penstock.fleet.shard_store import ShardStore
from penstock.settings import ENGINES, ROWS_VARIABLE
from penstock.streams.places import identify_rows, open_log
from penstock.streams.spark.java import require_spark

# Credentials of the control plane: engines do not get them, because user code runs there.
_SECRETS = ("DATABASE", "TOKEN", "URL", "ALARM_WEBHOOK", "ALARM_CHANNELS")
SECRET_VARIABLES = frozenset(f"PENSTOCK_{name}" for name in _SECRETS)
RUN_COMMAND = (sys.executable, "-m", "penstock.cli.main", "container", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """The settings a container starts with."""

    name: str
    folder: Path
    url: str
    token_file: Path
    bus: str
    rows: str  # sqlite:<folder>, or env:NAME as for the store
    profile: str
    engine: str
    cores: int
    store: str = ""  # a SQLite file, or env:NAME for a URL that must not appear in the process list
    master: str = ""  # another Spark cluster for its tasks, e.g. spark://host:7077; "": the engine's own JVM
    capacity: str = ""  # cpu,memory_mb,disk_mb,network_mbps; "": not limited
    region: str = ""

    def check(self) -> None:
        """Check the settings before a process starts; raises what is wrong."""
        if self.engine not in ENGINES:
            known = ", ".join(ENGINES)
            raise ConfigError(
                f"unknown engine: {self.engine!r}", why=f"known engines: {known}", fix="use one of them"
            )
        if self.profile not in PROFILES:
            known = ", ".join(PROFILES)
            raise ConfigError(
                f"unknown profile: {self.profile!r}", why=f"known profiles: {known}", fix="use one of them"
            )
        read_capacity(self.capacity)
        if self.engine == "spark":
            require_spark(self.master)
            open_log(self.bus)  # raises if the address is invalid; a broker may be unavailable for a while
            # The rows folder is created with the first job, so check its parent; network addresses are not
            # checked.
            needed = {"streams": self.bus.partition(":")} if self.bus.startswith("embedded:") else {}
            if self.rows.startswith("sqlite:"):
                needed["state"] = self.rows.rpartition("/")[0].partition(":")
            for what, (_, _, path) in needed.items():
                if not os.path.isdir(path):  # also False without permission to read it
                    raise EnvironmentProblem(
                        "Spark tasks cannot run here",
                        why=f"{path}, where the control plane keeps its {what}, is not on this machine",
                        fix="join from that machine, or use --engine process",
                    )

    @property
    def checkpoints(self) -> Path:
        """The folder of Spark's checkpoints: in memory if possible, because they are never read again."""
        memory = Path("/dev/shm")
        if not (memory.is_dir() and os.access(memory, os.W_OK)):
            return self.folder / "checkpoints"
        return memory / f"penstock-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]}"

    def clear_checkpoints(self) -> None:
        """Remove the checkpoints. Requires: no engine runs."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def arguments(self) -> list[str]:
        """The settings as command line arguments."""
        found = []
        for key, value in asdict(self).items():
            found += [f"--{key.replace('_', '-')}", str(value)]
        return found


def read_capacity(text: str) -> tuple[float, ...]:
    """cpu,memory_mb,disk_mb,network_mbps as numbers; empty: not limited."""
    if not text:
        return ()
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) != len(KINDS) or not all(0 <= part < 1e12 for part in found):
        raise ConfigError(
            f"not a capacity: {text[:100]!r}",
            why=f"a capacity is {len(KINDS)} numbers: {','.join(KINDS)}",
            fix="e.g. --capacity 4,8192,0,0; 0: it has none of that resource",
        )
    return found


def join_settings(
    name: str,
    *,
    url: str,
    token_file: Path,
    folder: Path,
    engine: str,
    cores: int,
    capacity: str,
    region: str,
    bus: str = "",
    rows: str = "",
) -> ContainerSettings:
    """The settings for a container that joins a control plane, most of them from its API; `bus` and `rows`:
    their addresses as this machine reaches them.
    """
    with Client(url, token_file.read_text().strip()) as client:
        installation = client.installation()
    if (owner := installation.get("container", name)) not in ("", name):
        raise Refused(
            f"this token is not for container {name!r}",
            why=f"it belongs to {owner!r}; each container has its own token",
            fix=f"use `--name {owner}`, or issue one: `penstock token new {name} --role container`",
        )
    is_here = installation["host"] == socket.gethostname()
    settings = ContainerSettings(
        name=name,
        folder=folder,
        url=url,
        token_file=token_file,
        bus=bus or str(installation["bus"]),
        rows=str(installation["rows"]),
        store=reachable_store(str(installation["store"]), is_here=is_here, variables=os.environ),
        profile=str(installation["profile"]),
        engine=engine,
        cores=cores,
        capacity=capacity,
        region=region,
    )
    settings.check()
    if engine == "spark" and settings.rows.startswith("env:"):
        _check_rows(rows, str(installation["rows_identity"]))
        # For the engine; not an argument, because every user can see arguments
        os.environ[ROWS_VARIABLE] = rows
    return settings


def _check_rows(rows: str, expected: str) -> None:
    found = identify_rows(rows, make=False) if rows else ""
    if found != expected:
        raise EnvironmentProblem(
            "Spark tasks cannot run here",
            why="the given row store is not that of the control plane"
            if rows
            else "the control plane keeps its state in a database, and its address was not given",
            fix=f"give its address as {ROWS_VARIABLE} or --rows, or join with --engine process",
        )


def pop_rows_address(place: str) -> str:
    """The row store's address. An environment variable is removed, so that user commands do not
    inherit it.
    """
    if not place.startswith("env:"):
        return place
    return os.environ.pop(place.removeprefix("env:"), "")


def reachable_store(store: str, *, is_here: bool, variables: Mapping[str, str]) -> str:
    """The store if this machine can reach it, else "". A file path is valid only on its own machine."""
    if store.startswith("env:"):
        return store if variables.get(store.removeprefix("env:")) else ""
    return store if is_here and os.access(store, os.R_OK | os.W_OK) else ""


def folder_id(folder: Path) -> str:
    """A persistent id of this folder: proves that a container is the one that registered before."""
    path = folder / "folder_id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


class _HttpLink:
    """The warden's link: the Shard Manager over HTTP, and its store."""

    def __init__(self, client: Client, identity: str, store: str) -> None:
        self._client, self._identity, self._store = client, identity, store
        self._shards: ShardStore | None = None

    def register(self, container: str, incarnation: str) -> None:
        self._client.register(container, incarnation, self._identity)

    def send_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        return self._client.beat(heartbeat)

    def renew(self, container: str, incarnation: str) -> Renewal | None:
        if self._shards is None:
            database = open_store(self._store)
            self._shards = ShardStore(database, JournalStore(database))
        found = self._shards.renew(container, incarnation)
        return None if found is None else Renewal(assignment_version=found.version, shards=found.shards)


def open_store(store: str) -> Database:
    """Open the control plane's database: an existing file, or the URL in the variable named after `env:`."""
    if store.startswith("env:") and (url := os.environ.get(store.removeprefix("env:"))):
        return Database(url)
    if not store or not os.path.isfile(store):
        raise EnvironmentProblem(
            "this container cannot reach the control plane's store",
            why=f"{store} does not exist" if store else "no store was given",
            fix="give it access to the control plane's store, or restore the connection to the control plane",
        )
    return Database(Path(store))


def run_warden(settings: ContainerSettings) -> None:
    """The warden's process: returns after SIGTERM or SIGINT, with nothing left running."""
    profile = PROFILES[settings.profile]
    with folder_lock(settings.folder, f"container {settings.name}"):
        client = Client(
            settings.url, settings.token_file.read_text().strip(), timeout_s=profile.deadline_ms / 4000
        )
        warden = Warden(
            container=settings.name,
            folder=settings.folder,
            engine_command=[*RUN_COMMAND, *settings.arguments()],
            environment={key: value for key, value in os.environ.items() if key not in SECRET_VARIABLES},
            link=_HttpLink(client, folder_id(settings.folder), settings.store),
            profile=profile,
            clock=SystemClock(),
            new_incarnation=lambda: secrets.token_hex(6),
            after_engine=settings.clear_checkpoints,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: warden.stop())
        warden.run()
