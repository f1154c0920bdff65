"""Two real clusters lend each other a real container, and the lending loop is killed on the way. No Java."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.client import new_key
from penstock.core.folder import token_file
from tests.builders import a_process
from tests.e2e.platform import Platform
from tests.e2e.test_fleet import WORKER, is_alive
from tests.kin import kill_all, kin_of
from tests.tidy_rules import ROOT

pytestmark = [pytest.mark.drill, pytest.mark.timeout(400)]


class Cluster(Platform):
    """One cluster without containers of its own; they join."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / name, containers=0, engine="process")
        self.name, self.marks = name, folder / f"marks-{name}"
        self.marks.mkdir()
        self.hosts: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return str(self.client._link._url)

    def join(self, name: str, cores: int) -> None:
        token = self.client.issue_token(name, "container", days=1, why="a test", key=new_key())["token"]
        folder = self.folder.parent / name
        command = [sys.executable, "-m", "penstock.cli.main", "container", "--join", self.url]
        folder.mkdir()
        with (folder / "host.log").open("ab") as output:
            self.hosts[name] = subprocess.Popen(
                [*command, "--name", name, "--dir", str(folder), "--capacity", f"{cores},8192,0,0"],
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "PENSTOCK_TOKEN": token},
            )

    def work(self, tasks: int) -> None:
        """A job of so many processes of one core each."""
        job = f"{self.name}.tick"
        command = [sys.executable, "-c", WORKER, str(self.marks), "{task}"]
        resources = {"cpu": 1.0, "memory_mb": 64}
        config = a_process(job, task_count=tasks, command=command, resources=resources)
        self.client.apply_job(job, config, why="new", key=new_key())

    def where(self) -> dict[str, str]:
        """Task -> its container, of those that run."""
        lines = self.client.tasks(job=f"{self.name}.tick")
        return {line["task_id"]: line["container"] for line in lines if line["state"] == "running"}

    def processes(self) -> list[int]:
        """Of the job's processes, those that live."""
        return [pid for path in self.marks.iterdir() if is_alive(pid := int(path.name.rpartition("-")[2]))]

    def loan(self, container: str) -> dict[str, Any]:
        return next((row for row in self.client.loans() if row["container"] == container), {"state": ""})

    def kill(self) -> None:
        for host in self.hosts.values():
            if host.poll() is None:
                kin = kin_of(host.pid)
                host.kill()
                host.wait()
                kill_all(kin)
        super().kill()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Cluster, Cluster]]:
    with ExitStack() as stack:
        clusters = Cluster(tmp_path, "a"), Cluster(tmp_path, "b")
        for cluster in clusters:
            stack.callback(cluster.kill)
        for cluster in clusters:
            cluster.launch()
        yield clusters


def lending_file(folder: Path, *clusters: Cluster) -> Path:
    path = folder / "clusters.toml"
    tables = [
        f'[[cluster]]\nname = "{cluster.name}"\nurl = "{cluster.url}"\n'
        f'token_file = "{token_file(cluster.folder, "admin")}"\n'
        for cluster in clusters
    ]
    path.write_text("\n".join(tables))
    return path


def start_loop(file: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "penstock.cli.main", "lend", "--clusters", str(file), *arguments]
    with file.with_suffix(".log").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)


def test_a_container_is_lent_although_the_loop_is_killed_and_its_tasks_run_once(
    pair: tuple[Cluster, Cluster], tmp_path: Path
) -> None:
    """Plan: a has two containers with room, b one that is full. A loop lends one and is killed with -9 as soon as
    that has begun; the container is drained, goes and runs tasks of b. No task of either cluster ever runs twice.
    Then it is sent back the same way, and leaves in order.
    """
    a, b = pair
    a.join("far1", 10)
    a.join("far2", 10)
    b.join("near", 4)
    a.work(4)
    b.work(4)
    a.wait("both of a", lambda: a.ready() == {"far1", "far2"} and len(a.where()) == 4)
    b.wait("that of b", lambda: b.ready() == {"near"} and len(b.where()) == 3)  # one does not fit
    for cluster, names in ((a, ("far1", "far2")), (b, ("near",))):
        cluster.wait(
            "hosts that listen", lambda c=cluster, n=names: all(c.loan(x)["state"] == "here" for x in n)
        )
    file = lending_file(tmp_path, a, b)

    said = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "lend", "--clusters", str(file), "--once", "--advice"],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert said.returncode == 0 and "advice: far" in said.stdout, said
    assert {a.loan(name)["state"] for name in ("far1", "far2")} == {"here"}

    loop = start_loop(file, "--every", "1")
    try:
        a.wait("somebody is lent", lambda: any(a.loan(n)["state"] != "here" for n in ("far1", "far2")))
    finally:
        loop.kill()
        loop.wait()
    (name,) = [name for name in ("far1", "far2") if a.loan(name)["state"] != "here"]
    assert start_loop(file, "--once").wait(60) == 0
    b.wait("it works for b", lambda: b.loan(name)["state"] == "here" and name in b.ready())
    assert a.loan(name)["state"] == "gone" and len([n for n in ("far1", "far2") if n in a.ready()]) == 1
    assert b.loan(name)["says"] == "borrowed from a"
    assert "lent to b" in a.cli("container", "ls").stdout
    assert f"borrowed: {name}" in b.cli("capacity").stdout
    host = psutil.Process(a.hosts[name].pid)
    assert not any("pk_" in text for text in kin_of(host.pid).values()), "no token is among arguments"

    # b has room: its new container gets shards, and everything runs once.
    b.work(8)
    b.wait("eight tasks on both", lambda: len(b.where()) == 8 and set(b.where().values()) == {"near", name})
    for cluster, tasks in ((a, 4), (b, 8)):
        cluster.wait(
            f"{tasks} processes of {cluster.name}", lambda c=cluster, n=tasks: len(c.processes()) == n
        )

    # Back again, as the loop does it.
    b.work(3)
    token = a.client.expect(name, lender="b", owner="", version=a.loan(name)["version"], why="test")["token"]
    b.client.lend(name, home="b", to="a", url=a.url, token=token, why="a test")
    a.wait("it is home", lambda: a.loan(name)["state"] == "here" and name in a.ready())
    assert b.loan(name)["state"] == "" and a.loan(name)["says"] == ""
    b.wait("three tasks on one", lambda: len(b.where()) == 3 and set(b.where().values()) == {"near"})
    b.wait("three processes", lambda: len(b.processes()) == 3)
    a.wait("four processes", lambda: len(a.where()) == 4 and len(a.processes()) == 4)
    kinds = [
        entry["decision"] for entry in a.client.journal(subject=name, limit=100) if entry["kind"] == "lending"
    ]
    assert "lent to b" in kinds and "back from b" in kinds

    # It leaves in order.
    kin = kin_of(a.hosts[name].pid)
    a.hosts[name].send_signal(signal.SIGTERM)
    assert a.hosts[name].wait(60) == 0
    assert not psutil.wait_procs(kin, timeout=10)[1]
