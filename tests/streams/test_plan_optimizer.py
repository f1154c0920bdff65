"""Rewritten graphs and the jobs cut from them make the same records as the graph that was written; each rule fires."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import StaticCatalogue
from penstock.streams.compile.graph import Graph
from penstock.streams.compile.optimize import optimize
from penstock.streams.compile.plan import compile_graph
from penstock.streams.dsl.pipeline import Pipeline, Stream
from tests.streams.evaluator import Record, run_graph, run_jobs
from tests.streams.plans import CATALOGUE, PACKAGE, Count, a_pipeline

COLUMNS = (("a", "string"), ("b", "string"), ("n", "int"), ("m", "int"))
TWO = StaticCatalogue(
    [CategorySpec(name=name, partitions=2, columns=COLUMNS, format="json") for name in ("one", "two")]
)

# --- random graphs over random records -----------------------------------------------------------------------------


class Drawn:
    """A pipeline that grows by drawn steps; each stream is kept with its columns and whether it has a key."""

    def __init__(self, data: st.DataObject) -> None:
        self.pipeline, self._data = Pipeline("p", partitions=2), data
        self.streams: list[tuple[Stream, tuple[tuple[str, str], ...], bool]] = []
        self._count = 0
        for name in ("one", "two"):
            self.streams.append((self.pipeline.source(name), COLUMNS, False))
        for _ in range(self._pick(range(1, 4))):
            if self._pick([True, False]):
                self._grow(["key_by"])
                for _ in range(self._pick(range(4))):
                    self._grow(["filter", "select", "select", "flat_map"])
                self._grow(["process", "process", "process", "key_by", "union", "nothing", "nothing"])
            else:
                self._grow(["filter", "select", "key_by", "flat_map", "union"], among=4)
        graph = self.pipeline.graph()
        read = {edge.source for edge in graph.edges}
        for number, (stream, _, _) in enumerate(self.streams):
            if stream.step not in read:
                stream.sink(f"sink{number}")

    def _pick(self, choices: Any) -> Any:
        return self._data.draw(st.sampled_from(list(choices)))

    def _grow(self, ops: list[str], among: int = 1) -> None:
        stream, columns, keyed = self._pick(self.streams[-among:])
        self._count += 1
        match self._pick(ops):
            case "filter":
                self.streams.append((stream.filter(self._condition(columns)), columns, keyed))
            case "select":
                self._select(stream, columns, keyed)
            case "key_by":
                keys = [self._pick(self._keys(columns)) for _ in range(self._pick([1, 1, 2]))]
                self.streams.append((stream.key_by(*keys, name=f"k{self._count}"), columns, True))
            case "flat_map":
                texts = [name for name, kind in columns if kind == "string"]
                if texts and "word" not in dict(columns):
                    made = stream.flat_map(f"explode(split({self._pick(texts)}, 'x')) AS word")
                    self.streams.append((made, (*columns, ("word", "string")), keyed))
            case "union":
                fitting = [other for other, theirs, _ in self.streams if theirs == columns]
                self.streams.append((stream.union(self._pick(fitting)), columns, False))
            case "process" if keyed:
                made = stream.process(Count, name=f"c{self._count}")
                self.streams.append((made, (("query", "string"), ("n", "bigint")), False))

    def _select(self, stream: Stream, columns: tuple[tuple[str, str], ...], keyed: bool) -> None:
        chosen = self._data.draw(st.lists(st.sampled_from(columns), min_size=1, unique=True))
        texts, made = [], []
        for name, kind in chosen:
            number = kind in ("int", "bigint")
            text = self._pick([name, f"{name} + 1" if number else f"upper({name})"])
            as_ = self._pick([name, name, name, f"{name}2"])
            if as_ in [taken for taken, _ in made]:
                continue
            texts.append(text if text == as_ else f"{text} AS {as_}")
            made.append((as_, kind))
        self.streams.append((stream.select(*texts), tuple(made), keyed))

    def _condition(self, columns: tuple[tuple[str, str], ...]) -> str:
        parts = []
        for _ in range(self._pick([1, 1, 2])):
            name, kind = self._pick(columns)
            number = kind in ("int", "bigint")
            simple = (
                f"{name} > {self._pick([0, 1, 2])}" if number else f"{name} <> {self._pick(['s', 'x'])!r}"
            )
            parts.append(self._pick([simple, simple, f"{name} IS NULL", f"NOT ({simple})"]))
        return self._pick([" AND ", " OR "]).join(parts)

    def _keys(self, columns: tuple[tuple[str, str], ...]) -> list[str]:
        return [
            text for name, kind in columns for text in (name, f"upper({name})" if kind == "string" else name)
        ]


texts = st.sampled_from([None, "", "x", "axb", "XS", "s"])
numbers = st.sampled_from([None, 0, 1, 2, 3])
rows = st.fixed_dictionaries({"a": texts, "b": texts, "n": numbers, "m": numbers})
logs = st.lists(st.tuples(st.sampled_from([None, "k"]), rows), max_size=5)


def outcomes(graph: Graph, inputs: dict[str, list[Record]]) -> dict[str, Any]:
    """The same records through the graph, the rewritten graph, and the jobs cut from either."""
    plain = compile_graph(graph, TWO, PACKAGE, optimized=False).to_json()["jobs"]
    better = compile_graph(graph, TWO, PACKAGE).to_json()["jobs"]
    return {
        "rewritten": run_graph(optimize(graph, TWO)[0].graph, inputs),
        "cut as written": run_jobs(plain, inputs),
        "cut after rewriting": run_jobs(better, inputs),
    }


@settings(max_examples=200)
@given(data=st.data(), one=logs, two=logs)
def test_rewriting_and_cutting_change_no_record(data: st.DataObject, one: list[Record], two: list[Record]):
    graph = Drawn(data).pipeline.graph()
    inputs = {"one": one, "two": two}
    expected = run_graph(graph, inputs)
    for how, found in outcomes(graph, inputs).items():
        assert found == expected, how


def _changed_key_then_filter(s):
    s.key_by("a").select("upper(a) AS a", "n + 1 AS n").filter("n > 1").process(Count).sink("x")


def _changed_key_then_sink(s):
    s.key_by("a").select("upper(a) AS a", "n").sink("x")


def _key_lost_then_filter(s):
    s.key_by("a", "b").select("n", "m").filter("n > 0 OR m IS NULL").process(Count).sink("x")


def _branches_of_one_source(s):
    s.filter("n > 0").key_by("a").union(s.select("a", "b", "n + 1 AS n", "m")).select("b", "n").sink("x")


def _union_in_a_union(s):
    first = s.filter("n > 0").union(s.filter("m > 0")).select("a", "n + 1 AS n")
    first.union(s.select("b AS a", "m AS n").filter("n > 1")).key_by("upper(a)").select("n").sink("x")


def _shared_shuffle(s):
    s.key_by("a", name="k1").filter("n > 0").process(Count, name="c1").sink("x")
    s.key_by("a", name="k2").flat_map("explode(split(b, 'x')) AS w").process(Count, name="c2").sink("y")


def _two_keys(s):
    s.key_by("a", name="k1").process(Count, name="c1").sink("x")
    s.key_by("b", name="k2").process(Count, name="c2").sink("y")


def _filter_on_what_is_made(s):
    s.key_by("a").flat_map("explode(split(b, 'x')) AS w").filter("w <> 'a'").process(Count).sink("x")


EDGES = [
    _two_keys, _filter_on_what_is_made,
    _changed_key_then_filter, _changed_key_then_sink, _key_lost_then_filter, _branches_of_one_source,
    _union_in_a_union, _shared_shuffle,
]  # fmt: skip


@pytest.mark.parametrize("build", EDGES)
def test_what_chance_rarely_draws_changes_no_record_either(build: Any):
    p = Pipeline("p", partitions=2)
    build(p.source("one"))
    values = [
        (a, b, n, m) for a in ("x", "sX", None) for b in ("axb", "") for n in (None, 0, 1) for m in (0, 2)
    ]
    records = [("k", dict(zip("abnm", row, strict=True))) for row in values]
    expected = run_graph(p.graph(), {"one": records})
    assert expected["x"].total()
    for how, found in outcomes(p.graph(), {"one": records}).items():
        assert found == expected, how


def test_the_evaluator_would_see_a_filter_that_moved_past_what_it_reads():
    right, wrong = Pipeline("p"), Pipeline("p")
    right.source("one").select("n + 1 AS n").filter("n > 1").sink("out")
    wrong.source("one").filter("n > 1").select("n + 1 AS n").sink("out")
    records = {"one": [(None, {"a": "", "b": "", "n": n, "m": 0}) for n in range(3)]}
    assert run_graph(right.graph(), records) != run_graph(wrong.graph(), records)


# --- each rule, by name --------------------------------------------------------------------------------------------


def _superseded(p):
    p.source("queries").key_by("lang").filter("ts > 0").key_by("query").process(Count).sink("x")


def _same_key_twice(p):
    stream = p.source("queries")
    stream.key_by("query", name="one").process(Count, name="c1").sink("x")
    stream.key_by(" QUERY ".lower(), name="two").process(Count, name="c2").sink("y")


def _key_of_a_sink(p):
    p.source("queries").key_by("query").sink("x")


def _filter_behind_key(p):
    p.source("queries").key_by("query").filter("ts > 0").process(Count).sink("x")


def _projection_behind_key(p):
    p.source("queries").key_by("query").select("query", "lang").process(Count).sink("x")


def _filter_behind_projection(p):
    keyed = p.source("queries").key_by("lower(query)")
    keyed.select("ts", "score").filter("ts > 0").process(Count).sink("x")


def _filter_behind_flat_map(p):
    p.source("queries").flat_map("explode(split(query, ' ')) AS w").filter("lang = 'en'").sink("x")


RULES = {
    "superseded": (_superseded, "drop shuffle", ("by_lang",), "replaced by a later one"),
    "same key twice": (_same_key_twice, "share shuffle", ("two", "one"), "the same key"),
    "key of a sink": (_key_of_a_sink, "drop shuffle", ("by_query",), "the writer partitions them"),
    "filter behind key": (_filter_behind_key, "push filter", ("filter", "by_query"), "need not go through"),
    "projection": (_projection_behind_key, "push projection", ("select", "by_query"), "by_query writes"),
    "filter behind projection": (
        _filter_behind_projection,
        "push filter",
        ("filter", "select"),
        "does not change",
    ),
    "filter behind flat_map": (
        _filter_behind_flat_map,
        "push filter",
        ("filter", "flat_map"),
        "once per record",
    ),
    "steps of one job": (_key_of_a_sink, "fuse", ("queries", "by_query", "x"), "one pass"),
    "pruned at the source": (_projection_behind_key, "prune columns", ("queries",), "score"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rewrite_is_told_with_its_reason(rule: str):
    build, name, steps, reason = RULES[rule]
    p = a_pipeline()
    build(p)
    found = compile_graph(p.graph(), CATALOGUE, PACKAGE).rewrites
    matching = [rewrite for rewrite in found if (rewrite.rule, rewrite.steps) == (name, steps)]
    assert len(matching) == 1 and reason in matching[0].reason


def _two_readers(p):
    keyed = p.source("queries").key_by("query")
    keyed.filter("ts > 0").process(Count, name="c1").sink("x")
    keyed.process(Count, name="c2").sink("y")


def _larger_records(p):
    p.source("queries").key_by("query").select("query", "upper(query) AS u", "lower(query) AS l").process(
        Count
    ).sink("x")


def _may_fail(p):
    p.source("queries").flat_map("explode(split(query, ' ')) AS w").filter("1 / ts > 0").sink("x")


def _reads_what_is_made(p):
    p.source("queries").flat_map("explode(split(query, ' ')) AS w").filter("w <> ''").sink("x")


@pytest.mark.parametrize("build", [_two_readers, _larger_records, _may_fail, _reads_what_is_made])
def test_what_would_be_wrong_or_dear_is_left_as_it_is(build: Any):
    p = a_pipeline()
    build(p)
    assert not [r for r in compile_graph(p.graph(), CATALOGUE, PACKAGE).rewrites if r.rule.startswith("push")]
