"""Claims about each command when all is well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main as cli
from penstock.cli.output import connect
from penstock.client import Client
from penstock.core.folder import token_file, tokens_folder
from tests.cli.world import COUNT, PARSE, QUERIES_SIX, ZEITGEIST, Run, World
from tests.waiting import until


def commands_of(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command by its words."""
    if not hasattr(group, "commands"):
        return {path: group}
    return {
        words: command
        for name, below in group.commands.items()
        for words, command in commands_of(below, (*path, name)).items()
    }


COMMANDS = commands_of(cli.program())
SILENT = {("up",), ("container", "run"), ("lend",), ("run",)}  # they run until they are stopped


def test_a_pipeline_is_planned_submitted_and_seen(empty: World, run: Run):
    """Plan: category, plan, submit, plan again, status, job: the way of a first user."""
    folder = ("--folder", empty.folder)
    assert "query string" in run(*QUERIES_SIX, *folder).text
    before = empty.everything()
    plan = run("plan", ZEITGEIST, *folder)
    assert plan.code == 0 and "pipeline zeitgeist: 2 jobs" in plan.text
    assert f"{PARSE} new" in plan.text and f"{COUNT} new" in plan.text
    assert empty.everything() == before

    submit = run("submit", ZEITGEIST, "--why", "first release", "--version", "v1", *folder)
    assert submit.code == 0 and f"created {PARSE}" in submit.text
    until(lambda: all(job["state"] == "running" for job in run("job", "ls", "-o", "json", *folder).json))

    again = run("plan", ZEITGEIST, "-o", "json", *folder).json
    # Another version of the package is the same code: a restart in place, and the state stays.
    assert {change["job"]: change["state_kept"] for change in again["changes"]} == {PARSE: True, COUNT: True}
    status = run("status", *folder)
    assert status.code == 0 and PARSE in status.text and "running" in status.text and "0/1" in status.text
    assert {job["name"] for job in run("status", "-o", "json", *folder).json["jobs"]} == {PARSE, COUNT}
    job = run("job", "get", COUNT, *folder)
    assert "partitions 6 provisioner" in job.text and "task_count 1 default" in job.text
    assert "first release" in job.text
    assert run("job", "get", COUNT, "-o", "json", *folder).json["config"]["package"]["version"] == "v1"
    names = [item["spec"]["name"] for item in run("category", "-o", "json", *folder).json]
    assert {"queries", "query_counts", "queries.dead"} <= set(names)
    assert run("category", "queries", "-o", "json", *folder).json["spec"]["partitions"] == 6
    assert "query_counts" in run("category", *folder).text


def test_oncall_overrides_with_a_reason_and_takes_back(world: World, run: Run):
    folder = ("--folder", world.folder)
    done = run(
        "oncall", "set", COUNT, "task_count=3", "slo.lag_s=5.5", "owner=olga", "--why", "a flood", *folder
    )
    assert done.code == 0 and "written" in done.text
    job = run("job", "get", COUNT, "-o", "json", *folder).json
    assert (job["config"]["task_count"], job["config"]["slo"]["lag_s"], job["config"]["owner"]) == (
        3,
        5.5,
        "olga",
    )
    assert job["provenance"]["task_count"]["layer"] == "oncall" == job["provenance"]["slo.lag_s"]["layer"]
    layer = next(row for row in job["layers"] if row["layer"] == "oncall")
    assert (layer["actor"], layer["reason"]) == ("local-oncall", "a flood")
    assert "task_count 3 oncall" in run("job", "get", COUNT, *folder).text

    one = run("oncall", "clear", COUNT, "owner", "--why", "wrong name", "-o", "json", *folder)
    assert one.json == {"job": COUNT, "version": job["expected_version"] + 1, "changes": {"owner": None}}
    assert run("job", "get", COUNT, "-o", "json", *folder).json["config"]["owner"] == ""

    assert run("oncall", "clear", COUNT, "--why", "over", *folder).code == 0
    job = run("job", "get", COUNT, "-o", "json", *folder).json
    assert job["config"]["task_count"] == 1
    assert "oncall" not in {decided["layer"] for decided in job["provenance"].values()}
    nothing = run("oncall", "clear", COUNT, "--why", "again", *folder)
    assert nothing.code == 0 and "nothing to clear" in nothing.text
    assert run("job", "get", COUNT, "-o", "json", *folder).json["expected_version"] == job["expected_version"]


