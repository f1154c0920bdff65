"""Windows computed by plain Python, record by record, from the events alone: what the vectorised ones must give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.streams.bus.log import LOW_MIN
from tests.streams.operator_world import Event, Low, Rec


def value_of(function: str, values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if function == "count":
        return len(known)
    if not known:
        return None
    if function in ("sum", "avg"):
        total = sum(known) if all(isinstance(value, int) for value in known) else math.fsum(known)
        return total if function == "sum" else total / len(known)
    return min(known) if function == "min" else max(known)


def windows_of(ts: int, size: int, slide: int) -> list[int]:
    last = ts - ts % slide
    return [start for start in range(last - size + slide, last + 1, slide)]


def on_time_results(
    events: Iterable[Event], *, size: int, slide: int, functions: Sequence[str], place: int = 0
) -> list[tuple[Any, ...]]:
    """(window_start, window_end, key, values…) in the order of giving; late records are dropped."""
    low, panes, found = LOW_MIN, {}, []
    for event in events:
        if isinstance(event, Rec):
            if event.ts >= low:
                for start in windows_of(event.ts, size, slide):
                    panes.setdefault((start, event.key), []).append(event.values[place])
            continue
        assert isinstance(event, Low)
        low = max(low, event.low)
        due = sorted(name for name in panes if name[0] + size <= low)
        for start, key in due:
            values = panes.pop((start, key))
            results = [len(values) if f == "count(*)" else value_of(f, values) for f in functions]
            found.append((start, start + size, key, *results))
    return found
