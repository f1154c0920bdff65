"""Claims about joining: what is refused before anything starts, what a container is told, which secrets it keeps."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.container.container import (
    SECRET_VARIABLES,
    ContainerSettings,
    join_settings,
    open_store,
    pop_rows_address,
    reachable_store,
    read_capacity,
)
from penstock.container.host import write_token_file
from penstock.core.errors import ConfigError, EnvironmentProblem, Refused
from penstock.installation import environment_of
from penstock.settings import DATABASE_VARIABLE, ROWS_VARIABLE, Settings
from tests.cli.world import Run
from tests.server.served import Served, served


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("plane")) as found:
        yield found


def joined(plane: Served, folder: Path, **changes: Any) -> ContainerSettings:
    given = {
        "engine": "process",
        "cores": 2,
        "capacity": "",
        "region": "",
        "url": plane.server.url,
        **changes,
    }
    role = given.pop("role", "")
    token = plane.tokens[role] if role else plane.token_of("far")
    return join_settings("far", token_file=write_token_file(folder, token), folder=folder, **given)


def test_a_container_is_told_where_things_are(plane: Served, tmp_path: Path):
    settings = joined(plane, tmp_path, capacity="4,8000,0,0", region="north")
    assert (settings.profile, settings.engine, settings.region) == ("fast", "process", "north")
    assert settings.store == str(plane.plane.settings.folder / "store.db")
    assert read_capacity(settings.capacity) == (4.0, 8000.0, 0.0, 0.0)


def test_a_container_does_not_join_with_the_token_of_another(plane: Served, tmp_path: Path):
    token = write_token_file(tmp_path, plane.token_of("near"))
    given = {
        "url": plane.server.url,
        "folder": tmp_path,
        "engine": "process",
        "cores": 2,
        "capacity": "",
        "region": "",
    }
    with pytest.raises(Refused, match="is not for container 'far'") as caught:
        join_settings("far", token_file=token, **given)
    assert "'near'" in caught.value.why and "token new far --role container" in caught.value.fix


def test_the_token_is_in_a_file_of_this_user_alone(tmp_path: Path):
    (tmp_path / "token").write_text("old")
    (tmp_path / "token").chmod(0o644)
    path = write_token_file(tmp_path, "pk_secret")
    assert path.read_text() == "pk_secret" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_store_on_another_machine_is_not_taken_for_ours(tmp_path: Path):
    """A path means nothing elsewhere: the file of that name there is another one."""
    file = tmp_path / "store.db"
    assert reachable_store(str(file), is_here=True, variables={}) == ""
    file.touch()
    assert reachable_store(str(file), is_here=True, variables={}) == str(file)
    assert reachable_store(str(file), is_here=False, variables={}) == ""
    with pytest.raises(EnvironmentProblem, match="cannot reach the control plane's store") as caught:
        open_store("")
    assert "no store was given" in caught.value.why


def test_a_database_is_reached_by_whoever_knows_its_address():
    store = f"env:{DATABASE_VARIABLE}"
    assert reachable_store(store, is_here=True, variables={}) == ""
    known = {DATABASE_VARIABLE: "postgresql://here"}
    assert reachable_store(store, is_here=False, variables=known) == store
    with pytest.raises(EnvironmentProblem, match="cannot reach"):
        open_store("env:PENSTOCK_NO_SUCH_VARIABLE")


@pytest.mark.parametrize(
    ("changes", "kind", "what"),
    [
        ({"engine": "flink"}, ConfigError, "unknown engine"),
        ({"capacity": "4"}, ConfigError, "not a capacity"),
        ({"capacity": "4,8000,0,lots"}, ConfigError, "not a capacity"),
        ({"capacity": "4,8000,0,nan"}, ConfigError, "not a capacity"),
        ({"capacity": "4,8000,0,-1"}, ConfigError, "not a capacity"),
        ({"role": "reader"}, Refused, "the role 'reader' may not"),
    ],
)
def test_what_cannot_join_is_refused_at_once(
    plane: Served, tmp_path: Path, changes: dict[str, str], kind: type[Exception], what: str
):
    with pytest.raises(kind, match=what):
        joined(plane, tmp_path, **changes)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--name", "far"), 1, "there is no --join URL"),
        (("--join", "http://127.0.0.1:1"), 1, "there is no --token"),
        (("--join", "http://127.0.0.1:1", "--token", "pk_x"), 5, "no control plane answers"),
        (("--join", "nonsense", "--token", "pk_x"), 1, "not the URL of a control plane"),
        (("--join", "http://127.0.0.1:1", "--token", "two words"), 1, "the token is not valid"),
        (
            ("--join", "http://127.0.0.1:1", "--token", "pk_x", "--name", "../up"),
            1,
            "is not a valid container name",
        ),
        (("--join", "http://127.0.0.1:1", "--token", "pk_x", "ls"), 1, "exclude each other"),
    ],
)
def test_a_join_that_cannot_be_says_why(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
):
    given = ("container", "--dir", str(tmp_path / "far"), *arguments)
    assert said in run(*given).is_refused(code)


def test_wardens_know_the_database_and_no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "from outside")
    settings = Settings(folder=tmp_path)
    assert not SECRET_VARIABLES & set(environment_of(settings))
    assert environment_of(settings)["PATH"] == os.environ["PATH"]
    settings = Settings(
        folder=tmp_path,
        database="postgresql://here",
        tls_cert=tmp_path / "cert.pem",
        tls_key=tmp_path / "key.pem",
    )
    found = environment_of(settings)
    assert found[DATABASE_VARIABLE] == "postgresql://here"
    assert found["PENSTOCK_CA"] == str(tmp_path / "cert.pem")
    assert not {"PENSTOCK_TOKEN", "PENSTOCK_URL"} & set(found)


@pytest.fixture
def plane_on_rows(postgres: Any, tmp_path: Path) -> Iterator[tuple[Served, str]]:
    place = str(postgres.new_database())
    with served(tmp_path / "plane", rows=place) as found:
        yield found, place


def test_spark_tasks_run_elsewhere_where_bus_and_rows_are_in_reach(
    plane_on_rows: tuple[Served, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The bus of this plane is a folder of this machine; another address of the same rows will do."""
    plane, place = plane_on_rows
    monkeypatch.setenv(ROWS_VARIABLE, "")
    (tmp_path / "plane" / "bus").mkdir(exist_ok=True)
    settings = joined(plane, tmp_path / "far", engine="spark", rows=place + "&application_name=far")
    assert place not in " ".join(settings.arguments())
    assert os.environ[ROWS_VARIABLE] == place + "&application_name=far"
    assert pop_rows_address(settings.rows) == place + "&application_name=far"
    assert ROWS_VARIABLE not in os.environ, "commands of users do not see it"


