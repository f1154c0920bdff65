"""Places of buses and row stores as text, which can be sent to workers; how to open and identify them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from penstock.core.errors import ConfigError, CorruptData, EnvironmentProblem
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.kafka.place import parse_place
from penstock.streams.bus.log import Log
from penstock.streams.rows.row_store import RowStore
from penstock.streams.rows.sqlite import SqliteRows

if TYPE_CHECKING:
    from penstock.jobs.config import JobConfig
    from penstock.streams.bus.kafka.log import KafkaLog

ROWS_FORMS = "sqlite:<folder> or postgresql://<user>@<host>:<port>/<database>"
CHECKPOINT_EXAMPLE = "plan: {computation: {function: main, checkpoint: file:///mnt/shared/checkpoints}}"
BUS_FORMS = "embedded:<folder> or kafka://<host>:<port>/<prefix>"


@lru_cache(maxsize=16)
def open_log(place: str) -> Log:
    """Open a bus: "embedded:<folder>" or "kafka://<host>:<port>/<prefix>". One handle per process."""
    kind, _, rest = place.partition(":")
    if kind == "embedded":
        return EmbeddedLog(Path(rest))
    if kind == "kafka":
        return _open_kafka(place)
    raise _unknown("bus", place, BUS_FORMS)


@lru_cache(maxsize=16)
def open_rows(place: str) -> RowStore:
    """Open a row store: "sqlite:<folder>" or "postgresql://…". One handle per process and place."""
    kind, _, rest = place.partition(":")
    if kind == "sqlite":
        return SqliteRows(Path(rest))
    if kind in ("postgresql", "postgres"):
        # Imported here: workers of an installation with rows on disk need no PostgreSQL client.
        from penstock.streams.rows.postgres import PostgresRows

        return PostgresRows(place)
    raise _unknown("row store", hidden_password(place), ROWS_FORMS)


def identify(place: str) -> str:
    """The identity of a bus, independent of its address: the folder, or the cluster, which must answer."""
    kind, _, rest = place.partition(":")
    if kind == "kafka":
        log = _open_kafka(place)
        try:
            return log.identity()
        finally:
            log.close()
    if kind == "embedded" and rest:
        return place
    raise _unknown("bus", place, BUS_FORMS)


def identify_rows(place: str, *, make: bool = True) -> str:
    """The identity of a row store, independent of its address. `make`: create missing tables."""
    kind, _, rest = place.partition(":")
    if kind in ("postgresql", "postgres"):
        from penstock.streams.rows.postgres_server import identify_database

        return identify_database(place, make=make)
    if kind == "sqlite" and rest:
        return place
    raise _unknown("row store", hidden_password(place), ROWS_FORMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The place of an installation's streams or states; nothing is written before `keep`."""

    place: str
    file: Path
    identity: str = ""  # "": the folder's own disk, which is not recorded

    def keep(self) -> None:
        """Record the place in the folder, for later starts without one."""
        if not self.identity:
            return
        new = self.file.with_suffix(".new")
        new.touch(mode=0o600)  # a place may contain a password
        new.write_text(json.dumps({"place": self.place, "identity": self.identity}))
        new.replace(self.file)


def settle_bus(folder: Path, given: str) -> Settled:
    """The bus of an installation's folder: as given, else as recorded, else on its own disk.

    State in the folder belongs to records of one bus: another bus is refused, another address of it is not.
    """
    return _settle(folder, given, what="bus", own="embedded", identify=identify)


def settle_rows(folder: Path, given: str) -> Settled:
    """The row store of an installation's folder, by the same rules as its bus."""
    return _settle(folder, given, what="rows", own="sqlite", identify=identify_rows)


def kept_bus(folder: Path) -> str:
    """The recorded bus of a folder; "" if it is on the folder's own disk."""
    kept = _kept(folder, "bus")
    return "" if kept is None else kept["place"]


def kept_rows(folder: Path) -> str:
    """The recorded row store of a folder; "" if it is on the folder's own disk."""
    kept = _kept(folder, "rows")
    return "" if kept is None else kept["place"]


def _settle(folder: Path, given: str, *, what: str, own: str, identify: Callable[[str], str]) -> Settled:
    here, kept, file = f"{own}:{folder / what}", _kept(folder, what), _record_file(folder, what)
    if not given and kept is None:
        return Settled(place=here, file=file)
    place = given or (kept or {})["place"]
    identity = identify(place)
    before = kept["identity"] if kept is not None else here if (folder / what).is_dir() else identity
    if before != identity:
        held = {"bus": "streams", "rows": "states"}[what]
        raise ConfigError(
            f"the {held} of {folder} are {'on another bus' if what == 'bus' else 'in another row store'}",
            why=f"they are on {before}, but {identity} was given",
            fix=f"name that one with --{what}, or another folder with --folder",
        )
    return Settled(place=place, file=file, identity="" if place == here else identity)


def _record_file(folder: Path, what: str) -> Path:
    return folder / f"{what}.json"


def _kept(folder: Path, what: str) -> dict[str, str] | None:
    file = _record_file(folder, what)
    try:
        recorded = json.loads(file.read_text())
        return {name: str(recorded[name]) for name in ("place", "identity")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptData(
            f"the {'bus' if what == 'bus' else 'row store'} of the folder {folder} is unknown",
            why=f"{file} cannot be read: {error}",
            fix=f"restore it, or remove it and name the place with --{what}",
        ) from error


def _open_kafka(place: str) -> KafkaLog:
    # Imported here: an installation on its own disk needs no Kafka client.
    try:
        from penstock.streams.bus.kafka.log import KafkaLog
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            "the Kafka client is not installed for this Python",
            why=f"the module {error.name!r} is not installed",
            fix="install penstock with the extra `kafka`",
        ) from error
    return KafkaLog(parse_place(place))


def checkpoint_folder(rows: str, job: str, config: JobConfig) -> Path:
    """The folder of checkpoints of a job of kind `spark`; ConfigError if it is not known. Pure.

    Rows in a folder belong to one machine: checkpoints are beside them. Rows on a server are used by many
    machines: the config must name a folder that all of them share.
    """
    given = config.computation.get("checkpoint")
    if given is None and rows.startswith("sqlite:"):
        return Path(rows.partition(":")[2]).parent / "query_checkpoints"
    if given is None:
        raise ConfigError(
            f"the query of job {job} has no place for its checkpoint",
            why="the rows are on PostgreSQL, so it may run on any machine and needs a shared folder",
            fix=f"mount one on every machine that runs Spark tasks, and name it: {CHECKPOINT_EXAMPLE}",
        )
    found = urlsplit(given) if isinstance(given, str) else None
    folder = Path(unquote(found.path)) if found is not None else Path()
    is_plain = found is not None and found.scheme == "file" and not (found.netloc or found.query)
    if found is None or not is_plain or not folder.is_absolute() or ".." in folder.parts:
        raise ConfigError(
            f"the query of job {job} has an invalid checkpoint folder",
            why="plan.computation.checkpoint is not the URI of a folder: file:/// and an absolute path",
            fix=f"mount the storage, and name the folder, e.g. {CHECKPOINT_EXAMPLE}",
        )
    return folder


def hidden_password(text: str) -> str:
    """A place, or a text with places, without passwords. Pure."""
    text = re.sub(r"(://[^\s:/@\"']*):[^\s\"']*@", r"\1:***@", text)
    return re.sub(r"([?&](?:ssl)?password=)[^\s&\"']*", r"\1***", text)


def _unknown(what: str, place: str, known: str) -> ConfigError:
    return ConfigError(f"no such {what}: {place!r}", why="its form is not known", fix=f"write it as {known}")
