"""Windows computed by plain Python, record by record, from the events alone: what the vectorised ones must give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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


def results_with_firing(
    events: Iterable[Event],
    *,
    size: int,
    slide: int,
    early: int | None,
    lateness: int | None,
    accumulating: bool,
    functions: Sequence[str],
    value: Callable[[str, Sequence[Any]], Any] = value_of,
) -> list[tuple[Any, ...]]:
    """(_ts, late, window_start, key, values…) in the order of giving. `lateness` None: late ones are dropped."""
    low, new, given, found = LOW_MIN, {}, {}, []

    def give(stamp: int, is_late: bool, start: int, key: str, values: Sequence[Any]) -> None:
        results = [len(values) if f == "count(*)" else value(f, values) for f in functions]
        found.append((stamp, is_late, start, key, *results))

    for event in events:
        if isinstance(event, Rec):
            if event.ts < low and lateness is None:
                continue
            for start in windows_of(event.ts, size, slide):
                name, end = (start, event.key), start + size
                if end > low:
                    new.setdefault(name, []).append(event.values[0])
                elif lateness is not None and end + lateness > low:
                    before = given.setdefault(name, []) if accumulating else []
                    before.append(event.values[0])
                    give(end - 1, True, start, event.key, before)
            continue
        assert isinstance(event, Low)
        before_low, low = low, max(low, event.low)
        due = []
        for start, key in {*new, *given}:
            end = start + size
            if before_low < end <= low:
                due.append((end, start, key, True))
            elif end > low and early and low < 2**62 and (start, key) in new:
                at = start + (low - start) // early * early
                if at > max(before_low, start):
                    due.append((at, start, key, False))
        for at, start, key, on_time in sorted(due):
            fresh = new.pop((start, key), [])
            if not accumulating:
                if fresh:
                    give(at - 1, False, start, key, fresh)
                continue
            given.setdefault((start, key), []).extend(fresh)
            if on_time or fresh:
                give(at - 1, False, start, key, given[start, key])
        for start, key in [*given]:
            if start + size + (lateness or 0) <= low:
                del given[start, key]
    return found


def session_results(events: Iterable[Event], *, gap: int, functions: Sequence[str]) -> list[tuple[Any, ...]]:
    """(window_start, window_end, key, values…) in the order of giving; late records are dropped."""
    low, sessions, found = LOW_MIN, [], []
    for event in events:
        if isinstance(event, Rec):
            if event.ts >= low:
                start, end, values = event.ts, event.ts + gap, [event.values[0]]
                apart = []
                for key, first, last, held in sessions:
                    if key == event.key and first < end and start < last:
                        start, end, values = min(start, first), max(end, last), [*held, *values]
                    else:
                        apart.append((key, first, last, held))
                sessions = [*apart, (event.key, start, end, values)]
            continue
        assert isinstance(event, Low)
        low = max(low, event.low)
        for key, start, end, values in sorted(
            (s for s in sessions if s[2] <= low), key=lambda s: (s[2], s[1], s[0])
        ):
            results = [len(values) if f == "count(*)" else value_of(f, values) for f in functions]
            found.append((start, end, key, *results))
        sessions = [s for s in sessions if s[2] > low]
    return found


def sessions_with_firing(
    events: Iterable[Event],
    *,
    gap: int,
    early: int | None,
    lateness: int | None,
    accumulating: bool,
    functions: Sequence[str],
    value: Callable[[str, Sequence[Any]], Any] = value_of,
) -> list[tuple[Any, ...]]:
    """(_ts, late, window_start, window_end, key, values…) in the order of giving. `lateness` None: late ones
    are dropped.
    """
    low, found = LOW_MIN, []
    sessions: list[dict[str, Any]] = []

    def give(stamp: int, is_late: bool, one: dict[str, Any], values: Sequence[Any]) -> None:
        results = [len(values) if f == "count(*)" else value(f, values) for f in functions]
        found.append((stamp, is_late, one["start"], one["end"], one["key"], *results))

    for event in events:
        if isinstance(event, Rec):
            if event.ts < low and lateness is None:
                continue
            start, end = event.ts, event.ts + gap
            if event.ts < low and end + (lateness or 0) <= low:
                continue
            mine = [s for s in sessions if s["key"] == event.key and s["start"] < end and start < s["end"]]
            whole = {
                "key": event.key,
                "start": min([start, *(s["start"] for s in mine)]),
                "end": max([end, *(s["end"] for s in mine)]),
                "new": [one for s in mine for one in s["new"]],
                "given": [one for s in mine for one in s["given"]],
            }
            sessions = [*(s for s in sessions if all(s is not other for other in mine)), whole]
            if whole["end"] > low:
                whole["new"].append(event.values[0])
            else:
                whole["given"].append(event.values[0])
                give(whole["end"] - 1, True, whole, whole["given"] if accumulating else [event.values[0]])
            continue
        assert isinstance(event, Low)
        before, low = low, max(low, event.low)
        due = []
        for one in sessions:
            if before < one["end"] <= low:
                due.append((one["end"], one["start"], one["key"], one))
            elif one["end"] > low and early and low < 2**62 and one["new"]:
                at = one["start"] + (low - one["start"]) // early * early
                if at > max(before, one["start"]):
                    due.append((at, one["start"], one["key"], one))
        for at, _, _, one in sorted(due, key=lambda item: item[:3]):
            fresh, one["new"] = one["new"], []
            one["given"] += fresh
            if fresh or (accumulating and at == one["end"]):
                give(at - 1, False, one, one["given"] if accumulating else fresh)
        # As long as a late record that counts may reach it.
        kept = 0 if lateness is None else lateness + gap
        sessions = [one for one in sessions if one["end"] + kept > low]
    return found
