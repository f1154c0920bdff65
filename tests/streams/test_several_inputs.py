"""A computation over several keyed streams: who is who, what is checked without a JVM, what order there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import testing
from penstock.core.errors import PipelineError
from penstock.jobs.config import PackageRef
from penstock.streams.bus.log import Mark
from penstock.streams.catalogue import StaticCatalogue, category_from_json
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.dsl.computation import Computation, Context, ListState, Record, Timer, Value
from penstock.streams.dsl.pipeline import Pipeline
from penstock.streams.step.watermark import cut_at_marks, order_at_marks

CLICKS = {"name": "clicks", "partitions": 2, "columns": [["user", "string"], ["page", "string"]]}
ORDERS = {
    "name": "orders",
    "partitions": 1,
    "columns": [["buyer", "string"], ["price", "double"], ["page", "string"]],
}
CATALOGUE = StaticCatalogue([category_from_json(CLICKS), category_from_json(ORDERS)])
PACKAGE = PackageRef(name="visits", version="1", hash="0" * 64, entry="visits.py")


class Visits(Computation):
    """Per user and second: the pages seen, and what was bought."""

    outputs = {"out": {"user": "string", "pages": "bigint", "spent": "double"}}
    inputs = {"clicks": {"page": "string"}, "orders": {"price": "double"}}
    pages = ListState(str)
    spent = Value(float)

    def process_record(self, record: Record, ctx: Context) -> None:
        if record.stream == "clicks":
            ctx.state.pages.append(record["page"])
            assert list(record.as_dict()) == ["page"]
        else:
            ctx.state.spent += record["price"]
            assert list(record.as_dict()) == ["price"]
        ctx.set_timer("end", (record.ts // 1000 + 1) * 1000)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        ctx.produce({"user": ctx.key, "pages": len(ctx.state.pages), "spent": ctx.state.spent})
        ctx.state.pages, ctx.state.spent = [], 0.0


class Undeclared(Visits):
    inputs = {}

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.state.spent += record["price"] if record.stream == "orders" else 0.0


def visits(computation: type = Visits) -> Pipeline:
    p = Pipeline("visits", partitions=2)
    clicks, orders = p.source("clicks"), p.source("orders").filter("price > 0.0")
    p.process(computation, clicks=clicks.key_by("user"), orders=orders.key_by("buyer")).sink("per_user")
    return p


def a_day(run: testing.PipelineRun) -> None:
    run.record("clicks", 100, "x", user="ann", page="a")
    run.record("orders", 500, buyer="ann", price=2.5, page="a")
    run.record("clicks", 700, "y", user="ann", page="b")
    run.record("orders", 800, buyer="bob", price=1.0)
    run.record("orders", 900, buyer="bob", price=-1.0)
    run.advance_watermark(1000)
    run.record("clicks", 1100, "x", user="ann", page="c")
    run.close()


def test_each_input_has_its_own_key_and_columns_and_a_record_says_where_it_came_from() -> None:
    run = testing.PipelineRun(visits(), CLICKS, ORDERS)
    a_day(run)
    found = sorted(tuple(row.values()) for row in run.outputs("per_user"))
    assert found == [("ann", 1, 0.0), ("ann", 2, 2.5), ("bob", 0, 1.0)]


def test_neither_crashes_nor_other_cuts_change_what_comes_out() -> None:
    def script(run: testing.Run) -> None:
        run.record("ann", 100, "clicks", page="a")
        run.record("ann", 500, "orders", price=2.5)
        run.advance_watermark(1000)
        run.record("ann", 1200, "clicks", page="b")
        run.record("ann", 1300, "orders", price=1.0)
        run.advance_watermark(2000)

    crashed = testing.crash_everywhere(Visits, script)
    assert crashed.result == testing.cut_everywhere(Visits, script).result
    spent = [made.values["spent"] for made in crashed.result["stream 'out', key 'ann'"]]
    assert spent == [2.5, 1.0]


def test_the_plan_reads_only_declared_columns_and_says_which_input_is_which() -> None:
    job = compile_pipeline(visits(), CATALOGUE, PACKAGE).to_json()["jobs"][-1]
    assert job["plan"]["computation"] == {
        "class": "Visits",
        "keys": ["user", "buyer"],
        "state": {"pages": "list[str]", "spent": "float"},
        "inputs": [["clicks", ["page"]], ["orders", ["price"]]],
    }
    assert [item["category"].split(".")[1] for item in job["inputs"]] == ["by_user", "by_buyer"]
    (clicks, orders) = job["plan"]["branches"]
    assert clicks["stages"][-1]["columns"][-1] == ["price", "CAST(NULL AS double)", "double"]
    assert orders["stages"][-1]["columns"][0] == ["page", "CAST(NULL AS string)", "string"]
    graph = visits().graph()
    assert graph.to_json()["nodes"][-2]["inputs"] == ["clicks", "orders"]


def test_without_a_declaration_each_record_has_all_columns_of_its_stream() -> None:
    job = compile_pipeline(visits(Undeclared), CATALOGUE, PACKAGE).to_json()["jobs"][-1]
    assert job["plan"]["computation"]["inputs"] == [
        ["clicks", ["user", "page"]],
        ["orders", ["buyer", "price", "page"]],
    ]


class WrongType(Visits):
    inputs = {"clicks": {"page": "bigint"}, "orders": {"price": "double"}}


def _process(computation: type = Visits, **streams: Any) -> Any:
    def build(p: Pipeline) -> None:
        made = {name: stream(p) for name, stream in streams.items()}
        p.process(computation, **made).sink("per_user")

    return build


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (_process(), "needs streams"),
        (_process(clicks=lambda p: "clicks"), "input 'clicks' is not a stream"),
        (
            _process(clicks=lambda p: p.source("clicks").key_by("user")),
            "declares 'clicks', 'orders', but process.* got 'clicks'",
        ),
        (
            _process(
                clicks=lambda p: p.source("clicks"), orders=lambda p: p.source("orders").key_by("buyer")
            ),
            "records that have no key",
        ),
        (
            _process(
                WrongType,
                clicks=lambda p: p.source("clicks").key_by("user"),
                orders=lambda p: p.source("orders").key_by("buyer"),
            ),
            "input 'clicks' has no column 'page' of type bigint",
        ),
        (
            _process(
                Undeclared,
                clicks=lambda p: p.source("clicks").select("user", "length(page) AS page").key_by("user"),
                orders=lambda p: p.source("orders").key_by("buyer"),
            ),
            "column 'page' of input 'orders' is string, in another input it is page int",
        ),
    ],
)
def test_mistakes_are_told_before_anything_runs(build: Any, said: str) -> None:
    p = Pipeline("visits", partitions=2)
    with pytest.raises(PipelineError, match=said):
        build(p)
        compile_pipeline(p, CATALOGUE, PACKAGE)


def test_two_inputs_of_the_same_shuffle_are_refused() -> None:
    p = Pipeline("visits", partitions=2)
    keyed = p.source("clicks").key_by("user")
    with pytest.raises(PipelineError, match="two inputs are the same stream"):
        p.process(Undeclared, clicks=keyed, orders=keyed)
    p.process(Undeclared, clicks=keyed.filter("page = 'a'"), orders=keyed.filter("page = 'b'")).sink(
        "per_user"
    )
    with pytest.raises(PipelineError, match="come from the same shuffle"):
        compile_pipeline(p, CATALOGUE, PACKAGE)


def test_rows_behind_a_mark_come_behind_what_other_inputs_had_before_theirs() -> None:
    inputs, offsets = np.array([0, 0, 0, 1, 1]), np.array([5, 6, 7, 2, 3])
    marks = [[Mark(low=10, end=6), Mark(low=20, end=7)], [Mark(low=10, end=3)]]
    order = order_at_marks(inputs, offsets, marks, low=0)
    assert order is not None
    assert [(int(inputs[n]), int(offsets[n])) for n in order] == [(0, 5), (1, 2), (0, 6), (1, 3), (0, 7)]
    (cut,) = cut_at_marks(inputs[order], offsets[order], marks, low=0)
    assert (cut.position, cut.low) == (2, 10)
    assert order_at_marks(np.array([0, 1]), np.array([1, 1]), [[], []], low=0) is None
    assert order_at_marks(np.array([0, 0]), np.array([1, 2]), [[Mark(low=1, end=2)]], low=0) is None


def test_a_run_needs_to_know_which_stream_is_meant() -> None:
    run = testing.Run(Visits())
    with pytest.raises(PipelineError, match="the input stream is not specified"):
        run.record("ann", 1, page="a")
    run.record("ann", 1, "clicks", page="a")
    run.advance_watermark(5000, "clicks")
    assert run.outputs() == [], "the other input may still bring something"
    run.advance_watermark(5000, "orders")
    assert run.outputs() == [{"user": "ann", "pages": 1, "spent": 0.0}]


def test_a_file_with_several_inputs_is_loaded_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "visits.py").write_text(
        "from penstock import Computation, Pipeline\n"
        "class Both(Computation):\n"
        "    outputs = {'out': {'stream': 'string'}}\n"
        "    def process_record(self, record, ctx):\n"
        "        ctx.produce({'stream': record.stream})\n"
        "p = Pipeline('visits', partitions=1)\n"
        "p.process(Both, a=p.source('clicks').key_by('user'), b=p.source('orders').key_by('buyer')).sink('seen')\n"
    )
    run = testing.PipelineRun(tmp_path / "visits.py", CLICKS, ORDERS)
    run.record("orders", 1, buyer="x")
    run.record("clicks", 2, user="x")
    assert [row["stream"] for row in run.outputs("seen")] == ["b", "a"]
