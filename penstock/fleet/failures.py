"""Which class of failure ended a run, told from what it said. Pure: text in, a short name out."""

from __future__ import annotations

import re
from collections.abc import Mapping

OUT_OF_MEMORY = "OutOfMemory"
OTHER = "Other"
CLASSES_MAX = 16  # of one task: a report goes out with every beat

_MEMORY = re.compile(r"\b(?:out of memory|OutOfMemoryError|MemoryError|oom[- ]kill)", re.IGNORECASE)
_SPARK = re.compile(r"\[([A-Z][A-Z0-9_.]{2,79})\]")
_NAMED = re.compile(
    r"\b([A-Z]\w{2,60}(?:Error|Exception|Expired|Problem|Failed|Lost|Conflict|Unavailable))\b"
)
_SIGNAL = re.compile(r"\bended by (SIG[A-Z0-9]+)")
_WHY = "Why: "  # how our own errors begin their reason
_CODE = re.compile(r"\bended with code (\d+)")


def failure_class(error: str) -> str:
    """A name for people and rules: our own for memory, Spark's, an exception's, a signal's; else `Other`."""
    if _MEMORY.search(error):
        return OUT_OF_MEMORY
    for pattern in (_SPARK, _NAMED, _SIGNAL):
        if found := pattern.search(error):
            return found.group(1)
    found = _CODE.search(error)
    return f"ExitCode{found.group(1)}" if found else OTHER


def shortly(error: str, *, length_max: int = 300) -> str:
    """One line of an error: its first, and the reason where it names one below."""
    lines = [line.strip() for line in error.strip().splitlines()]
    if not lines:
        return ""
    why = next((line for line in lines[1:] if line.startswith(_WHY)), "")
    return " ".join(filter(None, (lines[0], why)))[:length_max]


def count_failure(counts: Mapping[str, int], error: str) -> dict[str, int]:
    """The counts with one more; what there is no room for is `Other`."""
    name = failure_class(error)
    if name not in counts and len(counts) >= CLASSES_MAX:
        name = OTHER
    return {**counts, name: counts.get(name, 0) + 1}
