"""Configuration: trigger, partitions, threads, memory, retention, limits (StreamOps Table 1). Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from penstock.jobs.config import ISOLATED_MEMORY_MB_MIN, TASKS_MAX, TASKS_UNPRIVILEGED_MAX
from penstock.scaling.doctor.patient import Advice, Finding, NotKnown, Patient, more_tasks, set_command

# Turbine V-E: a task larger than this share of a container is hard to move.
TASK_SHARE_MAX = 0.2
BATCH_COST_MAX_MS = 10_000
RETENTION_WARN, RETENTION_CRITICAL = 0.5, 0.8


def trigger(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Compare the duration of batches with the trigger interval."""
    batches = [task.batch_ms for task in patient.tasks if task.batch_ms]
    trigger_ms, lag_s = patient.config.trigger_ms, patient.last("lag_s")
    if not batches:
        yield NotKnown(reason="its tasks do not report how long their batches take")
        return
    longest = max(batches)
    evidence = {"batch_ms": round(longest), "trigger_ms": trigger_ms}
    # The fixed cost of a batch is some seconds at most. A longer batch is slow because of its records, and a
    # longer trigger would only delay it.
    if 0 < trigger_ms < longest / 2 and longest <= BATCH_COST_MAX_MS:
        if lag_s is None:
            yield NotKnown(reason=f"whether it keeps up is not known: {patient.why_unknown('lag_s')}")
            return
        wanted = min(int(longest), int(patient.lag_slo_s * 250))
        if lag_s <= patient.lag_slo_s and wanted > trigger_ms:
            yield Finding(
                name="trigger_short",
                category="configuration",
                severity="info",
                symptom=f"batches take {longest:.0f} ms, and the trigger is {trigger_ms} ms",
                cause="the trigger is shorter than a batch: batches run back to back, and each is small",
                confidence=0.6,
                evidence=evidence,
                todo=(
                    Advice(
                        text="let batches grow",
                        command=set_command(patient.job, "trigger_ms", wanted, "batches take longer"),
                    ),
                ),
            )
    elif trigger_ms > patient.lag_slo_s * 1000:
        yield Finding(
            name="trigger_long",
            category="configuration",
            severity="warning",
            symptom=f"a batch starts every {trigger_ms / 1000:g} s, the SLO is {patient.lag_slo_s:g} s",
            cause="records wait for the next trigger longer than the SLO allows",
            confidence=0.95,
            evidence=evidence,
            todo=(
                Advice(
                    text="start batches more often",
                    command=set_command(
                        patient.job, "trigger_ms", int(patient.lag_slo_s * 250), "shorter than the SLO"
                    ),
                ),
            ),
        )