def test_oncall_writes_only_on_the_version_it_was_told(world: World, run: Run):
    folder = ("--folder", world.folder)
    version = run("job", "get", COUNT, "-o", "json", *folder).json["expected_version"]
    set_it = ("oncall", "set", COUNT, "task_count=3", "--why", "x", "--version", str(version), *folder)
    assert run(*set_it).code == 0
    before = world.everything()
    refused = run(*set_it).is_refused(4)
    assert "was changed by another writer" in refused and f"current version is {version + 1}" in refused
    assert world.everything() == before


def test_the_journal_says_who_did_what_and_why(world: World, run: Run):
    folder = ("--folder", world.folder)
    assert run("oncall", "set", COUNT, "task_count=2", "--why", "because [of] that", *folder).code == 0
    entries = run("journal", COUNT, "-o", "json", *folder).json
    assert {entry["subject"] for entry in entries} == {COUNT}
    written = next(entry for entry in entries if entry["decision"] == "layer.oncall")
    assert (written["actor"], written["reason"]) == ("local-oncall", "because [of] that")
    shown = run("journal", COUNT, *folder)
    assert "layer.oncall" in shown.text and "because [of] that" in shown.text
    assert len(run("journal", "-n", "2", "-o", "json", *folder).json) == 2


def test_logs_show_the_end_of_a_containers_log(empty: World, run: Run):
    log = empty.folder / "containers" / "c1" / "engine.log"
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\n[three]\n")
    empty.plane.register_container("c1", "i", folder_id="f")
    assert run("logs", "c1", "-n", "2", "--folder", empty.folder).out == "two\n[three]\n"


def test_a_repeated_submit_changes_nothing_that_runs(world: World, run: Run):
    folder = ("--folder", world.folder)
    until(lambda: all(job["state"] == "running" for job in run("job", "ls", "-o", "json", *folder).json))
    changes = run("plan", ZEITGEIST, "-o", "json", *folder).json["changes"]
    assert {change["change"] for change in changes} == {"unchanged"}
    generations = [job["generation"] for job in run("job", "ls", "-o", "json", *folder).json]
    assert run("submit", ZEITGEIST, *folder).code == 0
    until(lambda: all(job["state"] == "running" for job in run("job", "ls", "-o", "json", *folder).json))
    assert [job["generation"] for job in run("job", "ls", "-o", "json", *folder).json] == generations


