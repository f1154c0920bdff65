"""Spark's Python daemon with the step already imported: workers are forked from it, so each starts warm."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from typing import Any

import pyspark.daemon
import pyspark.util
from pyspark.daemon import manager

from penstock.streams.spark.planner_host import LOG_VARIABLE


def _say(*parts: object, **options: Any) -> None:
    """Instead of `print` in Spark's own modules: they use it to tell that Spark hung up on a worker, with a
    traceback, after every batch that failed elsewhere. What user code prints is not touched.
    """
    log = os.environ.get(LOG_VARIABLE)
    if log is None:
        print(*parts, **options)
        return
    with open(log, "a", encoding="utf-8") as file:
        print(*parts, file=file)


class _Traces:
    """Instead of `traceback` in Spark's daemon, for the same reason."""

    format_exc = staticmethod(traceback.format_exc)

    @staticmethod
    def print_exc() -> None:
        _say(traceback.format_exc(), file=sys.stderr)


if __name__ == "__main__":
    for module in (pyspark.daemon, pyspark.util):
        vars(module)["print"] = _say
    vars(pyspark.daemon)["traceback"] = _Traces
    if sys.argv[1] == "pyspark.worker":
        # pandas too: Arrow imports it at the first conversion of a Python list.
        import pandas  # noqa: F401
        import pyspark.worker

    # A worker collects garbage after every task of every batch. Measured: walking through all that was
    # imported took three times as long as the work itself; what is frozen is not walked through.
    gc.collect()
    gc.freeze()
    manager()
