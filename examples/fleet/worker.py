"""A plain process as a task: writes down that it lives, ten times a second, until it is told to stop.

Each line is (boot clock in ms, process id, version): whoever reads the file knows when which life of this
task was there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    folder, task, version = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"{task} begins, version {version}, process {os.getpid()}", flush=True)
    trace = os.open(folder / task.replace("/", "_"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    while True:
        now_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        os.write(trace, f"{now_ms} {os.getpid()} {version}\n".encode())
        time.sleep(0.1)


if __name__ == "__main__":
    main()
