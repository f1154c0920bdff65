"""Failovers: every exception class seen, memory, crash loops, packages, categories (Table 1). Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.fleet.messages import shortly
from penstock.jobs.config import why_no_skip
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
    """One kind of failure that a text shows."""

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
            *("poison_record", 0.95, "a record that cannot be worked on, and the job is to stop at such"),
            r"a record of .* cannot be (?:processed|worked on)",
        ),
        (
            *("missing_category", 0.95, "a category that it reads or writes is not there"),
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
            # By its class, not its words: a key of the record may be any text.
            *("dependency", 0.8, "something that its code asks does not answer"),
            r"user code failed[^\n]*\n\s*Why: (?:[\w.]*\.)?"
            r"(?:Connection\w*|Timeout\w*|\w+Timeout|BrokenPipeError|gaierror|URLError|HTTPError|OperationalError)\b",
        ),
        (
            *("user_code", 0.85, "the job's own code raised"),
            r"user code failed",
        ),
        (
            *("dependency", 0.8, "something that it depends on does not answer"),
            r"the database (?:is busy|refused|could not be written)|did not answer|"
            r"Connection ?(?:refused|reset|Error|aborted)|ConnectionRefusedError|timed? ?out|"
            r"TimeoutException|Broken pipe|UnknownHost|Name or service not known|Temporary failure in name|"
            r"(?:502|503|504) |Service Unavailable|Too Many Requests|AllBrokersDown|_TRANSPORT",
        ),
        (
            *("spark_value", 0.85, "a value that an expression cannot take"),
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
    """The most particular kind that a text shows; what nobody knows is named after its exception."""
    for pattern, kind in _KINDS:
        if pattern.search(error):
            return kind
    named = exception_class(error)
    if named:
        return FailureKind(name="exception", cause=f"{named} was raised", confidence=0.6)
    return FailureKind(name="exception", cause="it ended without naming an exception", confidence=0.3)


def exception_class(error: str) -> str:
    """The exception or Spark's error class that a text names; "" if none."""
    # The reason first: before it stand names and keys, which are anybody's words.
    found = _CLASS.search(error.partition("\nWhy: ")[2]) or _CLASS.search(error)
    return (found.group(1) or found.group(2)) if found else ""


def place_of(error: str) -> tuple[str, int, int] | None:
    """(category, partition, offset) of the record that an error is about."""
    if found := _PLACE.search(error):
        return found.group(1), int(found.group(2)), int(found.group(3))
    if found := _AT_RECORD.search(error):
        return found.group(2), int(found.group(3)), int(found.group(1))
    return None


def line_of(error: str) -> str:
    """The line of user code that an error names, as in `shops.py:12 in total`; "" if it names none."""
    found = _AT_LINE.search(error)
    return found.group(1) if found else ""


CRASHES_MIN = 3
FRESH_MS = 3_600_000  # an owner's change may be to blame for so long


def exceptions(patient: Patient) -> Iterator[Finding | NotKnown]:
    """One finding for each kind of error that its tasks show now."""
    if patient.task_count and not patient.tasks:
        yield NotKnown(reason="no task of it reports anything")
    kinds: dict[str, tuple[FailureKind, list[TaskFacts]]] = {}
    for task in patient.tasks:
        if task.error:
            kind = kind_of(task.error)
            kinds.setdefault(f"{kind.name} {kind.cause}", (kind, []))[1].append(task)
    for kind, tasks in kinds.values():
        yield _finding(patient, kind, tasks)


def memory_kills(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Ends above the memory reserved that the metrics count, where the error is gone with the restart."""
    if any(task.error and kind_of(task.error).name == "oom" for task in patient.tasks):
        return  # told with its error
    killed = patient.series("oom")
    if killed is None:
        yield NotKnown(reason=f"nobody counts ends above the memory reserved: {patient.why_unknown('oom')}")
        return
    if killed.max() > 0:
        yield _oom(patient, f"{killed.max():.0f} of its tasks ended above their memory in the last hour", 0.9)


def crash_loop(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Tasks that start again and again."""
    if patient.task_count and not patient.tasks:
        yield NotKnown(reason="no task of it reports anything")
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
        + f": {shortly(worst.error) or 'no error is known'}",
        confidence=0.9 if fresh else 0.7,
        evidence={"task": worst.task_id, "restarts": worst.restarts, "tasks": len(looping)},
        todo=(
            Advice(
                text="go back to what ran", command=rollback_command(patient, "it fails since this change")
            ),
            Advice(
                text="once mended, start it at once",
                command=f"penstock task restart {shlex.quote(worst.task_id)} --why 'mended'",
            ),
        ),
    )


