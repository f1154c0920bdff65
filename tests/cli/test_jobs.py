"""Claims about `penstock job`, `config`, `layer`, `token` and `audit` when all is well, and about exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.output import as_yaml, exit_code_of
from penstock.core import errors
from penstock.streams.bus.log import CategorySpec
from tests.builders import a_body
from tests.cli.world import COUNT, PARSE, Outcome, Run, World
from tests.waiting import until

JOB = "demo.count"


def a_file(folder: Path, text: str | None = None, *, name: str = "job.yaml", **changes: Any) -> Path:
    path = folder / name
    body = a_body(JOB, **changes)
    path.write_text(text or (json.dumps(body) if name.endswith(".json") else as_yaml(body)))
    return path


class Command:
    """Runs commands against one world."""

    def __init__(self, run: Run, world: World) -> None:
        self._run, self._folder = run, world.folder

    def __call__(self, *arguments: str | Path) -> Outcome:
        return self._run(*arguments, "--folder", self._folder)

    def json(self, *arguments: str | Path) -> Any:
        done = self(*arguments, "-o", "json")
        assert done.code == 0, done.err
        return done.json


@pytest.fixture
def command(empty: World, run: Run) -> Command:
    empty.plane.log.create(CategorySpec(name="queries", partitions=8, columns=(("query", "string"),)))
    return Command(run, empty)


def test_a_file_is_planned_applied_and_applied_again(command: Command, empty: World, tmp_path: Path):
    before = empty.everything()
    planned = command("job", "plan", "-f", a_file(tmp_path))
    assert planned.code == 0 and f"{JOB}: new" in planned.text and "state: kept" in planned.text
    assert empty.everything() == before
    applied = command("job", "apply", "-f", a_file(tmp_path), "--why", "first")
    assert applied.code == 0 and f"created {JOB}, expected version 1" in applied.text
    again = command.json(
        "job", "apply", "-f", a_file(tmp_path, name="job.json", task_count=3), "--why", "more"
    )
    assert again == {"job": JOB, "version": 2, "created": False}
    found = command.json("job", "get", JOB)
    assert found["config"]["task_count"] == 3
    assert found["provenance"]["task_count"]["reason"] == "more"


def test_a_file_may_come_from_standard_input(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(as_yaml(a_body(JOB))))
    assert command("job", "apply", "-f", "-", "--why", "piped").code == 0


def test_apply_respects_what_stands(command: Command, empty: World, tmp_path: Path):
    file = a_file(tmp_path)
    assert command("job", "apply", "-f", file, "--why", "x", "--new").code == 0
    before = empty.everything()
    assert "changed by another writer" in command(
        "job", "apply", "-f", file, "--why", "x", "--new"
    ).is_refused(4)
    assert command("job", "apply", "-f", file, "--why", "x", "--version", "7").is_refused(4)
    assert command("job", "apply", "-f", file, "--why", "x", "--version", "1", "--new").is_refused()
    assert empty.everything() == before
    assert command("job", "apply", "-f", file, "--why", "x", "--version", "1").code == 0


def test_every_form_of_output_says_the_same(command: Command, tmp_path: Path):
    command("job", "apply", "-f", a_file(tmp_path, labels={"team": "ads"}), "--why", "x")
    until(lambda: command.json("job", "get", JOB)["state"] == "running")
    as_json = command.json("job", "get", JOB)
    assert yaml.safe_load(command("job", "get", JOB, "-o", "yaml").out) == as_json
    assert JOB in command("job", "get", JOB, "-o", "table").text
    assert [job["name"] for job in command.json("job", "ls")] == [JOB]
    assert JOB in command("job", "ls").text


def test_a_config_that_was_shown_can_be_applied(command: Command, tmp_path: Path):
    """Plan: what `config show -o yaml` prints is a job file."""
    command("job", "apply", "-f", a_file(tmp_path, task_count=3), "--why", "x")
    shown = yaml.safe_load(command("config", "show", JOB, "-o", "yaml").out)["config"]
    path = tmp_path / "shown.yaml"
    path.write_text(as_yaml(shown))
    planned = command.json("job", "plan", "-f", path)
    assert planned["job"] == JOB and planned["tasks_after"] == 3


def test_ls_filters(command: Command, tmp_path: Path):
    command("job", "apply", "-f", a_file(tmp_path, labels={"team": "ads", "tier": "1"}), "--why", "x")
    assert len(command.json("job", "ls", "-l", "team=ads", "--label", "tier=1")) == 1
    assert (
        command.json("job", "ls", "-l", "team=maps") == [] == command.json("job", "ls", "--state", "paused")
    )
    assert len(command.json("job", "ls", "--pipeline", "demo")) == 1
    command("job", "rm", JOB, "--why", "over")
    assert command.json("job", "ls") == []
    assert [job["state"] for job in command.json("job", "ls", "--removed")] == ["removed"]


def test_overrides_history_diff_and_rollback(command: Command, tmp_path: Path):
    """Plan: the way of an oncall at night: override, override again, look back, compare, go back."""
    command("job", "apply", "-f", a_file(tmp_path), "--why", "x")
    first = command.json("oncall", "set", JOB, "task_count=3", "--why", "a flood")["version"]
    second = command.json("oncall", "set", JOB, "task_count=5", "priority=7", "--why", "more")["version"]
    history = command.json("job", "history", JOB, "--layer", "oncall")
    assert [row["version"] for row in history] == [second, first]
    assert "a flood" in command("job", "history", JOB).text
    changes = command.json("job", "diff", JOB, "--old", str(first), "--new", str(second))
    assert {change["path"]: change["sync"] for change in changes} == {
        "task_count": "complex",
        "priority": "live",
    }
    shown = command("job", "diff", JOB, "--old", str(first)).text
    assert "task_count 3 5 a plan" in shown and "priority 0 7 nothing" in shown
    assert command("job", "rollback", JOB, "oncall", "--to", str(first), "--why", "too many").code == 0
    found = command.json("job", "get", JOB)
    assert (found["config"]["task_count"], found["config"]["priority"]) == (3, 0)
    assert command("job", "rollback", JOB, "oncall", "--to", "999", "--why", "x").is_refused(3)
    assert command(
        "job", "rollback", JOB, "oncall", "--to", str(first), "--why", "x", "--version", "1"
    ).is_refused(4)


def test_pause_resume_stop(command: Command, tmp_path: Path):
    command("job", "apply", "-f", a_file(tmp_path), "--why", "x")
    for verb, state in (("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
        done = command.json("job", verb, JOB, "--why", "tonight")
        assert (done["layer"], done["effective"]) == ("oncall", state)
        assert command.json("job", "get", JOB)["config"]["state"] == state
    below = command("job", "resume", JOB, "--why", "mine", "--layer", "provisioner")
    assert below.code == 0 and "no effect: a higher layer sets stopped" in below.text


def test_rm_and_restore(command: Command, tmp_path: Path):
    command("job", "apply", "-f", a_file(tmp_path, task_count=4), "--why", "x")
    assert command("job", "rm", JOB, "--why", "over").code == 0
    assert command("job", "get", JOB).is_refused(3)
    said: list[str] = []

    def restored() -> bool:
        outcome = command("job", "restore", JOB, "--why", "a mistake")
        said.append(outcome.error)
        return outcome.code == 0

    try:
        until(restored)  # what the State Syncer does not notice it finds in a sweep, every 30 s
    except AssertionError as error:
        raise AssertionError(f"not restored: {dict.fromkeys(said)}") from error
    assert command.json("job", "get", JOB)["config"]["task_count"] == 4


def test_config_show_says_who_decided_each_field(command: Command, tmp_path: Path):
    command("job", "apply", "-f", a_file(tmp_path), "--why", "first")
    command("oncall", "set", JOB, "task_count=3", "--why", "a flood")
    shown = command("config", "show", JOB, "--layers")
    assert "task_count 3 oncall local-oncall" in shown.text and "a flood" in shown.text
    assert "layer oncall at version 2" in shown.text
    said = command.json("config", "show", JOB, "--layers")
    assert said["provenance"]["task_count"]["layer"] == "oncall"
    assert [row["layer"] for row in said["layers"]] == ["base", "provisioner", "oncall"]
    assert "layers" not in command.json("config", "show", JOB)


def test_a_deal_of_partitions_is_shown_and_said_to_be_ignored_where_it_does_not_fit(
    command: Command, tmp_path: Path
):
    deal = [0, 1, 1, 0, 1, 1, 1, 0]
    file = a_file(tmp_path, task_count=2)
    assert command("job", "apply", "-f", file, "--why", "first").code == 0
    file = a_file(tmp_path, task_count=2, partition_tasks=deal)
    assert "partition_tasks" in command("job", "plan", "-f", file).text
    assert command("job", "apply", "-f", file, "--why", "hot keys").code == 0
    for verb in (("job", "get", JOB), ("config", "show", JOB)):
        shown = command(*verb).text
        assert "partition_tasks" in shown and "0, 1, 1, 0, 1, 1, 1, 0" in shown and "ignored" not in shown
    assert command("oncall", "set", JOB, "task_count=4", "--why", "more").code == 0
    for verb in (("job", "get", JOB), ("config", "show", JOB)):
        assert "partition_tasks is ignored: task 2 of 4 would have no partition" in command(*verb).text
    refused = command("oncall", "set", JOB, "partition_tasks=[0,1]", "--why", "a slip")
    assert refused.code != 0 and "2 entries, and the job has 8 partitions" in " ".join(refused.err.split())


def test_layers_are_listed_and_added(command: Command):
    names = [kind["name"] for kind in command.json("layer", "ls")]
    assert names == ["base", "provisioner", "scaler", "oncall"]
    added = (
        "layer",
        "add",
        "doctor",
        "--precedence",
        "25",
        "--writer",
        "scaler",
        "--writer",
        "admin",
        "--why",
        "new",
    )
    assert command(*added).code == 0
    assert "scaler doctor oncall" in " ".join(kind["name"] for kind in command.json("layer", "ls"))
    assert "doctor" in command("layer", "ls").text


def test_tokens_are_issued_listed_and_taken_back(
    command: Command, empty: World, run: Run, monkeypatch: pytest.MonkeyPatch
):
    token = command("token", "new", "dana", "--role", "reader", "--why", "a colleague").out.strip()
    assert token.startswith("pk_")
    listed = command("token", "ls")
    assert "dana" in listed.text and token not in listed.out
    row = next(row for row in command.json("token", "ls") if row["name"] == "dana")
    monkeypatch.setenv("PENSTOCK_TOKEN", token)
    assert command("job", "ls").code == 0
    monkeypatch.delenv("PENSTOCK_TOKEN")
    assert "revoked" in command("token", "revoke", row["id"], "--why", "gone").text
    monkeypatch.setenv("PENSTOCK_TOKEN", token)
    assert "not known" in command("job", "ls").is_refused()


def test_the_audit_names_who_what_and_why(command: Command, tmp_path: Path):
    command("job", "apply", "-f", a_file(tmp_path), "--why", "because [of] that")
    entries = [(entry["actor"], entry["reason"]) for entry in command.json("audit", JOB)]
    assert ("local-developer", "because [of] that") in entries
    assert len(command.json("audit", "-n", "1")) == 1
    assert "because [of] that" in command("audit").text


def test_a_pipelines_jobs_are_jobs_like_others(world: World, run: Run):
    command = Command(run, world)
    assert [job["name"] for job in command.json("job", "ls", "--pipeline", "zeitgeist")] == [PARSE, COUNT]
    # Paused before its first start it would never run, and all of its config would differ from nothing.
    until(lambda: command.json("job", "get", COUNT)["state"] == "running")
    assert command("job", "pause", COUNT, "--why", "a look").code == 0
    until(lambda: command.json("job", "get", COUNT)["state"] == "paused")
    until(lambda: command.json("job", "diff", COUNT) == [])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name: demo.count\ntask_count: 1\ntask_count: 2\n", "line 3, column 1"),
        ("a: &a [1]\nb: *a\n", "anchors and aliases"),
        ("name: demo.count\nkind: !!python/name:os.system\n", "tags are not allowed"),
        ("- a\n", "not a map"),
        ("kind: stateless\n", "no `name:`"),
        (as_yaml(a_body(JOB, tsk_count=2)), "did you mean `task_count`?"),
        ("name: demo.count\nkind: stateful\n", "demo.count"),
        ("name: ../x\n", "'../x' is not a job name"),
        ("name: 2024-01-31\nowner: 2024-01-31\n", "2024-01-31"),
        ("\x00", "job.yaml"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "apply"])
def test_a_bad_file_is_explained_and_nothing_is_applied(
    shared: World, run: Run, tmp_path: Path, verb: str, text: str, named: str
):
    before = shared.everything()
    why = ("--why", "x") if verb == "apply" else ()
    ended = run("job", verb, "-f", a_file(tmp_path, text), *why, "--folder", shared.folder)
    assert named in ended.is_refused()
    assert shared.everything() == before


@pytest.mark.parametrize("verb", ["plan", "apply"])
def test_a_file_that_cannot_be_read_is_explained(shared: World, run: Run, tmp_path: Path, verb: str):
    why = ("--why", "x") if verb == "apply" else ()
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\n")
    for file in (tmp_path / "nowhere.yaml", tmp_path, tmp_path / "latin.yaml"):
        assert str(file) in run("job", verb, "-f", file, *why, "--folder", shared.folder).is_refused()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 1),
        (errors.Refused("x"), 1),
        (errors.KeyReused("x"), 1),
        (errors.EnvironmentProblem("x"), 1),
        (errors.DiskFull("x"), 1),
        (errors.NotFound("x"), 3),
        (errors.VersionConflict("x", expected=1, actual=2), 4),
        (errors.StoreUnavailable("x"), 5),
        (errors.OutcomeUnknown("x"), 5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes_tell_errors_apart(error: errors.PenstockError, code: int):
    assert exit_code_of(error) == code
