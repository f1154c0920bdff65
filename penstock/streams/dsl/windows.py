"""Windows of event time, and when they emit results, as values. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import PipelineError

WINDOW_START, WINDOW_END, RANK = "window_start", "window_end", "rank"
# The column with a partial result, in an aggregate with two phases.
PARTIAL = "partial"
PARTIAL_COLUMNS = ((WINDOW_START, "bigint"), (PARTIAL, "binary"))
DURATION_MS_MAX = 400 * 24 * 3600 * 1000
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_WORDS = {
    **dict.fromkeys(("millisecond", "milliseconds", "milli", "millis", "ms"), "ms"),
    **dict.fromkeys(("second", "seconds", "sec", "secs", "s"), "s"),
    **dict.fromkeys(("minute", "minutes", "min", "mins", "m"), "m"),
    **dict.fromkeys(("hour", "hours", "h"), "h"),
    **dict.fromkeys(("day", "days", "d"), "d"),
}
_DURATION = re.compile(r"\s*(?:interval\s+)?([0-9]{1,12})\s*([a-z]+)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Windows of event time: `tumbling`, `sliding` (a new one every `slide_ms`), or `session`."""

    kind: str
    size_ms: int  # session: the gap that ends one
    slide_ms: int = 0

    def to_json(self) -> dict[str, Any]:
        """The JSON form in a job's plan."""
        sizes = {"gap_ms": self.size_ms} if self.kind == "session" else {"size_ms": self.size_ms}
        return {"kind": self.kind, **sizes, **({"slide_ms": self.slide_ms} if self.slide_ms else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """When a window emits results, beside the result when the low watermark passes its end.

    `early_ms`: interval of early results before the end. `late`: "drop" late records, or "update" the result
    with each of them until the low watermark is `lateness_ms` beyond the end. `mode`: a later result is the
    whole value again ("accumulating") or only what is new ("discarding").
    """

    early_ms: int | None = None
    late: str = "drop"
    lateness_ms: int = 0
    mode: str = "accumulating"

    @property
    def is_plain(self) -> bool:
        """True if a window emits exactly one result."""
        return self.early_ms is None and self.late == "drop"

    def to_json(self) -> dict[str, Any]:
        """The JSON form in a job's plan."""
        return {
            "early_ms": self.early_ms,
            "late": self.late,
            "lateness_ms": self.lateness_ms,
            "mode": self.mode,
        }


def tumbling(size: str | int) -> Spans:
    """Windows of a fixed length without overlap: tumbling("10s")."""
    return Spans(kind="tumbling", size_ms=duration_ms(size))


def sliding(size: str | int, *, every: str | int) -> Spans:
    """Windows of a fixed length that overlap: sliding("1m", every="10s")."""
    size_ms, slide_ms = duration_ms(size), duration_ms(every)
    if size_ms % slide_ms:
        raise PipelineError(
            f"a window of {size!r} cannot slide by {every!r}",
            why="the length must be a multiple of `every`, so that each record is "
            "in the same number of windows",
            fix='choose such lengths, as in sliding("1m", every="10s")',
        )
    return Spans(kind="sliding", size_ms=size_ms, slide_ms=slide_ms)


def session(*, gap: str | int) -> Spans:
    """Windows that end when a key has no records for the gap: session(gap="30m")."""
    return Spans(kind="session", size_ms=duration_ms(gap))


def duration_ms(text: object) -> int:
    """A duration in milliseconds: "10s", "500ms", "5 minutes", or a number of milliseconds."""
    found = text if isinstance(text, int) and not isinstance(text, bool) else None
    if isinstance(text, str) and (parts := _DURATION.fullmatch(text)):
        unit = _WORDS.get(parts[2].lower())
        found = None if unit is None else int(parts[1]) * _UNITS[unit]
    if found is None or not 0 < found <= DURATION_MS_MAX:
        raise PipelineError(
            f"{text!r} is not a duration",
            why="a duration is a whole number above 0 and a unit (ms, s, m, h, d), at most 400 days",
            fix='write it like "10s" or "5 minutes"',
        )
    return found


def duration_text(ms: int) -> str:
    """A duration as text, exactly: "10 s", "90 s", "1 h"."""
    for unit, size in reversed(_UNITS.items()):
        if ms % size == 0 and ms:
            return f"{ms // size} {'min' if unit == 'm' else unit}"
    return "0 s"


def offset_ms(text: object) -> int:
    """Like `duration_ms`, but 0 and "0s" are allowed."""
    is_nothing = (isinstance(text, int) and text == 0) or re.fullmatch(r"\s*0\s*[A-Za-z]+\s*", str(text))
    return 0 if is_nothing else duration_ms(text)
