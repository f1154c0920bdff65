"""Whoever waits for a newer task list: hears of it at once, and is let go when time or the server is over."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from penstock.core.errors import StoreUnavailable
from penstock.server.routes.containers import WAIT_MAX_S, TaskListWatch
from tests.builders import a_process
from tests.server.served import served
from tests.waiting import LIMIT_S, join, until

LONG_S = LIMIT_S


class Versions:
    """What the store would say, and how often it was asked."""

    def __init__(self, now: int) -> None:
        self.now, self.asked, self.is_away = now, 0, False

    def __call__(self) -> int:
        self.asked += 1
        if self.is_away:
            raise StoreUnavailable("away", why="a test", fix="wait")
        return self.now


async def until_asked(versions: Versions, more: int) -> None:
    wanted = versions.asked + more
    while versions.asked < wanted:
        await asyncio.sleep(0.01)


def test_all_who_wait_hear_of_a_newer_list_and_share_the_looks():
    versions = Versions(7)

    async def main() -> None:
        watch = TaskListWatch(versions)
        waiting = [asyncio.create_task(watch.newer_than(7, LONG_S)) for _ in range(50)]
        await until_asked(versions, 3)
        assert versions.asked < 20 and not any(task.done() for task in waiting)
        versions.now = 8
        await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)
        asked = versions.asked
        await asyncio.sleep(0.3)
        assert versions.asked <= asked + 1, "nobody waits: nobody looks"
        again = asyncio.create_task(watch.newer_than(8, LONG_S))
        await until_asked(versions, 2)
        assert not again.done()
        versions.now = 9
        await asyncio.wait_for(again, LIMIT_S)

    asyncio.run(main())


def test_a_store_that_is_away_lets_nobody_go_and_is_asked_again():
    versions = Versions(7)
    versions.is_away = True

    async def main() -> None:
        watch = TaskListWatch(versions)
        waiting = asyncio.create_task(watch.newer_than(7, LONG_S))
        await until_asked(versions, 3)
        assert not waiting.done()
        versions.is_away, versions.now = False, 8
        await asyncio.wait_for(waiting, LIMIT_S)

    asyncio.run(main())


@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_time_is_over(wait_s: float):
    async def main() -> None:
        await asyncio.wait_for(TaskListWatch(Versions(7)).newer_than(7, wait_s), LIMIT_S)

    asyncio.run(main())


def test_a_container_hears_of_a_new_job_while_it_waits(tmp_path: Path):
    with served(tmp_path) as world:
        container = world.client("container", timeout_s=LONG_S)
        whole = container.task_list(None)
        assert whole is not None
        assert container.task_list(whole["version"], wait_s=0.2) is None
        found: list[object] = []
        waiting = threading.Thread(
            target=lambda: found.append(container.task_list(whole["version"], wait_s=WAIT_MAX_S))
        )
        waiting.start()
        world.client().apply_job("demo.tick", a_process("demo.tick"), why="a test", key="tick")
        until(lambda: not waiting.is_alive(), step=world.plane._sync)
        (news,) = found
        assert isinstance(news, dict) and news["version"] > whole["version"]


def test_a_server_that_ends_lets_them_go(tmp_path: Path):
    with served(tmp_path) as world:
        container = world.client("container", timeout_s=LONG_S)
        whole = container.task_list(None)
        assert whole is not None
        found: list[object] = []
        waiting = threading.Thread(
            target=lambda: found.append(container.task_list(whole["version"], wait_s=WAIT_MAX_S))
        )
        waiting.start()
        lists = world.server.api.state.long_polls[1]
        until(lambda: lists._waiting == 1, "it to wait")
        world.server.stop(LIMIT_S)
        join(waiting)
        assert found == [None]
