"""Where settings come from: default, file, environment, option; later wins, and a bad value is named with its source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.output import connect
from penstock.core.errors import ConfigError
from penstock.settings import FILE, JoinSettings, Settings
from tests.cli.world import Run, Up

# A value of each setting that is not its default: as a file, a variable and an option have it, and what comes of it.
OTHERS: dict[str, tuple[str, str, Any]] = {
    "containers": ("3", "4", 5),
    "port": ("1", "2", 3),
    "host": ('"::1"', "127.0.0.2", "127.0.0.3"),
    "tls_cert": ('"a.pem"', "b.pem", Path("c.pem")),
    "tls_key": ('"a.key"', "b.key", Path("c.key")),
    "tls_ca": ('"a.ca"', "b.ca", Path("c.ca")),
    "name": ('["a", "b"]', "c d", ("e",)),
    "database": ('"postgresql://a"', "postgresql://b", "postgresql://c"),
    "bus": ('"kafka://a:1/x"', "kafka://b:1/x", "kafka://c:1/x"),
    "rows": ('"postgresql://a"', "postgresql://b", "postgresql://c"),
    "engine": ('"process"', "process", "process"),
    "cores": ("3", "4", 5),
    "master": ('"spark://a:1"', "spark://b:1", "spark://c:1"),
    "profile": ('"paper"', "paper", "paper"),
    "workers": ("3", "4", 5),
    "control_port": ("1", "2", 3),
    "control_url": ('"http://a:1"', "http://b:1", "http://c:1"),
    "alarm_webhook": ('"https://a"', "https://b", "https://c"),
    "alarm_channels": ('"json://a"', "json://b", "json://c"),
    "rescales_max": ("3", "4", 5),
    "advice_only": ("true", "1", True),
}


def test_every_setting_that_people_may_set_is_an_option_and_in_this_file():
    from penstock.cli.main import program

    described = {name for name, field in Settings.model_fields.items() if field.description} - {"folder"}
    assert described == {*OTHERS}
    options = {parameter.name for parameter in program().commands["up"].params}  # type: ignore[attr-defined]
    assert options == {*OTHERS, "folder", "config"}
    join = {parameter.name for parameter in program().commands["container"].params}  # type: ignore[attr-defined]
    assert {*JoinSettings.model_fields} <= join


@pytest.mark.parametrize("name", OTHERS)
def test_an_option_wins_over_a_variable_over_a_file_over_the_default(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def found(**options: Any) -> Any:
        return getattr(Settings.of_up({"folder": tmp_path, **options}, config=None), name)

    in_file, in_variable, given = OTHERS[name]
    default = found()
    assert default == getattr(Settings(folder=tmp_path), name) != given
    (tmp_path / FILE).write_text(f"{name} = {in_file}\n")
    from_file = found()
    monkeypatch.setenv(f"PENSTOCK_{name.upper()}", in_variable)
    from_variable = found()
    assert from_file != default and from_variable != default and found(**{name: given}) == given
    if name not in ("engine", "profile", "advice_only"):  # of which there are two values
        assert from_file != from_variable
    monkeypatch.setenv(f"PENSTOCK_{name.upper()}", "")
    assert found() == from_file, "an empty variable is none"


def test_settings_that_are_made_directly_read_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_CORES", "7")
    (tmp_path / FILE).write_text("cores = 8\n")
    assert Settings(folder=tmp_path).cores == 2


@pytest.mark.e2e
def test_up_runs_with_file_environment_and_options(tmp_path: Path):
    """Plan: the file says all of it, a variable something else of two, an option something else of one."""
    (tmp_path / "mine.toml").write_text("containers = 0\nport = 0\nrescales_max = 5\nadvice_only = true\n")
    env = {**os.environ, "PENSTOCK_RESCALES_MAX": "3", "PENSTOCK_ADVICE_ONLY": "0"}
    up = Up(tmp_path, "--config", str(tmp_path / "mine.toml"), "--rescales-max", "7", env=env)
    up.wait_ready()
    with connect(tmp_path) as client:
        status = client.status()
    assert (status["advice_only"], status["rescales_max"], status["containers"]) == (False, 7, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('cores = "many"', f"cores in FOLDER/{FILE} cannot be used"),
        ("cores = 0", "0: Input should be greater than or equal to 1"),
        ('engine = "flink"', "unknown value 'flink'; use spark or process"),
        ("core = 3", f"core in FOLDER/{FILE} is not a setting"),
        ("core = 3", "did you mean `cores`?"),
        ('folder = "elsewhere"', "is not a setting"),
        ("sync_ms = 3", "is not a setting"),
        ("cores = 1\nport = -1", "cores in FOLDER/penstock.toml: "),
        ("cores =", f"FOLDER/{FILE} is not TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(run: Run, tmp_path: Path, text: str, said: str):
    (tmp_path / FILE).write_text(text.replace("cores = 1\n", "cores = 0\n"))
    refused = run("up", "--folder", tmp_path)
    assert said.replace("FOLDER", str(tmp_path)).replace(" ", "") in refused.is_refused(1).replace(" ", "")


def test_a_file_that_is_not_there_is_named(run: Run, tmp_path: Path):
    refused = run("up", "--folder", tmp_path, "--config", tmp_path / "none.toml")
    assert "cannot read the settings" in refused.is_refused(1)


@pytest.mark.parametrize(("variable", "value"), [("RESCALES_MAX", "many"), ("PORT", "tcp://10.0.0.1:7337")])
def test_a_variable_that_cannot_be_used_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
):
    monkeypatch.setenv(f"PENSTOCK_{variable}", value)
    refused = run("up", "--folder", tmp_path).is_refused(1)
    assert f"PENSTOCK_{variable} cannot be used" in refused and value in refused


def test_a_container_that_joins_reads_its_folder(run: Run, tmp_path: Path):
    (tmp_path / FILE).write_text('engine = "flink"\n')
    given = ("--join", "http://127.0.0.1:1", "--token", "pk_x", "--dir", tmp_path)
    assert "engine in" in run("container", *given).is_refused(1)
    # An option wins, and then there is nobody to join.
    assert "no control plane answers" in run("container", *given, "--engine", "process").is_refused(5)


def test_a_secret_is_not_shown_when_it_is_wrong(tmp_path: Path):
    (tmp_path / FILE).write_text('database = ["postgresql://user:hush@db/x"]\n')
    with pytest.raises(ConfigError) as refused:
        Settings.of_up({"folder": tmp_path}, config=None)
    assert "database in" in refused.value.what and "hush" not in str(refused.value)
