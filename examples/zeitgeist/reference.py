"""What anomalies.py must find, computed in one pass over all records: no state, no timers, no watermarks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

Anomaly = tuple[str, int, str, int, float]  # (query, second, kind, count, expected)


def anomalies_of(records: Iterable[tuple[int, str, str]]) -> set[Anomaly]:
    """Of all (event time in ms, query, language): every second of a query that is not as it was expected."""
    per_query: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for ts, query, lang in records:
        if query and lang != "robot":
            per_query[query.lower()][ts // 1000] += 1
    found: set[Anomaly] = set()
    for query, counts in per_query.items():
        first, last = min(counts), max(counts)
        mean, age, silent = float(counts[first]), 1, 0
        for second in range(first + 1, last + 2):
            count = counts.get(second, 0)
            # Judged with what was known when the second before had been counted.
            if not silent and age >= 5 and abs(count - mean) > 3:
                if count > 3 * mean:
                    found.add((query, second, "spike", count, mean))
                elif count < mean / 3:
                    found.add((query, second, "dip", count, mean))
            silent = 0 if count else silent + 1
            if silent >= 60:
                age = 0  # forgotten
            elif age == 0:
                mean, age = float(count), int(bool(count))
            else:
                mean, age = mean + 0.25 * (count - mean), age + 1
    return found
