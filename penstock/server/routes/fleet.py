"""Routes about where things run: containers, shards and tasks, and what people may ask of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi import Path as InPath
from pydantic import Field

from penstock.container.process_runner import log_file, read_on, read_tail
from penstock.core.errors import ConfigError, NotFound, StoreUnavailable
from penstock.core.text import did_you_mean, some_of
from penstock.db.tokens import Caller
from penstock.fleet.container_store import ContainerRow, ContainerState
from penstock.fleet.loan_service import describe_loan
from penstock.fleet.messages import ShardState, TaskReport, summarize_error
from penstock.fleet.orders import no_container, no_shard
from penstock.fleet.placement.placement import KINDS, ShardDecision, describe_outlook, history_of
from penstock.fleet.shard_load import KINDS as LOAD_KINDS
from penstock.fleet.shard_load import shard_of
from penstock.fleet.shard_store import ShardRow
from penstock.jobs.layer_writer import REASON_MAX
from penstock.jobs.text_rules import check_line
from penstock.server import bodies
from penstock.server.bodies import Name, NameQuery
from penstock.server.pools import LONG, WRITES
from penstock.server.replies import Number, Reply, problems
from penstock.server.security import Guard
from penstock.server.services import Control

HISTORY_MAX = 20
# The `after` of a task log: container, file number, offset.
PLACE_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}:[0-9]{1,30}:[0-9]{1,18}$"


class ContainerLine(Reply):
    """One container as of its last heartbeat."""

    name: str
    state: ContainerState | Literal["dead"]
    ready: bool
    cordoned: bool
    draining: bool
    shards: int
    tasks: int
    capacity: dict[str, Number]
    region: str
    host: str
    pid: int
    incarnation: str
    registered_ms: int
    seen_ms: int
    list_version: int
    lending: str

    @classmethod
    def of(cls, row: ContainerRow, *, shards: int, lending: str) -> ContainerLine:
        return ContainerLine(
            name=row.name,
            state="dead" if row.known_dead else row.state,
            ready=row.engine_ready,
            cordoned=row.cordoned,
            draining=row.draining,
            shards=shards,
            tasks=len(row.tasks) if row.may_run else 0,
            capacity=dict(zip(LOAD_KINDS, row.capacity, strict=False)),
            region=row.region,
            host=row.host,
            pid=row.pid,
            incarnation=row.incarnation,
            registered_ms=row.registered_ms,
            seen_ms=row.seen_ms,
            list_version=row.list_version,
            lending=lending,
        )


class Containers(Reply):
    """Every container that ever registered."""

    containers: list[ContainerLine]


class ShardLine(Reply):
    """One shard's record and number of tasks."""

    shard: int
    container: str | None
    state: ShardState | Literal["unowned"]
    target: str | None
    epoch: int
    tasks: int
    blame: int
    quarantined: bool

    @classmethod
    def of(cls, row: ShardRow, tasks: int) -> ShardLine:
        return ShardLine(
            shard=row.shard,
            container=row.container,
            state=row.state if row.container else "unowned",
            target=row.target,
            epoch=row.epoch,
            tasks=tasks,
            blame=row.blame,
            quarantined=row.is_quarantined,
        )


class Shards(Reply):
    """Shards by their numbers."""

    shards: list[ShardLine]


class ShardMoved(Reply):
    """One decision that moved a shard."""

    at_ms: int
    actor: str
    decision: str
    reason: str

    @classmethod
    def of(cls, moved: ShardDecision) -> ShardMoved:
        return ShardMoved(at_ms=moved.at_ms, actor=moved.actor, decision=moved.decision, reason=moved.reason)


class ShardPage(ShardLine):
    """One shard with its history; `outlook`: what the next placement round would do with it, and why."""

    task_ids: list[str]
    load: dict[str, Number]
    history: list[ShardMoved]
    outlook: str


