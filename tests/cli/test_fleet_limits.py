"""The fleet's cap on rescales and advice only: given to `penstock up`, shown by `penstock status`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from penstock.cli.output import connect
from penstock.cli.tables import status_tables
from penstock.core.errors import ConfigError
from penstock.settings import Settings
from tests.cli.test_tables import shown
from tests.cli.world import Run, Up, World


def test_status_says_when_the_fleet_only_advises(shared: World, run: Run):
    found = run("status", "--folder", shared.folder, "-o", "json").json
    assert (found["advice_only"], found["rescales_max"]) == (False, 10)
    assert "advice only" not in run("status", "--folder", shared.folder).text
    assert "report what they would do" in shown(status_tables({**found, "advice_only": True}))


@pytest.mark.parametrize("given", ["-1", "100001", "many"])
def test_a_cap_that_cannot_be_is_refused(run: Run, tmp_path: Path, given: str):
    refused = run("up", "--folder", tmp_path / "new", "--containers", "0", "--rescales-max", given)
    assert refused.code == 2 and "rescales-max" in refused.err and not (tmp_path / "new").exists()


def test_settings_refuse_it_in_three_parts(tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        Settings.of_up({"folder": tmp_path, "rescales_max": -1}, config=None)
    assert refused.value.what == "--rescales-max cannot be used"
    assert "-1: Input should be greater than or equal to 0" in refused.value.why and refused.value.fix


@pytest.mark.e2e
def test_up_takes_both_from_the_environment(tmp_path: Path):
    env = {**os.environ, "PENSTOCK_RESCALES_MAX": "3", "PENSTOCK_ADVICE_ONLY": "1"}
    up = Up(tmp_path, "--containers", "0", "--port", "0", env=env)
    up.wait_ready()
    with connect(tmp_path) as client:
        status = client.status()
    assert (status["advice_only"], status["rescales_max"]) == (True, 3)
    assert up.end(signal.SIGTERM).code == 0
