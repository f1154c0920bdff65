"""Claims about `penstock up` as a process: how it ends, what it refuses, what survives. No containers, no Java."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.cli.compiling import compile_file
from penstock.cli.connection import connect
from penstock.cli.up import ContainerHost
from penstock.container import ContainerSettings, folder_lock
from penstock.core.errors import EnvironmentProblem, StoreUnavailable
from penstock.core.system_clock import SystemClock
from penstock.tasks.sessions import write_pid_file
from tests.cli.world import COUNT, PARSE, ZEITGEIST, Outcome, Run, Up

pytestmark = pytest.mark.e2e
NONE = ("--containers", "0", "--port", "0")


def submit(folder: Path) -> None:
    columns = [["query", "string"], ["lang", "string"], ["ts", "bigint"]]
    with connect(folder) as client:
        client.create_category(
            {"name": "queries", "partitions": 6, "columns": columns, "watermark": "injector"}
        )
        compiled, package = compile_file(ZEITGEIST, client)
        client.put_package(package.hash, package.data)
        client.submit_pipeline(compiled.to_json(), why="a test", key="k")


def jobs(folder: Path) -> dict[str, int]:
    with connect(folder) as client:
        return {job["name"]: job["expected_version"] for job in client.jobs()}


@pytest.mark.parametrize(
    ("number", "in_background"), [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)]
)
def test_a_signal_ends_it_in_order(tmp_path: Path, number: signal.Signals, in_background: bool):
    up = Up(tmp_path, *NONE, in_background=in_background)
    url = up.wait_ready()
    client = connect(tmp_path)
    assert client.status()["jobs"] == []
    ended = up.end(number)
    assert ended.code == 0, ended.err
    assert "penstock is up" in ended.out and url in ended.out and "stopped" in ended.out
    assert "Traceback" not in ended.err
    assert not (tmp_path / "endpoint.json").exists()
    with client, pytest.raises(StoreUnavailable):
        client.status()


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path):
    """Plan: submit, kill -9, start again on the folder with a stale endpoint; everything is there and goes on."""
    up = Up(tmp_path, *NONE)
    up.wait_ready()
    submit(tmp_path)
    before = jobs(tmp_path)
    token = (tmp_path / "tokens" / "admin").read_text()
    assert up.end(signal.SIGKILL).code == -signal.SIGKILL
    assert (tmp_path / "endpoint.json").exists()
    again = Up(tmp_path, *NONE)
    again.wait_ready()
    assert jobs(tmp_path) == before == {PARSE: 1, COUNT: 1}
    assert (tmp_path / "tokens" / "admin").read_text() == token
    with connect(tmp_path) as client:
        assert client.patch_layer(COUNT, "oncall", {"task_count": 2}, why="on", key="k2") == 2
    assert again.end(signal.SIGTERM).code == 0


def test_a_second_one_on_the_same_folder_is_refused_and_the_first_goes_on(tmp_path: Path):
    up = Up(tmp_path, *NONE)
    url = up.wait_ready()
    refused = Up(tmp_path, *NONE).end().is_refused()
    assert str(tmp_path) in refused and "--folder" in refused
    assert (tmp_path / "endpoint.json").exists()
    with connect(tmp_path) as client:
        assert client.status()["jobs"] == []
    assert url in (tmp_path / "endpoint.json").read_text()
    assert up.end(signal.SIGTERM).code == 0


def test_a_port_in_use_is_refused_and_nothing_is_started(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = Up(tmp_path / "folder", "--containers", "0", "--port", str(port)).end()
    refused = ended.is_refused()
    assert str(port) in refused and "--port" in refused
    assert not (tmp_path / "folder" / "store.db").exists()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    refused = Up(tmp_path / "file" / "folder", *NONE).end().is_refused()
    assert "--folder" in refused
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_folder_without_rights_is_refused(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    assert "--folder" in Up(folder, *NONE).end().is_refused()


def test_no_java_is_said_before_anything_starts(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    env = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    env["PATH"] = str(tmp_path / "empty")
    refused = Up(tmp_path / "folder", "--containers", "1", "--port", "0", env=env).end().is_refused()
    assert "there is no Java on this machine" in refused and "17 or 21" in refused
    assert not (tmp_path / "folder").exists()


def test_a_java_home_without_java_is_said(tmp_path: Path):
    env = {**os.environ, "JAVA_HOME": str(tmp_path)}
    refused = Up(tmp_path / "folder", "--containers", "1", "--port", "0", env=env).end().is_refused()
    assert "Java" in refused and not (tmp_path / "folder").exists()


def test_an_unknown_profile_is_refused(run: Run, tmp_path: Path):
    refused: Outcome = run("up", "--folder", tmp_path / "folder", "--profile", "slow")
    assert "fast" in refused.is_refused() and not (tmp_path / "folder").exists()


def test_a_token_of_a_store_that_is_gone_is_issued_anew(tmp_path: Path):
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "admin").write_text("pk_of_another_life")
    up = Up(tmp_path, *NONE)
    up.wait_ready()
    assert jobs(tmp_path) == {}
    assert (tmp_path / "tokens" / "admin").read_text() != "pk_of_another_life"
    assert up.end(signal.SIGTERM).code == 0


def test_what_a_killed_host_left_is_ended_before_anything_starts(tmp_path: Path):
    """Plan: a process stands for the container of a killed `penstock up`; another is a stranger with its number."""
    left, stranger = (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        for _ in range(2)
    )
    try:
        for name, process in (("c1", left), ("c2", stranger)):
            (tmp_path / "containers" / name).mkdir(parents=True)
            write_pid_file(tmp_path / "containers" / name / "warden.session", process.pid)
        path = tmp_path / "containers" / "c2" / "warden.session"
        said = json.loads(path.read_text())
        path.write_text(json.dumps({**said, "started": said["started"] - 100}))
        up = Up(tmp_path, *NONE)
        up.wait_ready()
        assert left.wait() == -signal.SIGKILL
        assert stranger.poll() is None
        assert up.end(signal.SIGTERM).code == 0
    finally:
        for process in (left, stranger):
            process.kill()
            process.wait()


def test_it_listens_on_loopback_alone(tmp_path: Path):
    up = Up(tmp_path, *NONE)
    up.wait_ready()
    listening = {
        connection.laddr.ip
        for connection in psutil.Process(up.process.pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    assert up.end(signal.SIGTERM).code == 0


def test_a_second_host_of_a_folder_is_refused_and_harms_nothing(tmp_path: Path):
    """Plan: one host has the folder and a container in it; another one starts there, and stops."""
    settings = ContainerSettings(
        name="c1", folder=tmp_path / "c1", url="", token_file=tmp_path / "token", bus="", rows=""
    )
    host = ContainerHost((settings,), {}, SystemClock())
    with folder_lock(settings.folder / "host", "container c1"):
        living = subprocess.Popen(["sleep", "60"], start_new_session=True)
        try:
            write_pid_file(settings.folder / "warden.session", living.pid)
            with pytest.raises(EnvironmentProblem, match="another process already runs container c1"):
                host.start()
            host.stop()
            assert living.poll() is None
        finally:
            living.kill()
            living.wait()
