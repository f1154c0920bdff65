"""Data processing: lag, skew, stragglers, backpressure, late data, watermarks, poison (Table 1). Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.scaling.doctor.failure_rules import kind_of
from penstock.scaling.doctor.patient import (
    Advice,
    Finding,
    NotKnown,
    Patient,
    more_tasks,
    set_command,
    tail_command,
)
from penstock.scaling.doctor.resource_rules import slow_record_ms
from penstock.scaling.policies.balance import WAIT_S, OddTask, Uneven, Unknown, judge_balance

BUSY, IDLE = 0.9, 0.5
LATE_SHARE = 0.01
BACKPRESSURE_MINUTES = 5  # shorter backpressure is ignored
POISON_SHOWN = 3


def lag(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Lag over the SLO: the tasks are overloaded, or wait for something, or it is not known which."""
    now, slo = patient.last("lag_s"), patient.lag_slo_s
    if now is None:
        yield NotKnown(reason=f"its lag is not known: {patient.why_unknown('lag_s')}")
        return
    if now <= slo:
        return
    growth, busy = patient.growth("lag_records"), patient.series("busy_mean", 5)
    trend = (
        "" if growth is None else "and grows" if growth > 0 else "and shrinks" if growth < 0 else "and stays"
    )
    evidence: dict[str, float | int | str] = {"lag_s": round(now, 1), "slo_s": slo}
    if growth is not None:
        evidence["growth_records"] = round(growth)
    symptom = f"it lags {now:.0f} s, its SLO is {slo:g} s{trend and ', ' + trend}"
    if busy is None:
        why = patient.why_unknown("busy_mean")
        yield NotKnown(reason=f"{symptom}; the cause is unknown because busy_mean is not known: {why}")
        return
    share = float(busy.mean())
    evidence["busy_mean"] = round(share, 3)
    failing = [task.task_id for task in patient.tasks if task.error]
    if share >= BUSY and not isinstance(judge_balance(patient.tasks), Uneven):
        yield Finding(
            name="lag_overload",
            category="data",
            severity="critical" if growth is not None and growth > 0 else "warning",
            symptom=symptom,
            cause=f"all its tasks are busy, {share:.0%} on average: it needs more tasks or resources",
            confidence=0.85,
            evidence=evidence,
            todo=more_tasks(patient, "add tasks; the auto scaler does this by itself if it is enabled"),
        )
    elif (
        share < IDLE
        and not failing
        # These two have rules of their own.
        and not any((task.slot_wait_s or 0.0) >= WAIT_S for task in patient.tasks)
        and slow_record_ms(patient) is None
    ):
        yield Finding(
            name="lag_waiting",
            category="data",
            severity="warning",
            symptom=symptom,
            cause=f"its tasks are only {share:.0%} busy: they wait for a sink or a service that they call",
            confidence=0.6,
            evidence=evidence,
            todo=(
                Advice(text="more tasks would not help; check the sinks and services that it uses"),
                Advice(
                    text="see the decisions about it",
                    command=f"penstock journal {shlex.quote(patient.job)}",
                ),
            ),
        )
    elif IDLE <= share < BUSY:
        yield _half_busy(patient, symptom, evidence, share=share, growth=growth)
    elif failing:
        yield NotKnown(reason=f"{symptom}; its tasks fail ({', '.join(failing[:3])}): fix that first")
    else:
        yield NotKnown(reason=f"{symptom}; its tasks are unevenly busy: see skew and stragglers first")


def _half_busy(
    patient: Patient,
    symptom: str,
    evidence: Mapping[str, float | int | str],
    *,
    share: float,
    growth: float | None,
) -> Finding:
    """Lag over the SLO while tasks are neither fully busy nor idle."""
    job = shlex.quote(patient.job)
    if growth is not None and growth < 0:
        return Finding(
            name="lag_catching_up",
            category="data",
            severity="info",
            symptom=symptom,
            cause=f"its tasks are {share:.0%} busy and read more than arrives: it drains a backlog",
            confidence=0.6,
            evidence=evidence,
            todo=(Advice(text="wait, then check again", command=f"penstock doctor {job}"),),
        )
    return Finding(
        name="lag_unexplained",
        category="data",
        severity="warning",
        symptom=symptom,
        cause=f"its tasks are {share:.0%} busy, neither fully nor idle: they wait part of the time, for an "
        "unknown reason",
        confidence=0.3,
        evidence=evidence,
        todo=(
            Advice(
                text="compare its metrics before and after the lag began",
                command=f"penstock job metrics {job}",
            ),
        ),
    )


