"""Zeitgeist with models and detectors, in memory: what it finds is what the reference finds."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from penstock import testing

ZEITGEIST = Path(__file__).parents[2] / "examples" / "zeitgeist"


def reference() -> Any:
    spec = importlib.util.spec_from_file_location("zeitgeist_reference", ZEITGEIST / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def a_run() -> testing.PipelineRun:
    return testing.PipelineRun(ZEITGEIST / "anomalies.py", ZEITGEIST / "queries.json")


def searches(dice: random.Random, *, seconds: int) -> list[tuple[int, str, str]]:
    """Two quiet queries, of which one is suddenly asked by all and the other by nobody; and some noise."""
    found = []
    for second in range(seconds):
        rates = {
            "cats": 40 if second == seconds // 2 else 6,
            "Dogs": 0 if second == 12 else 8,
            "rare": second % 4 == 0,
        }
        for query, rate in rates.items():
            for _ in range(max(0, int(rate) + dice.choice((-1, 0, 0, 1)))):
                found.append((second * 1000 + dice.randrange(1000), query, "en"))
        found.append((second * 1000, "cats", "robot"))
        found.append((second * 1000, "", "en"))
    return sorted(found, key=lambda record: record[0] + dice.randrange(800))


def play(run: testing.PipelineRun, records: list[tuple[int, str, str]], *, batch: int) -> None:
    for start in range(0, len(records), batch):
        with run.batch():
            for ts, query, lang in records[start : start + batch]:
                run.record("queries", ts, query, query=query, lang=lang)
            # Records are at most 800 ms out of order.
            run.advance_watermark(min(ts for ts, _, _ in [*records[start + batch :], (10**9, "", "")]))
    run.close()


def rounded(found: Any) -> set[tuple[Any, ...]]:
    return {
        (query, second, kind, count, round(expected, 9)) for query, second, kind, count, expected in found
    }


@pytest.mark.parametrize(("seed", "batch"), [(1, 400), (2, 97)])
def test_spikes_and_dips_are_those_of_the_reference_in_any_batches(seed: int, batch: int) -> None:
    records = searches(random.Random(seed), seconds=24)
    expected = rounded(reference().anomalies_of(records))
    assert {(query, kind) for query, _, kind, _, _ in expected} >= {("cats", "spike"), ("dogs", "dip")}
    run = a_run()
    play(run, records, batch=batch)
    found = run.outputs("anomalies")
    assert rounded(tuple(row.values()) for row in found) == expected
    assert len(found) == len(expected), "each is told once"


def test_the_detector_survives_a_crash_at_every_point() -> None:
    """The detector alone, with a model and no count: a dip."""
    module = a_run().trial.jobs["anomalies.spike_dip_detector"].computation
    assert module is not None

    def script(run: testing.Run) -> None:
        run.record("cats", 5999, "counts", second=5, count=1)
        run.record("cats", 4999, "models", second=5, expected=30.0)
        run.record("cats", 5999, "models", second=6, expected=24.0)
        run.advance_watermark(7000)
        run.advance_watermark(8000)

    tried = testing.crash_everywhere(module, script)
    told = [
        (made.ts, made.values["kind"], made.values["count"])
        for made in tried.result["stream 'out', key 'cats'"]
    ]
    assert told == [(6999, "dip", 1), (7999, "dip", 0)]
