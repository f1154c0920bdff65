"""Resource usage: cpu and memory of tasks and of the engines that drive them (StreamOps Table 1). Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from math import ceil

from penstock.jobs.config import ISOLATED_MEMORY_MB_MIN
from penstock.scaling.doctor.patient import Advice, EngineFacts, Finding, NotKnown, Patient, set_command
from penstock.scaling.policies.balance import describe_starved

HIGH, LOW = 0.9, 0.2
WATCHED_MIN = 30  # minutes of metrics needed to report that a job reserves too much
MEMORY_STEP_MB = 128


def task_cpu(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Compare cpu used with cpu reserved, all tasks together."""
    used = patient.series("cpu")
    each = patient.config.resources.cpu
    reserved = each * max(1, patient.task_count)
    if used is None:
        yield NotKnown(reason="its tasks do not report their cpu usage")
        return
    mean, peak = float(used[-15:].mean()), float(used.max())
    evidence = {"cpu_mean": round(mean, 2), "cpu_peak": round(peak, 2), "cpu_reserved": reserved}
    if mean >= HIGH * reserved:
        wanted = ceil(10 * peak / max(1, patient.task_count) * 1.2) / 10
        yield Finding(
            name="cpu_high",
            category="resources",
            severity="warning",
            symptom=f"its tasks use {mean:.1f} of {reserved:g} cores",
            cause="they need all of the reserved cpu, or more",
            confidence=0.7,
            evidence=evidence,
            todo=(
                Advice(
                    text="give each task more cpu",
                    command=set_command(patient.job, "resources.cpu", f"{wanted:g}", "cpu is used up"),
                ),
            ),
        )
    elif len(used) >= WATCHED_MIN and peak <= LOW * reserved and each > 0.1:
        wanted = max(0.1, ceil(10 * peak / max(1, patient.task_count) * 2) / 10)
        yield Finding(
            name="cpu_low",
            category="resources",
            severity="info",
            symptom=f"its tasks never used more than {peak:.1f} of {reserved:g} cores in {len(used)} minutes",
            cause="more cpu is reserved than it needs",
            confidence=0.6,
            evidence=evidence,
            todo=(
                Advice(
                    text="reserve less",
                    command=set_command(patient.job, "resources.cpu", f"{wanted:g}", "most of it is unused"),
                ),
            ),
        )


