"""Claims about `penstock up` as a process: how it ends, what it refuses, what survives. No containers, no Java."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.cli.output import connect
from penstock.cli.pipelines import compile_file
from penstock.client import Client
from penstock.container.container import ContainerSettings, folder_lock
from penstock.container.host import ContainerHost
from penstock.container.sessions import write_pid_file
from penstock.core.errors import EnvironmentProblem, NotFound, Refused, StoreUnavailable
from penstock.core.folder import token_file, tokens_folder
from penstock.core.system_clock import SystemClock
from tests.cli.world import COUNT, PARSE, ZEITGEIST, Outcome, Run, Up
from tests.tidy_rules import ROOT
from tests.waiting import until

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
    token = token_file(tmp_path, "admin").read_text()
    assert up.end(signal.SIGKILL).code == -signal.SIGKILL
    assert (tmp_path / "endpoint.json").exists()
    again = Up(tmp_path, *NONE)
    again.wait_ready()
    assert jobs(tmp_path) == before == {PARSE: 1, COUNT: 1}
    assert token_file(tmp_path, "admin").read_text() == token
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


def without_pyspark(folder: Path) -> dict[str, str]:
    """The environment of a Python that has everything but PySpark."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'pyspark':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def test_no_pyspark_is_said_before_anything_starts(tmp_path: Path):
    """Plan: a Python without PySpark; `up` refuses, and with --engine process it starts all the same."""
    env = without_pyspark(tmp_path / "blocker")
    one = ("--containers", "1", "--port", "0")
    refused = Up(tmp_path / "folder", *one, env=env).end().is_refused()
    assert "Spark is not installed" in refused and "--engine process" in refused
    assert not (tmp_path / "folder").exists()
    for command in (("run", str(ZEITGEIST), "--local"), ("backfill", str(ZEITGEIST), "--into", "x")):
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", *command],
            cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "Spark is not installed" in Outcome(done.returncode, done.stdout, done.stderr).is_refused()
    up = Up(tmp_path / "folder", *NONE, env=env)
    up.wait_ready()
    assert up.end(signal.SIGTERM).code == 0


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_master_that_is_not_there_is_said_before_anything_starts(tmp_path: Path):
    for master, said in (
        (f"spark://127.0.0.1:{closed_port()}", "no Spark master answers at spark://127.0.0.1:"),
        ("spark:/127.0.0.1", "no such master"),
    ):
        arguments = ("--containers", "1", "--port", "0", "--master", master)
        assert said in Up(tmp_path / "folder", *arguments).end().is_refused()
        assert not (tmp_path / "folder").exists()


def test_it_says_up_when_the_first_container_is_ready(tmp_path: Path):
    """Plan: a container without Spark; what is said when, and that it is true by then."""
    up = Up(tmp_path, "--containers", "1", "--engine", "process", "--port", "0")
    up.wait_ready()
    said = up.read_until("penstock is up")
    with connect(tmp_path) as client:
        (row,) = client.status()["containers"]
        assert (row["name"], row["ready"], row["error"]) == ("c1", True, "")
    ended = up.end(signal.SIGTERM)
    assert ended.code == 0
    assert said.index("the control plane listens at") < said.index("1 container (process): starting")
    assert "c1 is ready after" in said and "code of jobs and policies runs as this user" in said


