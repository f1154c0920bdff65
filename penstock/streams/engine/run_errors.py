"""What ended a run, as its user should read it, and whether a successor did."""

from __future__ import annotations

import re

from penstock.core.errors import Fenced, PenstockError
from penstock.streams.blame import MESSAGE_CHARS_MAX, cut_short, line_of_user, said_by, user_line
from penstock.streams.engine.poison import error_class
from penstock.streams.places import hidden_password

TEXT_CHARS_MAX = 2000
_NAMED = re.compile(
    r"penstock\.(?:core\.errors|streams\.\w+)\.(\w+): (.*?)"
    r"(?=\s+SQLSTATE: |\n\s*\n|\n\tat |\nDriver stacktrace|\Z)",
    re.S,
)
# A traceback of a Python worker, as it comes inside of Spark's text.
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (.+)$', re.M)
_RAISED = re.compile(r"^(?:\w+\.)*(\w+(?:: .*)?)$")
_OF_JAVA = re.compile(r"^(?:\tat |\t\.\.\. |Caused by: |Driver stacktrace|JVM stacktrace)")


def readable(error: BaseException) -> str:
    """Our own error's three parts where there is one inside; else what user code raised and at which of its
    lines; else what Spark says, its error class first. Never a trace of Java.

    Everybody reads it, and Spark may print what a query was given: addresses lose their passwords.
    """
    return hidden_password(_said(error))


def _said(error: BaseException) -> str:
    if isinstance(error, PenstockError):
        return cut_short(str(error), TEXT_CHARS_MAX)
    text = str(error)
    named = _NAMED.search(text)
    if named is not None:
        return cut_short(named.group(2).strip(), TEXT_CHARS_MAX)
    return cut_short(_of_worker(text) or _of_driver(error) or _of_spark(error, text), TEXT_CHARS_MAX)


def _of_worker(text: str) -> str:
    """What a user's own function raised in a Python worker: the end of the first traceback in the text."""
    if _TRACEBACK not in text:
        return ""
    lines = text.partition(_TRACEBACK)[2].splitlines()
    raised = next((line for line in lines if _RAISED.match(line)), "")
    trace = "\n".join(lines[: lines.index(raised)] if raised else lines)
    found = [line_of_user(file, int(line), name) for file, line, name in _FRAME.findall(trace)]
    at = next((line for line in reversed(found) if line), "")
    why = cut_short(_RAISED.sub(r"\1", raised), MESSAGE_CHARS_MAX)
    return f"user code failed at {at}\nWhy: {why}" if raised and at else ""


def _of_driver(error: BaseException) -> str:
    """What a user's own function raised where it was called."""
    at = user_line(error)
    is_sparks = type(error).__module__.split(".")[0] in ("pyspark", "py4j")
    return f"user code failed at {at}\nWhy: {said_by(error)}" if at and not is_sparks else ""


def _of_spark(error: BaseException, text: str) -> str:
    name = error_class(error)
    lines = text[text.index(f"[{name}]") if name else 0 :].strip().splitlines()
    kept = [line for line in lines if not _OF_JAVA.match(line)][:12]
    at = user_line(error)  # it was called from there
    return "\n".join(kept) + (f"\nAt: {at}" if at else "")


def is_fenced(error: BaseException) -> bool:
    """A successor owns an interval of this task: told by type, or by name when it comes out of a worker's
    traceback.
    """
    if isinstance(error, Fenced):
        return True
    named = _NAMED.search(str(error))
    return named is not None and named.group(1) == "Fenced"
