"""What people see of containers, shards and tasks: where everything is, and what it printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.app import ControlPlane
from penstock.core.errors import ConfigError, NotFound, StoreUnavailable
from penstock.core.near_names import did_you_mean, some_of
from penstock.tasks.container_store import ContainerRow
from penstock.tasks.failures import shortly
from penstock.tasks.lending_service import whose
from penstock.tasks.messages import TaskReport
from penstock.tasks.shard_history import KINDS, history_of, say_outlook
from penstock.tasks.shard_load import KINDS as LOAD_KINDS
from penstock.tasks.shard_orders import no_container, no_shard
from penstock.tasks.shard_rows_store import ShardRow
from penstock.tasks.sharding import shard_of
from penstock.tasks.task_logs import log_file, read_on, read_tail

HISTORY_MAX = 20
# What `after` may be: the container, the file's number, how far into it.
PLACE_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}:[0-9]{1,30}:[0-9]{1,18}$"


class Fleet:
    """Reads what one control plane knows of where things run; writes nothing."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def containers(self) -> list[dict[str, Any]]:
        """Every container ever heard of, a line each."""
        owned: dict[str, int] = {}
        for shard in self._plane.fleet.shards():
            if shard.container:
                owned[shard.container] = owned.get(shard.container, 0) + 1
        loans = {loan.container: whose(loan) for loan in self._plane.lending.loans()}
        return [
            {**_container_line(row, owned.get(row.name, 0)), "lending": loans.get(row.name, "")}
            for row in self._plane.fleet.containers()
        ]

    def container(self, name: str) -> dict[str, Any]:
        """One of these lines."""
        for line in self.containers():
            if line["name"] == name:
                return line
        raise no_container(name, self._plane.fleet.containers())

    def shards(self, container: str | None) -> list[dict[str, Any]]:
        """Every shard, or those of one container."""
        if container is not None:
            self.container(container)
        counts = self._plane.task_service.reserved_loads(self._plane.settings.shards)
        return [
            _shard_line(row, counts.get(row.shard, (0,))[0])
            for row in self._plane.fleet.shards()
            if container is None or container in (row.container, row.target)
        ]

    def shard(self, number: int) -> dict[str, Any]:
        """One shard: its record, its tasks, its load, how it came where it is, what would be done next."""
        row = next((row for row in self._plane.fleet.shards() if row.shard == number), None)
        if row is None:
            raise no_shard(number)
        tasks = [
            spec.task_id
            for spec in self._plane.task_service.snapshot().specs()
            if shard_of(spec.task_id, self._plane.settings.shards) == number
        ]
        entries = [
            *(entry for kind in KINDS for entry in self._plane.journal.entries(kind=kind, limit=1000)),
        ]
        load, outlook = self._outlook(number)
        return {
            **_shard_line(row, len(tasks)),
            "task_ids": tasks,
            "load": load,
            "history": [asdict(moved) for moved in history_of(number, entries)[-HISTORY_MAX:]],
            "outlook": outlook,
        }

    def _outlook(self, number: int) -> tuple[dict[str, float], str]:
        try:
            load, decision = self._plane.shard_manager.outlook(number, self._plane.clock.boot_ms())
        except StoreUnavailable as error:  # a standby: the active one knows
            return {}, f"not known here: {error.what}"
        return dict(zip(LOAD_KINDS, load, strict=False)), say_outlook(decision)

    def tasks(self, job: str | None, container: str | None) -> list[dict[str, Any]]:
        """What containers say of tasks, and tasks that should be and of which nobody says anything."""
        if job is not None:
            self.check_job(job)
        if container is not None:
            self.container(container)
        lines = sorted(self._tasks(job), key=lambda line: (line["job"], line["index"], line["generation"]))
        return [line for line in lines if container is None or line["container"] == container]

    def _tasks(self, job: str | None) -> Iterator[dict[str, Any]]:
        reported = set()
        for name, report in self._plane.fleet.task_reports(job):
            reported.add((report.task_id, report.generation))
            yield _task_line(name, report)
        owners = {row.shard: row.container for row in self._plane.fleet.shards()}
        wanted = self._plane.task_service.snapshot().jobs
        for specs in [wanted.get(job, ())] if job is not None else wanted.values():
            for spec in specs:
                if (spec.task_id, spec.generation) in reported:
                    continue
                shard = shard_of(spec.task_id, self._plane.settings.shards)
                waiting = TaskReport(
                    task_id=spec.task_id,
                    job=spec.job,
                    generation=spec.generation,
                    shard=shard,
                    state="unreported",
                    running_version=spec.running_version,
                )
                yield _task_line(owners.get(shard) or "", waiting)

    def check_job(self, job: str) -> None:
        """NotFound, with what may have been meant, unless there is such a job."""
        try:
            self._plane.jobs.view(job)
        except NotFound as error:
            known = [view.name for view in self._plane.jobs.every_view()]
            fix = did_you_mean(job, known, otherwise="`penstock job ls` lists them")
            raise NotFound(error.what, why=f"jobs known: {some_of(known)}", fix=fix) from error

    def check_task(self, job: str, index: int) -> str:
        """The id of a task that is or should be; NotFound names those that are."""
        self.check_job(job)
        indexes = sorted({line["index"] for line in self._tasks(job)})
        if index in indexes:
            return f"{job}/{index}"
        raise NotFound(
            f"job {job} has no task {index}",
            why=f"its tasks now: {', '.join(map(str, indexes)) or 'none'}",
            fix=f"`penstock task ls {job}` lists them" if indexes else "a job that is stopped has none",
        )

    def log(self, job: str, index: int, *, lines: int, after: str | None) -> dict[str, Any]:
        """What a task printed: its last lines, or what came after a place that an earlier answer named."""
        task_id = self.check_task(job, index)
        row = self._container_of(job, task_id)
        folder = self._folder_of(row, task_id)
        place = _place(after)
        if place is None or place[0] != row.name:
            piece = read_tail(log_file(folder, task_id), lines)
        else:
            piece = read_on(log_file(folder, task_id), file=place[1], offset=place[2])
        if piece is None:
            errors = [shortly(line["error"]) for line in self._tasks(job) if line["task_id"] == task_id]
            error = next(filter(None, errors), "")
            raise NotFound(
                f"{task_id} has printed nothing on {row.name}",
                why="only plain processes have a log of their own, from their start on"
                + (f"; its last error: {error}" if error else ""),
                fix=f"`penstock logs {row.name}` shows what its container prints",
            )
        return {
            "task_id": task_id,
            "container": row.name,
            "text": piece.text,
            "place": f"{row.name}:{piece.file}:{piece.offset}",
            "is_gap": piece.is_gap,
        }

    def _container_of(self, job: str, task_id: str) -> ContainerRow:
        rows = {row.name: row for row in self._plane.fleet.containers()}
        where = [line["container"] for line in self._tasks(job) if line["task_id"] == task_id]
        found = next((rows[name] for name in where if name in rows), None)
        if found is None:
            raise NotFound(
                f"{task_id} is nowhere yet",
                why="no container owns its shard",
                fix="`penstock shard ls` shows where shards are",
            )
        return found

    def _folder_of(self, row: ContainerRow, task_id: str) -> Path:
        """Where a container of this machine keeps its files; the id in it proves that it is its own."""
        folder = self._plane.settings.folder / "containers" / row.name
        try:
            if (folder / "folder_id").read_text().strip() == row.folder_id:
                return folder
        except OSError:
            pass
        raise NotFound(
            f"the log of {task_id} cannot be reached from the control plane",
            why=f"{row.name} keeps it in its own folder, on host {row.host or 'unknown'}",
            fix="read it there: <folder of the container>/tasks/logs",
        )