def test_the_environment_wins_over_the_folder(
    empty: World, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    endpoint = json.loads((empty.folder / "endpoint.json").read_text())
    monkeypatch.setenv("PENSTOCK_URL", endpoint["url"])
    monkeypatch.setenv("PENSTOCK_TOKEN", token_file(empty.folder, "reader").read_text())
    assert run("status", "-o", "json", "--folder", tmp_path / "nowhere").json["jobs"] == []
    refused = run(*QUERIES_SIX, "--folder", tmp_path / "nowhere").is_refused()
    assert "'reader' may not category.create" in refused


def test_tokens_are_for_this_user_alone_and_endpoint_too(empty: World):
    kept = tokens_folder(empty.folder)
    assert empty.folder not in kept.parents, "the code of jobs runs in there"
    for path in [kept, *kept.iterdir(), empty.folder / "endpoint.json"]:
        assert path.stat().st_mode & 0o077 == 0


def test_a_command_uses_the_least_token(empty: World, run: Run):
    """Plan: without any other token in the folder, each command finds the one its work needs."""
    for role in ("admin", "developer", "oncall"):
        token_file(empty.folder, role).unlink()
    for command in (
        ("status",),
        ("job", "ls"),
        ("layer", "ls"),
        ("journal",),
        ("category",),
        ("container", "ls"),
        ("shard", "ls"),
        ("task", "ls"),
        ("top", "--once"),
    ):
        assert run(*command, "--folder", empty.folder).code == 0
    assert "there is no token" in run("plan", ZEITGEIST, "--folder", empty.folder).is_refused()


def test_the_python_client_reads_what_the_command_writes(world: World):
    with connect(world.folder) as client:
        check(client)


def check(client: Client) -> None:
    assert [job["name"] for job in client.jobs()] == [PARSE, COUNT]
    assert client.category("queries")["end_offsets"] == [0] * 6
    hash_ = client.job(COUNT)["config"]["package"]["hash"]
    assert client.package(hash_)[:2] == b"PK"
    assert client.task_list(None)["full"] is True


def test_there_are_these_commands():
    assert sorted(" ".join(path) for path in COMMANDS) == [
        "alarm ack",
        "alarm ls",
        "alarm show",
        "alarm silence",
        "alarm silences",
        "alarm test",
        "alarm unsilence",
        "audit",
        "backfill",
        "bus copy",
        "bus describe",
        "bus ls",
        "bus publish",
        "bus tail",
        "capacity",
        "category",
        "config show",
        "container cordon",
        "container drain",
        "container ls",
        "container run",
        "container uncordon",
        "dashboard",
        "doctor",
        "explain",
        "inject",
        "job apply",
        "job diff",
        "job get",
        "job history",
        "job ls",
        "job manage",
        "job metrics",
        "job pause",
        "job plan",
        "job readmit",
        "job restore",
        "job resume",
        "job rm",
        "job rollback",
        "job stop",
        "journal",
        "layer add",
        "layer ls",
        "lend",
        "logs",
        "oncall clear",
        "oncall set",
        "package",
        "plan",
        "run",
        "shard explain",
        "shard ls",
        "shard move",
        "shard release",
        "state export",
        "state get",
        "state scan",
        "state timers",
        "status",
        "submit",
        "task logs",
        "task ls",
        "task restart",
        "token ls",
        "token new",
        "token revoke",
        "top",
        "up",
        "watermark",
    ]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_says_its_exit_codes(run: Run, path: tuple[str, ...]):
    shown = run(*path, "--help")
    assert shown.code == 0
    assert "Exit codes: 0" in shown.text and f"Usage: penstock {' '.join(path)}" in shown.text
    help_ = COMMANDS[path].help or ""
    assert help_ and help_.split(".")[0].split()[0] in shown.text


@pytest.mark.parametrize("path", [path for path in COMMANDS if path not in SILENT], ids=" ".join)
def test_every_command_prints_what_it_is_asked_for(path: tuple[str, ...]):
    options = {name for parameter in COMMANDS[path].params for name in parameter.opts}
    assert {"--output", "-o"} <= options and "--json" not in options


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("job", "nonsense"),
        ("job", "ls", "--nonsense"),
        ("job", "ls", "--json"),
        ("job", "ls", "-o", "xml"),
        ("job", "pause", "a.b"),
        ("job", "rollback", "a.b", "oncall", "--why", "x"),
        ("job", "apply", "--why", "x"),
        ("oncall", "set", "a.b", "--why", "x"),
        ("oncall", "set", "a.b", "task_count=3"),
        ("token", "new", "x", "--why", "x"),
        ("plan",),
        ("logs", "c1", "-n", "0"),
        ("container", "drain", "c1"),
        ("container", "nonsense"),
        ("shard", "move", "1", "c1"),
        ("shard", "explain", "-1"),
        ("shard", "explain", "one"),
        ("task", "restart", "a.b/0"),
        ("task", "logs", "a.b/0", "-n", "0"),
    ],
)
def test_wrong_usage_is_exit_code_2(run: Run, arguments: tuple[str, ...]):
    ended = run(*arguments)
    assert ended.code == 2 and ended.err and "Traceback" not in ended.err


def test_code_of_no_pipeline_is_packaged_and_named_by_a_job(empty: World, run: Run, tmp_path: Path):
    """A query brought as it is: its package is put, a job names it; a package that nobody put is refused."""
    code = tmp_path / "queries.py"
    code.write_text("raise SystemExit('it is not run here')\n")
    found = run("package", code, "--version", "3", "--folder", empty.folder, "-o", "json").json
    assert (found["entry"], found["version"]) == ("queries.py", "3")
    job = {"name": "own.query", "pipeline": "own", "kind": "spark", "package": found}
    job["plan"] = {"computation": {"function": "main"}}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    assert run("job", "apply", "-f", path, "--why", "new", "--folder", empty.folder).code == 0
    path.write_text(json.dumps({**job, "package": {**found, "hash": "f" * 64}}))
    refused = run("job", "apply", "-f", path, "--why", "new", "--folder", empty.folder)
    assert "there is no package 'ffffffffffff'" in refused.is_refused(3)
    assert "there is no file" in run("package", tmp_path / "none.py", "--folder", empty.folder).is_refused()


def test_a_category_without_a_time_column_is_created_with_a_word_on_its_times(empty: World, run: Run):
    given = ("--create", "--folder", empty.folder, "--columns")
    made = run("category", "untimed", *given, "shop:string", "-o", "json")
    assert made.code == 0 and made.json["spec"]["lateness_ms"] == 1000
    assert "untimed has no time column" in made.error and "--ts" in made.error
    timed = run("category", "timed", *given, "shop:string,ts:bigint", "--ts", "ts")
    assert timed.code == 0 and timed.error == ""
