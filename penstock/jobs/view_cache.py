"""Views of jobs that were made before and still hold: merging and validating again would give the same.

Whether one holds is asked of the store each time, so a read sees every write that was acknowledged before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.core.sql_store import Database
from penstock.jobs import job_store
from penstock.jobs.job_view import JobView, view_of
from penstock.jobs.stamp_store import Stamp, peek_stamp, read_stamps

if TYPE_CHECKING:
    import sqlalchemy as sa

VIEWS_MAX = 10_000


class ViewCache:
    """The last view of each job, with the stamp it was made at. Thread-safe: one assignment per entry."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Stamp, JobView]] = {}

    def one(self, database: Database, name: str) -> JobView | None:
        """The view of a job, removed or not; None if there is none."""
        stamp, known = peek_stamp(database, name), self._made.get(name)
        if stamp is None:
            return None
        if known is not None and known[0] == stamp:
            return known[1]
        with database.reading() as connection:
            found = self.many(connection, [name])
        return found[0] if found else None

    def many(self, connection: sa.Connection, names: Sequence[str]) -> list[JobView]:
        """The views of jobs that exist, in this order."""
        if not names:
            return []
        stamps, views = read_stamps(connection, names), dict[str, JobView]()
        for name, stamp in stamps.items():
            known = self._made.get(name)
            if known is not None and known[0] == stamp:
                views[name] = known[1]
        views |= self._make(connection, {name: stamps[name] for name in stamps.keys() - views.keys()})
        return [views[name] for name in names if name in views]

    def _make(self, connection: sa.Connection, stamps: dict[str, Stamp]) -> dict[str, JobView]:
        if not stamps:
            return {}
        # Of the same moment as the stamps: both are read in one transaction.
        records = job_store.load_records(connection, list(stamps))
        views = {name: view_of(record) for name, record in records.items()}
        if len(self._made) + len(views) > VIEWS_MAX:
            self._made.clear()
        self._made.update({name: (stamps[name], view) for name, view in views.items()})
        return views
