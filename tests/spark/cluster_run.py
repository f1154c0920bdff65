"""One pipeline on another Spark, as a process of its own: a process has one Spark context, and the tests' is local."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from penstock.streams.engine.session import build_session, end_session
from penstock.streams.testing import Stage, wait_for
from tests.spark.test_tasks import CATEGORY, COUNT, PARSE, ZEITGEIST, publish, queries, reference


def run(folder: Path, master: str, count: int) -> dict[str, Any]:
    """Publish, run until all is counted; says where the work was done."""
    spark = build_session("cluster test", 2, folder / "scratch", master=master)
    stage = Stage(spark, folder, ZEITGEIST / "pipeline.py", CATEGORY)
    injector = stage.injector("queries")
    records = queries(0, count)
    publish(stage, records[: count // 2], injector, now_ms=1000)
    ids = stage.start(PARSE, tasks=2) + stage.start(COUNT, tasks=2)
    publish(stage, records[count // 2 :], injector, now_ms=2000)
    injector.close(now_ms=3000)
    expected = reference(records)
    wait_for(
        lambda: sum(stage.log.end_offsets("query_counts")) >= expected.total(), "the counts", seconds=150
    )
    places = spark.range(0, 8, 1, 8).mapInPandas(_where, "pid long, parent long").distinct().collect()
    stage.stop(ids)
    found = sorted((row["query"], row["second"], row["count"]) for row in stage.records("query_counts"))
    end_session(spark)
    return {
        "is_exact": found == sorted(expected),
        "counted": len(found),
        "driver": os.getpid(),
        "workers": [[row["pid"], row["parent"]] for row in places],
        "deaths": stage.deaths,
    }


def _where(batches: Any) -> Any:
    import os
    import time

    import pandas as pd
    import psutil

    for _ in batches:
        time.sleep(0.5)  # so long that one executor does not take them all
        jvm = psutil.Process(os.getpid()).parent()
        while jvm is not None and "java" not in jvm.name():
            jvm = jvm.parent()
        yield pd.DataFrame({"pid": [os.getpid()], "parent": [jvm.pid if jvm else 0]})


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
