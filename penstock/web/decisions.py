"""What was decided about a job: entries about it and its tasks, and those that moved its shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.app import ControlPlane
from penstock.core.journal import ENTRIES_MAX, Entry
from penstock.tasks.sharding import shard_of

PAGES_MAX = 5  # of the journal that one answer reads: placement tells of everybody's shards
TASKS_MAX = 1000


def decisions_of(plane: ControlPlane, job: str, *, before: int | None, limit: int) -> dict[str, Any]:
    """A page, newest first. `next` says where to go on, also where this page is not full."""
    view = plane.jobs.view(job)
    indices = sorted({*view.running.mapping})[:TASKS_MAX] if view.running is not None else []
    tasks = [f"{job}/{index}" for index in indices]
    shards = {str(shard_of(task, plane.settings.shards)) for task in tasks}
    places = {"shards", *(row.name for row in plane.fleet.containers())} if shards else set()
    subjects = {job, *tasks, *(f"shard {shard}" for shard in shards), *places}
    found: list[Entry] = []
    for _ in range(PAGES_MAX):
        page = plane.journal.about(subjects, before=before)
        mine = (_mine(entry, shards) if entry.subject in places else entry for entry in page)
        for entry in filter(None, mine):
            if len(found) == limit:
                return _page(job, found, found[-1].id)
            found.append(entry)
        if len(page) < ENTRIES_MAX:
            return _page(job, found, None)
        before = page[-1].id
    return _page(job, found, before)


def _page(job: str, found: list[Entry], next_: int | None) -> dict[str, Any]:
    return {"job": job, "decisions": [entry.to_json() for entry in found], "next": next_}


def _mine(entry: Entry, shards: set[str]) -> Entry | None:
    """What of a decision about many shards is about these; None: nothing."""
    named = "moves" if "moves" in entry.data else "shards"
    moved = {shard: to for shard, to in entry.data.get(named, {}).items() if shard in shards}
    return replace(entry, data={named: moved}) if moved else None
