"""Claims about tasks as Spark queries: exactly once across rescale, zombies, new code and bad records."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.stage import Stage, wait_for

ZEITGEIST = Path(__file__).parents[2] / "examples" / "zeitgeist"
CATEGORY = json.loads((ZEITGEIST / "queries.json").read_text())
PARSE, COUNT = "zeitgeist.by_query", "zeitgeist.count_per_second"


@pytest.fixture
def stage(spark: Any, tmp_path: Path) -> Stage:
    return Stage(spark, tmp_path, ZEITGEIST / "pipeline.py", CATEGORY)


def queries(first: int, count: int) -> list[tuple[str, int, bytes]]:
    """Deterministic search queries: key, event time, JSON."""
    found = []
    for n in range(first, first + count):
        query = ("Cats", " dogs ", "", "spark", "cats")[n % 5] + (str(n % 7) if n % 5 == 3 else "")
        lang = "robot" if n % 11 == 0 else "en"
        ts = n * 10
        found.append((str(n), ts, json.dumps({"query": query, "lang": lang, "ts": ts}).encode()))
    return found


def reference(records: list[tuple[str, int, bytes]]) -> Counter[tuple[str, int, int]]:
    """What must come out, computed another way."""
    counted: Counter[tuple[str, int]] = Counter()
    for _, ts, value in records:
        row = json.loads(value)
        if row["query"].strip() and row["lang"] != "robot":
            counted[row["query"].strip().lower(), ts // 1000] += 1
    return Counter({(query, second, n): 1 for (query, second), n in counted.items()})


def publish(
    stage: Stage,
    records: list[tuple[str, int, bytes]],
    injector: Any,
    *,
    low: int | None = None,
    now_ms: int = 0,
) -> None:
    """Records, and then the low: that of the last one unless told otherwise."""
    keys, stamps, values = zip(*records, strict=True)
    injector.publish(keys, stamps, values)
    injector.report_low(stamps[-1] if low is None else low, now_ms=now_ms)


def counts(stage: Stage) -> Counter[tuple[str, int, int]]:
    """What the sink holds, as a bag."""
    return Counter((row["query"], row["second"], row["count"]) for row in stage.records("query_counts"))


def settle(stage: Stage, expected: Counter[tuple[str, int, int]]) -> None:
    wait_for(lambda: counts(stage).total() >= expected.total(), f"{expected.total()} counts")
    assert counts(stage) == expected


def test_a_session_is_ready_for_queries_that_start_together(spark: Any, stage: Stage) -> None:
    """All queries share the source's environment; a start that adds to it would break another's tasks in flight.

    First in this file: afterwards any query would have put the names there.
    """
    manager = spark._jsparkSession.sessionState().dataSourceManager()
    shared = manager.lookupDataSource("penstock").dataSourceCls().envVars()
    before = set(shared.keySet())
    stage.stop(stage.start(PARSE, tasks=4))
    assert "SPARK_BUFFER_SIZE" in before
    assert set(shared.keySet()) == before


@pytest.mark.smoke
@pytest.mark.parametrize("rows", ["sqlite", "postgres"])
def test_counts_are_exact_across_rescale_and_restart(
    request: pytest.FixtureRequest, spark: Any, tmp_path: Path, rows: str
) -> None:
    """Plan: one task each; more records; stop; three tasks under a new generation; more; end of input."""
    place = str(request.getfixturevalue("postgres").new_database()) if rows == "postgres" else ""
    stage = Stage(spark, tmp_path, ZEITGEIST / "pipeline.py", CATEGORY, rows=place)
    injector = stage.injector("queries")
    everything = queries(0, 3000)
    publish(stage, everything[:1000], injector, now_ms=1000)
    first = stage.start(PARSE) + stage.start(COUNT)
    wait_for(lambda: counts(stage).total() > 0, "the first counts")
    publish(stage, everything[1000:2000], injector, now_ms=2000)
    stage.stop(first)
    second = stage.start(PARSE, generation=2, tasks=3) + stage.start(COUNT, generation=2, tasks=2)
    publish(stage, everything[2000:], injector, now_ms=3000)
    injector.close(now_ms=4000)
    settle(stage, reference(everything))
    stage.stop(second)
    assert not stage.deaths


@pytest.mark.smoke
def test_a_zombie_changes_nothing(stage: Stage) -> None:
    """Two engines run the same tasks; the older owner is fenced, told apart from a crash, and nothing is doubled."""
    injector = stage.injector("queries")
    everything = queries(0, 2000)
    publish(stage, everything[:1000], injector, now_ms=1000)
    old_engine = stage.new_engine()
    stage.start(PARSE, engine=old_engine)
    stage.start(COUNT, engine=old_engine)
    wait_for(lambda: counts(stage).total() > 0, "the first counts")
    new = stage.start(PARSE, epoch=2) + stage.start(COUNT, epoch=2)
    wait_for(lambda: all(view.state == "fenced" for view in old_engine.poll()), "the old owner to be fenced")
    publish(stage, everything[1000:], injector, now_ms=2000)
    injector.close(now_ms=3000)
    settle(stage, reference(everything))
    stage.stop(new)


def test_new_code_finishes_what_old_code_promised(stage: Stage, tmp_path: Path) -> None:
    """An intent left by a dead worker is replayed with the old plan, then the new plan goes on."""
    from penstock.streams.spark import worker as step_worker
    from penstock.streams.step.reading import read_ranges
    from penstock.streams.step.stateless import StatelessStep
    from penstock.streams.step.step import InputRange

    injector = stage.injector("queries")
    everything = queries(0, 400)
    publish(stage, everything[:200], injector, now_ms=1000)
    # A worker that promised its range and published nothing, then died.
    (spec,) = stage.specs(PARSE)
    task, _ = stage.tasks.open(spec, 1)
    for interval in task.intervals:
        end = stage.log.end_offsets("queries")[interval.ref.partition]
        batches = read_ranges(
            task=task,
            interval=interval,
            spans={task.inputs[0].birth: (0, end)},
            log=stage.log,
            rows=stage.rows,
        )
        begin, _ = step_worker._begin(batches)
        step = StatelessStep(
            ref=interval.ref,
            token=interval.token,
            producers=interval.producers,
            rows=stage.rows,
            log=stage.log,
            outputs=task.outputs,
            plan=task.logic(),
            plan_hash=task.logic_hash(),
            package=task.package.hash,
        )
        (span,) = begin["ranges"].values()
        assert step.begin(
            (InputRange(category="queries", birth=task.inputs[0].birth, start=span[0], end=span[1]),)
        )
    # The new code lets nothing through.
    changed = tmp_path / "pipeline.py"
    text = (ZEITGEIST / "pipeline.py").read_text()
    changed.write_text(text.replace("lang <> 'robot'", "lang = 'nobody'"))
    stage.compile(changed)
    ids = stage.start(PARSE, epoch=2) + stage.start(COUNT)
    publish(stage, everything[200:], injector, now_ms=2000)
    injector.close(now_ms=3000)
    settle(stage, reference(everything[:200]))
    wait_for(
        lambda: all(
            stage.rows.peek(interval.ref).offsets[task.inputs[0].birth]
            == stage.log.end_offsets("queries")[interval.ref.partition]
            for interval in task.intervals
        ),
        "the rest to be read",
    )
    assert counts(stage) == reference(everything[:200])
    stage.stop(ids)


def test_records_that_do_not_parse_go_to_the_dead_letters(stage: Stage) -> None:
    injector = stage.injector("queries")
    good = queries(0, 100)
    bad = [("x", 5, b"{nonsense"), ("y", 6, b"null"), ("z", 7, b'{"query": "no time", "lang": "en"}')]
    publish(stage, good[:50] + bad + good[50:], injector, now_ms=1000)
    ids = stage.start(PARSE) + stage.start(COUNT)
    injector.close(now_ms=3000)
    settle(stage, reference(good))
    dead = stage.records("queries.dead")
    assert sorted(row["value"] for row in dead) == sorted(value for _, _, value in bad)
    assert all(row["reason"] for row in dead)
    stage.stop(ids)


def test_user_code_that_raises_fails_the_task_with_its_message(stage: Stage, tmp_path: Path) -> None:
    broken = tmp_path / "pipeline.py"
    text = (ZEITGEIST / "pipeline.py").read_text()
    broken.write_text(text.replace("second = record.ts // 1000", "second = 1 // 0"))
    stage.compile(broken)
    injector = stage.injector("queries")
    publish(stage, queries(0, 100), injector, now_ms=1000)
    ids = stage.start(PARSE) + stage.start(COUNT)
    wait_for(lambda: any(view.state == "failed" for view in stage.tasks.poll()), "the task to fail")
    (view,) = (view for view in stage.tasks.poll() if view.state == "failed")
    assert "ZeroDivisionError" in view.error and COUNT in view.error, view.error
    assert "Traceback" not in view.error
    stage.stop(ids)