def partitions(patient: Patient) -> Iterator[Finding | NotKnown]:
    """As many tasks as partitions, or partitions that cannot be spread evenly."""
    count, tasks = patient.config.partitions, patient.task_count
    lag_s = patient.last("lag_s")
    if patient.config.kind == "process":
        return
    if tasks < 1:
        yield NotKnown(reason="it has no tasks now")
        return
    evidence = {"partitions": count, "tasks": tasks}
    if tasks >= count and lag_s is None:
        yield NotKnown(reason=f"whether it keeps up is not known: {patient.why_unknown('lag_s')}")
    elif lag_s is not None and lag_s > patient.lag_slo_s and tasks >= count:
        yield Finding(
            name="partitions_few",
            category="configuration",
            severity="warning",
            symptom=f"it lags {lag_s:.0f} s with {tasks} tasks on {count} partitions",
            cause="a partition is read by one task, so the job cannot have more tasks",
            confidence=0.8,
            evidence=evidence,
            todo=(
                Advice(text="give its input more partitions"),
                *(
                    (
                        Advice(
                            text="for now",
                            command=set_command(
                                patient.job,
                                "threads",
                                patient.config.threads + 1,
                                "no more tasks possible",
                            ),
                        ),
                    )
                    * _has_threads(patient)
                ),
            ),
        )
    elif tasks < count and count % tasks and count / tasks < 4:
        allowed = min(count, patient.config.task_count_max)
        divisors = [n for n in range(1, allowed + 1) if count % n == 0]
        even = next((n for n in divisors if n > tasks), divisors[-1])
        most = -(-count // tasks)
        yield Finding(
            name="partitions_uneven",
            category="configuration",
            severity="info",
            symptom=f"{tasks} tasks share {count} partitions: some have {most}, some {count // tasks}",
            cause=f"{count} partitions cannot be spread evenly over {tasks} tasks, so some do up to "
            f"{most / (count // tasks) - 1:.0%} more",
            confidence=0.9,
            evidence=evidence,
            todo=(
                Advice(
                    text="use a number of tasks that divides the partitions",
                    command=set_command(patient.job, "task_count", even, "partitions spread evenly"),
                ),
            ),
        )


def threads(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Compare threads with the cpu reserved for them."""
    count, cpu = patient.config.threads, patient.config.resources.cpu
    if count > 2 * cpu:
        yield Finding(
            name="threads_many",
            category="configuration",
            severity="info",
            symptom=f"{count} threads a task share {cpu:g} cores",
            cause="threads share cores, and placement counts only the reserved cores",
            confidence=0.6,
            evidence={"threads": count, "cpu": cpu},
            todo=(
                Advice(
                    text="reserve what they use",
                    command=set_command(patient.job, "resources.cpu", count, "a core for each thread"),
                ),
            ),
        )
    elif cpu >= 2 * count:
        yield Finding(
            name="threads_few",
            category="configuration",
            severity="info",
            symptom=f"{count} threads a task have {cpu:g} cores",
            cause="more cores are reserved than the threads can use",
            confidence=0.7,
            evidence={"threads": count, "cpu": cpu},
            todo=(
                Advice(
                    text="use them",
                    command=set_command(patient.job, "threads", int(cpu), "as many as its cores"),
                )
                if _has_threads(patient)
                else Advice(
                    text="reserve what they use",
                    command=set_command(patient.job, "resources.cpu", count, "a core for each thread"),
                ),
            ),
        )


def _has_threads(patient: Patient) -> bool:
    """Whether `threads` has an effect: other tasks share the threads of the container's Spark session."""
    return patient.config.isolation == "process"


def task_size(patient: Patient) -> Iterator[Finding | NotKnown]:
    """A task too large for its containers, or hard to place."""
    reserved, most = patient.config.resources.memory_mb, patient.container_memory_mb
    if most is None:
        yield NotKnown(reason="its containers do not declare their size")
    elif reserved > most:
        yield Finding(
            name="task_too_large",
            category="configuration",
            severity="critical",
            symptom=f"a task reserves {reserved} MB, a container has {most:.0f} MB",
            cause="no container can run it",
            confidence=0.95,
            evidence={"memory_mb": reserved, "container_memory_mb": most},
            todo=_smaller_tasks(patient, most),
        )
    elif reserved > TASK_SHARE_MAX * most:
        yield Finding(
            name="task_large",
            category="configuration",
            severity="info",
            symptom=f"a task reserves {reserved} of a container's {most:.0f} MB",
            cause=f"tasks above {TASK_SHARE_MAX:.0%} of a container are hard to move",
            confidence=0.6,
            evidence={"memory_mb": reserved, "container_memory_mb": most},
            todo=(Advice(text="see where there is room", command="penstock container ls"),),
        )


def _smaller_tasks(patient: Patient, most_mb: float) -> tuple[Advice, ...]:
    """Advice to reserve less memory per task, if a task can run with that."""
    least = ISOLATED_MEMORY_MB_MIN if patient.config.isolation == "process" else 1
    wanted = max(least, int(most_mb * TASK_SHARE_MAX))
    if wanted > most_mb:
        return (Advice(text=f"start containers that have more than the {least} MB a task needs"),)
    command = set_command(patient.job, "resources.memory_mb", wanted, "must fit")
    return (Advice(text="smaller tasks", command=command),)


def retention(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Compare the lag with the retention of the inputs."""
    if patient.inputs is None and patient.config.inputs:
        yield NotKnown(reason="the retention of its inputs was not read from the bus")
    for source in patient.inputs or ():
        if not source.is_known:
            yield NotKnown(reason=f"the bus did not return the retention of {source.category}")
    limits = [source for source in patient.inputs or () if source.retention_ms > 0]
    lag_s = patient.last("lag_s")
    if not limits:
        return
    if lag_s is None:
        yield NotKnown(reason=f"its lag is not known: {patient.why_unknown('lag_s')}")
        return
    for source in limits:
        share = lag_s * 1000 / source.retention_ms
        if share >= RETENTION_WARN:
            yield Finding(
                name="retention_near",
                category="configuration",
                severity="critical" if share >= RETENTION_CRITICAL else "warning",
                symptom=f"it lags {lag_s:.0f} s and {source.category} has a retention of "
                f"{source.retention_ms / 1000:g} s",
                cause="records will be deleted before they are read",
                confidence=0.9,
                evidence={"share": round(share, 3), "category": source.category},
                todo=(
                    Advice(text="increase the category's retention, and let the job catch up"),
                    *more_tasks(patient, "more tasks now"),
                ),
            )


def task_limit(patient: Patient) -> Iterator[Finding | NotKnown]:
    """The job lags, and `task_count_max` allows no more tasks."""
    most, count = patient.config.task_count_max, patient.config.partitions
    lag_s = patient.last("lag_s")
    if patient.task_count < most or most >= count:
        return
    if lag_s is None:
        yield NotKnown(reason=f"whether it keeps up is not known: {patient.why_unknown('lag_s')}")
        return
    if lag_s <= patient.lag_slo_s:
        return
    # A larger value would be refused.
    wanted = min(count, most * 2, TASKS_MAX if patient.config.privileged else TASKS_UNPRIVILEGED_MAX)
    yield Finding(
        name="task_limit",
        category="configuration",
        severity="warning",
        symptom=f"it lags {lag_s:.0f} s and has {patient.task_count} tasks, its limit",
        cause="task_count_max allows no more tasks; the auto scaler cannot exceed it",
        confidence=0.8,
        evidence={"task_count_max": most, "tasks": patient.task_count},
        todo=(
            Advice(
                text="raise the limit for now",
                command=set_command(patient.job, "task_count_max", wanted, "a backlog"),
            ),
            Advice(
                text="and remove this setting later",
                command=f"penstock oncall clear {shlex.quote(patient.job)} task_count_max --why 'caught up'",
            ),
        )
        if wanted > most
        else (Advice(text=f"more than {most} tasks are for jobs that an admin has marked as privileged"),),
    )


RULES = (trigger, partitions, threads, task_size, retention, task_limit)
