"""The example pipeline: it loads as a user's file does, fits its category, and counts rightly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from penstock.streams.catalogue import category_from_json
from penstock.streams.compile.packages import build_package, load_entry, load_pipeline, unpack_package
from penstock.streams.step.keyed_work import try_computation

EXAMPLE = Path(__file__).parents[2] / "examples" / "zeitgeist"


def test_the_category_it_reads_has_an_event_time_and_an_injector():
    spec = category_from_json(json.loads((EXAMPLE / "queries.json").read_text()))
    assert (spec.name, spec.format, spec.ts_column, spec.watermark) == ("queries", "json", "ts", "injector")
    assert dict(spec.columns) == {"query": "string", "lang": "string", "ts": "bigint"}


def test_it_needs_nothing_but_its_own_file(tmp_path):
    pipeline = load_pipeline(EXAMPLE / "pipeline.py")
    assert pipeline.local_files == ()
    package = build_package(EXAMPLE / "pipeline.py", name=pipeline.name)
    unpack_package(package.data, package.hash, tmp_path / "p")
    assert load_entry(tmp_path / "p", package.entry, package.hash).CountPerSecond.__name__ == "CountPerSecond"


def test_seconds_are_counted_when_the_watermark_passes_their_end():
    computation = load_pipeline(EXAMPLE / "pipeline.py").computations["CountPerSecond"]()
    asked = [("cats", 1_000), ("dogs", 1_500), ("cats", 1_999), ("cats", 2_000), ("cats", 3_400)]
    produced = list(try_computation(computation, asked, low=3_000))
    expected = Counter((query, ts // 1000) for query, ts in asked if ts < 3_000)
    counted = {(values["query"], values["second"]): values["count"] for _, _, _, values in produced}
    assert counted == dict(expected)
    assert len(produced) == len(expected)
    # Stamped inside the second it speaks of, so that nothing downstream is late.
    assert all(ts // 1000 == values["second"] for _, ts, _, values in produced)
