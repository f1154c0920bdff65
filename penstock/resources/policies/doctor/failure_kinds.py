"""What an error of a task means: known texts, then the class of whatever exception it names. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass


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
            r"a record of .* cannot be worked on",
        ),
        (
            *("missing_category", 0.95, "a category that it reads or writes is not there"),
            r"there is no category|UNKNOWN_TOPIC",
        ),
        (
            *("bad_package", 0.9, "its code cannot be loaded"),
            r"there is no module|ModuleNotFoundError|ImportError|the package (?:cannot be|is refused|is not)|"
            r"there is no package|does not parse|SyntaxError|raised while importing",
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
