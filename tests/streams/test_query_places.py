"""Where a query brought as it is keeps its checkpoint, and that no password is in a path, a message or an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from psycopg.conninfo import conninfo_to_dict

from penstock.core.errors import ConfigError, CorruptData, EnvironmentProblem, PenstockError
from penstock.jobs.config import validate_config
from penstock.jobs.tasks import single_task
from penstock.streams.data_plane import StreamDataPlane
from penstock.streams.places import (
    checkpoint_folder,
    hidden_password,
    identify_rows,
    open_log,
    open_rows,
    settle_rows,
)
from penstock.streams.rows.row_store import IntervalRef
from tests.builders import PACKAGE
from tests.server.served import Served, served

PASSWORD = "s3cret-of-rows"


def a_query(name: str = "own.counts", **computation: str) -> dict[str, Any]:
    return {
        "name": name,
        "pipeline": "own",
        "kind": "spark",
        "package": {"name": "demo", "version": "1", "hash": PACKAGE, "entry": "queries.py"},
        "plan": {"computation": {"function": "main", **computation}},
    }


@pytest.fixture
def rows(postgres: Any) -> str:
    """A real database whose address carries a password."""
    where = conninfo_to_dict(postgres.new_database())
    user = where.get("user") or "postgres"
    return f"postgresql://{user}:{PASSWORD}@/{where['dbname']}?host={where['host']}"


@pytest.fixture
def plane(tmp_path: Path, rows: str) -> Iterator[Served]:
    with served(tmp_path / "plane", rows=rows) as found:
        yield found


def test_a_query_without_a_place_for_its_checkpoint_is_refused_where_rows_are_on_a_server(
    plane: Served,
) -> None:
    """At plan and at apply, in three parts, and nothing is created; with a place it is taken."""
    client = plane.client("developer")
    asks: list[Callable[[], object]] = [
        lambda: client.plan_job("own.counts", a_query()),
        lambda: client.apply_job("own.counts", a_query(), why="new", key="k1"),
    ]
    for ask in asks:
        with pytest.raises(ConfigError) as caught:
            ask()
        error = caught.value
        assert error.what == "the query of job own.counts has no place for its checkpoint"
        assert "on PostgreSQL" in error.why and "checkpoint: file:///" in error.fix
        assert PASSWORD not in str(error)
    assert client.jobs() == []
    good = a_query(checkpoint="file:///mnt/shared/checkpoints")
    client.plan_job("own.counts", good)
    assert client.apply_job("own.counts", good, why="new", key="k2")["created"]


def test_what_runs_already_without_a_place_can_still_be_stopped(tmp_path: Path, rows: str) -> None:
    with served(tmp_path / "plane", rows=rows) as plane:
        before = plane.plane.jobs._writer._check
        plane.plane.jobs._writer._check = lambda config: None  # as in a former version
        plane.client("developer").apply_job("own.counts", a_query(), why="old", key="k")
        plane.plane.jobs._writer._check = before
        plane.client("oncall").set_state("own.counts", "stopped", why="move it", key="k2")
        with pytest.raises(ConfigError, match="no place for its checkpoint"):
            plane.client("developer").patch_layer(
                "own.counts", "provisioner", {"plan.computation.function": "other"}, why="x", key="k3"
            )


def test_its_plan_is_refused_where_a_former_version_let_it_in(tmp_path: Path, rows: str) -> None:
    config = validate_config("own.counts", a_query())
    data = StreamDataPlane(open_log(f"embedded:{tmp_path / 'bus'}"), open_rows(rows), rows_place=rows)
    with pytest.raises(ConfigError, match="no place for its checkpoint") as caught:
        data.prepare("own.counts", "b1", config)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    ["s3a://key:topsecret@bucket/x", "/no/scheme", "file:relative", "file://host/x", "file:///a/../b", "x"],
)
def test_only_the_uri_of_a_folder_is_a_place(given: str) -> None:
    config = validate_config("own.counts", a_query(checkpoint=given))
    for rows in ("sqlite:/a/rows", f"postgresql://u:{PASSWORD}@h/d"):
        with pytest.raises(ConfigError, match="has an invalid checkpoint folder") as caught:
            checkpoint_folder(rows, "own.counts", config)
        assert "topsecret" not in str(caught.value) and PASSWORD not in str(caught.value)


def test_rows_in_a_folder_have_the_checkpoints_beside_them() -> None:
    config = validate_config("own.counts", a_query())
    assert checkpoint_folder("sqlite:/a/rows", "own.counts", config) == Path("/a/query_checkpoints")
    named = validate_config("own.counts", a_query(checkpoint="file:///mnt/my%20disk"))
    for rows in ("sqlite:/a/rows", "postgresql://u:p@h/d"):
        assert checkpoint_folder(rows, "own.counts", named) == Path("/mnt/my disk")


def test_a_successor_on_another_machine_finds_the_checkpoint_or_says_that_it_is_not_there(
    tmp_path: Path, rows: str
) -> None:
    """Rows on PostgreSQL, two engines: the second goes on from a copy of what the first left."""
    from penstock.streams.spark.tasks import OwnQuery, QueryLease

    shared, birth = tmp_path / "shared", "birth"
    config = validate_config("own.counts", a_query(checkpoint=shared.as_uri()))
    ref = IntervalRef(job="own.counts", job_birth="b1", partition=0, birth=birth)
    store = open_rows(rows)
    store.create(ref, offsets={}, low=0)

    def lease(epoch: int) -> QueryLease:
        spec = single_task("own.counts", "b1", config)
        query = OwnQuery(spec=spec, shard_epoch=epoch, ref=ref, package_folder=tmp_path)
        folder = checkpoint_folder(rows, "own.counts", config)
        return QueryLease(query, store, folder / birth, mounted=folder)

    with pytest.raises(EnvironmentProblem, match="cannot reach its checkpoint"), lease(1).held():
        pass
    assert not shared.exists(), "what is not mounted is not made here"
    shared.mkdir()
    with lease(1).held() as first:
        (first / "offsets").write_text("so far")
    with lease(2).held() as second:
        assert second != first and (second / "offsets").read_text() == "so far"
    for path in shared.rglob("*"):
        assert PASSWORD not in str(path)
    (shared / birth).rename(tmp_path / "lost")
    with (
        pytest.raises(CorruptData, match=r"the checkpoint of own\.counts/0 is not there") as caught,
        lease(3).held(),
    ):
        pass
    assert "lineage" in caught.value.fix
    (shared / birth / "lease").unlink()
    (shared / birth).rmdir()
    (tmp_path / "lost").rename(shared / birth)
    with lease(4).held() as fourth:
        assert (fourth / "offsets").read_text() == "so far"


SECRETS = (
    f"postgresql://u:{PASSWORD}@h:5432/d",
    f"postgresql://u:{PASSWORD}%40x@h/d?sslmode=require",
    f"postgresql://u:a@{PASSWORD}@h/d",
    f"postgresql://u:a/{PASSWORD}@h/d",
    f"postgresql://h/d?user=u&password={PASSWORD}&sslmode=require",
    f"could not read 'postgresql://u:{PASSWORD}@h/d' of task",
)


@pytest.mark.parametrize("text", SECRETS)
def test_a_password_is_in_no_text_for_people(text: str) -> None:
    assert PASSWORD not in hidden_password(text) and "***" in hidden_password(text)
    assert hidden_password("http://localhost:80/a see b@c") == "http://localhost:80/a see b@c"


def test_what_spark_says_of_a_task_has_no_password() -> None:
    pytest.importorskip("pyspark")
    from penstock.streams.spark.run_errors import readable

    said = readable(RuntimeError(f'[X] {{"rows": "postgresql://u:{PASSWORD}@h/d"}} failed'))
    assert PASSWORD not in said and "postgresql://u:***@h/d" in said


def test_a_password_in_the_address_is_in_no_answer_no_file_name_and_no_process_line(
    plane: Served, tmp_path: Path, rows: str
) -> None:
    """Every question that a container or a person asks, the files of the folder, and what `ps` shows."""
    plane.client("developer").apply_job(
        "own.counts", a_query(checkpoint=tmp_path.as_uri()), why="new", key="k"
    )
    plane.plane._sync()
    said = [
        plane.client(container="c1").installation(),
        plane.client(container="c1").task_list(None),
        plane.client("admin").status(),
        plane.client("admin").job("own.counts"),
        plane.client("admin").journal(),
        plane.client("admin").audit(),
    ]
    assert PASSWORD not in json.dumps(said)
    settle_rows(tmp_path / "plane", rows)
    for path in (tmp_path / "plane").rglob("*"):
        assert PASSWORD not in str(path)
        if path.is_file() and PASSWORD.encode() in path.read_bytes():
            assert (path.name, path.stat().st_mode & 0o077) == ("rows.json", 0), "only its owner reads it"
    mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
    assert not any(PASSWORD in " ".join(process.cmdline()) for process in mine if process.is_running())


def test_an_engine_takes_the_address_out_of_the_environment_of_what_it_starts(rows: str) -> None:
    code = (
        "import os, subprocess, sys\n"
        "from penstock.container.container import pop_rows_address\n"
        "assert pop_rows_address('env:PENSTOCK_ROWS')\n"
        "print(subprocess.run(['env'], capture_output=True, text=True).stdout)\n"
    )
    environment = {**os.environ, "PENSTOCK_ROWS": rows}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "PATH=" in found.stdout and PASSWORD not in found.stdout


def test_an_address_that_is_none_is_not_repeated(tmp_path: Path) -> None:
    for wrong in (f"postgresql://u:{PASSWORD}@h:port/d", f"mysql://u:{PASSWORD}@h/d"):
        with pytest.raises(PenstockError) as caught:
            identify_rows(wrong)
        assert PASSWORD not in str(caught.value)
