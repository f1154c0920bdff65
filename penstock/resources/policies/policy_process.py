"""Users' own policies: each in a process of its own, which is ended when it takes too long.

The control plane never imports user code. What a policy can do to it is to give no answer.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.clock import Clock, Millis
from penstock.core.errors import PenstockError
from penstock.resources.policies.facts import JobFacts
from penstock.resources.policies.policy import Broken, Verdict, find_nonsense
from penstock.resources.policies.runnable import Declared
from penstock.resources.policies.wire import Ask, Reply, facts_to_json

HOST = "penstock.policy_host"
REPLY_BYTES_MAX = 2**20
# What it needs to find Python's modules; nothing else of our environment is its business.
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "HOME")
# Each thread of NumPy's would take a part of the memory that a policy may have.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class ProcessPolicy:
    """One policy of one package. One question at a time; a process that fails to answer is ended."""

    def __init__(
        self,
        name: str,
        folder: Callable[[], Path],
        *,
        entry: str,
        class_name: str,
        clock: Clock,
        budget_ms: Millis = 10_000,
        start_ms: Millis = 30_000,
    ) -> None:
        self._name, self._folder, self._entry, self._class = name, folder, entry, class_name
        self._clock, self._budget_ms, self._start_ms = clock, budget_ms, start_ms
        self._process: subprocess.Popen[bytes] | None = None
        self._declared: Declared | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    def declare(self) -> Declared | Broken:
        with self._turn() as is_mine:
            if not is_mine:
                return self._crowded()
            if self._declared is None:
                answer = self._ask(Ask(), self._start_ms)
                if isinstance(answer, Broken):
                    return answer
                if answer.declared is None:
                    return (
                        answer.verdict if isinstance(answer.verdict, Broken) else self._nonsense("no answer")
                    )
                self._declared = answer.declared
            return self._declared

    def run(self, facts: JobFacts, settings: Mapping[str, Any]) -> Verdict | Broken:
        with self._turn() as is_mine:
            if not is_mine:
                return self._crowded()
            # A process that was ended is started first, which takes longer than an answer.
            start = None if self._is_up() else self._ask(Ask(), self._start_ms)
            if isinstance(start, Broken):
                return start
            answer = self._ask(Ask(facts=facts_to_json(facts), settings=dict(settings)), self._budget_ms)
        if isinstance(answer, Broken):
            return answer
        verdict = answer.verdict
        if verdict is None or verdict.policy != self._name:
            return self._nonsense(f"it answers as {verdict.policy!r}" if verdict else "no verdict")
        problem = "" if isinstance(verdict, Broken) else find_nonsense(verdict, facts)
        return self._nonsense(problem) if problem else verdict

    def stop(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """One question at a time. False: those before it took all the time that an answer may take."""
        is_mine = self._lock.acquire(timeout=(self._start_ms + self._budget_ms) / 1000)
        try:
            yield is_mine
        finally:
            if is_mine:
                self._lock.release()

    def _crowded(self) -> Broken:
        return Broken(policy=self._name, how="hung", text="it still answers for other jobs")

    def _nonsense(self, text: str) -> Broken:
        return Broken(policy=self._name, how="nonsense", text=text)

    def _is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _ask(self, ask: Ask, limit_ms: Millis) -> Reply | Broken:
        try:
            if not self._is_up():
                self._start()
            line = self._exchange(msgspec.json.encode(ask) + b"\n", limit_ms)
        except PenstockError as error:
            return Broken(policy=self._name, how="raised", text=str(error)[:2000])
        except OSError as error:
            self._end()
            return Broken(policy=self._name, how="raised", text=f"its process cannot be reached: {error}")
        if isinstance(line, Broken):
            self._end()
            return line
        try:
            return msgspec.json.decode(line, type=Reply)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self._end()
            return self._nonsense(f"its answer cannot be read: {error}"[:2000])

    def _start(self) -> None:
        self._end()
        command = [sys.executable, "-m", HOST, str(self._folder()), self._entry, self._class, self._name]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | _ONE_THREAD,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def _exchange(self, line: bytes, limit_ms: Millis) -> bytes | Broken:
        """Send a line and read one, neither for longer than the limit: it may neither read nor write."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        into, out = process.stdin.fileno(), process.stdout.fileno()
        end_ms, left, found = self._clock.boot_ms() + limit_ms, memoryview(line), bytearray()
        while not found.endswith(b"\n"):
            wait_ms = end_ms - self._clock.boot_ms()
            if wait_ms <= 0:
                return Broken(policy=self._name, how="hung", text=f"no answer within {limit_ms / 1000:g} s")
            readable, writable, _ = select.select([out], [into] if left else [], [], wait_ms / 1000)
            if writable:
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(into, left[:65536]) :]
            if readable:
                piece = os.read(out, 65536)
                if not piece:
                    return Broken(policy=self._name, how="raised", text="its process ended without an answer")
                found += piece
                if len(found) > REPLY_BYTES_MAX:
                    return self._nonsense(f"its answer is longer than {REPLY_BYTES_MAX} bytes")
        return bytes(found)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started ends with it
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class UserPolicies:
    """The policies that jobs bring: one process for each (name, code), started when first asked."""

    def __init__(self, folder_of: Callable[[str], Path], clock: Clock, *, budget_ms: Millis) -> None:
        self._folder_of, self._clock, self._budget_ms = folder_of, clock, budget_ms
        self._known: dict[tuple[str, str], ProcessPolicy] = {}

    def load(self, name: str, code: str) -> ProcessPolicy:
        """The policy behind `hash/file:class`, as settings name it."""
        if (name, code) not in self._known:
            hash_, _, rest = code.partition("/")
            entry, _, class_name = rest.rpartition(":")
            self._known[name, code] = ProcessPolicy(
                name,
                lambda: self._folder_of(hash_),
                entry=entry,
                class_name=class_name,
                clock=self._clock,
                budget_ms=self._budget_ms,
            )
        return self._known[name, code]

    def stop(self) -> None:
        """End every process."""
        for policy in self._known.values():
            policy.stop()
        self._known.clear()
