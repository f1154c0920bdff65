"""Views of jobs that were made before and still hold: merging and validating again would give the same.

Whether one holds is asked of the store each time, so a read sees every write that was acknowledged before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.core.sql_store import Database
from penstock.jobs import job_store
from penstock.jobs.job_store import JobRecord
from penstock.jobs.job_view import JobView, view_of
from penstock.jobs.stamp_store import Stamp, ask_stamps, look_at_page, peek_stamps, read_stamps

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
        return self._now(database, peek_stamps(database, names))

    def page(self, database: Database, *, after: str, limit: int) -> tuple[list[JobView], str | None]:
        """The first jobs behind a name that are not removed, each as it was at one moment; and the name
        behind which there are more of them.
        """
        stamps = look_at_page(database, after=after, limit=limit + 1)
        names = list(stamps)[:limit]
        views = self._now(database, {name: stamps[name] for name in names})
        # One that was removed since the page was turned is not on it.
        found = [views[name] for name in names if name in views and not views[name].removed]
        return found, names[-1] if len(stamps) > limit else None

    def _now(self, database: Database, stamps: dict[str, Stamp]) -> dict[str, JobView]:
        """The views of these jobs, of which they had these stamps just now."""
        views = self._known(stamps)
        changed = [name for name in stamps if name not in views]
        return views | self._look(database, changed) if changed else views

    def _look(self, database: Database, names: Sequence[str]) -> dict[str, JobView]:
        if len(names) <= job_store.FEW:
            asked = [ask_stamps(database, names), job_store.ask_records(database, names)]
            stamps, rows = database.look(asked)
            records = job_store.plain_records(rows)
            if records is not None:
                return self._keep({row[0]: tuple(row) for row in stamps}, records)
        with database.reading() as connection:
            return {view.name: view for view in self.many(connection, names)}

    def many(self, connection: sa.Connection, names: Sequence[str]) -> list[JobView]:
        """The views of jobs that exist, in this order."""
        if not names:
            return []
        views = self._of(connection, read_stamps(connection, names))
        return [views[name] for name in names if name in views]

    def _of(self, connection: sa.Connection, stamps: dict[str, Stamp]) -> dict[str, JobView]:
        """The views that these stamps of this moment stand for."""
        views = self._known(stamps)
        return views | self._make(connection, {name: stamps[name] for name in stamps.keys() - views.keys()})

    def _make(self, connection: sa.Connection, stamps: dict[str, Stamp]) -> dict[str, JobView]:
        if not stamps:
            return {}
        # Of the same moment as the stamps: both are read in one transaction.
        records = job_store.load_records(connection, list(stamps))
        return self._keep(stamps, records)

    def _keep(self, stamps: dict[str, Stamp], records: Mapping[str, JobRecord]) -> dict[str, JobView]:
        views = {name: view_of(record) for name, record in records.items()}
        if len(self._made) + len(views) > VIEWS_MAX:
            self._made.clear()
        self._made.update({name: (stamps[name], view) for name, view in views.items()})
        return views

    def _known(self, stamps: dict[str, Stamp]) -> dict[str, JobView]:
        """Those of which the stamp is still the one that the view was made at."""
        views = dict[str, JobView]()
        for name, stamp in stamps.items():
            known = self._made.get(name)
            if known is not None and known[0] == stamp:
                views[name] = known[1]
        return views
