"""The table of containers: the lease of each, and its last report. `shard_store` writes it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.db.bulk import ByName
from penstock.db.database import METADATA, NAME
from penstock.fleet.messages import TaskReport

CONTAINERS = sa.Table(
    "containers",
    METADATA,
    sa.Column("name", NAME, primary_key=True),
    sa.Column("incarnation", sa.String, nullable=False),
    sa.Column("folder_id", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("renewals", sa.BigInteger, nullable=False),
    sa.Column("registered_ms", sa.BigInteger, nullable=False),
    sa.Column("seen_ms", sa.BigInteger, nullable=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("list_version", sa.BigInteger, nullable=False),
    sa.Column("assignment_version", sa.BigInteger, nullable=False),
    sa.Column("engine_ready", sa.Boolean, nullable=False),
    sa.Column("host", sa.String, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("tasks", sa.Text, nullable=False),
    sa.Column("known_dead", sa.Boolean, nullable=False),
    sa.Column("cordoned", sa.Boolean, nullable=False),
    sa.Column("draining", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("capacity", sa.Text, nullable=False, server_default="[]"),
    sa.Column("region", sa.String, nullable=False, server_default=""),
)


class ContainerState(StrEnum):
    """`live`: has a lease. `withheld`: its lease is no longer extended. `gone`: failed over, the lease has
    ended.
    """

    LIVE = "live"
    WITHHELD = "withheld"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRow:
    """One container's lease, and its last report."""

    name: str
    incarnation: str
    folder_id: str
    state: ContainerState
    renewals: int
    registered_ms: Millis
    seen_ms: Millis
    sequence: int
    list_version: int
    assignment_version: int
    engine_ready: bool
    host: str
    pid: int
    known_dead: bool
    cordoned: bool  # gets no new shards
    draining: bool = False  # and its shards move to other containers
    capacity: tuple[float, ...] = ()
    region: str = ""
    tasks_text: str = "[]"  # its task reports as JSON; empty if they were not read

    @property
    def tasks(self) -> tuple[TaskReport, ...]:
        """Its task reports. Decoded on demand: a fleet has many tasks, and most callers need none."""
        return tuple(_decode(self.tasks_text))

    def tasks_of(self, job: str) -> tuple[TaskReport, ...]:
        """Its task reports of one job."""
        if _encode(job).decode() not in self.tasks_text:
            return ()
        return tuple(task for task in self.tasks if task.job == job)

    @property
    def may_run(self) -> bool:
        """Whether a process of it may still be running."""
        return self.state is not ContainerState.GONE and not self.known_dead


def read_container(connection: sa.Connection, name: str, *, with_tasks: bool = True) -> ContainerRow | None:
    """The row of a container, None if there is none."""
    row = connection.execute(_READ if with_tasks else _READ_LEASE, {"key": name}).first()
    return None if row is None else _container_row(row)


def read_containers(connection: sa.Connection, *, with_tasks: bool = True) -> tuple[ContainerRow, ...]:
    """Every container that ever registered, by name."""
    rows = connection.execute(_READ_ALL if with_tasks else _READ_LEASES)
    return tuple(_container_row(row) for row in rows)


def read_reports(connection: sa.Connection) -> list[tuple[str, str]]:
    """(container, its task reports as JSON) of containers that may still run tasks, by name.

    Takes a third of the time of whole rows (15 of 43 ms for 2,000); the API calls it several times a second.
    """
    return [(name, tasks) for name, tasks in connection.execute(_READ_REPORTS)]


def decode_tasks(text: str) -> list[TaskReport]:
    """Decode the task reports of a container."""
    return _decode(text)


def read_leases(connection: sa.Connection, names: Sequence[str]) -> tuple[ContainerRow, ...]:
    """The rows of these containers, without their task reports."""
    return tuple(_container_row(row) for row in _LEASES_OF.rows(connection, names))


