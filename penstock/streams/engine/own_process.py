"""One task in a process and JVM of its own: started with a file that says what to do, it tells how it is in
another.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from penstock.core.errors import PenstockError
from penstock.core.system_clock import sleep_ms
from penstock.streams.engine.run_errors import readable
from penstock.streams.engine.session import build_session
from penstock.streams.engine.spark_tasks import Assignment, RunView, SparkTasks

LOOK_MS = 200
FINAL = ("stopped", "failed", "fenced")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """What the process is given. Packages lie unpacked in `packages`, by their hashes."""

    assignment: Assignment
    bus: str
    rows: str
    packages: str
    scratch: str
    status_file: str
    stop_file: str
    cores: int
    heap_mb: int

    def to_json(self) -> str:
        """As the process reads it."""
        data = asdict(self)
        data["assignment"]["partitions"] = list(self.assignment.partitions)
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> OwnWork:
        """From the file."""
        data = json.loads(text)
        return OwnWork(**{**data, "assignment": Assignment(**data["assignment"])})


def run(work: OwnWork) -> RunView:
    """Run until it ends, or is asked to."""
    task_id = work.assignment.task_id
    scratch = Path(work.scratch)
    _say(work, RunView(task_id=task_id, state="starting"))
    spark = build_session(f"penstock {task_id}", work.cores, scratch, heap_mb=work.heap_mb, is_shared=False)
    tasks = SparkTasks(
        spark,
        bus=work.bus,
        rows=work.rows,
        package_folder=lambda hash_: Path(work.packages) / hash_,
        checkpoints=scratch / "checkpoints",
        die=_die,
    )
    tasks.start(work.assignment)
    while True:
        if os.path.exists(work.stop_file):
            tasks.stop(task_id)
        (view,) = tasks.poll()
        _say(work, view)
        if view.state in FINAL:
            return view
        if not tasks.is_alive():
            _die("Spark's JVM is gone: it may have run out of memory")
        sleep_ms(LOOK_MS)


def _say(work: OwnWork, view: RunView) -> None:
    path = Path(work.status_file)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"state": view.state, "error": view.error, "metrics": view.metrics}))
    os.replace(new, path)


def _die(reason: str) -> NoReturn:
    print(reason, file=sys.stderr, flush=True)
    os._exit(70)


def main(arguments: list[str]) -> int:
    """The process: 0 if it was stopped, 1 if not."""
    work = OwnWork.from_json(Path(arguments[0]).read_text())
    try:
        view = run(work)
    except (PenstockError, PySparkException, Py4JJavaError) as error:
        view = RunView(task_id=work.assignment.task_id, state="failed", error=readable(error))
        _say(work, view)
    return 0 if view.state == "stopped" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
