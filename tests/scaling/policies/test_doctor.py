"""The doctor: every trouble is named with its cause, its numbers and a command that exists."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.admin import _setting
from penstock.cli.main import program
from penstock.jobs.config import JobConfig, validate_config
from penstock.jobs.layers import merge_json
from penstock.scaling.doctor.doctor import RULES, JobDoctor, alerts_of, examine
from penstock.scaling.doctor.failure_rules import exception_class, kind_of, place_of
from penstock.scaling.doctor.patient import (
    DeadLetter,
    EngineFacts,
    Examination,
    Finding,
    InputFacts,
    Patient,
    WatermarkFacts,
)
from penstock.scaling.metrics.frames import NoFrame
from penstock.scaling.policies.balance import Starved
from penstock.scaling.policies.policy import ControlSettings, Nothing, RaiseAlert, Verdict, evaluate
from tests.builders import a_body, an_output
from tests.scaling.policies.kit import NOW_MS, a_config, a_frame, a_task, some_facts

WELL = {
    "lag_s": 1.0,
    "lag_records": 10.0,
    "busy": 0.5,
    "busy_mean": 0.5,
    "ingest_rate": 4000.0,
    "processed_rate": 4000.0,
    "cpu": 2.0,
    "memory_task_mb": 400.0,
    "oom": 0.0,
    "restarts": 0.0,
    "watermark_lag_s": 2.0,
}
POISON = """job shops.total: a record of 'sales' cannot be processed
Why: partition 3, offset 4711: not JSON
What to do: correct the plan"""


def a_patient(minutes: dict[str, Any] | None = None, /, **changes: Any) -> Patient:
    tasks = tuple(a_task(n, cpu=0.5, batch_ms=500.0, late=0.0, bad=0.0, records=1000.0) for n in range(4))
    values: dict[str, Any] = {
        "job": "shops.total",
        "at_ms": NOW_MS,
        "config": a_config(),
        "task_count": 4,
        "tasks": tasks,
        "frame": a_frame(60, **(WELL | (minutes or {}))),
        "inputs": (InputFacts(category="sales", retention_ms=3_600_000, lateness_ms=1000),),
        "watermarks": (WatermarkFacts(category="totals", age_s=2.0, who="", because=""),),
        "engines": (EngineFacts(container="c0", cpu=1.0, cpu_max=4.0, memory_mb=900, memory_max_mb=4096),),
        "container_memory_mb": 16_000.0,
        "is_package_there": True,
        "state": "running",
    }
    return Patient(**(values | changes))


def failing(error: str, **changes: Any) -> Patient:
    tasks = (a_task(0, state="backoff", restarts=1, error=error), *(a_task(n) for n in range(1, 4)))
    return a_patient(tasks=tasks, **changes)


def found(patient: Patient, name: str) -> Finding:
    examination = examine(patient)
    match = [finding for finding in examination.findings if finding.name == name]
    assert match, f"{name} not in {[finding.name for finding in examination.findings]}"
    return match[0]


def hot(**odd: Any) -> tuple[Any, ...]:
    return tuple(a_task(n, **(odd if n == 2 else {})) for n in range(8))


TROUBLES: dict[str, Patient] = {
    "cpu_high": a_patient({"cpu": 3.9}),
    "cpu_low": a_patient({"cpu": 0.2}),
    "memory_high": a_patient({"memory_task_mb": 1000.0}),
    "memory_low": a_patient(
        {"memory_task_mb": 300.0}, config=a_config(resources={"cpu": 1.0, "memory_mb": 4096})
    ),
    "engine_memory_high": a_patient(
        engines=(EngineFacts(container="c0", memory_mb=4000, memory_max_mb=4096),)
    ),
    "engine_cpu_high": a_patient(engines=(EngineFacts(container="c0", cpu=3.9, cpu_max=4.0),)),
    "oom": failing("out of memory: it used 1100 MB and had reserved 1024 MB"),
    "poison_record": failing(POISON),
    "missing_category": failing("there is no category 'sales'"),
    "bad_package": failing("shops.py:3: there is no module 'pandsa'"),
    "cannot_start": failing("cannot start `runn`: no such file"),
    "records_expired": failing("records of category 'sales' partition 1 are gone before they were read"),
    "state_mismatch": failing("the states of job 'a' do not fit computation 'B'"),
    "disk_full": failing("the disk is full: 17.arrow could not be written"),
    "corrupt_data": failing("segment 17: its checksum does not match"),
    "user_code": failing("user code failed: job 'a', key 'b', record at 17\nWhy: KeyError: 'x'"),
    "dependency": failing("requests.exceptions.ConnectionError: Connection refused"),
    "spark_value": failing("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012"),
    "fenced": failing("a successor owns this now"),
    "exception": failing("java.lang.IllegalStateException: what is this"),
    "crash_loop": a_patient(tasks=(a_task(0, state="backoff", restarts=5, error="ValueError: x"), a_task(1))),
    "change_refused": a_patient(state="quarantined", problem="the plan failed 3 times"),
    "trigger_short": a_patient(tasks=tuple(a_task(n, batch_ms=5000.0) for n in range(4))),
    "trigger_long": a_patient(
        config=a_config(trigger_ms=200_000), tasks=tuple(a_task(n, batch_ms=500.0) for n in range(4))
    ),
    "partitions_few": a_patient({"lag_s": 200.0}, config=a_config(partitions=4)),
    "partitions_uneven": a_patient(config=a_config(partitions=6)),
    "threads_many": a_patient(config=a_config(threads=8)),
    "threads_few": a_patient(config=a_config(resources={"cpu": 4.0, "memory_mb": 1024})),
    "task_too_large": a_patient(container_memory_mb=1000.0),
    "task_large": a_patient(container_memory_mb=4000.0),
    "retention_near": a_patient({"lag_s": 3000.0}),
    "task_limit": a_patient({"lag_s": 200.0}, config=a_config(task_count_max=4)),
    "lag_overload": a_patient({"lag_s": 200.0, "busy_mean": 0.97}),
    "lag_waiting": a_patient({"lag_s": 200.0, "busy_mean": 0.1}),
    "slow_code": a_patient(
        {"lag_s": 200.0, "busy_mean": 0.1},
        tasks=tuple(a_task(n, slots_held=0.5, slots_user=0.49, user_ms_per_record=20.1) for n in range(4)),
    ),
    "starved": a_patient(
        {"lag_s": 200.0, "busy_mean": 0.1},
        tasks=tuple(a_task(n, slot_wait_s=45.0) for n in range(4)),
        starved=(
            Starved(
                job="shops.total",
                task_id="shops.total/0",
                container="c1",
                wait_s=45.0,
                by="slow.slow",
                slots=1.9,
                user_share=0.97,
            ),
        ),
    ),
    "skew": a_patient(tasks=hot(busy=0.98, rate=5000.0)),
    "straggler": a_patient(tasks=hot(busy=0.98, rate=600.0)),
    "backpressure": a_patient({"processed_rate": 2000.0}),
    "late_data": a_patient(tasks=tuple(a_task(n, late=50.0, records=1000.0) for n in range(4))),
    "watermark_held": a_patient(
        watermarks=(
            WatermarkFacts(category="totals", age_s=900.0, who="shops.by_shop/2", because="it waits"),
        )
    ),
    "poison_records": a_patient(
        dead_letters=(DeadLetter(category="sales", partition=3, offset=4711, reason="not JSON"),)
    ),
}


def test_a_job_that_is_well_has_nothing_and_everything_was_looked_at():
    examination = examine(a_patient())
    assert examination.findings == () and examination.is_well
    assert examination.not_known == ()
    assert len(examination.ruled_out) == len(RULES)


@pytest.mark.parametrize("name", sorted(TROUBLES))
def test_every_trouble_is_found_with_evidence_and_something_to_do(name: str):
    finding = found(TROUBLES[name], name)
    assert finding.symptom and finding.cause and 0 < finding.confidence <= 1
    assert finding.evidence and finding.todo and all(advice.text for advice in finding.todo)
    if finding.severity != "info":
        assert any(alert.key == name for alert in alerts_of(TROUBLES[name]))


@pytest.mark.parametrize(
    ("why", "name"),
    [
        ("ConnectionRefusedError: [Errno 111] Connection refused", "dependency"),
        ("requests.exceptions.ConnectTimeout: x", "dependency"),
        ("TimeoutError: x", "dependency"),
        ("KeyError: 'connection refused'", "user_code"),
    ],
)
def test_a_service_that_does_not_answer_user_code_is_no_mistake_of_the_code(why: str, name: str):
    error = f"user code failed: job 'a', key 'timed out', record at 17\nWhy: {why}"
    assert why in found(failing(error), name).symptom


def commands_of(examination: Examination) -> list[str]:
    return [advice.command for finding in examination.findings for advice in finding.todo if advice.command]


def every_command(group: Any, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not hasattr(group, "commands"):
        return {words: group}
    below = (every_command(command, (*words, word)) for word, command in group.commands.items())
    return {name: command for group in below for name, command in group.items()}


COMMANDS = every_command(program())


@pytest.mark.parametrize("name", sorted(TROUBLES))
def test_every_command_that_is_advised_exists_with_its_options(name: str):
    for line in commands_of(examine(TROUBLES[name])):
        words = shlex.split(line)
        assert words[0] == "penstock"
        known = [key for key in COMMANDS if tuple(words[1 : 1 + len(key)]) == key]
        assert known, f"there is no command {line!r}"
        command = COMMANDS[max(known, key=len)]
        given_words = words[1 + len(max(known, key=len)) :]
        options = {
            text for parameter in command.params for text in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in given_words if word.startswith("--")} <= options, line
        # The command's own parser takes it: as many arguments as it has, values of the right type.
        command.make_context("penstock", list(given_words), resilient_parsing=False)
        if words[1:3] == ["oncall", "set"]:
            for word in given_words:
                setting = re.match(r"^([a-z_.]+)=", word)
                if setting:
                    assert setting[1].split(".")[0] in JobConfig.model_fields, line


def changed_by(line: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config with what `penstock oncall set` would write: its own reading of the setting, merged."""
    path, value = _setting(shlex.split(line)[4])
    change: Any = value
    for part in reversed(path.split(".")):
        change = {part: change}
    return merge_json(config, change)


