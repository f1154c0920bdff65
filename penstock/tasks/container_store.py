"""The rows of containers: each one's lease, and what it last said of itself. `shard_store` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.quick_store import MADE_ONCE
from penstock.core.sql_store import METADATA, NAME
from penstock.tasks.messages import TaskReport

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
    """`live`: has a lease. `withheld`: its lease runs out unanswered. `gone`: failed over, lease over."""

    LIVE = "live"
    WITHHELD = "withheld"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRow:
    """One container's lease, and what it last said of itself."""

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
    draining: bool = False  # and loses those it has
    capacity: tuple[float, ...] = ()
    region: str = ""
    tasks_text: str = "[]"  # what it said of its tasks; empty where it was not asked for

    @property
    def tasks(self) -> tuple[TaskReport, ...]:
        """What it said of its tasks. Read when wanted: a fleet's tasks are many, and most looks need none."""
        return tuple(_decode(self.tasks_text))

    def tasks_of(self, job: str) -> tuple[TaskReport, ...]:
        """The same of one job."""
        if _encode(job).decode() not in self.tasks_text:
            return ()
        return tuple(task for task in self.tasks if task.job == job)

    @property
    def may_run(self) -> bool:
        """Whether anything of it may still be alive."""
        return self.state is not ContainerState.GONE and not self.known_dead


def read_container(connection: sa.Connection, name: str, *, with_tasks: bool = True) -> ContainerRow | None:
    """The row of that name."""
    row = connection.execute(_READ if with_tasks else _READ_LEASE, {"key": name}).first()
    return None if row is None else _container_row(row)


def read_containers(connection: sa.Connection, *, with_tasks: bool = True) -> tuple[ContainerRow, ...]:
    """Every container ever heard of, by name."""
    rows = connection.execute(_READ_ALL if with_tasks else _READ_LEASES)
    return tuple(_container_row(row) for row in rows)


def _container_row(row: Sequence[Any]) -> ContainerRow:
    values = dict(zip(_FIELDS, row, strict=False))
    capacity = values["capacity"]
    values["capacity"] = tuple(json.loads(capacity)) if capacity != "[]" else ()
    values["state"] = ContainerState(values["state"])
    return ContainerRow(**values)


def tasks_to_text(tasks: Sequence[TaskReport]) -> str:
    """Tasks as they are kept in a row."""
    return _encode(tasks).decode()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[TaskReport]).decode


def _container_values(row: ContainerRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in ContainerRow.__slots__}
    text = values.pop("tasks_text")
    return {**values, "state": str(row.state), "tasks": text, "capacity": json.dumps(row.capacity)}


# Built once: every beat of every container executes these two.
_LEASE_COLUMNS = [column for column in CONTAINERS.c if column.name != "tasks"]
_FIELDS = (*(column.name for column in _LEASE_COLUMNS), "tasks_text")
_ALL_COLUMNS = (*_LEASE_COLUMNS, CONTAINERS.c.tasks)
_READ_ALL = sa.select(*_ALL_COLUMNS).order_by(CONTAINERS.c.name).execution_options(**MADE_ONCE)
_READ_LEASES = sa.select(*_LEASE_COLUMNS).order_by(CONTAINERS.c.name).execution_options(**MADE_ONCE)
_READ = (
    sa.select(*_ALL_COLUMNS).where(CONTAINERS.c.name == sa.bindparam("key")).execution_options(**MADE_ONCE)
)
_READ_LEASE = (
    sa.select(*_LEASE_COLUMNS).where(CONTAINERS.c.name == sa.bindparam("key")).execution_options(**MADE_ONCE)
)
# What a beat may change; with what it says of its tasks if that is news.
_BEATEN = (
    *("seen_ms", "renewals", "sequence", "list_version", "assignment_version"),
    *("engine_ready", "host", "pid", "capacity", "region"),
)


def _update(*names: str) -> Any:
    return (
        sa.update(CONTAINERS)
        .where(CONTAINERS.c.name == sa.bindparam("key"))
        .values({name: sa.bindparam(name) for name in names})
        .execution_options(**MADE_ONCE)
    )


_WRITE = _update(*(column.name for column in CONTAINERS.c))
_RENEW, _RENEW_WITH_TASKS = _update(*_BEATEN), _update(*_BEATEN, "tasks")


def insert_container(connection: sa.Connection, row: ContainerRow) -> None:
    """Requires: no row of that name."""
    connection.execute(sa.insert(CONTAINERS).values(**_container_values(row)))


def write_container(connection: sa.Connection, row: ContainerRow) -> None:
    """Replace the whole row."""
    connection.execute(_WRITE, {"key": row.name, **_container_values(row)})


def renew_container(connection: sa.Connection, row: ContainerRow, tasks: Sequence[TaskReport] | None) -> None:
    """Write what a beat may change, and the tasks if they are given."""
    values = {"key": row.name, **{name: getattr(row, name) for name in _BEATEN}}
    values["capacity"] = json.dumps(row.capacity)
    if tasks is None:
        connection.execute(_RENEW, values)
    else:
        connection.execute(_RENEW_WITH_TASKS, {**values, "tasks": tasks_to_text(tasks)})


def update_container(connection: sa.Connection, name: str, /, **values: Any) -> None:
    """Change single columns."""
    connection.execute(sa.update(CONTAINERS).where(CONTAINERS.c.name == name).values(**values))