def _place(after: str | None) -> tuple[str, int, int] | None:
    if after is None:
        return None
    if re.fullmatch(PLACE_PATTERN, after) is None:
        raise ConfigError(
            f"{after[:100]!r} is no place in a log", why="an answer names it", fix="give the last `place`"
        )
    container, file, offset = after.rsplit(":", 2)
    return container, int(file), int(offset)


def _container_line(row: ContainerRow, shards: int) -> dict[str, Any]:
    return {
        "name": row.name,
        "state": "dead" if row.known_dead else row.state.value,
        "ready": row.engine_ready,
        "cordoned": row.cordoned,
        "draining": row.draining,
        "shards": shards,
        "tasks": len(row.tasks) if row.may_run else 0,
        "capacity": dict(zip(LOAD_KINDS, row.capacity, strict=False)),
        "region": row.region,
        "host": row.host,
        "pid": row.pid,
        "incarnation": row.incarnation,
        "registered_ms": row.registered_ms,
        "seen_ms": row.seen_ms,
        "list_version": row.list_version,
    }


def _shard_line(row: ShardRow, tasks: int) -> dict[str, Any]:
    return {
        "shard": row.shard,
        "container": row.container,
        "state": row.state.value if row.container else "unowned",
        "target": row.target,
        "epoch": row.epoch,
        "tasks": tasks,
        "blame": row.blame,
        "quarantined": row.is_quarantined,
    }


def _task_line(container: str, report: TaskReport) -> dict[str, Any]:
    number = report.task_id.rpartition("/")[2]
    index = int(number) if number.isdecimal() and len(number) < 10 else -1  # said by a container: anything
    return {"container": container, "index": index, **asdict(report)}