def test_an_engine_that_cannot_start_says_why_in_up_and_in_status(run: Run, tmp_path: Path):
    """Plan: PySpark breaks only when it is imported, as a damaged installation does: no check sees that."""
    (tmp_path / "broken" / "pyspark").mkdir(parents=True)
    (tmp_path / "broken" / "pyspark" / "__init__.py").write_text("raise ImportError('its files are damaged')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "broken"), str(ROOT)])}
    folder = tmp_path / "folder"
    up = Up(folder, "--containers", "1", "--port", "0", env=env)
    up.wait_ready()
    said = up.read_until("its files are damaged")
    assert "container c1 cannot start" in said and "penstock is up" not in said
    status = run("status", "--folder", folder)
    assert "c1 cannot start: ImportError: its files are damaged" in status.text
    ended = up.end(signal.SIGTERM)
    assert ended.code == 0 and "penstock is up" not in ended.out


def test_a_refused_up_leaves_no_note_of_a_place(tmp_path: Path, postgres: Any):
    """Plan: rows on a database that is there, the store on one that is not; then start without naming either."""
    folder, rows = tmp_path / "folder", postgres.new_database()
    nowhere = f"postgresql://nobody@127.0.0.1:{closed_port()}/x"
    ended = Up(folder, *NONE, "--rows", rows, "--database", nowhere).end()
    ended.is_refused(5)
    assert not (folder / "rows.json").exists()
    up = Up(folder, *NONE)
    up.wait_ready()
    assert f"rows sqlite:{folder}" in up.end(signal.SIGTERM).out.replace("\n", "")


TELLTALE = """import os, pathlib, re, sys, time
found = []
for place in (pathlib.Path(sys.argv[1]), pathlib.Path.cwd()):
    for path in place.rglob("*"):
        if path.is_file():
            found += re.findall(rb"pk_[A-Za-z0-9_-]{43}", path.read_bytes())
found += re.findall(r"pk_[A-Za-z0-9_-]{43}", str(dict(os.environ)) + str(sys.argv))
tokens = {one if isinstance(one, str) else one.decode() for one in found}
print("tokens:", *sorted(tokens), "end", flush=True)
time.sleep(10_000)
"""


def test_a_job_finds_no_token_of_people_in_the_folder_and_others_cannot_look_in(tmp_path: Path):
    """Plan: a folder as an earlier version left it, open and with an admin token; a job looks for tokens."""
    folder = tmp_path / "folder"
    (tmp_path / "look.py").write_text(TELLTALE)
    up = Up(folder, *NONE)
    up.wait_ready()
    issued = token_file(folder, "admin").read_text()
    assert up.end(signal.SIGTERM).code == 0
    (folder / "tokens" / "admin").write_text(issued)
    token_file(folder, "admin").unlink()
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)

    up = Up(folder, "--containers", "1", "--engine", "process", "--port", "0")
    url = up.wait_ready()
    body = {
        "pipeline": "thief",
        "kind": "process",
        "command": [sys.executable, str(tmp_path / "look.py"), str(folder)],
        "partitions": 1,
    }
    with connect(folder) as client:
        client.apply_job("thief.look", body, why="a test", key="k")
        log = ""

        def has_looked() -> bool:
            nonlocal log
            with contextlib.suppress(NotFound):
                log = client.task_log("thief.look", 0)["text"]
            return " end" in log

        until(has_looked)
    found = log.partition("tokens:")[2].split(" end")[0].split()
    for token in found:
        with Client(url, token) as thief, pytest.raises(Refused):
            thief.tokens()
    people = {token_file(folder, role).read_text() for role in ("admin", "developer", "oncall", "reader")}
    assert not people & set(found) and issued not in people
    with Client(url, issued) as stale, pytest.raises(Refused, match="not known"):
        stale.status()

    modes = {
        str(path): path.lstat().st_mode for path in [folder, *folder.rglob("*")] if not path.is_symlink()
    }
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}
    assert len(modes) > 20 and any(path.endswith(".log") for path in modes)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert up.end(signal.SIGTERM).code == 0


def test_nothing_but_its_own_files_is_made_private(tmp_path: Path):
    """Plan: an open folder with a stranger's files and a link out of it."""
    folder = tmp_path / "folder"
    (folder / "containers").mkdir(parents=True)
    (folder / "mine.txt").write_text("x")
    (tmp_path / "outside.txt").write_text("x")
    (folder / "containers" / "link").symlink_to(tmp_path / "outside.txt")
    (folder / "containers" / "old.log").write_text("x")
    for path in (folder / "mine.txt", tmp_path / "outside.txt", folder / "containers" / "old.log"):
        path.chmod(0o644)
    folder.chmod(0o755)
    up = Up(folder, *NONE)
    up.wait_ready()
    assert up.end(signal.SIGTERM).code == 0
    kept = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (folder / "mine.txt", tmp_path / "outside.txt")
    }
    assert kept == {"mine.txt": 0o644, "outside.txt": 0o644}
    assert stat.S_IMODE((folder / "containers" / "old.log").stat().st_mode) == 0o600


def test_tokens_of_folders_that_are_gone_are_removed(tmp_path: Path):
    up = Up(tmp_path / "first", *NONE)
    up.wait_ready()
    assert up.end(signal.SIGTERM).code == 0
    gone, kept = tokens_folder(tmp_path / "first"), tokens_folder(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    up = Up(tmp_path / "second", *NONE)
    up.wait_ready()
    assert up.end(signal.SIGTERM).code == 0
    assert not gone.exists() and sorted(path.name for path in kept.iterdir()) == [
        "admin",
        "developer",
        "folder",
        "oncall",
        "reader",
    ]


def test_a_java_home_without_java_is_said(tmp_path: Path):
    env = {**os.environ, "JAVA_HOME": str(tmp_path)}
    refused = Up(tmp_path / "folder", "--containers", "1", "--port", "0", env=env).end().is_refused()
    assert "Java" in refused and not (tmp_path / "folder").exists()


def test_an_unknown_profile_is_refused(run: Run, tmp_path: Path):
    refused: Outcome = run("up", "--folder", tmp_path / "folder", "--profile", "slow")
    assert "fast" in refused.is_refused() and not (tmp_path / "folder").exists()


def test_a_token_of_a_store_that_is_gone_is_issued_anew(tmp_path: Path):
    token_file(tmp_path, "admin").parent.mkdir(parents=True)
    token_file(tmp_path, "admin").write_text("pk_of_another_life")
    up = Up(tmp_path, *NONE)
    up.wait_ready()
    assert jobs(tmp_path) == {}
    assert token_file(tmp_path, "admin").read_text() != "pk_of_another_life"
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
        name="c1",
        folder=tmp_path / "c1",
        url="",
        token_file=tmp_path / "token",
        bus="",
        rows="",
        profile="fast",
        engine="spark",
        cores=2,
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