EDGES: dict[str, Patient] = {
    "at the limit of an unprivileged job": a_patient(
        {"lag_s": 200.0, "busy_mean": 0.97}, config=a_config(task_count_max=32, partitions=64), task_count=32
    ),
    "near its limit": a_patient(
        {"lag_s": 200.0, "busy_mean": 0.97}, config=a_config(task_count_max=6, partitions=64)
    ),
    "an even number beyond its limit": a_patient(config=a_config(partitions=14, task_count_max=5)),
    "no container has more memory": failing("OutOfMemoryError", container_memory_mb=1100.0),
    "nothing is promised": a_patient(config=a_config(slo={"lag_s": 31_536_000.0}, trigger_ms=1)),
    "a short promise": a_patient(config=a_config(slo={"lag_s": 0.001})),
}


@pytest.mark.parametrize("name", sorted(TROUBLES | EDGES))
def test_every_setting_that_is_advised_is_taken_and_changes_something(name: str):
    """Plan: what the command would write is merged and validated as the control plane does."""
    patient = (TROUBLES | EDGES)[name]
    base = merge_json(
        a_body("shops.total", plan={"stages": [], "key": None, "computation": None, "late": "drop"}),
        {
            key: value
            for key, value in patient.config.to_json().items()
            if key not in ("kind", "package", "outputs")
        },
    )
    validate_config("shops.total", base)
    for line in commands_of(examine(patient)):
        if shlex.split(line)[1:3] == ["oncall", "set"]:
            after = changed_by(line, base)
            assert validate_config("shops.total", after) and after != base, line


