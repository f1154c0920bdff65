"""Slots of a container's session: whose own code holds them, and who waits for them. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from penstock.jobs.config import ISOLATED_MEMORY_MB_MIN
from penstock.scaling.doctor.patient import Advice, Finding, NotKnown, Patient
from penstock.scaling.policies.balance import told

# Less than this cannot be what a job is slow by; more of its tasks' time than this is in its own code.
RECORD_MS_MIN, USER_SHARE_MIN = 1.0, 0.5


def starved(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Tasks that wait for a slot while others use them."""
    if not patient.starved:
        return
    worst = patient.starved[0]
    by = worst.by or "somebody"
    is_own = by == patient.job
    yield Finding(
        name="starved",
        category="resources",
        severity="warning",
        symptom=told(worst),
        cause="its own batches hold all slots of the container"
        if is_own
        else f"it does not get its turn: batches of {by} hold the slots of {worst.container}",
        confidence=0.9 if worst.by else 0.5,
        evidence={"wait_s": round(worst.wait_s), "by": worst.by, "slots": round(worst.slots, 1)},
        todo=(
            Advice(text=f"see what {by} does", command=f"penstock doctor {shlex.quote(by)}")
            if worst.by and not is_own
            else Advice(
                text="see what runs there", command=f"penstock task ls --container {worst.container}"
            ),
        ),
    )


def slow_code(patient: Patient) -> Iterator[Finding | NotKnown]:
    """It lags, and most of its tasks' time is in its own code."""
    lags = patient.series("lag_s")
    if lags is None:
        yield NotKnown(reason="its lag is not known")
        return
    if float(lags[-1]) <= patient.lag_slo_s or (record_ms := slow_record_ms(patient)) is None:
        return
    held = sum(task.slots_held or 0.0 for task in patient.tasks)
    user = sum(task.slots_user or 0.0 for task in patient.tasks)
    yield Finding(
        name="slow_code",
        category="data",
        severity="warning",
        symptom=f"it lags {lags[-1]:.0f} s, its SLO is {patient.lag_slo_s:g} s",
        cause=f"its own code takes {record_ms:.3g} ms for a record, so a task does at most "
        f"{1000 / record_ms:.3g} records/s; {min(1.0, user / held):.0%} of its tasks' time is in it",
        confidence=0.9,
        evidence={
            "user_ms_per_record": round(record_ms, 3),
            "slots_held": round(held, 2),
            "slots_user": round(user, 2),
        },
        todo=(
            Advice(
                text="make process_record faster: ask services for many records at once, in process_batch"
            ),
            *_apart(patient),
        ),
    )


def slow_record_ms(patient: Patient) -> float | None:
    """What a record takes in the job's own code, where that is most of its tasks' time; else None."""
    known = [task for task in patient.tasks if task.slots_held and task.user_ms_per_record is not None]
    held = sum(task.slots_held or 0.0 for task in known)
    user = sum(task.slots_user or 0.0 for task in known)
    record_ms = max((task.user_ms_per_record or 0.0 for task in known), default=0.0)
    return record_ms if known and record_ms >= RECORD_MS_MIN and user >= USER_SHARE_MIN * held else None


def _apart(patient: Patient) -> Iterator[Advice]:
    if patient.config.isolation == "process":
        return
    memory_mb = max(ISOLATED_MEMORY_MB_MIN, patient.config.resources.memory_mb)
    yield Advice(
        text="or give its tasks processes and slots of their own",
        command=f"penstock oncall set {shlex.quote(patient.job)} isolation=process "
        f"resources.memory_mb={memory_mb} --why 'its code is slow'",
    )


RULES = (starved, slow_code)
