"""The DSL records a graph, and tells mistakes where they were made."""

from __future__ import annotations

import pytest

from penstock import sliding, tumbling
from penstock.core.errors import PipelineError
from penstock.streams.compile.graph import Edge, KeyByStep, ProcessStep, SelectStep, SinkStep, SourceStep
from penstock.streams.dsl.computation import Computation
from penstock.streams.dsl.pipeline import Pipeline


class Count(Computation):
    outputs = {"out": {"query": "string", "n": "bigint"}}


class Watch(Computation):
    outputs = {"counts": {"query": "string"}, "alerts": {"query": "string", "why": "string"}}
    late = "process"


class Silent(Computation):
    pass


class HTTPLogReader(Count):
    pass


class NotAComputation:
    pass


def test_a_chain_is_recorded_in_order_with_derived_names():
    p = Pipeline("zeitgeist", partitions=2)
    p.source("raw.queries").filter("a").filter("b").select("x").key_by("lower(x)").process(Count).sink(
        "counts"
    )
    graph = p.graph()
    assert [step.name for step in graph.steps] == [
        "raw_queries",
        "filter",
        "filter_2",
        "select",
        "by_lower_x",
        "count",
        "counts",
    ]
    assert graph.edges[0] == Edge(source="raw_queries", target="filter")
    assert len(graph.edges) == 6


def test_steps_keep_what_was_written():
    p = Pipeline("p")
    p.source("q", start="latest").select("a AS b", "c", name="cut").key_by("b", "c", name="k").process(
        Watch, name="w"
    )["alerts"].sink("s", partitions=7)
    source, select, key, process, sink = p.graph().steps
    assert isinstance(source, SourceStep) and (source.category, source.start) == ("q", "latest")
    assert isinstance(select, SelectStep) and (select.name, select.columns) == ("cut", ("a AS b", "c"))
    assert isinstance(key, KeyByStep) and key.keys == ("b", "c")
    assert isinstance(process, ProcessStep) and (process.computation, process.late) == ("Watch", "process")
    assert process.outputs[1] == ("alerts", (("query", "string"), ("why", "string")))
    assert isinstance(sink, SinkStep) and (sink.category, sink.partitions) == ("s", 7)
    assert p.graph().edges[-1] == Edge(source="w", target="s", stream="alerts")


def test_a_step_knows_its_line():
    p = Pipeline("p")
    stream = p.source("q")
    stream.filter("a")
    first, second = (step.place for step in p.graph().steps)
    assert first.file == "test_pipeline.py" and second.line == first.line + 1


def test_a_stream_is_a_value_that_may_be_used_twice():
    p = Pipeline("p")
    stream = p.source("q")
    left, right = stream.filter("a"), stream.filter("b")
    assert stream.step == "q" and (left.step, right.step) == ("filter", "filter_2")
    with pytest.raises(AttributeError):
        left.step = "other"  # type: ignore[misc]


def test_class_names_become_step_names():
    p = Pipeline("p")
    assert p.source("q").key_by("a").process(HTTPLogReader).step == "http_log_reader"


def test_the_default_stream_is_out_and_others_are_named():
    p = Pipeline("p")
    keyed = p.source("q").key_by("a")
    assert keyed.process(Count).output == "out"
    watched = keyed.process(Watch)
    assert watched["alerts"] == watched.stream("alerts")


def _nested():
    class Inner(Count):
        pass

    return Inner


def _a():
    return Pipeline("p").source("q")


def _odd(outputs, late="drop"):
    body = {"outputs": outputs, "late": late, "process_record": lambda self, record, ctx: None}
    return type("Odd", (), body)


def _two_sources():
    p = Pipeline("p")
    p.source("q")
    p.source("q")


def _same_names():
    stream = _a()
    stream.key_by("a")
    stream.key_by("a")


def _sink_then_source():
    p = Pipeline("p")
    p.source("q").sink("r")
    p.source("r")


