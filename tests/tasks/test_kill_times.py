"""A container that cannot end its tasks in time does not run with those times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.core.errors import EnvironmentProblem
from penstock.tasks.kill_times import KEPT, KillTimes
from penstock.tasks.messages import FAST, PAPER


def test_without_a_measurement_every_profile_will_do(tmp_path: Path):
    KillTimes(tmp_path).check(FAST)


@pytest.mark.parametrize(("took_ms", "fits"), [(3_999, True), (4_000, True), (4_001, False)])
def test_a_kill_must_fit_between_deadline_and_failover(tmp_path: Path, took_ms: int, fits: bool):
    times = KillTimes(tmp_path)
    times.note(5_000)
    times.note(100)
    times.check(FAST)  # once may be a bad moment
    times.note(took_ms)
    times.check(PAPER)
    if fits:
        times.check(FAST)
        return
    with pytest.raises(EnvironmentProblem, match="cannot run with these times") as refused:
        times.check(FAST)
    assert "4001 ms" in refused.value.why and "4000 ms" in refused.value.why
    assert "--profile paper" in refused.value.fix and "kill_times.json" in refused.value.fix


def test_a_machine_that_became_faster_is_believed_after_a_few(tmp_path: Path):
    times = KillTimes(tmp_path)
    times.note(30_000)
    for _ in range(KEPT):
        times.note(50)
    assert times.read() == (50,) * KEPT
    times.check(FAST)


@pytest.mark.parametrize("text", ["", "{", "7", '{"a": 1}', '["x", null, 2.5]'])
def test_a_file_that_cannot_be_read_is_no_measurement(tmp_path: Path, text: str):
    (tmp_path / "kill_times.json").write_text(text)
    times = KillTimes(tmp_path)
    assert times.read() == ()
    times.note(7)
    assert json.loads((tmp_path / "kill_times.json").read_text()) == [7]
