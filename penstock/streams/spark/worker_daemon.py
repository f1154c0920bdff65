"""Spark's Python daemon with the step already imported: workers are forked from it, so each starts warm.

When a job is cancelled while it waits for a new worker, Spark takes the interrupted wait for a daemon that
does not answer, ends it and starts another. The workers of the old one are busy with other jobs and must not
end with it: each stays until Spark hangs up on it.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from typing import Any

import pyspark.daemon
import pyspark.util
from pyspark.daemon import manager, worker

from penstock.core.system_clock import sleep_ms
from penstock.streams.spark.planner_host import LOG_VARIABLE

# What the daemon tells its workers when it ends, and what Spark's own code sends where it would end them.
# Programs that workers have started take no notice of either.
GIVEN_UP, NOTHING = signal.SIGURG, signal.SIGWINCH
# Nobody may know a new worker of a daemon that was given up. One that Spark does know has work by then.
UNKNOWN_S = 60
LOOK_MS = 100


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


def _worker(connection: socket.socket, authenticated: bool) -> int:
    """Spark's own, from when there is work."""
    signal.signal(GIVEN_UP, _wait_no_more)
    connection.recv(1, socket.MSG_PEEK)
    signal.signal(GIVEN_UP, _print_to_log)
    signal.siginterrupt(GIVEN_UP, False)  # not every library of users goes on by itself
    signal.alarm(0)
    return worker(connection, authenticated)


def _wait_no_more(number: int, frame: object) -> None:
    _print_to_log(number, frame)
    signal.alarm(UNKNOWN_S)


def _print_to_log(number: int, frame: object) -> None:
    """Spark has closed what reads from standard output and error: a `print` in user code would raise."""
    log = os.open(os.environ.get(LOG_VARIABLE, os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _outlast_workers(spark: int) -> None:
    """Tell them, and wait until the last one has ended. If Spark ends first, what still runs is killed."""
    os.killpg(0, GIVEN_UP)
    while _has_workers() and os.getppid() == spark:
        sleep_ms(LOOK_MS)
    os.killpg(0, signal.SIGKILL)  # with what workers have started, and this process


def _has_workers() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    for module in (pyspark.daemon, pyspark.util):
        vars(module)["print"] = _say
    vars(pyspark.daemon).update(traceback=_Traces, worker=_worker, SIGHUP=NOTHING)
    if sys.argv[1] == "pyspark.worker":
        # pandas too: Arrow imports it at the first conversion of a Python list.
        import pandas  # noqa: F401
        import pyspark.worker

    # A worker collects garbage after every task of every batch. Measured: walking through all that was
    # imported took three times as long as the work itself; what is frozen is not walked through.
    gc.collect()
    gc.freeze()
    started_by = os.getppid()
    try:
        manager()
    except SystemExit:
        _outlast_workers(started_by)
