"""Exclusions: containers on which tasks of a job should not run, and the shard moves that follow.

A shard holds tasks of many jobs and moves as a whole. If one of its tasks is excluded from a container, the
shard should not be on that container. This is a preference: a shard that fits nowhere else may still go
there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.db.database import METADATA, NAME, Database, upsert, values_of
from penstock.db.journal_store import JournalStore

LONGEST_MS: Millis = 7 * 86_400_000

Bars = Mapping[tuple[int, str], str]  # (shard, container) -> why the shard should not be on that container


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """No task of a job, or not one task of it, on a container until a time."""

    subject: str  # a job, or a task as `job/index`
    birth: str  # of the job: does not apply to another job of the same name
    container: str
    until_ms: Millis
    reason: str = ""

    @property
    def job(self) -> str:
        return self.subject.partition("/")[0]


def bars_of(exclusions: Iterable[Exclusion], shards_of: Callable[[str, str], Collection[int]]) -> Bars:
    """The bars that follow from exclusions. `shards_of(subject, birth)`: the shards of its tasks."""
    found: dict[tuple[int, str], str] = {}
    for exclusion in exclusions:
        for shard in shards_of(exclusion.subject, exclusion.birth):
            why = f"{exclusion.subject} is excluded from {exclusion.container}"
            found.setdefault((shard, exclusion.container), why)
    return found


def bars_in_force(bars: Bars, accepting: Collection[str]) -> Bars:
    """The bars without those of shards that no accepting container could take."""
    shards = {shard for shard, _ in bars}
    stuck = {shard for shard in shards if all((shard, name) in bars for name in accepting)}
    return {key: why for key, why in bars.items() if key[0] not in stuck}


EXCLUSIONS = sa.Table(
    "exclusions",
    METADATA,
    sa.Column("subject", NAME, primary_key=True),
    sa.Column("container", NAME, primary_key=True),
    sa.Column("birth", sa.String, nullable=False),
    sa.Column("until_ms", sa.BigInteger, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
)
_COLUMNS = ("subject", "container", "birth", "until_ms", "reason")
_READ = sa.select(*(EXCLUSIONS.c[name] for name in _COLUMNS)).order_by(
    EXCLUSIONS.c.subject, EXCLUSIONS.c.container
)


class ExclusionStore:
    """The table of exclusions. Expired ones are deleted by the next write."""

    def __init__(self, database: Database, journal: JournalStore) -> None:
        self._database, self._journal = database, journal

    def put(self, exclusions: Sequence[Exclusion], entry: Entry) -> None:
        """Add or extend exclusions, with their journal entry in the same transaction."""
        with self._database.transaction() as connection:
            connection.execute(sa.delete(EXCLUSIONS).where(EXCLUSIONS.c.until_ms <= entry.at_ms))
            rows = [values_of(exclusion) for exclusion in exclusions]
            upsert(connection, EXCLUSIONS, rows, replace=("birth", "until_ms", "reason"))
            self._journal.append(connection, entry)

    def lift(self, job: str, entry: Entry) -> int:
        """Delete all exclusions of a job and its tasks; returns how many there were."""
        with self._database.transaction() as connection:
            mine = [item for item in _read(connection) if item.job == job]
            for item in mine:
                matches = (EXCLUSIONS.c.subject == item.subject) & (EXCLUSIONS.c.container == item.container)
                connection.execute(sa.delete(EXCLUSIONS).where(matches))
            if mine:
                self._journal.append(connection, entry)
            return len(mine)

    def current(self, now_ms: Millis) -> tuple[Exclusion, ...]:
        """The exclusions in force. One that ends after the maximum time was written by a wrong clock:
        ignored.
        """
        with self._database.reading() as connection:
            found = _read(connection)
        return tuple(item for item in found if now_ms < item.until_ms <= now_ms + LONGEST_MS)


def _read(connection: sa.Connection) -> tuple[Exclusion, ...]:
    return tuple(Exclusion(**dict(zip(_COLUMNS, row, strict=True))) for row in connection.execute(_READ))
