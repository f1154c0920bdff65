"""A control plane on a loopback port in a thread, without containers, and commands run against it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import pytest
import structlog

from penstock.app import ControlPlane
from penstock.cli.main import main
from penstock.cli.output import out
from penstock.core.folder import write_endpoint
from penstock.installation import write_tokens
from penstock.server.api import build_api
from penstock.server.security import RateLimit
from penstock.server.serving import ApiServer, Listening, bind
from penstock.settings import Settings
from tests.builders import CODE, PACKAGE
from tests.kin import kill_all, kin_of
from tests.ready import ready_folder
from tests.server.world import tables_of
from tests.tidy_rules import ROOT
from tests.waiting import until

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
    url: str

    def everything(self) -> dict[str, Any]:
        """All that a refused command must leave as it was, once the syncer has done what it was asked before."""
        until(lambda: all(view.is_in_sync for view in self.plane.jobs.every_view()), "the jobs to settle")
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
            yield World(plane=plane, folder=folder, url=server.url)
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


# With this before it, a command is started as a shell starts what a script puts in the background.
IN_BACKGROUND = ("sh", "-c", 'trap \'\' INT; exec "$0" "$@"')


class Started:
    """A `penstock` command as a process of its own. What a test does not end is killed after it."""

    left: ClassVar[list[Started]] = []

    def __init__(self, *arguments: str | Path, in_background: bool = False, **given: Any) -> None:
        command = [*(IN_BACKGROUND if in_background else ()), sys.executable, "-m", "penstock.cli.main"]
        command += [str(argument) for argument in arguments]
        # Files, not pipes: a pipe that nobody reads is full some time.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, **given
        )
        self.left.append(self)

    @property
    def out(self) -> str:
        """What it printed so far."""
        return _text(self._out)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait, but no longer for a process that has ended."""
        until(lambda: condition() or self.process.poll() is not None, lambda: f"{what}: {self._all()}")
        assert condition(), f"{what}: {self._all()}"

    def read_until(self, words: str) -> str:
        """All that it has said on stdout, once these words are among it."""
        self.until(lambda: words in self.out, f"it says {words!r}")
        return self.out

    def end(self, number: signal.Signals | None = None) -> Outcome:
        """Send a signal, wait for the end."""
        if number is not None:
            self.process.send_signal(number)
        until(lambda: self.process.poll() is not None, lambda: f"its end: {self._all()}")
        outcome = Outcome(code=self.process.returncode, out=_text(self._out), err=_text(self._err))
        self._close()
        return outcome

    def kill(self) -> None:
        """Whatever happens, nothing of it survives the test."""
        kin = kin_of(self.process.pid)
        self.process.kill()
        self.process.wait()
        kill_all(kin)
        self._close()

    def _all(self) -> str:
        return f"{_text(self._out)} {_text(self._err)}"

    def _close(self) -> None:
        self.left.remove(self)
        self._out.close()
        self._err.close()


def _text(file: IO[bytes]) -> str:
    # Its place is shared with the process that writes: this reads without moving it.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


class Up(Started):
    """`penstock up`."""

    def __init__(self, folder: Path, *arguments: str, **given: Any) -> None:
        self.folder = folder
        super().__init__("up", "--folder", folder, *arguments, **given)

    def wait_ready(self) -> str:
        """Wait until it says where it answers, and that it is this process; returns the URL."""
        self.until(lambda: self._endpoint().get("pid") == self.process.pid, "it is up")
        return str(self._endpoint()["url"])

    def _endpoint(self) -> dict[str, Any]:
        path = self.folder / "endpoint.json"
        return json.loads(path.read_text()) if path.exists() else {}


def plain(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
