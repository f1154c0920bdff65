"""Claims about `penstock plan` and `submit`: Python and SQL, what changes and why, what cannot be run yet."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.world import QUERIES_SIX, Run, World
from tests.waiting import LIMIT_S, until

WORDS_SQL = """CREATE PIPELINE words WITH (partitions = 3);
INSERT INTO words SELECT word, lang FROM queries
  LATERAL VIEW explode(split(lower(query), ' ')) t AS word WHERE lang <> 'robot' DISTRIBUTE BY word;
"""
WORDS_PY = """from penstock import Pipeline
p = Pipeline("words", partitions=3)
stream = p.source("queries").flat_map("explode(split(lower(query), ' ')) AS word").filter("lang <> 'robot'")
stream.select("word", "lang").key_by("word").sink("words")
"""
JOINED_SESSIONS = """from penstock import Pipeline, session
p = Pipeline("windows", partitions=3)
queries = p.source("queries")
left, right = queries.select("query").key_by("query"), queries.select("query", "lang").key_by("query", name="by")
left.join(right, window=session(gap="1m")).sink("pairs")
"""
WINDOWS_SQL = """INSERT INTO per_query SELECT query, window.start, count(*) AS n FROM queries
GROUP BY query, window(event_time, '10 seconds');
"""


def a_file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_python_and_sql_are_planned_to_the_same_jobs(empty: World, run: Run, tmp_path: Path):
    folder = ("--folder", empty.folder)
    assert run(*QUERIES_SIX, *folder).code == 0
    answers = [
        run("plan", a_file(tmp_path, name, text), "-o", "json", *folder).json["compiled"]
        for name, text in (("w.sql", WORDS_SQL), ("w.py", WORDS_PY))
    ]
    for answer in answers:
        for part in (answer, *answer["jobs"]):
            del part["package"]  # other bytes, other hash
    assert answers[0] == answers[1]
    drawn = run("plan", tmp_path / "w.sql", *folder)
    assert drawn.code == 0
    for words in ("pipeline words: 1 job", "push filter", "fuse", "explode", "words.words new", "why"):
        assert words in drawn.text


def test_a_plan_says_what_is_kept_replaced_removed_and_new(empty: World, run: Run, tmp_path: Path):
    folder = ("--folder", empty.folder)
    assert run(*QUERIES_SIX, *folder).code == 0
    more = (
        WORDS_SQL + "INSERT INTO langs SELECT lang FROM queries; INSERT INTO gone SELECT query FROM queries;"
    )
    # The name of a file is part of its package: the same file, edited.
    assert run("submit", a_file(tmp_path, "w.sql", more), *folder).code == 0
    until(lambda: all(job["state"] == "running" for job in run("job", "ls", "-o", "json", *folder).json))
    kept = run("plan", tmp_path / "w.sql", *folder).text
    assert "words.words kept" in kept and "words.gone kept" in kept
    edited = more.replace("lang <> 'robot'", "lang = 'en'").replace("INTO gone", "INTO here")
    edited = edited.replace("SELECT lang FROM", "SELECT lang, ts FROM").replace("INTO langs", "INTO langs2")
    text = run("plan", a_file(tmp_path, "w.sql", edited), *folder).text
    for words in (
        "words.words replaced in place",
        "words.here new",
        "words.gone removed",
        "no longer has it",
    ):
        assert words in text


def test_what_cannot_be_run_yet_is_planned_and_not_submitted(empty: World, run: Run, tmp_path: Path):
    folder = ("--folder", empty.folder)
    assert run(*QUERIES_SIX, *folder).code == 0
    path, before = a_file(tmp_path, "windows.py", JOINED_SESSIONS), empty.everything()
    drawn = run("plan", path, *folder)
    assert drawn.code == 1 and "cannot run these jobs" in drawn.text and "windows.join: join" in drawn.text
    assert "'windows.join' cannot be run yet" in drawn.error and "what to do" in drawn.error
    planned = run("plan", path, "-o", "json", *folder)
    assert planned.code == 1
    compiled = planned.json["compiled"]
    said = run("submit", path, *folder).is_refused()
    assert "'windows.join' cannot be run yet" in said and "session windows" in said
    assert empty.everything() == before
    # A client that does not check is refused all the same.
    from penstock.cli.output import connect
    from penstock.core.errors import PenstockError

    package = compiled["package"]
    with connect(empty.folder, role="developer") as client:
        from penstock.streams.compile.packages import build_package

        client.put_package(package["hash"], build_package(path).data)
        try:
            client.submit_pipeline(compiled, why="x", key="k")
        except PenstockError as error:
            assert "cannot be run yet" in str(error)
        else:
            raise AssertionError("it was taken")


def test_windows_are_planned_and_submitted(empty: World, run: Run, tmp_path: Path):
    folder = ("--folder", empty.folder)
    assert run(*QUERIES_SIX, *folder).code == 0
    path = a_file(tmp_path, "windows.sql", WINDOWS_SQL)
    drawn = run("plan", path, *folder)
    assert drawn.code == 0 and "cannot run these jobs" not in drawn.text
    assert run("submit", path, *folder).code == 0


OTHER_SQL = """CREATE PIPELINE words WITH (partitions = 3);
INSERT INTO langs SELECT lang FROM queries;
"""


def states(world: World) -> dict[str, str]:
    return {view.name: view.config.state for view in world.plane.jobs.views()}


def test_a_second_file_with_the_name_of_a_running_pipeline_does_not_stop_it(
    empty: World, run: Run, tmp_path: Path
):
    """Plan: submit a file, then another with the same pipeline name and other jobs; then insist."""
    folder = ("--folder", empty.folder)
    assert run(*QUERIES_SIX, *folder).code == 0
    first = run("submit", a_file(tmp_path, "w.sql", WORDS_SQL), *folder)
    assert first.code == 0 and "created words.words, expected version 1" in first.text
    again = run("submit", tmp_path / "w.sql", *folder)
    assert again.code == 0 and "unchanged words.words" in again.text
    other, before = a_file(tmp_path, "other.sql", OTHER_SQL), empty.everything()

    said = run("submit", other, *folder).is_refused()
    assert "would stop words.words; nothing was changed" in said and "--yes" in said
    assert f"{tmp_path.name}/w.sql" in said and f"{tmp_path.name}/other.sql" in said
    after = empty.everything()
    after["packages"] = before["packages"]  # the code was put before the jobs were refused; it runs nowhere
    assert after == before and states(empty) == {"words.words": "running"}
    planned = run("plan", other, *folder)
    assert planned.code == 0 and "a submit would stop words.words: it asks first" in planned.text

    done = run("submit", other, "--yes", *folder)
    assert done.code == 0 and "created words.langs" in done.text and "stopped words.words" in done.text
    assert "submitted" not in done.text
    assert states(empty) == {"words.langs": "running", "words.words": "stopped"}


def test_a_copy_elsewhere_does_not_take_a_pipeline_over(empty: World, run: Run, tmp_path: Path):
    """Plan: the same file from another folder, edited: its jobs have the same names."""
    folder = ("--folder", empty.folder)
    assert run(*QUERIES_SIX, *folder).code == 0
    for name in ("mine", "yours"):
        (tmp_path / name).mkdir()
    assert run("submit", a_file(tmp_path / "mine", "w.sql", WORDS_SQL), *folder).code == 0
    copy, before = a_file(tmp_path / "yours", "w.sql", WORDS_SQL.replace("robot", "r2")), empty.everything()
    said = run("submit", copy, *folder).is_refused()
    assert "it was submitted from mine/w.sql before, now from yours/w.sql" in said
    assert empty.everything()["tables"] == before["tables"]
    assert "submitted from mine/w.sql before" in run("plan", copy, *folder).text
    done = run("submit", copy, "--yes", "-o", "json", *folder)
    assert done.json["done"] == {"words.words": "updated"}


@pytest.mark.parametrize(("answer", "code", "state"), [("y", 0, "stopped"), ("n", 1, "running")])
def test_at_a_terminal_it_asks(empty: World, run: Run, tmp_path: Path, answer: str, code: int, state: str):
    """Plan: the real command with a terminal of its own, which answers the question."""
    folder = ("--folder", empty.folder)
    assert run(*QUERIES_SIX, *folder).code == 0
    assert run("submit", a_file(tmp_path, "w.sql", WORDS_SQL), *folder).code == 0
    terminal, end = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "submit",
        str(a_file(tmp_path, "w2.sql", OTHER_SQL)),
    ]
    process = subprocess.Popen(
        [*command, "--folder", str(empty.folder)], stdin=end, stdout=subprocess.PIPE, stderr=end, cwd=tmp_path
    )
    os.close(end)
    said = b""
    while b"[y/N]" not in said:
        piece = os.read(terminal, 4096)
        assert piece, said
        said += piece
    assert b"words.words" in said
    os.write(terminal, answer.encode() + b"\n")
    assert process.communicate(timeout=LIMIT_S) and process.returncode == code
    os.close(terminal)
    assert states(empty)["words.words"] == state


def test_a_plan_that_would_be_refused_says_so_with_its_exit_code(empty: World, run: Run, tmp_path: Path):
    """Plan: windows over queries run; the same job with another window cannot keep its state."""
    folder = ("--folder", empty.folder)
    assert run(*QUERIES_SIX, *folder).code == 0
    path = a_file(tmp_path, "windows.sql", WINDOWS_SQL)
    assert run("submit", path, *folder).code == 0
    until(lambda: all(job["state"] == "running" for job in run("job", "ls", "-o", "json", *folder).json))
    a_file(tmp_path, "windows.sql", WINDOWS_SQL.replace("10 seconds", "15 seconds"))
    for form in ("table", "json"):
        planned = run("plan", path, "-o", form, *folder)
        assert planned.code == 1 and "cannot be kept" in planned.error, planned
        assert "--reset-state windows." in planned.error and "what to do" in planned.error
    assert "cannot be kept" in run("submit", path, *folder).is_refused()
    (job,) = [change["job"] for change in planned.json["changes"] if change["conflict"]]
    (body,) = [body for body in planned.json["compiled"]["jobs"] if body["name"] == job]
    alone = run("job", "plan", "-f", a_file(tmp_path, "job.json", json.dumps(body)), *folder)
    assert alone.code == 1 and "cannot be kept" in alone.error and "state: refused" in alone.text
    assert run("plan", path, "--reset-state", job, *folder).code == 0
    done = run("submit", path, "--reset-state", job, *folder)
    assert done.code == 0 and f"reset {job}" in done.text


def test_bad_files_of_sql_are_refused(empty: World, run: Run, tmp_path: Path):
    folder = ("--folder", empty.folder)
    assert run(*QUERIES_SIX, *folder).code == 0
    cases = {
        "SET x = 1;": "bad.sql:1: SET cannot be used",
        "ADD JAR '/x.jar'": "ADD JAR cannot be used",
        "INSERT INTO x SELECT * FROM parquet.`/x`": "is not a category",
        "INSERT INTO x SELECT reflect('a', 'b') AS y FROM queries": "reflect() cannot be used",
        WORDS_SQL + "SELECT 1": "SELECT cannot be used",
    }
    for text, said in cases.items():
        for command in ("plan", "submit"):
            assert said in run(command, a_file(tmp_path, "bad.sql", text), *folder).is_refused()
    assert "there is no file" in run("plan", tmp_path / "none.sql", *folder).is_refused()
    (tmp_path / "latin.sql").write_bytes(b"\xff\xfe")
    assert "cannot read" in run("plan", tmp_path / "latin.sql", *folder).is_refused()
