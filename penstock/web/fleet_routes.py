"""Routes about where things run: containers, shards and tasks, and what people may ask of them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from penstock.app import ControlPlane
from penstock.core.token_store import Caller
from penstock.jobs.layer_writer import REASON_MAX
from penstock.jobs.text_rules import check_line
from penstock.web import bodies, fleet_replies
from penstock.web.answers import answer
from penstock.web.bodies import Name, NameQuery
from penstock.web.fleet import PLACE_PATTERN, Fleet
from penstock.web.guard import Guard
from penstock.web.pools import LONG, WRITES
from penstock.web.replies import problems

ShardNumber = Annotated[int, Path(ge=0, le=2**31 - 1)]
Index = Annotated[int, Path(ge=0, le=2**31 - 1)]
Lines = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[
    str | None,
    Query(
        max_length=250, pattern=PLACE_PATTERN, description="The `place` of an earlier answer: go on there."
    ),
]
ASKING = (404, 507)


class Because:
    """What every order is given with: who, why, when; a reason is needed."""

    def __init__(self, plane: ControlPlane) -> None:
        self._clock = plane.clock

    def __call__(self, caller: Caller, why: str) -> dict[str, Any]:
        check_line("the reason", why, length_max=REASON_MAX)
        return {"now_ms": self._clock.boot_ms(), "reason": why, "actor": caller.name}


def add_fleet_reads(router: APIRouter, fleet: Fleet, guard: Guard) -> None:
    """Where everything is."""

    @router.get("/containers", response_model=fleet_replies.Containers, responses=problems())
    @LONG
    def list_containers(caller: Caller = guard.allow("container.read")) -> Response:
        """Every container ever heard of."""
        return answer({"containers": fleet.containers()})

    @router.get("/shards", response_model=fleet_replies.Shards, responses=problems(404))
    @LONG
    def list_shards(caller: Caller = guard.allow("shard.read"), container: NameQuery = None) -> Response:
        """Every shard, or those that one container has or gets."""
        return answer({"shards": fleet.shards(container)})

    @router.get("/shards/{shard}", response_model=fleet_replies.ShardPage, responses=problems(404))
    @LONG
    def explain_shard(shard: ShardNumber, caller: Caller = guard.allow("shard.read")) -> Response:
        """One shard: where it is, how it came there, what would be done with it next, and why."""
        return answer(fleet.shard(shard))

    @router.get("/tasks/reports", response_model=fleet_replies.TaskReports, responses=problems(404))
    @LONG
    def task_reports(
        caller: Caller = guard.allow("task.read"), job: NameQuery = None, container: NameQuery = None
    ) -> Response:
        """What containers say of tasks, and tasks of which nobody says anything."""
        return answer({"tasks": fleet.tasks(job, container)})

    @router.get(
        "/jobs/{name}/tasks/{index}/log", response_model=fleet_replies.TaskLog, responses=problems(404)
    )
    @LONG
    def task_log(
        name: Name,
        index: Index,
        caller: Caller = guard.allow("log.read"),
        lines: Lines = 100,
        after: After = None,
    ) -> Response:
        """What a task printed: the last lines, or what came after a place."""
        return answer(fleet.log(name, index, lines=lines, after=after))


def add_fleet_orders(router: APIRouter, plane: ControlPlane, fleet: Fleet, guard: Guard) -> None:
    """What people may ask of containers, shards and tasks. Each may be repeated."""
    because = Because(plane)

    @router.post(
        "/containers/{name}/drain", response_model=fleet_replies.ContainerLine, responses=problems(*ASKING)
    )
    @WRITES
    def drain_container(
        name: Name, body: bodies.Because, caller: Caller = guard.allow("container.write")
    ) -> Response:
        """Move everything away from it, and give it nothing new."""
        plane.shard_manager.drain(name, **because(caller, body.why))
        plane.wake_shard_manager()
        return answer(fleet.container(name))

    @router.post(
        "/containers/{name}/cordon", response_model=fleet_replies.ContainerLine, responses=problems(*ASKING)
    )
    @WRITES
    def cordon_container(
        name: Name, body: bodies.Because, caller: Caller = guard.allow("container.write")
    ) -> Response:
        """Give it nothing new; it keeps what it has."""
        plane.shard_manager.cordon(name, **because(caller, body.why))
        return answer(fleet.container(name))

    @router.post(
        "/containers/{name}/uncordon", response_model=fleet_replies.ContainerLine, responses=problems(*ASKING)
    )
    @WRITES
    def uncordon_container(
        name: Name, body: bodies.Because, caller: Caller = guard.allow("container.write")
    ) -> Response:
        """Take it back."""
        plane.shard_manager.uncordon(name, **because(caller, body.why))
        plane.wake_shard_manager()
        return answer(fleet.container(name))

    @router.post("/shards/{shard}/move", response_model=fleet_replies.ShardPage, responses=problems(*ASKING))
    @WRITES
    def move_shard(
        shard: ShardNumber, body: bodies.MoveShard, caller: Caller = guard.allow("shard.write")
    ) -> Response:
        """Begin to move a shard to a container."""
        plane.shard_manager.move(shard, body.container, **because(caller, body.why))
        return answer(fleet.shard(shard))

    @router.post(
        "/shards/{shard}/release", response_model=fleet_replies.ShardPage, responses=problems(*ASKING)
    )
    @WRITES
    def release_shard(
        shard: ShardNumber, body: bodies.Because, caller: Caller = guard.allow("shard.write")
    ) -> Response:
        """Let a quarantined shard be placed again."""
        plane.shard_manager.release(shard, **because(caller, body.why))
        plane.wake_shard_manager()
        return answer(fleet.shard(shard))

    @router.post(
        "/jobs/{name}/tasks/{index}/restart",
        response_model=fleet_replies.Restarting,
        responses=problems(*ASKING),
    )
    @WRITES
    def restart_task(
        name: Name, index: Index, body: bodies.Because, caller: Caller = guard.allow("task.restart")
    ) -> Response:
        """Ask for one task to be ended and started again where it is."""
        task_id = fleet.check_task(name, index)
        container = plane.shard_manager.restart(task_id, **because(caller, body.why))
        return answer({"task_id": task_id, "container": container})