class TaskReportLine(Reply):
    """One task; state `unreported`: it is expected, and no container reports it."""

    container: str
    task_id: str
    state: str
    job: str
    index: int
    generation: int
    shard: int
    running_version: int
    error: str
    restarts: int
    metrics: dict[str, float]
    failures: dict[str, int]

    @classmethod
    def of(cls, container: str, report: TaskReport) -> TaskReportLine:
        number = report.task_id.rpartition("/")[2]
        return TaskReportLine(
            container=container,
            # Reported by a container: not trusted.
            index=int(number) if number.isdecimal() and len(number) < 10 else -1,
            task_id=report.task_id,
            job=report.job,
            generation=report.generation,
            shard=report.shard,
            state=report.state,
            running_version=report.running_version,
            error=report.error,
            restarts=report.restarts,
            metrics=report.metrics,
            failures=report.failures,
        )


class TaskReports(Reply):
    """Tasks by job and index."""

    tasks: list[TaskReportLine]


class TaskLog(Reply):
    """A part of a task's log; `place`: its end position, `is_gap`: text before it was deleted."""

    task_id: str
    container: str
    text: str
    place: str
    is_gap: bool


class Restarting(Reply):
    """A task whose restart was ordered, and its container."""

    task_id: str
    container: str


class Buried(Reply):
    """Whether the container was recorded as alive until now."""

    is_news: bool


class InstallationReply(Reply):
    """The settings that a container needs to join."""

    profile: str
    bus: str
    rows: str
    rows_identity: str
    store: str
    host: str
    container: str = Field(description='The container for which the token is valid; "": any.')


class FleetReader:
    """Reads containers, shards, tasks and their logs; writes nothing."""

    def __init__(self, plane: Control) -> None:
        self._plane = plane

    def containers(self) -> list[ContainerLine]:
        """A line for every container that ever registered."""
        owned: dict[str, int] = {}
        for shard in self._plane.fleet.shards():
            if shard.container:
                owned[shard.container] = owned.get(shard.container, 0) + 1
        loans = {loan.container: describe_loan(loan) for loan in self._plane.lending.loans()}
        return [
            ContainerLine.of(row, shards=owned.get(row.name, 0), lending=loans.get(row.name, ""))
            for row in self._plane.fleet.containers()
        ]

    def container(self, name: str) -> ContainerLine:
        """The line of one container."""
        for line in self.containers():
            if line.name == name:
                return line
        raise no_container(name, self._plane.fleet.containers())

    def shards(self, container: str | None) -> list[ShardLine]:
        """Every shard, or those of one container."""
        if container is not None:
            self.container(container)
        counts = self._plane.task_service.reserved_loads(self._plane.settings.shards)
        return [
            ShardLine.of(row, counts.get(row.shard, (0,))[0])
            for row in self._plane.fleet.shards()
            if container is None or container in (row.container, row.target)
        ]

    def shard(self, number: int) -> ShardPage:
        """One shard: its record, tasks, load, history, and what placement would do with it."""
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
        return ShardPage(
            **dict(ShardLine.of(row, len(tasks))),
            task_ids=tasks,
            load=load,
            history=[ShardMoved.of(moved) for moved in history_of(number, entries)[-HISTORY_MAX:]],
            outlook=outlook,
        )

    def _outlook(self, number: int) -> tuple[dict[str, Number], str]:
        try:
            load, decision = self._plane.shard_manager.outlook(number, self._plane.clock.boot_ms())
        except StoreUnavailable as error:  # on a standby; only the active instance has it
            return {}, f"unknown on this instance: {error.what}"
        return dict(zip(LOAD_KINDS, load, strict=False)), describe_outlook(decision)

    def tasks(self, job: str | None, container: str | None) -> list[TaskReportLine]:
        """Tasks that containers report, and expected tasks that no container reports."""
        if job is not None:
            self.check_job(job)
        if container is not None:
            self.container(container)
        lines = sorted(self._tasks(job), key=lambda line: (line.job, line.index, line.generation))
        return [line for line in lines if container is None or line.container == container]

    def _tasks(self, job: str | None) -> Iterator[TaskReportLine]:
        reported = set()
        for name, report in self._plane.fleet.task_reports(job):
            reported.add((report.task_id, report.generation))
            yield TaskReportLine.of(name, report)
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
                yield TaskReportLine.of(owners.get(shard) or "", waiting)

    def check_job(self, job: str) -> None:
        """NotFound, with a suggestion, if the job does not exist."""
        try:
            self._plane.jobs.view(job)
        except NotFound as error:
            known = [view.name for view in self._plane.jobs.every_view()]
            fix = did_you_mean(job, known, otherwise="`penstock job ls` lists them")
            raise NotFound(error.what, why=f"jobs known: {some_of(known)}", fix=fix) from error

    def check_task(self, job: str, index: int) -> str:
        """The id of a reported or expected task; NotFound lists the job's tasks."""
        self.check_job(job)
        indexes = sorted({line.index for line in self._tasks(job)})
        if index in indexes:
            return f"{job}/{index}"
        raise NotFound(
            f"job {job} has no task {index}",
            why=f"its tasks now: {', '.join(map(str, indexes)) or 'none'}",
            fix=f"`penstock task ls {job}` lists them" if indexes else "start the job",
        )

    def log(self, job: str, index: int, *, lines: int, after: str | None) -> TaskLog:
        """A task's log: its last lines, or the text after the `place` of an earlier response."""
        task_id = self.check_task(job, index)
        row = self._container_of(job, task_id)
        folder = self._folder_of(row, task_id)
        place = _place(after)
        if place is None or place[0] != row.name:
            piece = read_tail(log_file(folder, task_id), lines)
        else:
            piece = read_on(log_file(folder, task_id), file=place[1], offset=place[2])
        if piece is None:
            errors = [summarize_error(line.error) for line in self._tasks(job) if line.task_id == task_id]
            error = next(filter(None, errors), "")
            raise NotFound(
                f"{task_id} has no log on {row.name}",
                why="only tasks of kind `process` have a log of their own"
                + (f"; its last error: {error}" if error else ""),
                fix=f"`penstock logs {row.name}` shows the log of its container",
            )
        return TaskLog(
            task_id=task_id,
            container=row.name,
            text=piece.text,
            place=f"{row.name}:{piece.file}:{piece.offset}",
            is_gap=piece.is_gap,
        )

    def _container_of(self, job: str, task_id: str) -> ContainerRow:
        rows = {row.name: row for row in self._plane.fleet.containers()}
        where = [line.container for line in self._tasks(job) if line.task_id == task_id]
        found = next((rows[name] for name in where if name in rows), None)
        if found is None:
            raise NotFound(
                f"{task_id} is not placed yet",
                why="no container owns its shard",
                fix="`penstock shard ls` lists shards and their containers",
            )
        return found

    def _folder_of(self, row: ContainerRow, task_id: str) -> Path:
        """The folder of a container on this machine; the id in it must be the container's."""
        folder = self._plane.settings.folder / "containers" / row.name
        try:
            if (folder / "folder_id").read_text().strip() == row.folder_id:
                return folder
        except OSError:
            pass
        raise NotFound(
            f"the log of {task_id} cannot be reached from the control plane",
            why=f"it is in the folder of {row.name}, on host {row.host or 'unknown'}",
            fix="read it there: <folder of the container>/tasks/logs",
        )