def test_the_advice_about_a_trigger_is_bounded_and_is_not_given_again():
    """Plan: batches of some length; whatever is advised, the trouble is gone with it, and half the SLO kept."""
    for batch_ms in (2_500.0, 9_000.0, 10_000.0, 32_136.0, 1e7):
        tasks = tuple(a_task(n, batch_ms=batch_ms) for n in range(4))
        for slo_s in (1.0, 8.0, 90.0):
            config = a_config(slo={"lag_s": slo_s})
            patient = a_patient(
                {"lag_s": 0.5}, tasks=tuple(replace(t, lag_s=0.5) for t in tasks), config=config
            )
            lines = [line for line in commands_of(examine(patient)) if "trigger_ms" in line]
            assert len(lines) <= 1 and not (batch_ms > 10_000 and lines)
            for line in lines:
                after = JobConfig.from_stored(changed_by(line, config.to_json()))
                assert after.trigger_ms <= min(10_000, slo_s * 500)
                again = commands_of(examine(replace(patient, config=after)))
                assert not any("trigger_ms" in each for each in again)


def test_a_rule_without_its_inputs_says_not_known_and_rules_nothing_out():
    """Plan: of every rule that needs something, each part is left out by itself."""
    parts: dict[str, dict[str, Any]] = {
        "missing package": {"is_package_there": None},
        "missing category": {"inputs": None},
        "retention": {"inputs": None},
        "watermark": {"watermarks": None},
        "stuck change": {"state": ""},
        "exceptions": {"tasks": ()},
        "crash loop": {"tasks": ()},
        "stragglers": {"tasks": ()},
        "partitions": {"task_count": 0},
    }
    for rule, part in parts.items():
        examination = examine(a_patient(**part))
        assert rule not in examination.ruled_out and rule in dict(examination.not_known), rule
    silent = a_patient({"lag_s": np.array([200.0] * 50 + [np.nan] * 10)}, tasks=())
    examination = examine(silent)
    assert "lag" in dict(examination.not_known), "what was so ten minutes ago is no news"
    deaf = a_patient(inputs=(InputFacts(category="sales", is_known=False),))
    assert {"missing category", "retention"} <= dict(examine(deaf).not_known).keys()


