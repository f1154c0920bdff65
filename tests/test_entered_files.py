"""Claims about `tests.support.entered_files`: what is noted of a process, its threads and its forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.entered_files import Watch

# Each line that it reads is a phase; what it does then is done by the process, a thread and a fork.
CODE = """
import os, sys, threading
from penstock.core.system_clock import SystemClock

clock = SystemClock()
for line in sys.stdin:
    clock.now_ms()
    clock.now_ms()
    thread = threading.Thread(target=clock.boot_ms, name="second")
    thread.start()
    thread.join()
    if not (child := os.fork()):
        clock.boot_ms()
        os._exit(0)
    os.waitpid(child, 0)
    print("done", flush=True)
"""


def test_each_process_notes_once_a_phase_what_it_and_its_threads_and_forks_enter(tmp_path: Path):
    watch = Watch(tmp_path / "watch")
    command = [sys.executable, "-c", CODE]
    env = {**os.environ, "PYTHONPATH": watch.path}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for phase in (1, 2):
            assert watch.begin() == phase
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
        process.stdin.close()
    for phase in (1, 2):
        here, beside, forked = watch.entries(phase)
        assert {entry.file for entry in (here, beside, forked)} == {"core/system_clock.py"}
        assert (here.function, here.thread, here.pid) == ("SystemClock.now_ms", "MainThread", process.pid)
        assert (beside.function, beside.thread) == ("SystemClock.boot_ms", "second")
        assert forked.function == "SystemClock.boot_ms" and forked.pid != process.pid


def test_what_an_import_calls_is_not_noted(tmp_path: Path):
    watch = Watch(tmp_path / "watch")
    command = [sys.executable, "-c", "import penstock.cli.installation"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": watch.path}, check=True)
    assert watch.entries() == []
