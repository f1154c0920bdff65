"""Spark's Python daemon with the step already imported: workers are forked from it, so each starts warm.

When a job is cancelled while it waits for a new worker, Spark takes the interrupted wait for a timeout of
the daemon, terminates it and starts another. Workers of the old daemon are busy with other jobs and must
survive it: each runs until Spark closes its connection.
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

# GIVEN_UP: sent by the daemon to its workers when Spark terminates it. NOTHING: sent by Spark's own code in
# place of SIGHUP, which would kill them. Programs that workers have started ignore both by default.
GIVEN_UP, NOTHING = signal.SIGURG, signal.SIGWINCH
# A new worker of a terminated daemon may be unknown to Spark. A worker that Spark knows has work by then.
UNKNOWN_S = 60
CHECK_MS = 100


def _print_aside(*parts: object, **options: Any) -> None:
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
        _print_aside(traceback.format_exc(), file=sys.stderr)


def _worker(connection: socket.socket, authenticated: bool) -> int:
    """Spark's own worker, once there is work for it."""
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
    """Spark no longer reads standard output and error: without this a `print` in user code would raise."""
    log = os.open(os.environ.get(LOG_VARIABLE, os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _outlast_workers(spark: int) -> None:
    """Notify the workers and wait until the last one has ended. If Spark ends first, they are killed."""
    os.killpg(0, GIVEN_UP)
    while _has_workers() and os.getppid() == spark:
        sleep_ms(CHECK_MS)
    os.killpg(0, signal.SIGKILL)  # with what workers have started, and this process


def _has_workers() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    for module in (pyspark.daemon, pyspark.util):
        vars(module)["print"] = _print_aside
    vars(pyspark.daemon).update(traceback=_Traces, worker=_worker, SIGHUP=NOTHING)
    if sys.argv[1] == "pyspark.worker":
        # pandas too: Arrow imports it at the first conversion of a Python list.
        import pandas  # noqa: F401
        import pyspark.worker

        # The step with all that it imports, pydantic among it: measured 0.4 s in each worker otherwise.
        import penstock.streams.spark.worker
        import penstock.streams.step.arrow_stages  # noqa: F401

    # A worker collects garbage after every task of every batch. Measured: without `freeze`, traversing all
    # imported objects took three times as long as the work itself.
    gc.collect()
    gc.freeze()
    started_by = os.getppid()
    try:
        manager()
    except SystemExit:
        _outlast_workers(started_by)