def test_spark_tasks_do_not_run_without_the_rows_of_the_control_plane(
    plane_on_rows: tuple[Served, str], postgres: Any, tmp_path: Path
):
    plane, _ = plane_on_rows
    (tmp_path / "plane" / "bus").mkdir(exist_ok=True)
    with pytest.raises(EnvironmentProblem, match="cannot run here") as caught:
        joined(plane, tmp_path / "far", engine="spark")
    assert "address was not given" in caught.value.why
    with pytest.raises(EnvironmentProblem, match="cannot run here") as caught:
        joined(plane, tmp_path / "far", engine="spark", rows=postgres.new_database())
    assert "is not that of the control plane" in caught.value.why
    assert joined(plane, tmp_path / "far").engine == "process"  # which needs none


@pytest.mark.parametrize(
    ("bus", "rows", "missing"),
    [
        ("embedded:/nowhere/bus", "env:PENSTOCK_ROWS", "streams"),
        ("kafka://h:1/x", "sqlite:/nowhere/rows", "state"),
        ("kafka://h:1/x", "env:PENSTOCK_ROWS", ""),
    ],
)
def test_spark_tasks_need_whatever_is_a_folder_to_be_here(tmp_path: Path, bus: str, rows: str, missing: str):
    settings = ContainerSettings(
        name="far",
        folder=tmp_path,
        url="",
        token_file=tmp_path / "token",
        bus=bus,
        rows=rows,
        profile="fast",
        engine="spark",
        cores=2,
    )
    if not missing:
        settings.check()
        return
    with pytest.raises(EnvironmentProblem, match="cannot run here") as caught:
        settings.check()
    assert missing in caught.value.why


def test_containers_are_told_of_rows_in_their_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(ROWS_VARIABLE, "from outside")
    settings = Settings(folder=tmp_path, rows="postgresql://here")
    assert environment_of(settings)[ROWS_VARIABLE] == "postgresql://here"
    settings = Settings(folder=tmp_path, rows="sqlite:/x")
    assert ROWS_VARIABLE not in environment_of(settings)
