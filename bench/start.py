"""How long a Spark session takes to be ready for tasks, with the archive of Spark's classes and without it.

Each start is a process of its own: JVM, session, first batch. The two kinds take turns, so that whatever else
the machine does meets both. Baseline: the same session in an environment that has no archive.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from rich.console import Console
from rich.table import Table

RATIO_MIN = 1.2
STARTER = """
import sys, time
from pathlib import Path
folder, is_bare = Path(sys.argv[1]), sys.argv[2] == "bare"
if is_bare:
    sys.prefix = str(folder / "elsewhere")  # where no archive is
from penstock.streams.spark.session import build_session, end_session
import psutil
began = time.monotonic()
session = build_session("bench", 2, folder / "scratch")
took_s = time.monotonic() - began
used = psutil.Process(session.sparkContext._gateway.proc.pid).cpu_times()
end_session(session)
print("took", took_s, used.user + used.system)
"""


def start(kind: str) -> tuple[float, float]:
    """Seconds until one session is ready, and seconds of processor time that its JVM used for it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", STARTER, folder, kind]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("took ")]
    _, took_s, cpu_s = line.split()
    return float(took_s), float(cpu_s)


def main() -> int:
    """Measure, print, and compare with what is promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help=f"fail below {RATIO_MIN} times as fast")
    given = parser.parse_args()
    runs: dict[str, list[tuple[float, float]]] = {"bare": [], "archive": []}
    for _ in range(given.repeats):
        for kind, found in runs.items():
            found.append(start(kind))
    table = Table("session", "ready after s", "spread", "JVM's processor s", title="Start of a session")
    medians = {}
    for kind, found in runs.items():
        took = [took_s for took_s, _ in found]
        medians[kind] = statistics.median(took)
        cpu_s = statistics.median(cpu for _, cpu in found)
        table.add_row(kind, f"{medians[kind]:.1f}", f"{min(took):.1f}-{max(took):.1f}", f"{cpu_s:.1f}")
    ratio = medians["bare"] / medians["archive"]
    Console().print(table, f"with the archive {ratio:.2f} times as fast (promised: {RATIO_MIN})")
    if given.json:
        print(json.dumps({"runs": runs, "ratio": ratio}))
    return 1 if given.check and ratio < RATIO_MIN else 0


if __name__ == "__main__":
    sys.exit(main())
