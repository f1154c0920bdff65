"""Claims about `penstock container`, `shard`, `task` and `top`, on a control plane whose container only speaks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.fleet import follow_log, split_task
from penstock.cli.output import connect
from penstock.client import Client
from penstock.container.process_runner import RotatedFile, log_file
from penstock.core.errors import ConfigError, NotFound, StoreUnavailable
from penstock.core.loop import Loop
from penstock.fleet.messages import Heartbeat, TaskReport
from tests.builders import a_process
from tests.cli.world import Run, Started, World, a_world
from tests.streams.test_load import counted
from tests.waiting import until

JOB = "demo.tick"


class Speaker:
    """A container that beats and says of its tasks what it is told to; nothing runs."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.sequence, self.acked, self.orders = name, 0, (), []
        self.tasks: tuple[TaskReport, ...] = ()
        now_ms = world.plane.clock.now_ms()
        token = world.plane.tokens.issue(name, "container", now_ms=now_ms, container=name)
        self.client = Client(world.url, token)
        self.client.register(name, "i1", f"folder-{name}")
        self.loop = Loop(name, self.beat, every_ms=50).start()

    def beat(self) -> None:
        self.sequence += 1
        reply = self.client.beat(
            Heartbeat(
                container=self.name,
                incarnation="i1",
                sequence=self.sequence,
                acked=self.acked,
                tasks=self.tasks,
                engine_ready=True,
                host="testbed",
            )
        )
        self.acked = reply.shards
        self.orders += reply.restarts

    def stop(self) -> None:
        self.loop.stop()
        self.client.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, dict[str, Speaker]]]:
    """Two containers and a job of two processes, one of which says that it runs on c1."""
    with a_world(tmp_path_factory.mktemp("fleet") / "plane") as world:
        with connect(world.folder) as client:
            client.apply_job(JOB, a_process(JOB, task_count=2), why="new", key="k")
        speakers = {name: Speaker(world, name) for name in ("c1", "c2")}
        try:
            speakers["c1"].tasks = (
                TaskReport(
                    task_id=f"{JOB}/0",
                    job=JOB,
                    generation=1,
                    shard=3,
                    state="running",
                    metrics={"cpu": 0.5, "memory_mb": 12.0},
                ),
            )
            until(lambda: all(row.container for row in world.plane.fleet.shards()))
            until(lambda: world.plane.jobs.view(JOB).is_in_sync)
            yield world, speakers
        finally:
            for speaker in speakers.values():
                speaker.stop()


@pytest.fixture
def cli(fleet: tuple[World, dict[str, Speaker]], run: Run) -> Run:
    def call(*arguments: Any) -> Any:
        return run(*arguments, "--folder", fleet[0].folder)

    return call


def test_containers_are_listed(cli: Run):
    found = cli("container", "ls")
    assert found.code == 0 and "c1 live shards" in found.text and "testbed" in found.text
    assert [row["name"] for row in cli("container", "ls", "-o", "json").json] == ["c1", "c2"]
    assert "- name: c1" in cli("container", "ls", "-o", "yaml").out


def test_a_container_is_cordoned_drained_and_taken_back(cli: Run):
    assert "cordoned c2" in cli("container", "cordon", "c2", "--why", "a look").text
    assert "c2 live nothing, cordoned" in cli("container", "ls").text
    assert "draining c2" in cli("container", "drain", "c2", "--why", "new kernel").text
    until(lambda: "c2 live nothing, drained 0" in cli("container", "ls").text)
    assert cli("container", "uncordon", "c2", "--why", "it is back", "-o", "json").json["draining"] is False
    assert "new kernel" in cli("journal", "c2").text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("container", "drain", "c11", "--why", "x"), "did you mean `c1`?"),
        (("shard", "ls", "--container", "c-2"), "did you mean `c2`?"),
        (("shard", "explain", "64"), "there is no shard 64"),
        (("shard", "move", "1", "c22", "--why", "x"), "did you mean `c2`?"),
        (("shard", "release", "99", "--why", "x"), "there is no shard 99"),
        (("task", "ls", "demo.tack"), f"did you mean `{JOB}`?"),
        (("task", "restart", f"{JOB}/9", "--why", "x"), "its tasks now: 0, 1"),
        (("task", "logs", "demo.tock/0"), f"did you mean `{JOB}`?"),
        (("task", "logs", f"{JOB}/0"), "cannot be reached from the control plane"),
    ],
)
def test_what_is_not_there_is_exit_code_3_with_a_suggestion(cli: Run, arguments: tuple[str, ...], said: str):
    assert said in cli(*arguments).is_refused(3)


