"""Views of jobs that were made before and still hold: merging and validating again would give the same.

Whether one holds is asked of the store each time, so a read sees every write that was acknowledged before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.core.sql_store import Database
from penstock.jobs import job_store
from penstock.jobs.job_view import JobView, view_of
from penstock.jobs.stamp_store import Stamp, peek_stamps, read_page, read_stamps

if TYPE_CHECKING:
    import sqlalchemy as sa

VIEWS_MAX = 10_000


class ViewCache:
    """The last view of each job, with the stamp it was made at. Thread-safe: one assignment per entry."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Stamp, JobView]] = {}

    def one(self, database: Database, name: str) -> JobView | None:
        """The view of a job, removed or not; None if there is none."""
        return self.several(database, [name]).get(name)

    def several(self, database: Database, names: Sequence[str]) -> dict[str, JobView]:
        """The views of jobs that exist, by name, each as it was at one moment."""
        views, changed = dict[str, JobView](), list[str]()
        for name, stamp in peek_stamps(database, names).items():
            known = self._made.get(name)
            if known is not None and known[0] == stamp:
                views[name] = known[1]
            else:
                changed.append(name)
        if changed:
            with database.reading() as connection:
                views |= {view.name: view for view in self.many(connection, changed)}
        return views

    def many(self, connection: sa.Connection, names: Sequence[str]) -> list[JobView]:
        """The views of jobs that exist, in this order."""
        if not names:
            return []
        views = self._of(connection, read_stamps(connection, names))
        return [views[name] for name in names if name in views]

    def page(self, connection: sa.Connection, *, after: str, limit: int) -> tuple[list[JobView], bool]:
        """The first jobs behind a name that are not removed, and whether there are more of them."""
        stamps = read_page(connection, after=after, limit=limit + 1)
        names = list(stamps)[:limit]
        views = self._of(connection, {name: stamps[name] for name in names})
        return [views[name] for name in names], len(stamps) > limit

    def _of(self, connection: sa.Connection, stamps: dict[str, Stamp]) -> dict[str, JobView]:
        """The views that these stamps of this moment stand for."""
        views = dict[str, JobView]()
        for name, stamp in stamps.items():
            known = self._made.get(name)
            if known is not None and known[0] == stamp:
                views[name] = known[1]
        return views | self._make(connection, {name: stamps[name] for name in stamps.keys() - views.keys()})

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
