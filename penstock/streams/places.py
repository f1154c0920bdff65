"""Where the data lies: names of buses and row stores as text, so that they travel to workers, and how to
open them.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from penstock.core.errors import ConfigError, EnvironmentProblem
from penstock.streams.bus.embedded_log import EmbeddedLog
from penstock.streams.bus.kafka_place import parse_place
from penstock.streams.bus.log import Log
from penstock.streams.rows.row_store import RowStore
from penstock.streams.rows.sqlite_rows import SqliteRows


@lru_cache(maxsize=16)
def open_log(place: str) -> Log:
    """Open a bus: "embedded:<folder>" or "kafka://<host>:<port>/<prefix>". One handle per process."""
    kind, _, rest = place.partition(":")
    if kind == "embedded":
        return EmbeddedLog(Path(rest))
    if kind == "kafka":
        return _open_kafka(place)
    raise _unknown("bus", place, "embedded:<folder> or kafka://<host>:<port>/<prefix>")


@lru_cache(maxsize=16)
def open_rows(place: str) -> RowStore:
    """Open a row store: "sqlite:<folder>". One handle per process and place."""
    kind, _, rest = place.partition(":")
    if kind == "sqlite":
        return SqliteRows(Path(rest))
    raise _unknown("row store", place, "sqlite:<folder>")


def _open_kafka(place: str) -> Log:
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
