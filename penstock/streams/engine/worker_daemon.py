"""Spark's Python daemon with the step already imported: workers are forked from it, so each starts warm."""

from __future__ import annotations

import gc
import sys

from pyspark.daemon import manager

if __name__ == "__main__":
    if sys.argv[1] == "pyspark.worker":
        # pandas too: Arrow imports it at the first conversion of a Python list.
        import pandas  # noqa: F401
        import pyspark.worker  # noqa: F401

        import penstock.streams.at_source
        import penstock.streams.engine.step_worker
    import penstock.streams.bus.spark_source  # noqa: F401

    # A worker collects garbage after every task of every batch. Measured: walking through all that was
    # imported took three times as long as the work itself; what is frozen is not walked through.
    gc.collect()
    gc.freeze()
    manager()
