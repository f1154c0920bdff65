"""Spark's Python daemon with the step already imported, so that forked workers start fast."""

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


def _print_to_log(*parts: object, **options: Any) -> None:
    """Replaces `print` in Spark's own modules, which print a traceback when Spark closes a worker's
    connection after a batch that failed elsewhere. Output of user code is not affected.
    """
    log = os.environ.get(LOG_VARIABLE)
    if log is None:
        print(*parts, **options)
        return
    with open(log, "a", encoding="utf-8") as file:
        print(*parts, file=file)


class _Traces:
    """Replaces `traceback` in Spark's daemon, for the same reason."""

    format_exc = staticmethod(traceback.format_exc)

    @staticmethod
    def print_exc() -> None:
        _print_to_log(traceback.format_exc(), file=sys.stderr)


if __name__ == "__main__":
    for module in (pyspark.daemon, pyspark.util):
        vars(module)["print"] = _print_to_log
    vars(pyspark.daemon)["traceback"] = _Traces
    if sys.argv[1] == "pyspark.worker":
        # pandas too: Arrow imports it at the first conversion of a Python list.
        import pandas  # noqa: F401
        import pyspark.worker

    # A worker collects garbage after every task of every batch. Measured: without `freeze`, traversing all
    # imported objects took three times as long as the work itself.
    gc.collect()
    gc.freeze()
    manager()
