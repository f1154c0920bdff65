"""Failures: exceptions by class, memory, crash loops, packages, categories (StreamOps Table 1). Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.fleet.messages import summarize_error
from penstock.jobs.config import skip_problem
from penstock.scaling.doctor.patient import (
    Advice,
    Finding,
    NotKnown,
    Patient,
    rollback_command,
    set_command,
    tail_command,
)
from penstock.scaling.doctor.resource_rules import more_memory
from penstock.scaling.policies.facts import TaskFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureKind:
    """A kind of failure, recognized by an error text."""

    name: str
    cause: str
    confidence: float


_KINDS: tuple[tuple[re.Pattern[str], FailureKind], ...] = tuple(
    (re.compile(pattern, re.I), FailureKind(name=name, cause=cause, confidence=confidence))
    for name, confidence, cause, pattern in (
        (
            *("oom", 0.95, "it needs more memory than it has"),
            r"out of memory|OutOfMemoryError|\bMemoryError|GC overhead limit|cannot allocate memory",
        ),
        (
            *(
                "poison_record",
                0.95,
                "a record cannot be processed, and the job is configured to stop at such records",
            ),
            r"a record of .* cannot be (?:processed|worked on)",
        ),
        (
            *("missing_category", 0.95, "a category that it reads or writes does not exist"),
            r"there is no category|UNKNOWN_TOPIC",
        ),
        (
            *("bad_package", 0.9, "its code cannot be loaded"),
            r"there is no module|ModuleNotFoundError|ImportError|the package (?:cannot be|is refused|is not)|"
            r"there is no package|does not parse|SyntaxError|syntax error|"
            r"raised (?:while importing|during the import)",
        ),
        (
            *("cannot_start", 0.9, "the command cannot be started"),
            r"cannot start `",
        ),
        (
            *("records_expired", 0.95, "records were deleted before it read them"),
            r"are gone before they were read",
        ),
        (
            *("state_mismatch", 0.9, "its state was written by code that does not fit the code that runs"),
            r"do(?:es)? not fit computation|StateMismatch|is not that of session windows",
        ),
        (
            *("disk_full", 0.95, "a disk is full"),
            r"the disk is full|No space left on device|no room to unpack|DiskFull",
        ),
        (
            *("corrupt_data", 0.9, "a file is damaged"),
            r"checksum|CorruptData|was damaged",
        ),
        (
            # By the exception's class, not the text: a key in the text may contain anything.
            *("dependency", 0.8, "a service that its code calls does not answer"),
            r"user code failed[^\n]*\n\s*Why: (?:[\w.]*\.)?"
            r"(?:Connection\w*|Timeout\w*|\w+Timeout|BrokenPipeError|gaierror|URLError|HTTPError|OperationalError)\b",
        ),
        (
            *("user_code", 0.85, "the job's own code raised"),
            r"user code failed",
        ),
        (
            *("dependency", 0.8, "a dependency does not answer"),
            r"the database (?:is busy|refused|could not be written)|did not answer|"
            r"Connection ?(?:refused|reset|Error|aborted)|ConnectionRefusedError|timed? ?out|"
            r"TimeoutException|Broken pipe|UnknownHost|Name or service not known|Temporary failure in name|"
            r"(?:502|503|504) |Service Unavailable|Too Many Requests|AllBrokersDown|_TRANSPORT",
        ),
        (
            *("spark_value", 0.85, "a value is invalid for an expression"),
            r"\[(?:DIVIDE_BY_ZERO|CAST_|ARITHMETIC_OVERFLOW|NUMERIC_|CANNOT_PARSE|MALFORMED_)",
        ),
        (
            *("fenced", 0.7, "another instance of the task took over"),
            r"a successor|Fenced",
        ),
    )
)
_CLASS = re.compile(
    r"\b(?:[\w.]*\.)?([A-Z]\w*(?:Error|Exception|Failure|Interrupt|Exit))\b|\[([A-Z][A-Z0-9_.]+)\]"
)
_PLACE = re.compile(r"a record of '([^']+)'.*?partition (\d+), offset (\d+)", re.S)
_AT_RECORD = re.compile(r", record at (\d+) of '([^']+)', partition (\d+)$", re.M)
_AT_LINE = re.compile(r" at (\S+:\d+(?: in [\w.<>]+)?): job '")


def kind_of(error: str) -> FailureKind:
    """The first kind that matches an error text; an unknown error is named after its exception."""
    for pattern, kind in _KINDS:
        if pattern.search(error):
            return kind
    named = exception_class(error)
    if named:
        return FailureKind(name="exception", cause=f"{named} was raised", confidence=0.6)
    return FailureKind(name="exception", cause="it ended without naming an exception", confidence=0.3)


def exception_class(error: str) -> str:
    """The exception or Spark's error class that a text names; "" if none."""
    # The part after "Why" first: names and keys before it may contain any text.
    found = _CLASS.search(error.partition("\nWhy: ")[2]) or _CLASS.search(error)
    return (found.group(1) or found.group(2)) if found else ""