def test_a_poison_record_is_named_with_its_place():
    finding = found(TROUBLES["poison_record"], "poison_record")
    assert finding.evidence == {"category": "sales", "partition": 3, "offset": 4711}
    assert finding.todo[0].command == "penstock bus tail sales --partition 3 --from 4711 --lines 1"
    assert place_of("no place") is None


def test_out_of_memory_asks_for_more_than_was_used():
    finding = found(
        failing("java.lang.OutOfMemoryError: Java heap space", frame=a_frame(60, memory_task_mb=2000.0)),
        "oom",
    )
    assert "resources.memory_mb=3072" in finding.todo[0].command
    counted = found(a_patient({"oom": np.array([0.0] * 59 + [2.0])}), "oom")
    assert counted.evidence["memory_mb"] == 1024


def test_who_holds_a_watermark_back_is_said():
    finding = found(TROUBLES["watermark_held"], "watermark_held")
    assert "shops.by_shop/2 holds it back: it waits" in finding.cause


def test_a_hot_key_is_not_lag_for_want_of_tasks():
    names = {
        finding.name
        for finding in examine(
            a_patient({"lag_s": 300.0, "busy_mean": 0.95}, tasks=hot(busy=0.98, rate=5000.0))
        ).findings
    }
    assert "skew" in names and "lag_overload" not in names


@pytest.mark.parametrize("rate", [600.0, 5000.0])
@pytest.mark.parametrize(("lag_s", "is_told"), [(1.0, False), (300.0, True)])
def test_an_odd_task_with_time_left_is_told_only_while_the_job_lags(lag_s: float, is_told: bool, rate: float):
    examination = examine(a_patient({"lag_s": lag_s}, tasks=hot(busy=0.8, rate=rate)))
    assert any(finding.name in ("skew", "straggler") for finding in examination.findings) is is_told


def test_a_dependency_that_fails_is_never_answered_with_more_tasks():
    patient = failing("Connection refused", frame=a_frame(60, **(WELL | {"lag_s": 300.0, "busy_mean": 0.2})))
    advised = " ".join(commands_of(examine(patient)))
    assert "task_count" not in advised and "job pause" in advised


def test_after_its_owners_change_the_way_back_is_shown():
    patient = failing("ValueError: x", user_update_ms=NOW_MS - 60_000, last_good_version=6)
    finding = found(patient, "exception")
    assert "since its owner's last change" in finding.cause
    assert any(
        "penstock job rollback shops.total provisioner --to 6" in line
        for line in commands_of(examine(patient))
    )
    old = failing("ValueError: x", user_update_ms=NOW_MS - 86_400_000)
    assert "owner" not in found(old, "exception").cause


def test_missing_things_are_found_before_a_task_fails():
    assert (
        found(a_patient(inputs=(InputFacts(category="gone", exists=False),)), "missing_category").confidence
        > 0.9
    )
    assert found(a_patient(is_package_there=False), "bad_package").confidence > 0.9


def test_what_is_not_known_is_said_and_nothing_is_made_up():
    blind = a_patient(
        frame=NoFrame(job="shops.total", reason="no metrics"),
        tasks=(),
        engines=(),
        container_memory_mb=None,
        watermarks=(),
    )
    examination = examine(blind)
    assert examination.findings == ()
    assert {rule for rule, _ in examination.not_known} >= {
        "task cpu",
        "task memory",
        "lag",
        "skew",
        "backpressure",
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("java.net.SocketTimeoutException: Read timed out", "SocketTimeoutException"),
        (
            "pyspark.errors.exceptions.captured.AnalysisException: [TABLE_OR_VIEW_NOT_FOUND] x",
            "AnalysisException",
        ),
        ("[STATE_STORE_FAILED] x", "STATE_STORE_FAILED"),
        ("KeyError: 'a'", "KeyError"),
        ("something odd", ""),
    ],
)
def test_the_class_of_any_exception_is_read(text: str, name: str):
    assert exception_class(text) == name
    assert kind_of(text).name


