"""Claims about jobs with several inputs, branches, arrays and missing keys, on Spark."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import NotYet
from penstock.jobs.config import JobConfig
from penstock.streams.catalogue import category_from_json
from penstock.streams.places import open_log
from tests.support.stage import Stage, wait_for

PIPELINE = Path(__file__).parent / "unions.py"
BEFORE, AFTER = 1, 4_102_444_800_000  # the first millisecond of 1970 but one; the first of 2100
QUERIES = {
    "name": "queries",
    "partitions": 3,
    "columns": [
        ["query", "string"],
        ["lang", "string"],
        ["ts", "bigint"],
        ["tags", "array<string>"],
        ["n", "int"],
    ],
    "format": "json",
    "watermark": "event_time",
    "lateness_ms": 0,
    "ts_column": "ts",
    "ahead_max_ms": 0,  # any time is fine
}
NOTES = {
    "name": "notes",
    "partitions": 2,
    "columns": [["body", "string"], ["lang", "string"], ["at", "bigint"], ["labels", "array<string>"]],
    "format": "json",
    "watermark": "event_time",
    "lateness_ms": 0,
    "ts_column": "at",
    "ahead_max_ms": 0,
}


@pytest.fixture
def stage(spark: Any, tmp_path: Path) -> Stage:
    open_log(f"embedded:{tmp_path / 'bus'}").create(category_from_json(NOTES))
    return Stage(spark, tmp_path, PIPELINE, QUERIES)


def a_query(number: int) -> dict[str, Any]:
    text = (None, "", "One two", "two  TWO three")[number % 4]
    lang = (None, "en", "")[number % 3]
    ts = (BEFORE, AFTER, number)[number % 3]
    return {
        "query": text,
        "lang": lang,
        "ts": ts,
        "tags": ["a", None] if number % 2 else None,
        "n": "not read",
    }


def a_note(number: int) -> dict[str, Any]:
    return {"body": f"Note {number % 5}" if number % 6 else None, "lang": "en", "at": number, "labels": []}


def publish(stage: Stage, category: str, records: list[dict[str, Any]], injector: Any) -> None:
    stamps = [record.get("ts", record.get("at")) for record in records]
    injector.publish(["k"] * len(records), stamps, [json.dumps(record).encode() for record in records])


def expected_words(queries: list[dict[str, Any]], notes: list[dict[str, Any]]) -> Counter[Any]:
    """The pipeline in plain Python."""
    found: Counter[Any] = Counter()
    texts = [(q["query"], q["ts"], q["tags"]) for q in queries]
    texts += [(n["body"], n["at"], n["labels"]) for n in notes]
    for text, ts, tags in texts:
        for place, word in enumerate((text or "").lower().split(" ")):
            if word:
                found[word, place, ts, None if tags is None else tuple(tags)] += 1
    return found


def words(stage: Stage) -> Counter[Any]:
    return Counter(
        (row["_key"], row["place"], row["ts"], None if row["tags"] is None else tuple(row["tags"]))
        for row in stage.records("words")
    )


def test_two_sources_become_one_stream_exactly_once_across_restarts_and_rescale(stage: Stage) -> None:
    """Plan: some of both; start; more of one only; stop; two tasks; more; compare bags and keys."""
    queries = [a_query(number) for number in range(300)]
    notes = [a_note(number) for number in range(200)]
    into_queries, into_notes = stage.injector("queries"), stage.injector("notes")
    publish(stage, "queries", queries[:100], into_queries)
    first = stage.start("unions.words")
    wait_for(lambda: words(stage) == expected_words(queries[:100], []), "words of one source alone")
    publish(stage, "notes", notes[:150], into_notes)
    stage.stop(first)
    second = stage.start("unions.words", generation=2, tasks=2)
    publish(stage, "queries", queries[100:], into_queries)
    publish(stage, "notes", notes[150:], into_notes)
    expected = expected_words(queries, notes)
    wait_for(lambda: words(stage).total() >= expected.total(), "all words")
    assert words(stage) == expected
    assert stage.records("queries.dead") == []  # what nobody reads is not decoded, and so not bad
    stage.stop(second)
    assert not stage.deaths


def test_what_was_promised_is_finished_also_by_a_plan_with_other_inputs(stage: Stage, tmp_path: Path) -> None:
    """A worker promises ranges of both inputs and dies; the next plan has them in another order, and then only one."""
    from penstock.streams.step.stateless import StatelessStep
    from penstock.streams.step.step import InputRange

    queries, notes = [a_query(number) for number in range(60)], [a_note(number) for number in range(40)]
    publish(stage, "queries", queries, stage.injector("queries"))
    publish(stage, "notes", notes, stage.injector("notes"))
    job = "unions.words"
    for generation, text in enumerate(("notes.union(queries)", "queries\nnotes.sink('elsewhere')"), 1):
        (spec,) = stage.specs(job, generation=generation)
        task, rows = stage.tasks.open(spec, 1)
        for interval, row in zip(task.intervals, rows, strict=True):
            step = StatelessStep(
                ref=interval.ref, token=interval.token, producers=interval.producers, rows=stage.rows, log=stage.log,
                outputs=task.outputs, plan=task.logic(), plan_hash=task.logic_hash(), package=task.package.hash,
            )  # fmt: skip
            ranges = [
                InputRange(
                    category=source.category, birth=source.birth, start=row.offsets[source.birth], number=number,
                    end=stage.log.end_offsets(source.category)[interval.ref.partition],
                )
                for number, source in task.inputs_of(interval.ref.partition)
            ]  # fmt: skip
            assert step.begin(ranges)
        changed = tmp_path / "unions.py"
        changed.write_text(PIPELINE.read_text().replace("both = queries.union(notes)", f"both = {text}"))
        before = stage.configs[job]
        stage.compile(changed)
        registered = set(stage.log.producers("words"))
        configs = map(JobConfig.from_stored, (before, stage.configs[job]))
        change = job, stage.birth(job), *configs
        if generation == 2:  # what is promised was read of an input whose producers go
            with pytest.raises(NotYet, match="has unsent output for 'words'"):
                stage.data.retire(*change)
            assert set(stage.log.producers("words")) == registered
        tasks = stage.start(job, generation=generation + 1)
        expected = expected_words(queries, notes)
        wait_for(lambda expected=expected: words(stage).total() >= expected.total(), "what was promised")
        publish(stage, "queries", [a_query(3)], stage.injector("queries", epoch=generation * 10))
        queries.append(a_query(3))
        expected = expected_words(queries, notes)
        wait_for(lambda expected=expected: words(stage).total() >= expected.total(), "what came afterwards")
        assert words(stage) == expected
        stage.stop(tasks)
        stage.data.retire(*change)
        assert (set(stage.log.producers("words")) < registered) == (generation == 2)
        if generation == 1:  # a range of both inputs again, for the next plan to finish
            publish(stage, "queries", [a_query(7)], stage.injector("queries", epoch=15))
            publish(stage, "notes", [a_note(7)], stage.injector("notes", epoch=15))
            queries.append(a_query(7))
            notes.append(a_note(7))


def test_a_key_that_is_null_is_the_same_key_in_every_batch_and_not_the_empty_one(stage: Stage) -> None:
    """The first batch has no other key: it must go where NULL goes later, or two places would count from 1."""
    queries = [a_query(number) for number in range(60)]
    keyless = [{**a_query(2), "lang": None}] * 5
    injector = stage.injector("queries")
    publish(stage, "queries", keyless, injector)
    tasks = stage.start("unions.by_lang") + stage.start("unions.count_per_key")
    wait_for(lambda: len(stage.records("langs")) == 5, "the first counts")
    publish(stage, "queries", queries, injector)
    langs = Counter("[null]" if query["lang"] is None else query["lang"] for query in [*keyless, *queries])
    wait_for(lambda: len(stage.records("langs")) >= langs.total(), "all counts")
    rows = sorted(stage.records("langs"), key=lambda row: row["count"])
    assert {row["key"]: row["count"] for row in rows} == langs and len(rows) == langs.total()
    stage.stop(tasks)


def test_a_source_may_be_put_together_with_itself(stage: Stage) -> None:
    texts = [a_query(number)["query"] for number in range(40)]
    publish(stage, "queries", [a_query(number) for number in range(40)], stage.injector("queries"))
    tasks = stage.start("unions.twice")
    twice = Counter(texts) + Counter(text.upper() for text in texts if text is not None)
    wait_for(lambda: len(stage.records("twice")) >= twice.total(), "both branches of one source")
    assert Counter(row["text"] for row in stage.records("twice")) == twice
    stage.stop(tasks)


def test_sql_runs_as_it_is_written(spark: Any, tmp_path: Path) -> None:
    """The records of a union of two branches with arrays, from a file of SQL alone."""
    path = tmp_path / "words.sql"
    path.write_text(
        """CREATE PIPELINE words WITH (partitions = 2);
        INSERT INTO words
        SELECT place, word, tags FROM (SELECT query AS text, tags FROM queries WHERE query IS NOT NULL
          UNION ALL SELECT lang AS text, array('lang') AS tags FROM queries) t
        LATERAL VIEW posexplode(split(lower(t.text), ' ')) w AS place, word
        WHERE word <> '' DISTRIBUTE BY word;"""
    )
    stage = Stage(spark, tmp_path, path, QUERIES)
    queries = [a_query(number) for number in range(30)]
    publish(stage, "queries", queries, stage.injector("queries"))
    expected: Counter[Any] = Counter()
    for query in queries:
        for text, tags in ((query["query"], query["tags"]), (query["lang"], ["lang"])):
            for place, word in enumerate((text or "").lower().split(" ")):
                expected[place, word, None if tags is None else tuple(tags)] += bool(word)
    expected = +expected
    tasks = stage.start("words.words", tasks=2)
    wait_for(lambda: len(stage.records("words")) >= expected.total(), "all words")
    found = stage.records("words")
    assert expected == Counter(
        (row["place"], row["word"], None if row["tags"] is None else tuple(row["tags"])) for row in found
    )
    assert all(row["_key"] == row["word"] for row in found)
    stage.stop(tasks)


def test_settings_of_the_machine_do_not_reach_an_expression(spark: Any) -> None:
    """Why `${` is refused: Spark replaces it, inside quotes too."""
    from pyspark.sql import functions as F

    (row,) = spark.range(1).select(F.expr("'${spark.app.name}'").alias("x")).collect()
    assert row.x == "penstock-tests"