def missing_package(patient: Patient) -> Iterator[Finding | NotKnown]:
    """Its code is not on the shelf."""
    if patient.is_package_there is None:
        if patient.config.package:
            yield NotKnown(reason="nobody looked whether its package is kept")
    elif not patient.is_package_there:
        yield _finding(
            patient, FailureKind(name="bad_package", cause="its package is not here", confidence=1.0), []
        )


def missing_category(patient: Patient) -> Iterator[Finding | NotKnown]:
    """A category that it reads is not on the bus."""
    if patient.inputs is None and patient.config.inputs:
        yield NotKnown(reason="nobody asked the bus about its inputs")
    for source in patient.inputs or ():
        if not source.is_known:
            yield NotKnown(reason=f"the bus does not say whether {source.category} is there")
        elif not source.exists:
            yield _missing(source.category, 1.0, {"category": source.category})


def stuck_change(patient: Patient) -> Iterator[Finding | NotKnown]:
    """A change that was given up, or layers that do not fit together."""
    if not patient.state:
        yield NotKnown(reason="nobody looked whether a change of it was given up")
    if patient.state not in ("quarantined", "invalid"):
        return
    given_up = patient.state == "quarantined"
    yield Finding(
        name="change_refused",
        category="failures",
        severity="critical",
        symptom="its last change was given up, and the old config runs on"
        if given_up
        else "its layers do not fit together, so nothing of its last change runs",
        cause=patient.problem or "no reason is recorded",
        confidence=0.95,
        evidence={"state": patient.state},
        todo=(
            Advice(text="see what differs", command=f"penstock job diff {shlex.quote(patient.job)}"),
            Advice(text="take it back", command=rollback_command(patient, "this change cannot be made")),
        ),
    )


def _finding(patient: Patient, kind: FailureKind, tasks: list[TaskFacts]) -> Finding:
    job, error = shlex.quote(patient.job), tasks[0].error if tasks else ""
    names = ", ".join(task.task_id for task in tasks[:3]) + (" …" if len(tasks) > 3 else "")
    symptom = f"{names}: {shortly(error)}" if tasks else kind.cause
    evidence: dict[str, float | int | str] = {"tasks": len(tasks), "exception": exception_class(error)}
    evidence |= {"line": line_of(error)} if line_of(error) else {}
    logs = Advice(text="see the whole error", command=_logs(patient, tasks))
    rollback = Advice(
        text="go back to what ran", command=rollback_command(patient, f"{kind.name} since this change")
    )
    restart = Advice(
        text="once mended, start it at once",
        command=f"penstock task restart {shlex.quote(tasks[0].task_id)} --why 'mended'" if tasks else "",
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
                Advice(text="more tasks would only ask more of it; see whether it answers again"),
                Advice(
                    text="to spare it meanwhile",
                    command=f"penstock job pause {job} --why 'its dependency is down'",
                ),
            )
        case "records_expired":
            todo = (
                Advice(text="what is gone is gone; let the category keep more"),
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
    """The record that an error is about."""
    if (place := place_of(error)) is not None:
        yield Advice(text="look at the record", command=tail_command(*place))


def _put_aside(patient: Patient, kind: str) -> Iterator[Advice]:
    """How the job goes on without the records that fail, where a setting of it does that."""
    poison = patient.config.poison
    if kind == "user_code" and poison != "skip" and not why_no_skip(patient.config):
        command = set_command(patient.job, "poison", "skip", "one record must not stop all")
        yield Advice(text="or put aside the records at which it raises", command=command)
    elif kind == "spark_value" and poison == "fail":
        command = set_command(patient.job, "poison", "dead_letter", "one record must not stop all")
        yield Advice(text="or put aside the records whose values it cannot take", command=command)


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
        symptom=f"the category {category or 'that it names'} is not there",
        cause="nobody created it, or it has another name",
        confidence=confidence,
        evidence=evidence,
        todo=(
            Advice(text="see which there are", command="penstock bus ls"),
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
            text="put such records aside",
            command=set_command(patient.job, "poison", "dead_letter", "one record must not stop all"),
        )
    ]
    if place is not None:
        category, partition, offset = place
        evidence = {"category": category, "partition": partition, "offset": offset}
        command = tail_command(category, partition, offset)
        todo.insert(0, Advice(text="look at the record", command=command))
    return Finding(
        name="poison_record",
        category="data",
        severity="critical",
        symptom=symptom,
        cause="it stops at a record that cannot be worked on"
        + (f": {place[0]} partition {place[1]} offset {place[2]}" if place else ""),
        confidence=confidence,
        evidence=evidence,
        todo=tuple(todo),
    )


def is_fresh(patient: Patient) -> bool:
    """Whether its owner changed it so lately that the change may be to blame."""
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