@pytest.mark.parametrize("name", ["demo.tick", "demo.tick/", "/1", "demo.tick/one", "demo.tick/-1", ""])
def test_what_is_no_task_is_refused_with_an_example(cli: Run, name: str):
    assert "not a task" in cli("task", "restart", name, "--why", "x").is_refused()
    with pytest.raises(ConfigError):
        split_task(name)


def test_a_task_is_its_job_and_index():
    assert split_task("demo.tick/12") == ("demo.tick", 12)


def test_shards_are_listed_explained_and_moved(cli: Run):
    assert cli("shard", "ls", "--container", "c1").code == 0

    def moved() -> str:
        """A shard of c1 that goes to c2 because we say so. Others go for balance: c2 was drained before."""
        rows = cli("shard", "ls", "-o", "json").json
        assert len(rows) == 64
        shard = next(str(row["shard"]) for row in rows if row["container"] == "c1" and not row["target"])
        is_asked = cli("shard", "move", shard, "c2", "--why", "closer").code == 0
        return shard if is_asked and "closer" in cli("shard", "explain", shard).text else ""

    shard = until(moved, "a shard that is not on its way")
    until(lambda: cli("shard", "explain", shard, "-o", "json").json["container"] == "c2", "its arrival")
    explained = cli("shard", "explain", shard)
    assert "c1 → c2 closer" in explained.text and "local-oncall" in explained.text
    assert "owned by c2" in explained.text and "next" in explained.text
    assert "released" in cli("shard", "release", shard, "--why", "fine").text


def test_tasks_are_listed_and_restarted(cli: Run, fleet: tuple[World, dict[str, Speaker]]):
    until(lambda: "running" in cli("task", "ls").text)
    found = cli("task", "ls", JOB)
    assert f"{JOB}/0 c1 running" in found.text and "50% 12 MB" in found.text
    assert f"{JOB}/1" in found.text and "unreported" in found.text
    listed = cli("task", "ls", "--container", "c1", "-o", "json").json
    assert f"{JOB}/0" in {row["task_id"] for row in listed}
    assert f"ordered c1 to restart {JOB}/0" in cli("task", "restart", f"{JOB}/0", "--why", "it hangs").text
    until(lambda: any(order.task_id == f"{JOB}/0" for order in fleet[1]["c1"].orders))


def test_top_shows_one_frame(cli: Run):
    found = cli("top", "--once")
    assert found.code == 0 and "1 of 1 jobs running" in found.text and "busiest tasks" in found.text
    assert "c1 live" in found.text and "0.50" in found.text and "last decisions" in found.text
    data = cli("top", "--once", "-o", "json").json
    assert {"containers", "tasks", "jobs", "journal", "now_ms"} == set(data)