def skew(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Tasks that are busier because they get more records."""
    found = judge_balance(patient.tasks)
    if isinstance(found, Unknown):
        yield NotKnown(reason=found.reason)
        return
    if isinstance(found, Uneven) and (hot := _trouble(patient, found.skewed)):
        yield Finding(
            name="skew",
            category="data",
            severity="warning",
            symptom=f"{hot.task.task_id} is {hot.busy:.0%} busy, its peers {found.busy_median:.0%}",
            cause=f"it gets {hot.rate / max(found.rate_median, 1e-9):.1f} times their records: few keys have "
            "most of the records",
            confidence=0.85,
            evidence={
                "task": hot.task.task_id,
                "rate": round(hot.rate, 1),
                "rate_median": round(found.rate_median, 1),
                "busy": round(hot.busy, 3),
                "tasks": len(found.skewed),
            },
            todo=(
                Advice(
                    text="more tasks cannot split a key: use a finer key, or aggregate before the shuffle"
                ),
                Advice(
                    text="see its keys",
                    command=f"penstock bus tail {shlex.quote(str(_input(patient)))} --lines 100",
                ),
            ),
        )


def stragglers(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Tasks that are busier at the same rate."""
    found = judge_balance(patient.tasks)
    if isinstance(found, Unknown):
        yield NotKnown(reason=found.reason)
        return
    if isinstance(found, Uneven) and (slow := _trouble(patient, found.stragglers)):
        yield Finding(
            name="straggler",
            category="data",
            severity="warning",
            symptom=f"{slow.task.task_id} is {slow.busy:.0%} busy, its peers {found.busy_median:.0%}",
            cause=f"it reads {slow.rate:.0f} records/s, they read {found.rate_median:.0f}: its host is slow",
            confidence=0.8,
            evidence={"task": slow.task.task_id, "container": slow.task.container, "z": round(slow.z, 1)},
            todo=(
                Advice(text="the straggler detector moves it while the job lags"),
                Advice(
                    text="to place nothing new on this container meanwhile",
                    command=f"penstock container cordon {shlex.quote(slow.task.container)} --why 'slow'",
                ),
            ),
        )


def _trouble(patient: Patient, odd: Sequence[OddTask]) -> OddTask | None:
    """The strongest outlier; None if it is not fully busy and the job is within its SLO."""
    if not odd:
        return None
    lag_s = patient.last("lag_s")
    keeps_up = lag_s is not None and lag_s <= patient.lag_slo_s
    return None if keeps_up and odd[0].busy < BUSY else odd[0]


def backpressure(patient: Patient) -> Iterator[Finding | NotKnown]:
    """The job reads less than arrives, over several minutes."""
    arrived, read = patient.series("ingest_rate", 10), patient.series("processed_rate", 10)
    if arrived is None or read is None:
        missing = "ingest_rate" if arrived is None else "processed_rate"
        yield NotKnown(reason=f"{missing} is not known: {patient.why_unknown(missing)}")
        return
    known = min(len(arrived), len(read))
    if known < BACKPRESSURE_MINUTES:
        yield NotKnown(reason=f"only {known} minutes of metrics are known, {BACKPRESSURE_MINUTES} are needed")
        return
    come, done = float(np.mean(arrived)), float(np.mean(read))
    if come > 0 and done < 0.9 * come:
        yield Finding(
            name="backpressure",
            category="data",
            severity="warning",
            symptom=f"{come:.0f} records/s arrive and {done:.0f} are read",
            cause="its input piles up",
            confidence=0.8,
            evidence={"ingest_rate": round(come, 2), "processed_rate": round(done, 2)},
            todo=(Advice(text="see its tasks", command=f"penstock task ls {shlex.quote(patient.job)}"),),
        )


def late_data(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Records that arrive behind the watermark."""
    known = [
        (task.late, task.records)
        for task in patient.tasks
        if task.late is not None and task.records is not None
    ]
    if not known:
        yield NotKnown(reason="its tasks do not report late records")
        return
    late, records = sum(found[0] for found in known), sum(found[1] for found in known)
    if records > 0 and late > LATE_SHARE * records:
        computation = patient.config.computation
        process = set_command(patient.job, "plan.late", "process", "late records count")
        allowed = max((source.lateness_ms for source in patient.inputs or ()), default=0)
        yield Finding(
            name="late_data",
            category="data",
            severity="warning",
            symptom=f"{late:.0f} of {records:.0f} records arrived behind the watermark",
            cause=f"they are later than the {allowed / 1000:g} s of lateness that their category allows",
            confidence=0.8,
            evidence={"late": late, "records": records, "lateness_ms": allowed},
            todo=(
                Advice(text="create their category with more lateness; it cannot be changed later"),
                *((Advice(text="or process late records too", command=process),) * ("class" in computation)),
            ),
        )


def watermark(patient: Patient) -> Iterator[Finding | NotKnown]:
    """A watermark that is far behind, and what holds it back."""
    if patient.watermarks is None:
        if patient.config.kind != "process":
            yield NotKnown(reason="its watermarks were not read")
        return
    for found in patient.watermarks:
        if found.age_s is not None and found.age_s > max(patient.lag_slo_s, 60.0):
            yield Finding(
                name="watermark_held",
                category="data",
                severity="warning",
                symptom=f"the watermark of {found.category} is {found.age_s:.0f} s behind the clock",
                cause=f"{found.who} holds it back: {found.because}"
                if found.who
                else "it is not known what holds it back",
                confidence=0.9 if found.who else 0.4,
                evidence={"age_s": round(found.age_s, 1), "who": found.who, "category": found.category},
                todo=(
                    Advice(
                        text="see all watermarks from the sources on",
                        command=f"penstock watermark {shlex.quote(found.category)}",
                    ),
                ),
            )


def poison(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Records that were written to the dead letters."""
    counts = [task.bad for task in patient.tasks if task.bad is not None]
    if any(task.error and kind_of(task.error).name == "poison_record" for task in patient.tasks):
        return  # reported with its error
    if not counts and not patient.dead_letters:
        yield NotKnown(reason="its tasks do not report bad records")
        return
    if not sum(counts) and not patient.dead_letters:
        return
    shown = patient.dead_letters[:POISON_SHOWN]
    places = ", ".join(f"{one.category} {one.partition}:{one.offset}" for one in shown)
    look = [
        Advice(
            text="see the record",
            command=tail_command(one.category, one.partition, one.offset),
        )
        for one in shown[:1]
    ]
    yield Finding(
        name="poison_records",
        category="data",
        severity="warning",
        symptom=f"{max(sum(counts), len(patient.dead_letters)):.0f} records could not be processed"
        + (f": {places}" if places else ""),
        cause=shown[0].reason if shown else "they cannot be parsed, or their values are invalid for the plan",
        confidence=0.9 if shown else 0.6,
        evidence={"records": sum(counts), **({"offset": shown[0].offset} if shown else {})},
        todo=(
            *look,
            *(
                Advice(text="see all of them", command=f"penstock bus tail {shlex.quote(category)}")
                for category in _dead_letters(patient)
            ),
        ),
    )


def _dead_letters(patient: Patient) -> list[str]:
    """The categories of its dead letters: those in its plan, or the default one."""
    planned = [
        output.category for output in patient.config.outputs if output.stream.partition(".")[0] == "dead"
    ]
    return planned or [f"{patient.job}.dead"]


def _input(patient: Patient) -> str:
    inputs = patient.config.inputs
    return inputs[0].category if inputs else patient.job


RULES = (lag, skew, stragglers, backpressure, late_data, watermark, poison)
