"""A control plane on a loopback port in a thread, without containers, and commands run against it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.app import ControlPlane
from penstock.cli.main import main
from penstock.cli.output import out
from penstock.cli.up import write_endpoint, write_tokens
from penstock.core.system_clock import sleep_ms
from penstock.settings import Settings
from penstock.web.api import build_api
from penstock.web.limits import RateLimit
from penstock.web.server import ApiServer, Listening, bind
from tests.builders import CODE, PACKAGE
from tests.ready import ready_folder
from tests.tidy_rules import ROOT
from tests.web.world import tables_of

ZEITGEIST = ROOT / "examples" / "zeitgeist" / "pipeline.py"
# What only callers change; the loops go on writing the others.
WRITTEN = frozenset(
    {
        "idempotency_keys",
        "job_labels",
        "jobs",
        "layer_history",
        "layer_kinds",
        "layers",
        "pipelines",
        "tokens",
    }
)
PARSE, COUNT = "zeitgeist.by_query", "zeitgeist.count_per_second"
QUERIES = ("category", "queries", "--create", "--columns", "query:string,lang:string,ts:bigint", "--ts", "ts")
QUERIES_SIX = (*QUERIES, "--partitions", "6", "--watermark", "injector")


@dataclass(frozen=True)
class Outcome:
    """What a command said and how it ended; `text` and `error` without line breaks of the terminal."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return " ".join(self.out.split())

    @property
    def error(self) -> str:
        return " ".join(self.err.split())

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def is_refused(self, code: int = 1) -> str:
        """An exit code, three parts on stderr, nothing on stdout, no traceback; returns the text."""
        assert self.code == code, (self.code, self.out, self.err)
        assert self.out == ""
        assert "Traceback" not in self.err
        what, _, rest = self.err.partition("\n  why ")
        why, _, fix = rest.partition("\n  what to do ")
        assert what.strip() and why.strip() and fix.strip(), self.err
        return self.error


Run = Callable[..., Outcome]


@dataclass
class World:
    """A folder as `penstock up` makes it, and the control plane that serves it."""

    plane: ControlPlane
    folder: Path

    def everything(self) -> dict[str, Any]:
        """All that a refused command must leave as it was, once the syncer has done what it was asked before."""
        deadline_ms = self.plane.clock.boot_ms() + 30_000
        while not all(view.is_in_sync for view in self.plane.jobs.every_view()):
            assert self.plane.clock.boot_ms() < deadline_ms, "the jobs do not settle"
            sleep_ms(20)
        return {
            "tables": {
                name: rows for name, rows in tables_of(self.plane.database).items() if name in WRITTEN
            },
            "audit": [row for row in self.plane.jobs.audit(limit=1000) if row.actor.startswith("local-")],
            "journal": [e for e in self.plane.journal.entries(limit=1000) if e.actor.startswith("local-")],
            "categories": [category.spec.name for category in self.plane.log.categories()],
            "packages": sorted(path.name for path in (self.folder / "packages").iterdir()),
        }


@contextmanager
def a_world(folder: Path) -> Iterator[World]:
    """Loops run, so that submitted jobs are synced; there are no containers."""
    folder.mkdir(parents=True)
    # Commands run in this process too: what the control plane logs is not what they say.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with bind(Listening()) as listener:
        plane = ControlPlane(Settings(folder=ready_folder(folder), sync_ms=50, sync_gap_ms=0))
        plane.packages.put(PACKAGE, CODE)
        write_tokens(plane, folder)
        server = ApiServer(build_api(plane, rate=RateLimit(100_000)), listener).start()
        plane.start()
        write_endpoint(folder, server.url)
        try:
            yield World(plane=plane, folder=folder)
        finally:
            server.stop()
            plane.stop()
            structlog.reset_defaults()


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, on a wide terminal."""
    out.width = 200

    def run(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code: Any = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ending:
            code = ending.code or 0
        out, err = capsys.readouterr()
        return Outcome(code=code, out=out, err=err)

    return run


class Up:
    """`penstock up` as a process of its own."""

    def __init__(self, folder: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "penstock.cli.main", "up", "--folder", str(folder), *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_ready(self, seconds: float = 60) -> str:
        """Wait until it says where it answers, and that it is this process; returns the URL."""
        deadline = time.monotonic() + seconds
        path = self.folder / "endpoint.json"
        while time.monotonic() < deadline and self.process.poll() is None:
            if path.exists():
                said = json.loads(path.read_text())
                if said["pid"] == self.process.pid:
                    return str(said["url"])
            time.sleep(0.05)
        self.process.kill()
        out, err = self.process.communicate()
        raise AssertionError(f"not up: {out} {err}")

    def read_until(self, words: str, seconds: float = 300) -> str:
        """What it has said on stdout since the last time, up to the line with these words."""
        said, deadline = "", time.monotonic() + seconds
        assert self.process.stdout is not None
        while words not in said:
            assert time.monotonic() < deadline, said
            line = self.process.stdout.readline()
            assert line, f"it ended: {said}"
            said += line
        return said

    def end(self, number: signal.Signals | None = None, seconds: float = 30) -> Outcome:
        """Send a signal, wait for the end."""
        if number is not None:
            self.process.send_signal(number)
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return Outcome(code=self.process.returncode, out=out, err=err)


def wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for what a loop does in its next rounds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def plain(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
