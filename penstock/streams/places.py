"""Where the data lies: names of buses and row stores as text, so that they travel to workers, and how to
open them.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError, CorruptData, EnvironmentProblem
from penstock.streams.bus.embedded_log import EmbeddedLog
from penstock.streams.bus.kafka_place import parse_place
from penstock.streams.bus.log import Log
from penstock.streams.rows.row_store import RowStore
from penstock.streams.rows.sqlite_rows import SqliteRows

if TYPE_CHECKING:
    from penstock.streams.bus.kafka_log import KafkaLog

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
    """Open a row store: "sqlite:<folder>". One handle per process and place."""
    kind, _, rest = place.partition(":")
    if kind == "sqlite":
        return SqliteRows(Path(rest))
    raise _unknown("row store", place, "sqlite:<folder>")


def identify(place: str) -> str:
    """What a bus is, whatever its address: the folder, or the Kafka cluster, which must answer."""
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


def settle_bus(folder: Path, given: str) -> str:
    """The bus of an installation's folder: the one given, else the one it had before, else its own disk.

    State in the folder is about records of one bus: another one is refused, another address of it is not.
    """
    own, kept = f"embedded:{folder / 'bus'}", _kept(folder)
    if not given and kept is None:
        return own
    place = given or (kept or {})["place"]
    identity = identify(place)
    before = kept["identity"] if kept is not None else own if (folder / "bus").is_dir() else identity
    if before != identity:
        raise ConfigError(
            f"the streams of {folder} are on another bus",
            why=f"they are on {before}, asked for was {identity}",
            fix="name that bus with --bus, or another folder with --folder",
        )
    if place != own:
        file = _kept_file(folder)
        file.with_suffix(".new").write_text(json.dumps({"place": place, "identity": identity}))
        file.with_suffix(".new").replace(file)
    return place


def kept_bus(folder: Path) -> str:
    """The bus that a folder's installation had last; "" if it has none but its own."""
    kept = _kept(folder)
    return "" if kept is None else kept["place"]


def _kept_file(folder: Path) -> Path:
    return folder / "bus.json"


def _kept(folder: Path) -> dict[str, str] | None:
    file = _kept_file(folder)
    try:
        said = json.loads(file.read_text())
        return {name: str(said[name]) for name in ("place", "identity")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptData(
            f"cannot tell on which bus the streams of {folder} are",
            why=f"{file} cannot be read: {error}",
            fix="restore it, or remove it and name the bus with --bus",
        ) from error


def _open_kafka(place: str) -> KafkaLog:
    # Imported here: an installation on its own disk needs no Kafka client.
    try:
        from penstock.streams.bus.kafka_log import KafkaLog
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            "this Python cannot talk to Kafka",
            why=f"the module {error.name!r} is not installed",
            fix="install penstock with the extra `kafka`",
        ) from error
    return KafkaLog(parse_place(place))


def _unknown(what: str, place: str, known: str) -> ConfigError:
    return ConfigError(f"no such {what}: {place!r}", why=f"known forms: {known}", fix=f"write it as {known}")