def _twice_written():
    stream = _a()
    stream.sink("r", name="one")
    stream.sink("r", name="two")


def _two_classes_of_one_name():
    keyed = _a().key_by("a")
    keyed.process(_odd({"out": {"a": "int"}}), name="one")
    keyed.process(_odd({"out": {"a": "int"}}), name="two")


MISTAKES = {
    "pipeline name": (
        lambda: Pipeline("my pipeline!"),
        ["'my pipeline!'", "name of a pipeline", '"my_pipeline"'],
    ),
    "no partitions": (lambda: Pipeline("p", partitions=0), ["partitions=0", "1 to 1024"]),
    "partitions as text": (lambda: Pipeline("p", partitions="4"), ["partitions='4'"]),
    "sink partitions": (lambda: _a().sink("s", partitions=-1), ["partitions=-1"]),
    "source name": (lambda: Pipeline("p").source("../etc"), ["'../etc'", "name of a category"]),
    "sink name": (lambda: _a().sink("_x"), ["'_x'", "name of a category"]),
    "start": (lambda: Pipeline("p").source("q", start="first"), ["start='first'", 'start="latest"']),
    "step name": (lambda: _a().filter("a", name="a b"), ["name of a step", '"a_b"']),
    "two sources": (
        _two_sources,
        ["two steps named 'q'", "the other one is at test_pipeline.py:", 'name="…"'],
    ),
    "two keys": (_same_names, ["two steps named 'by_a'"]),
    "self feeding": (lambda: _a().sink("q"), ["both a source and a sink", "read its own output"]),
    "self feeding, reversed": (_sink_then_source, ["both a source and a sink"]),
    "dead letters": (lambda: _a().sink("q.dead"), ["cannot be a sink", "dead-letter category"]),
    "written twice": (_twice_written, ["written twice", "step 'one'"]),
    "empty filter": (lambda: _a().filter(""), ["filter() needs Spark SQL text", "lang = 'en'"]),
    "lambda": (lambda: _a().filter(lambda row: True), ["filter() needs Spark SQL text", "inside Spark"]),
    "empty select": (lambda: _a().select(), ["select() needs Spark SQL text"]),
    "empty key": (lambda: _a().key_by(), ["key_by() needs Spark SQL text"]),
    "an object": (
        lambda: _a().key_by("a").process(Count()),
        ["process() needs a subclass of Computation", "the class itself"],
    ),
    "a function": (lambda: _a().key_by("a").process(len), ["process() needs a subclass of Computation"]),
    "another class": (
        lambda: _a().key_by("a").process(NotAComputation),
        ["process() needs a subclass of Computation"],
    ),
    "a nested class": (
        lambda: _a().key_by("a").process(_nested()),
        ["is defined inside _nested", "top level"],
    ),
    "no outputs": (lambda: _a().key_by("a").process(Silent), ["declares no output streams", "outputs = {"]),
    "no columns": (lambda: _a().key_by("a").process(_odd({"out": {}})), ["stream 'out'", "has no columns"]),
    "output type": (
        lambda: _a().key_by("a").process(_odd({"out": {"n": "long"}})),
        ["unknown type 'long'", "bigint"],
    ),
    "reserved output": (
        lambda: _a().key_by("a").process(_odd({"out": {"_n": "int"}})),
        ["'_n'", "reserved for system columns"],
    ),
    "output case": (
        lambda: _a().key_by("a").process(_odd({"out": {"n": "int", "N": "int"}})),
        ["there are two columns named", "case"],
    ),
    "stream name": (lambda: _a().key_by("a").process(_odd({"a b": {"n": "int"}})), ["name of a stream"]),
    "late": (lambda: _a().key_by("a").process(_odd({"out": {"n": "int"}}, late="keep")), ["late is 'keep'"]),
    "one class name": (_two_classes_of_one_name, ["two computations named 'Odd'"]),
    "stream for dead letters": (
        lambda: _a().key_by("a").process(_odd({"dead": {"n": "int"}})),
        ["stream named 'dead'", "could not be read"],
    ),
    "union of nothing": (lambda: _a().union(), ["union() needs other streams"]),
    "union of text": (lambda: _a().union("q"), ["union() needs other streams"]),
    "two pipelines": (
        lambda: _a().union(Pipeline("other").source("r")),
        ["reads streams of two pipelines", "'other'"],
    ),
    "empty flat_map": (lambda: _a().flat_map(""), ["flat_map() needs Spark SQL text", "explode"]),
    "no window": (lambda: _a().key_by("a").window("10s"), ["window('10s')", "tumbling"]),
    "window late": (lambda: _a().key_by("a").window(tumbling(5), late="keep"), ["late='keep'"]),
    "window mode": (lambda: _a().key_by("a").window(tumbling(5), mode="all"), ["mode='all'"]),
    "no values": (
        lambda: _a().key_by("a").window(tumbling(5)).aggregate(),
        ["aggregate() needs Spark SQL text"],
    ),
    "endless join": (lambda: _a().key_by("a").join(_a().key_by("a")), ["within= or window="]),
    "join of a kind": (lambda: _a().join(_a(), within=(0, 1), how="anti"), ["inner, left, outer"]),
    "endless dedup": (lambda: _a().key_by("a").dedup(), ["dedup() needs within=", "grow without limit"]),
    "dedup by both": (
        lambda: _a().key_by("a").dedup(within="1s", window=tumbling(5)),
        ["within= or window="],
    ),
    "dedup by sliding windows": (
        lambda: _a().key_by("a").dedup(window=sliding(10, every=5)),
        ["window=tumbling(...)"],
    ),
    "top of nothing": (lambda: _a().top(0, by="n"), ["top(0)", "1 to 10000"]),
    "top by nothing": (lambda: _a().top(3, by=""), ["names of columns"]),
    "top per nothing": (lambda: _a().top(3, by="n", per=[5]), ["names of columns"]),
    "sql of nothing": (lambda: Pipeline("p").sql(""), ["there is no statement"]),
    "sql of a number": (lambda: Pipeline("p").sql(5), ["sql() needs text"]),
    "unknown stream": (
        lambda: _a().key_by("a").process(Watch)["alert"],
        ["no stream 'alert'", "'counts', 'alerts'", '["alerts"]'],
    ),
    "no default stream": (
        lambda: _a().key_by("a").process(Watch).sink("s"),
        ["no stream 'out'", "'counts', 'alerts'"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_where_it_was_made(mistake):
    build, said = MISTAKES[mistake]
    with pytest.raises(PipelineError) as caught:
        build()
    error = caught.value
    assert error.what.startswith("test_pipeline.py:") and error.why and error.fix
    for words in said:
        assert words in str(error)


@pytest.mark.parametrize("length", ["10", "s", "-5s", "0s", "1.5s", "5 moons", 0, -1, True, None, "9999999d"])
def test_what_is_no_length_of_time_is_told(length):
    with pytest.raises(PipelineError, match="is not a duration") as caught:
        tumbling(length)
    assert caught.value.why and caught.value.fix


def test_lengths_of_time_are_milliseconds_in_the_end():
    assert tumbling("10s") == tumbling("10 seconds") == tumbling(10_000) == tumbling("INTERVAL 10 SECOND")
    assert sliding("1m", every="10s").to_json() == {"kind": "sliding", "size_ms": 60_000, "slide_ms": 10_000}
    with pytest.raises(PipelineError, match="cannot slide"):
        sliding("1m", every="7s")


def test_a_refused_step_leaves_no_trace():
    p = Pipeline("p")
    watched = p.source("q").key_by("a").process(Watch)
    before = p.graph()
    with pytest.raises(PipelineError):
        watched.sink("s")
    assert p.graph() == before
