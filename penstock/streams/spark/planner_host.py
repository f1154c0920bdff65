"""The planner host: a process with all imports loaded, forked for each query that Spark starts.

For each query of a Python source Spark starts a planner process, which returns offsets and partitions; unlike
workers, these are not forked from a daemon. Each would import Spark and the source again, which takes 0.85 s
of CPU: four tasks that start together on two cores would wait two seconds for that alone.

The host ends with the process that started it, when its standard input ends.
"""

from __future__ import annotations

import array
import gc
import os
import selectors
import signal
import socket
import sys
from typing import NoReturn

STREAMS = 3
LOG_VARIABLE = "PENSTOCK_SPARK_LOG"  # the error log of Spark and its processes
REQUEST_S = 10.0  # timeout of a request
_INT = array.array("i").itemsize


def main(listening: int) -> int:
    """Serve at an inherited socket until standard input ends. Early requests wait in the backlog."""
    with socket.socket(fileno=listening) as listener:
        _import_all()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(0, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if 0 in ready:
                    return 0
                if listener in ready:
                    _serve(listener)


def _import_all() -> None:
    import pyspark.sql.streaming.python_streaming_source_runner  # noqa: F401

    gc.collect()
    gc.freeze()  # keeps pages shared with children: the collector does not touch them


def _serve(listener: socket.socket) -> None:
    """Fork a planner for one request. A bad request does not end the host."""
    client, _ = listener.accept()
    streams: list[int] = []
    try:
        client.settimeout(REQUEST_S)
        streams, environment = _receive(client)
        if os.fork() == 0:
            listener.close()
            _plan(client, streams, environment)
    except (OSError, ValueError):
        pass  # the client starts a planner itself
    finally:
        client.close()
        for stream in streams:
            os.close(stream)


def _receive(client: socket.socket) -> tuple[list[int], dict[bytes, bytes]]:
    head, ancillary, _, _ = client.recvmsg(8, socket.CMSG_LEN(STREAMS * _INT))
    streams = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            streams.frombytes(data[: len(data) - len(data) % _INT])
    size, text = int.from_bytes(head, "big"), bytearray()
    while len(text) < size and (part := client.recv(min(65_536, size - len(text)))):
        text += part
    if len(streams) != STREAMS or len(text) < size:
        for stream in streams:
            os.close(stream)
        raise ValueError("incomplete request")
    pairs = (entry.split(b"=", 1) for entry in bytes(text).split(b"\0") if b"=" in entry)
    return list(streams), {name: value for name, value in pairs}


def _plan(client: socket.socket, streams: list[int], environment: dict[bytes, bytes]) -> NoReturn:
    """Run as the planner process; never returns to the host's loop."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        os.environb.clear()
        os.environb.update(environment)
        known = set(sys.path)
        sys.path[:0] = [
            path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in known
        ]
        client.sendall(b"+")
        client.close()
        _redirect_stderr()
        _run_planner()
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 0  # Spark has ended the query
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        for stream_out in (sys.stdout, sys.stderr):
            stream_out.flush()
        os._exit(code & 0xFF)


def _redirect_stderr() -> None:
    """Send stderr to the log: errors reach Spark over its socket; the rest only says that Spark has ended."""
    if log := os.environ.get(LOG_VARIABLE):
        opened = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(opened, 2)
        os.close(opened)


def _run_planner() -> None:
    from pyspark.sql.streaming.python_streaming_source_runner import main as run_planner
    from pyspark.worker_util import get_sock_file_to_executor

    with get_sock_file_to_executor(timeout=None) as spark:
        run_planner(spark, spark)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