def _place(after: str | None) -> tuple[str, int, int] | None:
    if after is None:
        return None
    if re.fullmatch(PLACE_PATTERN, after) is None:
        raise ConfigError(
            f"{after[:100]!r} is not a valid log position",
            why="it must be the `place` of an earlier response",
            fix="send the last `place`",
        )
    container, file, offset = after.rsplit(":", 2)
    return container, int(file), int(offset)


ShardNumber = Annotated[int, InPath(ge=0, le=2**31 - 1)]
Index = Annotated[int, InPath(ge=0, le=2**31 - 1)]
Lines = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[
    str | None,
    Query(
        max_length=250,
        pattern=PLACE_PATTERN,
        description="The `place` of an earlier response, to continue.",
    ),
]
ASKING = (404, 507)


class OrderArguments:
    """Makes the arguments that every order takes: actor, reason and time. A reason is required."""

    def __init__(self, plane: Control) -> None:
        self._clock = plane.clock

    def __call__(self, caller: Caller, why: str) -> dict[str, Any]:
        check_line("the reason", why, length_max=REASON_MAX)
        return {"now_ms": self._clock.boot_ms(), "reason": why, "actor": caller.name}


def add_fleet_reads(router: APIRouter, fleet: FleetReader, guard: Guard) -> None:
    """Routes to read containers, shards and tasks."""

    @router.get("/containers", responses=problems())
    @LONG
    def list_containers(caller: Caller = guard.allow("container.read")) -> Containers:
        """Every container that ever registered."""
        return Containers(containers=fleet.containers())

    @router.get("/shards", responses=problems(404))
    @LONG
    def list_shards(caller: Caller = guard.allow("shard.read"), container: NameQuery = None) -> Shards:
        """Every shard, or those that one container owns or is the target of."""
        return Shards(shards=fleet.shards(container))

    @router.get("/shards/{shard}", responses=problems(404))
    @LONG
    def explain_shard(shard: ShardNumber, caller: Caller = guard.allow("shard.read")) -> ShardPage:
        """One shard: its container, its history, and what placement would do with it next, and why."""
        return fleet.shard(shard)

    @router.get("/tasks/reports", responses=problems(404))
    @LONG
    def task_reports(
        caller: Caller = guard.allow("task.read"), job: NameQuery = None, container: NameQuery = None
    ) -> TaskReports:
        """Tasks that containers report, and expected tasks that no container reports."""
        return TaskReports(tasks=fleet.tasks(job, container))

    @router.get("/jobs/{name}/tasks/{index}/log", responses=problems(404))
    @LONG
    def task_log(
        name: Name,
        index: Index,
        caller: Caller = guard.allow("log.read"),
        lines: Lines = 100,
        after: After = None,
    ) -> TaskLog:
        """A task's log: its last lines, or the text after a position."""
        return fleet.log(name, index, lines=lines, after=after)


