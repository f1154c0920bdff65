"""Claims about bad input: exit code 1, what, why and what to do on stderr, no traceback, and nothing changed."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from penstock.core.folder import token_file
from tests.cli.world import COUNT, PARSE, ZEITGEIST, Run, World
from tests.waiting import until

GOOD = ZEITGEIST.read_text()


def a_file(folder: Path, text: str) -> Path:
    path = folder / "pipeline.py"
    path.write_text(text)
    return path


# What is in the file, and what the message must name.
PIPELINES = {
    "a syntax error": (GOOD + "\nif True print(1)\n", "line"),
    "an unfinished line": ("from penstock import Pipeline\np = Pipeline('a', partitions=2", "line"),
    "an unknown column": (GOOD.replace("length(trim(query))", "length(trim(qury))"), "query"),
    "an unknown column in a select": (GOOD.replace("lower(trim(query))", "lower(trim(textt))"), "textt"),
    "SQL that is none": (GOOD.replace("length(trim(query)) > 0", "length((query > 0"), "filter"),
    "an unknown function": (GOOD.replace("lower(trim", "lowercase(trim"), "lowercase"),
    "a missing category": (GOOD.replace('p.source("queries")', 'p.source("querys")'), "queries"),
    "no pipeline": ("x = 1\n", "Pipeline"),
    "two pipelines": (GOOD + '\nq = Pipeline("other", partitions=2)\n', "2 pipelines"),
    "an error of its own": ("1 / 0\n", "ZeroDivisionError"),
    "a missing import": ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
    "an end of its own": ("raise SystemExit(0)\n", "SystemExit"),
    "no text": ("\x00\x01\x02", ""),
}


@pytest.mark.parametrize("command", ["plan", "submit"])
@pytest.mark.parametrize(("text", "named"), PIPELINES.values(), ids=PIPELINES)
def test_a_bad_pipeline_file_is_explained(
    shared: World, run: Run, tmp_path: Path, command: str, text: str, named: str
):
    before = shared.everything()
    path = a_file(tmp_path, text)
    assert named in run(command, path, "--folder", shared.folder).is_refused()
    assert shared.everything() == before


@pytest.mark.parametrize("command", ["plan", "submit"])
def test_a_file_that_is_not_there_is_explained(shared: World, run: Run, tmp_path: Path, command: str):
    before = shared.everything()
    assert "nowhere.py" in run(command, tmp_path / "nowhere.py", "--folder", shared.folder).is_refused()
    run(command, tmp_path, "--folder", shared.folder).is_refused()
    assert shared.everything() == before


@pytest.mark.parametrize(
    ("arguments", "named", "code"),
    [
        (("set", COUNT, "tsk_count=3", "--why", "x"), "did you mean `task_count`?", 1),
        (("set", COUNT, "slo.lag=3", "--why", "x"), "did you mean `slo.lag_s`?", 1),
        (("set", COUNT, "task_count=many", "--why", "x"), "task_count", 1),
        (("set", COUNT, "task_count=0", "--why", "x"), "task_count", 1),
        (("set", COUNT, "slo.lag_s=NaN", "--why", "x"), "slo.lag_s", 1),
        (("set", COUNT, "task_count=99999999999999999999", "--why", "x"), "too large", 1),
        (("set", COUNT, "task_count", "--why", "x"), "field=value", 1),
        (("set", COUNT, "task_count=", "--why", "x"), "field=value", 1),
        (("set", COUNT, "=3", "--why", "x"), "field=value", 1),
        (("set", COUNT, "a..b=3", "--why", "x"), "a..b", 1),
        (("set", COUNT, "task_count.x=3", "--why", "x"), "task_count", 1),
        (("set", COUNT, "task_count=3", "--why", " "), "reason", 1),
        (("set", COUNT, "task_count=3", "--why", "a\x1b[31mb"), "why", 1),
        (("set", COUNT, "task_count=3", "--why", "x", "--version", "999"), "999", 4),
        (("set", COUNT, "owner=\udcff", "--why", "x"), "cannot be encoded", 1),
        (("set", "zeitgeist.nobody", "task_count=3", "--why", "x"), "zeitgeist.nobody", 3),
        (("set", "..", "task_count=3", "--why", "x"), "..", 1),
        (("set", "a/b", "task_count=3", "--why", "x"), "a/b", 3),
        (("set", "x" * 1_000_000, "task_count=3", "--why", "x"), "", 1),
        (("clear", COUNT, "task_count=3", "--why", "x"), "task_count=3", 1),
        (("clear", COUNT, "a..b", "--why", "x"), "a..b", 1),
        (("clear", "zeitgeist.nobody", "--why", "x"), "zeitgeist.nobody", 3),
    ],
)
def test_a_bad_override_is_explained_and_not_made(
    submitted: World, run: Run, arguments: tuple[str, ...], named: str, code: int
):
    before = submitted.everything()
    assert named in run("oncall", *arguments, "--folder", submitted.folder).is_refused(code)
    assert submitted.everything() == before


@pytest.fixture(scope="module")
def submitted(shared: World) -> World:
    from penstock.cli.output import connect
    from penstock.cli.pipelines import compile_file

    with connect(shared.folder) as client:
        compiled, package = compile_file(ZEITGEIST, client)
        client.put_package(package.hash, package.data)
        client.submit_pipeline(compiled.to_json(), why="a test", key="k")
        until(lambda: all(job["state"] == "running" for job in client.jobs()))
    return shared


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("job", "get", ".."), ".."),
        (("job", "ls", "--label", "team"), "name=value"),
        (("job", "ls", "--label", "=x"), "name=value"),
        (("job", "ls", "--state", "lazy"), "state"),
        (("job", "ls", "--pipeline", "../x"), "pipeline"),
        (("layer", "add", "../x", "--precedence", "15", "--writer", "admin", "--why", "x"), "name"),
        (("layer", "add", "new", "--precedence", "15", "--writer", "emperor", "--why", "x"), "writers"),
        (("layer", "add", "new", "--precedence", "20", "--writer", "admin", "--why", "x"), "scaler"),
        (("layer", "add", "base", "--precedence", "15", "--writer", "admin", "--why", "x"), "base"),
        (("token", "new", "x", "--role", "emperor", "--why", "x"), "role"),
        (("token", "new", "../x", "--role", "reader", "--why", "x"), "name"),
        (("token", "new", "x", "--role", "reader", "--why", ""), "reason"),
        (("category", "queries", "--create"), "--columns"),
        (("category", "queries", "--create", "--columns", "query"), "--columns"),
        (("category", "new", "--create", "--columns", "query:strng"), "strng"),
        (("category", "../new", "--create", "--columns", "query:string"), "../new"),
        (("category", "queries", "--create", "--columns", "query:string"), "another spec"),
        (("category", "new", "--create", "--columns", "q:string", "--watermark", "x"), "watermark"),
        (("category", "--create", "--columns", "q:string"), "name"),
    ],
)
def test_a_bad_name_or_spec_is_explained(shared: World, run: Run, arguments: tuple[str, ...], named: str):
    before = shared.everything()
    assert named in run(*arguments, "--folder", shared.folder).is_refused()
    assert shared.everything() == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("job", "get", "nobody"), "nobody"),
        (("job", "get", "nobody", "--watch"), "nobody"),
        (("job", "diff", "nobody"), "nobody"),
        (("job", "history", "nobody"), "nobody"),
        (("job", "rollback", "nobody", "oncall", "--to", "1", "--why", "x"), "nobody"),
        (("job", "pause", "nobody", "--why", "x"), "nobody"),
        (("job", "rm", "nobody", "--why", "x"), "nobody"),
        (("job", "restore", "nobody", "--why", "x"), "nobody"),
        (("config", "show", "nobody"), "nobody"),
        (("token", "revoke", "0123456789abcdef", "--why", "x"), "0123456789abcdef"),
        (("logs", "c9"), "c9"),
        (("logs", "../../store.db"), "store.db"),
        (("category", "nobody"), "nobody"),
    ],
)
def test_what_is_not_there_is_exit_code_3(shared: World, run: Run, arguments: tuple[str, ...], named: str):
    before = shared.everything()
    assert named in run(*arguments, "--folder", shared.folder).is_refused(3)
    assert shared.everything() == before


COMMANDS: list[tuple[str | Path, ...]] = [
    ("status",),
    ("status", "--watch"),
    ("status", "-o", "json"),
    ("job", "ls"),
    ("job", "get", PARSE),
    ("job", "diff", PARSE),
    ("job", "history", PARSE),
    ("job", "pause", PARSE, "--why", "x"),
    ("job", "rm", PARSE, "--why", "x"),
    ("config", "show", PARSE),
    ("layer", "ls"),
    ("token", "ls"),
    ("audit",),
    ("journal",),
    ("logs", "c1"),
    ("category",),
    ("plan", ZEITGEIST),
    ("submit", ZEITGEIST),
    ("oncall", "set", COUNT, "task_count=3", "--why", "x"),
    ("oncall", "clear", COUNT, "--why", "x"),
]
every_command = pytest.mark.parametrize(
    "command", COMMANDS, ids=lambda command: " ".join(map(str, command[:2]))[:20]
)


@every_command
def test_a_wrong_token_is_explained(
    shared: World, run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str | Path, ...]
):
    before = shared.everything()
    monkeypatch.setenv("PENSTOCK_TOKEN", "pk_wrong")
    refused = run(*command, "--folder", shared.folder).is_refused()
    assert "this token is not known" in refused and "pk_wrong" not in refused
    monkeypatch.setenv("PENSTOCK_TOKEN", "not even\none")
    assert "token is not valid" in run(*command, "--folder", shared.folder).is_refused()
    assert shared.everything() == before


@every_command
def test_no_control_plane_is_explained(run: Run, tmp_path: Path, command: tuple[str | Path, ...]):
    assert "penstock up" in run(*command, "--folder", tmp_path / "nowhere").is_refused(5)
    assert not (tmp_path / "nowhere").exists()


def put_token(folder: Path, role: str) -> None:
    token_file(folder, role).parent.mkdir(parents=True, exist_ok=True)
    token_file(folder, role).write_text("pk_token")


@every_command
def test_a_control_plane_that_is_gone_is_explained(run: Run, tmp_path: Path, command: tuple[str | Path, ...]):
    """Plan: the folder of a killed `penstock up` still names a port; nobody listens there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "endpoint.json").write_text(json.dumps({"url": f"http://127.0.0.1:{port}", "pid": 1}))
    for role in ("reader", "developer", "oncall", "admin"):
        put_token(tmp_path, role)
    refused = run(*command, "--folder", tmp_path).is_refused(5)
    assert f"no control plane answers at http://127.0.0.1:{port}" in refused


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": 1}', "null", '{"url": "nonsense"}', '{"url": 5}', "\x00"]
)
def test_a_damaged_endpoint_file_is_explained(run: Run, tmp_path: Path, text: str):
    (tmp_path / "endpoint.json").write_text(text)
    put_token(tmp_path, "reader")
    run("status", "--folder", tmp_path).is_refused()


def test_a_folder_that_is_a_file_is_explained(run: Run, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    run("status", "--folder", tmp_path / "file").is_refused()