def place_of(error: str) -> tuple[str, int, int] | None:
    """(category, partition, offset) of the record in an error text."""
    if found := _PLACE.search(error):
        return found.group(1), int(found.group(2)), int(found.group(3))
    if found := _AT_RECORD.search(error):
        return found.group(2), int(found.group(3)), int(found.group(1))
    return None


def line_of(error: str) -> str:
    """The line of user code in an error text, as `shops.py:12 in total`; "" if there is none."""
    found = _AT_LINE.search(error)
    return found.group(1) if found else ""


CRASHES_MIN = 3
FRESH_MS = 3_600_000  # for this time after an owner's change it may be the cause


def exceptions(patient: Patient) -> Iterator[Finding | NotKnown]:
    """One finding for each kind of error that its tasks have now."""
    if patient.task_count and not patient.tasks:
        yield NotKnown(reason="none of its tasks reports")
    kinds: dict[str, tuple[FailureKind, list[TaskFacts]]] = {}
    for task in patient.tasks:
        if task.error:
            kind = kind_of(task.error)
            kinds.setdefault(f"{kind.name} {kind.cause}", (kind, []))[1].append(task)
    for kind, tasks in kinds.values():
        yield _finding(patient, kind, tasks)


def memory_kills(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Tasks that ran out of memory according to metrics, when the error is gone after the restart."""
    if any(task.error and kind_of(task.error).name == "oom" for task in patient.tasks):
        return  # reported with its error
    killed = patient.series("oom")
    if killed is None:
        yield NotKnown(reason=f"the metric oom is not known: {patient.why_unknown('oom')}")
        return
    if killed.max() > 0:
        yield _oom(patient, f"{killed.max():.0f} of its tasks ran out of memory in the last hour", 0.9)


def crash_loop(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Tasks that fail after each start."""
    if patient.task_count and not patient.tasks:
        yield NotKnown(reason="none of its tasks reports")
    looping = [task for task in patient.tasks if task.restarts >= CRASHES_MIN and task.state != "running"]
    if not looping:
        return
    worst = max(looping, key=lambda task: (task.restarts, task.task_id))
    fresh = is_fresh(patient)
    yield Finding(
        name="crash_loop",
        category="failures",
        severity="critical",
        symptom=f"{worst.task_id} failed {worst.restarts} times in a row and is {worst.state}",
        cause="it fails the same way after each start"
        + (", since its owner's last change" if fresh else "")
        + f": {summarize_error(worst.error) or 'no error is known'}",
        confidence=0.9 if fresh else 0.7,
        evidence={"task": worst.task_id, "restarts": worst.restarts, "tasks": len(looping)},
        todo=(
            Advice(
                text="go back to what ran", command=rollback_command(patient, "it fails since this change")
            ),
            Advice(
                text="when it is fixed, restart it at once",
                command=f"penstock task restart {shlex.quote(worst.task_id)} --why 'fixed'",
            ),
        ),
    )


def missing_package(patient: Patient) -> Iterator[Finding | NotKnown]:
    """The package of its code does not exist."""
    if patient.is_package_there is None:
        if patient.config.package:
            yield NotKnown(reason="it was not checked whether its package exists")
    elif not patient.is_package_there:
        yield _finding(
            patient,
            FailureKind(name="bad_package", cause="its package does not exist here", confidence=1.0),
            [],
        )


def missing_category(patient: Patient) -> Iterator[Finding | NotKnown]:
    """A category that it reads does not exist."""
    if patient.inputs is None and patient.config.inputs:
        yield NotKnown(reason="its inputs were not read from the bus")
    for source in patient.inputs or ():
        if not source.is_known:
            yield NotKnown(reason=f"the bus did not return whether {source.category} exists")
        elif not source.exists:
            yield _missing(source.category, 1.0, {"category": source.category})


def stuck_change(patient: Patient) -> Iterator[Finding | NotKnown]:
    """A quarantined change, or layers that are invalid together."""
    if not patient.state:
        yield NotKnown(reason="it was not checked whether a change of it was given up")
    if patient.state not in ("quarantined", "invalid"):
        return
    given_up = patient.state == "quarantined"
    yield Finding(
        name="change_refused",
        category="failures",
        severity="critical",
        symptom="its last change was given up, and the old config still runs"
        if given_up
        else "its layers are invalid together, so its last change does not run",
        cause=patient.problem or "no reason is recorded",
        confidence=0.95,
        evidence={"state": patient.state},
        todo=(
            Advice(text="see what differs", command=f"penstock job diff {shlex.quote(patient.job)}"),
            Advice(text="undo it", command=rollback_command(patient, "this change cannot be made")),
        ),
    )


def _finding(patient: Patient, kind: FailureKind, tasks: list[TaskFacts]) -> Finding:
    job, error = shlex.quote(patient.job), tasks[0].error if tasks else ""
    names = ", ".join(task.task_id for task in tasks[:3]) + (" …" if len(tasks) > 3 else "")
    symptom = f"{names}: {summarize_error(error)}" if tasks else kind.cause
    evidence: dict[str, float | int | str] = {"tasks": len(tasks), "exception": exception_class(error)}
    evidence |= {"line": line_of(error)} if line_of(error) else {}
    logs = Advice(text="see the whole error", command=_logs(patient, tasks))
    rollback = Advice(
        text="go back to what ran", command=rollback_command(patient, f"{kind.name} since this change")
    )
    restart = Advice(
        text="when it is fixed, restart it at once",
        command=f"penstock task restart {shlex.quote(tasks[0].task_id)} --why 'fixed'" if tasks else "",
    )
    confidence = kind.confidence
    match kind.name:
        case "oom":
            return _oom(patient, symptom, confidence)
        case "missing_category":
            return _missing(_quoted(error), confidence, evidence)
        case "poison_record":
            return _poison(patient, symptom, error, confidence)
        case "bad_package" | "state_mismatch" | "cannot_start":
            todo: tuple[Advice, ...] = (rollback, restart) if tasks else (rollback,)
        case "user_code" | "spark_value":
            todo = (*_look(error), rollback, *_put_aside(patient, kind.name), logs)
        case "dependency":
            todo = (
                Advice(text="more tasks would only add load to it; check whether it answers again"),
                Advice(
                    text="to take load off it meanwhile",
                    command=f"penstock job pause {job} --why 'its dependency is down'",
                ),
            )
        case "records_expired":
            todo = (
                Advice(text="deleted records are lost; increase the category's retention"),
                Advice(text="see how far behind it is", command="penstock status"),
            )
        case "disk_full":
            todo = (Advice(text="free space on its machine", command="penstock container ls"), restart)
        case _:
            todo = (logs, rollback) if is_fresh(patient) else (logs,)
    fresh = is_fresh(patient) and kind.name in ("exception", "user_code", "bad_package", "state_mismatch")
    return Finding(
        name=kind.name,
        category="failures",
        severity="critical" if kind.name in ("bad_package", "records_expired", "corrupt_data") else "warning",
        symptom=symptom,
        cause=kind.cause + (", since its owner's last change" if fresh else ""),
        confidence=min(0.99, confidence + (0.1 if fresh else 0.0)),
        evidence=evidence,
        todo=todo,
    )


def _look(error: str) -> Iterator[Advice]:
    """Advice to see the record in an error text."""
    if (place := place_of(error)) is not None:
        yield Advice(text="see the record", command=tail_command(*place))


def _put_aside(patient: Patient, kind: str) -> Iterator[Advice]:
    """Advice to skip failing records, if a setting of the job allows it."""
    poison = patient.config.poison
    if kind == "user_code" and poison != "skip" and not skip_problem(patient.config):
        command = set_command(patient.job, "poison", "skip", "one record must not stop all")
        yield Advice(text="or skip the records at which it raises", command=command)
    elif kind == "spark_value" and poison == "fail":
        command = set_command(patient.job, "poison", "dead_letter", "one record must not stop all")
        yield Advice(text="or write records with such values to the dead letters", command=command)


def _oom(patient: Patient, symptom: str, confidence: float) -> Finding:
    reserved = patient.config.resources.memory_mb
    used = patient.series("memory_task_mb")
    peak = max(
        [task.memory_mb or 0.0 for task in patient.tasks] + ([float(used.max())] if used is not None else [])
    )
    return Finding(
        name="oom",
        category="failures",
        severity="critical",
        symptom=symptom,
        cause=f"its tasks need more than the {reserved} MB they have",
        confidence=confidence,
        evidence={"memory_mb": reserved, "memory_peak_mb": round(peak)},
        todo=more_memory(patient, peak, "give each task more memory", "out of memory"),
    )


def _missing(category: str, confidence: float, evidence: dict[str, float | int | str]) -> Finding:
    name = shlex.quote(category) if category else "NAME"
    return Finding(
        name="missing_category",
        category="failures",
        severity="critical",
        symptom=f"the category {category or 'that it names'} does not exist",
        cause="it was not created, or its name is wrong",
        confidence=confidence,
        evidence=evidence,
        todo=(
            Advice(text="list the categories", command="penstock bus ls"),
            Advice(
                text="or create it",
                command=f"penstock category {name} --create --columns 'key:string,ts:bigint'",
            ),
        ),
    )


def _poison(patient: Patient, symptom: str, error: str, confidence: float) -> Finding:
    place = place_of(error)
    evidence: dict[str, float | int | str] = {}
    todo = [
        Advice(
            text="write such records to the dead letters",
            command=set_command(patient.job, "poison", "dead_letter", "one record must not stop all"),
        )
    ]
    if place is not None:
        category, partition, offset = place
        evidence = {"category": category, "partition": partition, "offset": offset}
        command = tail_command(category, partition, offset)
        todo.insert(0, Advice(text="see the record", command=command))
    return Finding(
        name="poison_record",
        category="data",
        severity="critical",
        symptom=symptom,
        cause="it stops at a record that cannot be processed"
        + (f": {place[0]} partition {place[1]} offset {place[2]}" if place else ""),
        confidence=confidence,
        evidence=evidence,
        todo=tuple(todo),
    )


def is_fresh(patient: Patient) -> bool:
    """Whether its owner changed it so recently that the change may be the cause."""
    return patient.user_update_ms is not None and 0 <= patient.at_ms - patient.user_update_ms < FRESH_MS


def _quoted(error: str) -> str:
    parts = error.strip().partition("\n")[0].split("'")
    return parts[1] if len(parts) > 2 else ""


def _logs(patient: Patient, tasks: list[TaskFacts]) -> str:
    if patient.config.kind == "process" and tasks:
        return f"penstock task logs {shlex.quote(tasks[0].task_id)}"
    return (
        f"penstock logs {shlex.quote(tasks[0].container)}"
        if tasks
        else f"penstock journal {shlex.quote(patient.job)}"
    )


RULES = (exceptions, memory_kills, crash_loop, missing_package, missing_category, stuck_change)