def test_a_log_is_printed_and_cannot_steer_the_terminal(
    cli: Run, fleet: tuple[World, dict[str, Speaker]], tmp_path: Path
):
    folder = fleet[0].folder / "containers" / "c1"
    file = RotatedFile(log_file(folder, f"{JOB}/0"))
    file.write(b"one\n\x1b[31mtwo\tthree\n")
    file.close()
    (folder / "folder_id").write_text("folder-c1")
    try:
        found = cli("task", "logs", f"{JOB}/0", "-n", "1")
        assert found.out == "\ufffd[31mtwo\tthree\n"
        assert cli("task", "logs", f"{JOB}/0", "-o", "json").json["container"] == "c1"
    finally:
        (folder / "folder_id").unlink()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_log_is_followed_until_ctrl_c(
    cli: Run, fleet: tuple[World, dict[str, Speaker]], in_background: bool
):
    """In the background of a script SIGINT is ignored, until the command says that it ends with it."""
    folder = fleet[0].folder / "containers" / "c1"
    file = RotatedFile(log_file(folder, f"{JOB}/0"))
    file.write(b"begin\n")
    (folder / "folder_id").write_text("folder-c1")
    try:
        logs = Started(
            "task", "logs", f"{JOB}/0", "-f", "--folder", fleet[0].folder, in_background=in_background
        )
        logs.until(lambda: "begin" in logs.out, "what was there")
        file.write(b"more\n")
        logs.until(lambda: logs.out.endswith("more\n"), "what came")
        ended = logs.end(signal.SIGINT)
        assert (ended.code, ended.err) == (0, "")
    finally:
        file.close()
        (folder / "folder_id").unlink()


class Stop(Exception):
    """The reader has seen enough."""


def test_following_waits_for_what_is_away_and_goes_where_the_task_goes(capsys: pytest.CaptureFixture[str]):
    """Plan: text, nothing new, the task on its way, the control plane away, the task elsewhere, a gap, enough."""

    def piece(text: str, container: str = "c1", *, place: str, is_gap: bool = False) -> dict[str, Any]:
        return {"task_id": "a/0", "container": container, "text": text, "place": place, "is_gap": is_gap}

    answers = iter(
        [
            piece("two\n", place="p2"),
            piece("", place="p2"),
            NotFound("on its way"),
            StoreUnavailable("away"),
            piece("three\n", "c2", place="q1"),
            piece("five\n", "c2", place="q2", is_gap=True),
            Stop(),
        ]
    )
    asked: list[str] = []
    said: list[str] = []
    pauses: list[int] = []

    def read(after: str) -> dict[str, Any]:
        asked.append(after)
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    with pytest.raises(Stop):
        follow_log(read, piece("one\n", place="p1"), lambda found: said.append(found["text"]), pauses.append)
    assert asked == ["p1", "p2", "p2", "p2", "p2", "q1", "q2"]
    assert said == ["two\n", "", "three\n", "five\n"]
    assert len(pauses) == 3
    err = capsys.readouterr().err
    assert "a/0 is on c2 now" in err and "some lines were deleted" in err


def test_status_says_what_was_late_dropped_put_aside_and_is_waiting(
    cli: Run, fleet: tuple[World, dict[str, Speaker]], tmp_path: Path
):
    """What a real task tells goes with a container's heartbeat, and is added up by job."""
    _, speakers = fleet
    before = speakers["c1"].tasks
    try:
        speakers["c1"].tasks = tuple(
            TaskReport(
                task_id=f"{JOB}/{index}",
                job=JOB,
                generation=1,
                shard=3,
                state="running",
                metrics=counted(tmp_path / str(index)),
            )
            for index in (0, 1)
        )

        def counts() -> dict[str, int] | None:
            (job,) = (job for job in cli("status", "-o", "json").json["jobs"] if job["name"] == JOB)
            return job["counts"]

        until(lambda: counts() is not None)
        assert counts() == {"records": 28, "late": 10, "dropped": 6, "dead_letters": 6, "waiting": 12}
        shown = cli("status").text
        assert "read late dropped dead letters waiting" in shown and f"{JOB} 28 10 6 6 12" in shown
        assert cli("job", "get", JOB, "-o", "json").json["counts"] == counts()
    finally:
        speakers["c1"].tasks = before