def live_containers(connection: sa.Connection, names: Collection[str]) -> set[str]:
    """The names of those containers that have a lease and are not known to be dead."""
    rows = read_leases(connection, sorted(names))
    return {row.name for row in rows if row.state is ContainerState.LIVE and not row.known_dead}


def _container_row(row: Sequence[Any]) -> ContainerRow:
    values = dict(zip(_FIELDS, row, strict=False))
    capacity = values["capacity"]
    values["capacity"] = tuple(json.loads(capacity)) if capacity != "[]" else ()
    values["state"] = ContainerState(values["state"])
    return ContainerRow(**values)


def tasks_to_text(tasks: Sequence[TaskReport]) -> str:
    """Encode task reports for a row."""
    return _encode(tasks).decode()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[TaskReport]).decode


def _container_values(row: ContainerRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in ContainerRow.__slots__}
    text = values.pop("tasks_text")
    return {**values, "state": str(row.state), "tasks": text, "capacity": json.dumps(row.capacity)}


# Built once: every heartbeat executes some of these statements.
_LEASE_COLUMNS = [column for column in CONTAINERS.c if column.name != "tasks"]
_FIELDS = (*(column.name for column in _LEASE_COLUMNS), "tasks_text")
_ALL_COLUMNS = (*_LEASE_COLUMNS, CONTAINERS.c.tasks)
_READ_ALL = sa.select(*_ALL_COLUMNS).order_by(CONTAINERS.c.name)
_READ_LEASES = sa.select(*_LEASE_COLUMNS).order_by(CONTAINERS.c.name)
_READ_REPORTS = (
    sa.select(CONTAINERS.c.name, CONTAINERS.c.tasks)
    .where(CONTAINERS.c.state != ContainerState.GONE.value, ~CONTAINERS.c.known_dead)
    .order_by(CONTAINERS.c.name)
)
_LEASES_OF = ByName(sa.select(*_LEASE_COLUMNS), CONTAINERS.c.name)
_READ = sa.select(*_ALL_COLUMNS).where(CONTAINERS.c.name == sa.bindparam("key"))
_READ_LEASE = sa.select(*_LEASE_COLUMNS).where(CONTAINERS.c.name == sa.bindparam("key"))
# What a heartbeat may change, besides the task reports.
_HEARTBEAT_COLUMNS = (
    *("seen_ms", "renewals", "sequence", "list_version", "assignment_version"),
    *("engine_ready", "host", "pid", "capacity", "region"),
)


# Sets the columns that it is given values for.
_UPDATE = sa.update(CONTAINERS).where(CONTAINERS.c.name == sa.bindparam("key"))
_INSERT = sa.insert(CONTAINERS)


def insert_container(connection: sa.Connection, row: ContainerRow) -> None:
    """Requires: no row of that name."""
    connection.execute(_INSERT, _container_values(row))


def write_container(connection: sa.Connection, row: ContainerRow) -> None:
    """Replace the whole row."""
    connection.execute(_UPDATE, {"key": row.name, **_container_values(row)})


def renew_containers(
    connection: sa.Connection, rows: Sequence[tuple[ContainerRow, Sequence[TaskReport] | None]]
) -> None:
    """Write what the heartbeats of these containers change: also their tasks, where they are given."""
    plain: list[dict[str, Any]] = []
    with_tasks: list[dict[str, Any]] = []
    for row, tasks in rows:
        values = {"key": row.name, **{name: getattr(row, name) for name in _HEARTBEAT_COLUMNS}}
        values["capacity"] = json.dumps(row.capacity)
        if tasks is None:
            plain.append(values)
        else:
            with_tasks.append({**values, "tasks": tasks_to_text(tasks)})
    for batch in (plain, with_tasks):
        if batch:
            connection.execute(_UPDATE, batch)


def update_container(connection: sa.Connection, name: str, /, **values: Any) -> None:
    """Change single columns."""
    connection.execute(_UPDATE, {"key": name, **values})