def add_fleet_orders(router: APIRouter, plane: Control, fleet: FleetReader, guard: Guard) -> None:
    """Routes to give orders for containers, shards and tasks. Each may be repeated."""
    arguments = OrderArguments(plane)

    @router.post("/containers/{name}/drain", responses=problems(*ASKING))
    @WRITES
    def drain_container(
        name: Name, body: bodies.ReasonBody, caller: Caller = guard.allow("container.write")
    ) -> ContainerLine:
        """Move all shards away from the container, and place no new ones there."""
        plane.shard_manager.drain(name, **arguments(caller, body.why))
        plane.wake_shard_manager()
        return fleet.container(name)

    @router.post("/containers/{name}/cordon", responses=problems(*ASKING))
    @WRITES
    def cordon_container(
        name: Name, body: bodies.ReasonBody, caller: Caller = guard.allow("container.write")
    ) -> ContainerLine:
        """Place no new shards on the container; it keeps those it has."""
        plane.shard_manager.cordon(name, **arguments(caller, body.why))
        return fleet.container(name)

    @router.post("/containers/{name}/uncordon", responses=problems(*ASKING))
    @WRITES
    def uncordon_container(
        name: Name, body: bodies.ReasonBody, caller: Caller = guard.allow("container.write")
    ) -> ContainerLine:
        """Use the container for placement again."""
        plane.shard_manager.uncordon(name, **arguments(caller, body.why))
        plane.wake_shard_manager()
        return fleet.container(name)

    @router.post("/shards/{shard}/move", responses=problems(*ASKING))
    @WRITES
    def move_shard(
        shard: ShardNumber, body: bodies.MoveShardBody, caller: Caller = guard.allow("shard.write")
    ) -> ShardPage:
        """Begin to move a shard to a container."""
        plane.shard_manager.move(shard, body.container, **arguments(caller, body.why))
        return fleet.shard(shard)

    @router.post("/shards/{shard}/release", responses=problems(*ASKING))
    @WRITES
    def release_shard(
        shard: ShardNumber, body: bodies.ReasonBody, caller: Caller = guard.allow("shard.write")
    ) -> ShardPage:
        """Allow a quarantined shard to be placed again."""
        plane.shard_manager.release(shard, **arguments(caller, body.why))
        plane.wake_shard_manager()
        return fleet.shard(shard)

    @router.post(
        "/jobs/{name}/tasks/{index}/restart",
        responses=problems(*ASKING),
    )
    @WRITES
    def restart_task(
        name: Name, index: Index, body: bodies.ReasonBody, caller: Caller = guard.allow("task.restart")
    ) -> Restarting:
        """Order a restart of one task in its container."""
        task_id = fleet.check_task(name, index)
        container = plane.shard_manager.restart(task_id, **arguments(caller, body.why))
        return Restarting(task_id=task_id, container=container)
