"""Is what a call of the DSL was given possible at all? Pure: whether it fits the columns is checked later."""

from __future__ import annotations

from penstock.core.errors import PipelineError
from penstock.streams.graph import Place
from penstock.streams.windows import Spans

TOP_MAX = 10_000


def check_window(spans: object, late: object, mode: object, place: Place) -> None:
    """Windows, and when they give results."""
    what = ""
    if not isinstance(spans, Spans):
        what, why = f"window({spans!r}) is not possible", "a window is tumbling, sliding or a session"
        fix = 'write .window(tumbling("10s")), with from penstock import tumbling'
    elif late not in ("drop", "update"):
        what, why = f"late={late!r} is not possible", "what comes too late is dropped or updates the result"
        fix = 'write late="drop" or late="update"'
    elif mode not in ("accumulating", "discarding"):
        what, why = f"mode={mode!r} is not possible", "a further result is the whole again, or what is new"
        fix = 'write mode="accumulating" or mode="discarding"'
    if what:
        raise PipelineError(f"{place}: {what}", why=why, fix=fix)


def check_texts(texts: tuple[str, ...], *, what: str, place: Place) -> None:
    """Expressions of a step."""
    if texts and all(isinstance(text, str) and text.strip() for text in texts):
        return
    wrong = next((text for text in texts if not isinstance(text, str) or not text.strip()), None)
    raise PipelineError(
        f"{place}: {what}() needs Spark SQL text" + (f", not {wrong!r}" if texts else ""),
        why="expressions run inside Spark, so they are given as text",
        fix={
            "filter": "write .filter(\"lang = 'en'\")",
            "select": 'write .select("lower(query) AS query", "ts")',
            "key_by": 'write .key_by("query")',
            "flat_map": "write .flat_map(\"explode(split(text, ' ')) AS word\")",
            "aggregate": 'write .aggregate("count(*) AS n")',
        }[what],
    )


def check_dedup(within: object, window: object, place: Place) -> None:
    """How long a record is remembered."""
    if (within is None) != (window is None) and (
        window is None or (isinstance(window, Spans) and window.kind == "tumbling")
    ):
        return
    raise PipelineError(
        f"{place}: dedup() needs within= or window=tumbling(...)",
        why="what was seen is remembered for a bounded time, or state would grow for ever",
        fix='write .key_by("id").dedup(within="1h")',
    )


def check_top(count: object, by: object, per: tuple[object, ...], place: Place) -> None:
    """How many, and by what."""
    fix = 'write .aggregate("count(*) AS n").top(3, by="n")'
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= TOP_MAX:
        raise PipelineError(
            f"{place}: top({count!r}) is not possible",
            why=f"it is a whole number from 1 to {TOP_MAX}: so many records are kept per window",
            fix=fix,
        )
    if not all(isinstance(name, str) and name.strip() for name in (by, *per)):
        raise PipelineError(
            f"{place}: top() needs names of columns, not by={by!r}, per={per!r}",
            why="it goes by a column of the results, and has a list for each value of other columns",
            fix=fix,
        )


def check_two_phase(two_phase: object, place: Place) -> None:
    """Whether an aggregate is taken apart."""
    if not isinstance(two_phase, bool):
        raise PipelineError(
            f"{place}: two_phase={two_phase!r} is not possible",
            why="records of a key are added up in one place, or in all partitions first",
            fix="write two_phase=True, or leave it out",
        )
