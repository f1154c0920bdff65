"""Claims about the scaler over hours and days, with the settings of a job that says nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from penstock.db.database import Database
from penstock.scaling.scaler.observation import DEFAULTS, DecisionSettings
from penstock.scaling.scaler.observe import settings_of
from tests.builders import a_config, a_stored_config
from tests.scaling.scaler_days import Days, Plant, noisy

JOB = "demo.count"
HOUR_S = 3600


@pytest.fixture
def days() -> Iterator[Days]:
    database = Database(None)
    yield Days(database)
    database.close()


def each_hour(thread_rate: float, dear: float, *, after_s: float = 0.0) -> Callable[[float], float]:
    """What a thread can do where a sink is dear for the first ten minutes of each hour."""
    return lambda s: dear if s >= after_s and s % HOUR_S < 600 else thread_rate


def test_a_job_that_says_nothing_has_the_documented_settings():
    """Plan: an hour of quiet before it goes down, not a minute; Algorithm 2 waits for a day."""
    assert settings_of(a_config().scaler) == DEFAULTS
    assert (DEFAULTS.down_after_min, DEFAULTS.reactive_quiet_min) == (60, 1440)
    assert settings_of(a_config(scaler={"quiet_s": 60}).scaler).down_after_min == 1
    stored_before = {"enabled": True, "quiet_s": 60.0, "settle_s": 10.0, "task_count_min": 1}
    assert settings_of(a_stored_config(scaler=stored_before).scaler) == DecisionSettings(
        down_after_min=1, reactive_quiet_min=1
    )


def test_a_job_whose_batches_run_back_to_back_and_keep_up_stays_as_it_is(days: Days):
    """Plan: 500 records/s, trigger 0. It is busy all the time; one thread could do 2,000. It went to 32 tasks."""
    plant = Plant(JOB, input_rate=lambda s: 500.0, thread_rate=2000.0, trigger_s=0.0, batch_cost_s=0.4)
    days.add_plant(plant)
    days.pass_minutes(12 * 60)
    assert days.steps_of() == [] and plant.task_count == 1
    assert days.entries()[-1].data["bound"] == "keeps up"


def test_a_job_whose_batches_run_back_to_back_grows_when_records_pile_up(days: Days):
    """Plan: the same, and the input becomes what no thread can do: that shows, and it gets enough."""
    plant = Plant(
        JOB,
        input_rate=lambda s: 500.0 if s < HOUR_S else 3000.0,
        thread_rate=2000.0,
        trigger_s=0.0,
        batch_cost_s=0.4,
    )
    days.add_plant(plant)
    days.pass_minutes(120)
    assert [direction for _, direction, _ in days.steps_of()] == ["up"]
    assert 2 <= plant.task_count <= 4 and plant.lag_s < 1


def test_a_job_that_processes_nothing_is_untriaged(days: Days):
    """Plan: what its tasks call never answers. It went to its limit: "one thread gives 0"."""
    plant = Plant(JOB, input_rate=lambda s: 100.0, thread_rate_at=lambda s: 0.0)
    days.add_plant(plant, task_count=4)
    days.pass_minutes(60)
    assert days.steps_of() == [] and plant.task_count == 4
    assert days.entries()[-1].decision == "untriaged" and "nothing is processed" in days.entries()[-1].reason
    assert days.alarm_keys() == {"not_scaled"}


@pytest.mark.parametrize(("task_count", "rate"), [(2, 150.0), (4, 300.0)])
def test_what_was_tried_while_a_dependency_hung_does_not_block_the_recovery(
    days: Days, task_count: int, rate: float
):
    """Plan: half an hour in which nothing is processed, then all is well. It took 86 minutes, on the tasks of
    before: a step tried meanwhile was held useless.
    """
    plant = Plant(
        JOB, input_rate=lambda s: rate, thread_rate_at=lambda s: 0.0 if 7200 <= s < 9000 else 100.0,
        batch_cost_s=0.1,
    )  # fmt: skip
    days.add_plant(plant, task_count=task_count)
    days.pass_minutes(150)
    assert plant.lag_s > 1700
    assert days.pass_minutes(240, until=lambda: plant.lag_s < 90) <= 16


@pytest.mark.slow
@pytest.mark.parametrize(("mean", "task_count", "seed"), [(500.0, 4, 2), (300.0, 6, 1)])
def test_noise_around_one_mean_takes_few_steps(days: Days, mean: float, task_count: int, seed: int):
    """Plan: two days, minutes with a standard deviation of 20 %. It took 60 to 90 steps."""
    plant = Plant(JOB, input_rate=noisy(mean, 0.2, seed), batch_cost_s=0.1)
    days.add_plant(plant, task_count=task_count)
    days.pass_minutes(2 * 1440)
    assert len(days.steps_of()) <= 3, days.steps_of()
    assert plant.lag_s < 90


@pytest.mark.slow
@pytest.mark.parametrize(("dear", "after_s"), [(100 / 3, 0.0), (20.0, 3 * HOUR_S), (0.0, 3 * HOUR_S)])
def test_a_sink_that_is_dear_ten_minutes_an_hour_takes_few_steps(days: Days, dear: float, after_s: float):
    """Plan: a day. Before it goes down it looks at what the same input cost; it took tens of steps."""
    plant = Plant(
        JOB, input_rate=noisy(300, 0.02, 3), thread_rate_at=each_hour(100.0, dear, after_s=after_s),
        batch_cost_s=0.1,
    )  # fmt: skip
    days.add_plant(plant, task_count=4)
    days.pass_minutes(1440)
    assert 1 <= len(days.steps_of()) <= 3, days.steps_of()


@pytest.mark.slow
def test_a_job_comes_down_again_a_day_after_its_sink_was_dear(days: Days):
    """Plan: the sink is dear once. For a day that is remembered, and then it is not."""
    plant = Plant(JOB, input_rate=lambda s: 300.0, batch_cost_s=0.1)
    plant.thread_rate_at = lambda s: 100 / 3 if s < 600 else 100.0
    days.add_plant(plant, task_count=4)
    days.pass_minutes(20 * 60)
    assert [direction for _, direction, _ in days.steps_of()] == ["up"]
    assert "only" in days.entries()[-1].reason and days.entries()[-1].data["bound"] == "cost"
    held_at = plant.task_count
    days.pass_minutes(6 * 60, until=lambda: plant.task_count < held_at)
    assert plant.task_count < held_at and plant.lag_s_max < 200


def test_a_job_below_one_that_drained_a_backlog_gets_what_arrives(days: Days):
    """Plan: an hour in which the first job stands still. It drains with 1,100/s; afterwards 150/s arrive."""
    output = {"stream": "out", "category": "mid", "partitions": 32, "columns": [], "internal": True}
    first = Plant("demo.first", input_rate=lambda s: 150.0, batch_cost_s=0.05)
    first.thread_rate_at = lambda s: 0.0 if 5400 <= s < 9000 else 100.0
    days.add_plant(first, task_count=3, outputs=[output])
    second = Plant("demo.second", input_rate=lambda s: first.sent_rate, batch_cost_s=0.05)
    days.add_plant(second, task_count=3, inputs=[{"category": "mid"}])
    days.pass_minutes(152)
    days.pass_minutes(30, until=lambda: first.lag_s + second.lag_s < 1)
    days.pass_minutes(3)
    assert second.task_count > 8, "while it drains the job below must follow"
    decision = days.scaler.decisions["demo.second"]
    assert decision.inputs["X"] == pytest.approx(150, rel=0.02)  # it was 1,015
    days.pass_minutes(75, until=lambda: second.task_count <= 3)
    downs = [direction for at, direction, _ in days.steps_of("demo.second") if at > 160]
    assert downs == ["down"] and second.task_count == 3