@given(st.text("aZ0_ .:'[]\n\té☃ErrorException", max_size=200))
def test_any_text_is_some_kind_of_failure(text: str):
    assert kind_of(text).cause
    assert examine(failing(text or "x")).findings


numbers = st.one_of(st.floats(0, 1e9), st.just(float("nan")))


@given(st.fixed_dictionaries({name: numbers for name in WELL}), st.integers(1, 64), st.integers(1, 64))
def test_whatever_the_numbers_are_there_is_an_answer(frame, partitions, tasks):
    patient = a_patient(frame, config=a_config(partitions=partitions), task_count=tasks)
    examination = examine(patient)
    for finding in examination.findings:
        assert 0 < finding.confidence <= 1
        finding.to_alert()
    assert examination.to_json()["job"] == "shops.total"


def test_as_a_policy_it_alarms_and_changes_nothing():
    behind = (a_task(number, lag_s=300.0, busy=0.95) for number in range(4))
    ill = evaluate(
        JobDoctor(),
        some_facts(*behind, frame=a_frame(60, **(WELL | {"lag_s": 300.0, "busy_mean": 0.95}))),
        ControlSettings(),
    )
    assert isinstance(ill, Verdict) and isinstance(ill.resolution, RaiseAlert)
    assert ill.resolution.key == "lag_overload" and "penstock oncall set" in ill.resolution.what_to_do
    well = evaluate(JobDoctor(), some_facts(frame=a_frame(60, **WELL)), ControlSettings())
    assert isinstance(well, Verdict) and isinstance(well.resolution, Nothing)


LATE = tuple(a_task(n, late=50.0, records=1000.0) for n in range(4))
USER_CODE, DIVIDED = "user code failed: job 'a', key 'b', record at 17", "[DIVIDE_BY_ZERO] Division by zero."
BY_KEY, IN_BATCHES = {"class": "Sums"}, {"class": "Sums", "vectorised": True}
OPERATOR = {"operator": "aggregate"}


@pytest.mark.parametrize(
    ("setting", "error", "config", "is_advised"),
    [
        ("poison=skip", USER_CODE, {"plan": {"computation": BY_KEY}}, True),
        ("poison=skip", USER_CODE, {"plan": {"computation": BY_KEY}, "poison": "skip"}, False),
        ("poison=skip", USER_CODE, {"plan": {"computation": IN_BATCHES}}, False),
        ("poison=", DIVIDED, {"kind": "stateless"}, False),
        ("poison=dead_letter", DIVIDED, {"kind": "stateless", "poison": "fail"}, True),
        ("plan.late=process", "", {"plan": {"computation": BY_KEY}}, True),
        ("plan.late=process", "", {"plan": {"computation": OPERATOR}}, False),
        ("plan.late=process", "", {"kind": "stateless", "plan": {"computation": None}}, False),
        ("threads=4", "", {"resources": {"cpu": 4.0, "memory_mb": 1024}}, True),
        ("threads=", "", {"resources": {"cpu": 4.0, "memory_mb": 1024}, "isolation": "shared"}, False),
    ],
)
def test_a_setting_is_advised_only_where_tasks_obey_it(
    setting: str, error: str, config: dict[str, Any], is_advised: bool
):
    tasks = (a_task(0, state="backoff", restarts=1, error=error), a_task(1)) if error else LATE
    commands = commands_of(examine(a_patient(config=a_config(**config), tasks=tasks)))
    assert any(f" {setting}" in command for command in commands) == is_advised, commands


def test_the_dead_letters_that_it_shows_are_those_of_the_job():
    letters = an_output(stream="dead", category="sales.dead", partitions=4)
    config = a_config(kind="stateless", outputs=[letters])
    patient = a_patient(config=config, tasks=tuple(a_task(n, bad=3.0) for n in range(4)))
    commands = [advice.command for advice in found(patient, "poison_records").todo]
    assert commands == ["penstock bus tail sales.dead"]
    kept = replace(patient, config=a_config(outputs=[]))
    assert [advice.command for advice in found(kept, "poison_records").todo] == [
        "penstock bus tail shops.total.dead"
    ]
