"""The example of three jobs: each fits what the one before it writes, and gives the reference's rows."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import StaticCatalogue, category_from_json
from penstock.streams.compile.packages import build_package, load_pipeline
from penstock.streams.compile.plan import compile_pipeline

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders"


def test_three_jobs_hand_on_their_records():
    known = [category_from_json(json.loads((EXAMPLE / "orders.json").read_text()))]
    for name, job_name in (
        ("clean.py", "clean.clean_orders"),
        ("regroup.sql", "regroup.orders_by_customer"),
        ("deliver.sql", "deliver.deliveries"),
    ):
        pipeline = load_pipeline(EXAMPLE / name)
        package = build_package(EXAMPLE / name, name=pipeline.name).ref("1")
        (job,) = compile_pipeline(pipeline, StaticCatalogue(known), package).jobs
        assert (job.name, job.kind) == (job_name, "stateless")
        output = next(item for item in job.outputs if item.stream == "out")
        known.append(CategorySpec(name=output.category, partitions=output.partitions, columns=output.columns))
    assert dict(known[-1].columns) == {
        "id": "bigint",
        "customer": "string",
        "amount": "double",
        "is_large": "boolean",
    }
