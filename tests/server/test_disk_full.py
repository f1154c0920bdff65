"""A full disk is told in three parts, leaves everything as it was, and ends when there is room again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx

from tests.server.world import JOB, World, a_world


def patch(world: World, reason: str) -> httpx.Response:
    body = {"changes": {"task_count": 2}, "why": reason}
    return world.ask("PATCH", f"/jobs/{JOB}/layers/oncall", role="oncall", json=body)


def test_a_full_disk_is_told_and_nothing_is_half_written(small_disk: Path):
    with a_world(small_disk / "plane") as world:
        assert world.submit().status_code == 200
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 512)
            except OSError:
                pass
        version = world.version()
        answers = [patch(world, "x" * 1_900) for _ in range(20)]
        full = [answer for answer in answers if answer.status_code == 507]
        assert full, [answer.text for answer in answers]
        problem = full[-1].json()
        assert problem["title"] and problem["detail"] and problem["fix"]
        done = sum(answer.status_code == 200 for answer in answers)
        assert world.version() == version + done
        data = b"y" * 50_000
        put = world.ask("PUT", f"/packages/{hashlib.sha256(data).hexdigest()}", content=data)
        assert put.status_code == 507 and put.json()["fix"], put.text
        assert not world.plane.packages.has(hashlib.sha256(data).hexdigest())
        assert [path for path in (small_disk / "plane" / "packages").iterdir() if path.suffix != ".zip"] == []
        ballast.unlink()
        assert patch(world, "there is room again").status_code == 200
        assert world.version() == version + done + 1