def task_memory(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Compare the memory of the largest task with the memory reserved per task."""
    used = patient.series("memory_task_mb")
    reserved = patient.config.resources.memory_mb
    if used is None:
        yield NotKnown(reason="its tasks do not report their memory")
        return
    peak = float(used.max())
    evidence = {"memory_peak_mb": round(peak), "memory_mb": reserved}
    if peak >= HIGH * reserved:
        yield Finding(
            name="memory_high",
            category="resources",
            severity="warning",
            symptom=f"a task used {peak:.0f} of {reserved} MB",
            cause="its memory is nearly used up; a task that exceeds it is killed",
            confidence=0.8,
            evidence=evidence,
            todo=more_memory(patient, peak, "reserve more", "nearly used up"),
        )
    elif len(used) >= WATCHED_MIN and peak <= LOW * reserved and reserved > 2 * MEMORY_STEP_MB:
        wanted = max(2 * MEMORY_STEP_MB, ceil(peak * 2 / MEMORY_STEP_MB) * MEMORY_STEP_MB)
        wanted = max(wanted, ISOLATED_MEMORY_MB_MIN) if patient.config.isolation == "process" else wanted
        if wanted < reserved:
            yield Finding(
                name="memory_low",
                category="resources",
                severity="info",
                symptom=f"no task used more than {peak:.0f} of {reserved} MB in {len(used)} minutes",
                cause="more memory is reserved than it needs",
                confidence=0.6,
                evidence=evidence,
                todo=(
                    Advice(
                        text="reserve less",
                        command=set_command(
                            patient.job, "resources.memory_mb", wanted, "most of it is unused"
                        ),
                    ),
                ),
            )


def engine_memory(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Memory of the engine processes, which all tasks of a container share."""
    known = [found for found in patient.engines if found.memory_mb is not None and found.memory_max_mb]
    if not known:
        yield NotKnown(reason="the engines of its containers do not report their memory")
        return
    for engine in known:
        used, most = engine.memory_mb or 0.0, engine.memory_max_mb or 1.0
        if used >= HIGH * most:
            yield _engine(engine, "memory", f"{used:.0f} of {most:.0f} MB", {"used": used, "most": most})


def engine_cpu(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Cpu of the engine processes."""
    known = [found for found in patient.engines if found.cpu is not None and found.cpu_max]
    if not known:
        yield NotKnown(reason="the engines of its containers do not report their cpu usage")
        return
    for engine in known:
        used, most = engine.cpu or 0.0, engine.cpu_max or 1.0
        if used >= HIGH * most:
            yield _engine(engine, "cpu", f"{used:.1f} of {most:g} cores", {"used": used, "most": most})


def more_memory(patient: Patient, peak_mb: float, text: str, why: str) -> tuple[Advice, ...]:
    """Advice to reserve 1.5 times the used or reserved memory, at most what a container has."""
    reserved, most = patient.config.resources.memory_mb, patient.container_memory_mb
    wanted = ceil(max(peak_mb, reserved) * 1.5 / MEMORY_STEP_MB) * MEMORY_STEP_MB
    if most is not None and wanted > most:
        wanted = int(most // MEMORY_STEP_MB) * MEMORY_STEP_MB
    if wanted <= reserved:
        return (Advice(text=f"it needs more than the {most:.0f} MB that a container has: start larger ones"),)
    return (Advice(text=text, command=set_command(patient.job, "resources.memory_mb", wanted, why)),)


def _engine(engine: EngineFacts, what: str, used: str, evidence: dict[str, float]) -> Finding:
    return Finding(
        name=f"engine_{what}_high",
        category="resources",
        severity="warning",
        symptom=f"the engine of {engine.container} uses {used}",
        cause="too many tasks share this engine",
        confidence=0.7,
        evidence={"container": engine.container, **evidence},
        todo=(
            Advice(
                text="move shards away from it",
                command=f"penstock container drain {engine.container} --why 'its engine is full'",
            ),
            Advice(text="see which tasks use it", command=f"penstock task ls --container {engine.container}"),
        ),
    )


# User code is slow from these milliseconds per record and this share of its tasks' time on.
RECORD_MS_MIN, USER_SHARE_MIN = 1.0, 0.5


def starved(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Tasks that wait for a slot of their container."""
    if not patient.starved:
        return
    worst = patient.starved[0]
    by = worst.by or "other jobs"
    is_own = by == patient.job
    yield Finding(
        name="starved",
        category="resources",
        severity="warning",
        symptom=describe_starved(worst),
        cause="its own batches hold all slots of the container"
        if is_own
        else f"batches of {by} hold the slots of {worst.container}",
        confidence=0.9 if worst.by else 0.5,
        evidence={"wait_s": round(worst.wait_s), "by": worst.by, "slots": round(worst.slots, 1)},
        todo=(
            Advice(text=f"see why {by} uses so many slots", command=f"penstock doctor {shlex.quote(by)}")
            if worst.by and not is_own
            else Advice(
                text="see what runs there", command=f"penstock task ls --container {worst.container}"
            ),
        ),
    )


def slow_code(patient: Patient) -> Iterator[Finding | NotKnown]:
    """The job lags, and its own code takes most of its tasks' time."""
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
        cause=f"its own code takes {record_ms:.3g} ms per record, so a task processes at most "
        f"{1000 / record_ms:.3g} records/s; {min(1.0, user / held):.0%} of its tasks' time is in this code",
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
    """Milliseconds per record in the job's own code, if that is most of its tasks' time; else None."""
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


RULES = (task_cpu, task_memory, engine_memory, engine_cpu, starved, slow_code)
