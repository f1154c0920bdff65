"""The watchdog process of a container (Turbine IV-C): sends heartbeats, renews the lease, and kills the
engine when the lease ends.

It is a separate process, because a paused or stuck engine cannot run its own timer.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from penstock.container.sessions import (
    is_session_alive,
    kill_previous_session,
    kill_session,
    last_failure,
    write_failure,
    write_pid_file,
)
from penstock.container.watchdog import MISSED_HEARTBEATS, Contact, EndEngine, Lease, Renewal, Watchdog
from penstock.core.clock import Clock, Millis
from penstock.core.errors import EnvironmentProblem, PenstockError
from penstock.core.loop import Loop
from penstock.fleet.messages import Heartbeat, HeartbeatReply, Profile

__all__ = ["Renewal", "ShardManagerLink", "Warden"]

log = structlog.get_logger(__name__)

STOP_MS: Millis = 8_000


class ShardManagerLink(Protocol):
    """The warden's connection to the Shard Manager and its store."""

    def register(self, container: str, incarnation: str) -> None:
        """Register a new incarnation; raises Refused while another one is alive."""

    def send_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Send one heartbeat; returns the reply."""

    def renew(self, container: str, incarnation: str) -> Renewal | None:
        """Renew the lease row directly in the store, and read the assignment; None: the lease has ended."""


@dataclass(slots=True)
class _Engine:
    """One engine process and its watchdog."""

    process: subprocess.Popen[bytes]
    incarnation: str
    watchdog: Watchdog


class Warden:
    """Runs an engine, and starts a new one when it ends, until `stop` is called."""

    def __init__(
        self,
        *,
        container: str,
        folder: Path,
        engine_command: Sequence[str],
        link: ShardManagerLink,
        profile: Profile,
        clock: Clock,
        new_incarnation: Callable[[], str],
        after_engine: Callable[[], None] = lambda: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._container, self._folder, self._command = container, folder, tuple(engine_command)
        self._link, self._profile, self._clock, self._new_incarnation = link, profile, clock, new_incarnation
        self._after_engine = after_engine  # cleans up after an engine, once all its processes are dead
        self._environment = environment  # of the engine; None: this process's own
        self._stop = threading.Event()
        self._signs: queue.Queue[tuple[str, Millis, Heartbeat]] = queue.Queue()
        # (incarnation, reply, when the renewal began if the store gave the reply)
        self._replies: queue.Queue[tuple[str, HeartbeatReply, Millis | None]] = queue.Queue()
        self._contact = Contact()
        self._beats: queue.Queue[Heartbeat] = queue.Queue(maxsize=1)
        self._kill_times = KillTimes(folder)

    def stop(self) -> None:
        """Request an orderly stop: tasks stop, the engine exits, `run` returns."""
        self._stop.set()

    def run(self) -> None:
        """Run engines until `stop`; EnvironmentProblem if kills take too long for the profile."""
        self._folder.mkdir(parents=True, exist_ok=True)
        pid_file = self._folder / "engine.pid"
        killed = kill_previous_session(pid_file)
        if killed:
            log.info("killed processes of a previous engine", container=self._container, processes=killed)
        self._after_engine()
        # A loop goes on after an error: the next heartbeat is sent whatever was wrong with a reply.
        Loop("heartbeats", self._send_heartbeat, every_ms=1).start()
        while not self._stop.is_set():
            self._kill_times.check(self._profile)
            incarnation = self._register()
            if incarnation is None:
                return
            engine = self._spawn(incarnation)
            write_pid_file(pid_file, engine.process.pid)
            reason = self._watch(engine)
            if engine.process.returncode not in (None, 0) and not last_failure(self._folder):
                write_failure(self._folder, f"{reason}; see {self._folder / 'engine.log'}")
            self._end(engine, reason)
            self._after_engine()
            pid_file.unlink(missing_ok=True)

    def _register(self) -> str | None:
        last_error = ""
        while not self._stop.is_set():
            incarnation = self._new_incarnation()
            try:
                self._link.register(self._container, incarnation)
                return incarnation
            except PenstockError as error:
                if str(error) != last_error:  # once per reason, not once per attempt
                    last_error = str(error)
                    parts = {"error": error.what, "why": error.why, "fix": error.fix}
                    log.warning("cannot register yet", container=self._container, **parts)
                self._stop.wait(self._profile.heartbeat_ms / 1000)
        return None

    def _spawn(self, incarnation: str) -> _Engine:
        with (self._folder / "engine.log").open("ab") as output:
            process = subprocess.Popen(
                [*self._command, "--incarnation", incarnation],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                env=self._environment,
            )
        watchdog = Watchdog(
            container=self._container,
            incarnation=incarnation,
            profile=self._profile,
            started_ms=self._clock.boot_ms(),
            lease=Lease(deadline_ms=self._profile.deadline_ms),
            pid=process.pid,
        )
        engine = _Engine(process=process, incarnation=incarnation, watchdog=watchdog)
        threading.Thread(target=self._read_signs, args=(engine,), name="signs", daemon=True).start()
        log.info("engine started", container=self._container, incarnation=incarnation, pid=process.pid)
        return engine

    def _watch(self, engine: _Engine) -> str:
        """Returns why this engine must end."""
        while not self._stop.is_set():
            self._take_signs(engine)  # process the pipe before checking deadlines
            self._take_replies(engine)
            if engine.process.poll() is not None:
                return f"the engine ended by itself with code {engine.process.returncode}"
            now_ms = self._clock.boot_ms()
            for action in engine.watchdog.check(now_ms).actions:
                if isinstance(action, EndEngine):
                    return action.reason
                self._queue_heartbeat(engine, action.heartbeat, now_ms)
            self._stop.wait(0.1)
        return "the container was told to stop"

    def _queue_heartbeat(self, engine: _Engine, heartbeat: Heartbeat, now_ms: Millis) -> None:
        engine.watchdog.on_sent(heartbeat, now_ms)  # first: the reply may arrive at once
        # If the last one is still being sent, this one is skipped; the lease is not extended.
        with contextlib.suppress(queue.Full):
            self._beats.put_nowait(heartbeat)

    def _send_heartbeat(self) -> None:
        contact, heartbeat = self._contact, self._beats.get()
        try:
            reply = self._link.send_heartbeat(heartbeat)
        except PenstockError as error:
            if not contact.missed:
                parts = {"error": error.what, "why": error.why, "fix": error.fix}
                log.warning("heartbeats are not acknowledged", container=self._container, **parts)
            if contact.on_silence():
                self._renew_in_store(heartbeat)
            return
        self._replies.put((heartbeat.incarnation, reply, None))
        if contact.missed:
            missed = contact.missed
            log.info("heartbeats are acknowledged again", container=self._container, missed=missed)
        contact.on_answer(reply)

    def _renew_in_store(self, heartbeat: Heartbeat) -> None:
        """No Shard Manager answers: renew the lease row in the store and read the assignment there."""
        is_first = self._contact.missed == MISSED_HEARTBEATS
        began_ms = self._clock.boot_ms()
        try:
            renewal = self._link.renew(self._container, heartbeat.incarnation)
        except PenstockError as error:
            if is_first:
                log.warning("the store does not answer either", container=self._container, error=error.what)
            return
        if is_first:
            log.warning("renewing the lease in the store", container=self._container)
        self._replies.put(
            (heartbeat.incarnation, self._contact.reply_from_store(heartbeat, renewal), began_ms)
        )

    def _take_replies(self, engine: _Engine) -> None:
        while not self._replies.empty():
            incarnation, reply, renewed_ms = self._replies.get()
            if incarnation != engine.incarnation:
                continue
            now_ms = self._clock.boot_ms()
            if renewed_ms is None:
                is_for_engine = engine.watchdog.on_reply(reply, now_ms)
            else:
                is_for_engine = engine.watchdog.on_renewed(reply, renewed_ms, now_ms)
            if is_for_engine:
                self._send(engine, {"reply": reply.to_json()})

    def _take_signs(self, engine: _Engine) -> None:
        while not self._signs.empty():
            incarnation, at_ms, report = self._signs.get()
            if incarnation == engine.incarnation:
                engine.watchdog.on_sign(at_ms, report)

    def _read_signs(self, engine: _Engine) -> None:
        assert engine.process.stdout is not None
        for line in engine.process.stdout:
            try:
                sign = json.loads(line)
                name = {"container": self._container, "incarnation": engine.incarnation, "sequence": 0}
                report = Heartbeat.from_json({**sign["report"], **name})
                self._signs.put((engine.incarnation, int(sign["at_ms"]), report))
            except (ValueError, KeyError, TypeError):
                log.warning("cannot read a message of the engine", line=line[:200])

    def _send(self, engine: _Engine, message: dict[str, Any]) -> None:
        assert engine.process.stdin is not None
        try:
            engine.process.stdin.write(json.dumps(message).encode() + b"\n")
            engine.process.stdin.flush()
        except (BrokenPipeError, OSError):
            pass  # it is ending; the next poll of the process notices

    def _end(self, engine: _Engine, reason: str) -> None:
        log.info("engine ends", container=self._container, incarnation=engine.incarnation, reason=reason)
        if self._stop.is_set():
            self._send(engine, {"stop": True})
            try:
                engine.process.wait(STOP_MS / 1000)
            except subprocess.TimeoutExpired:
                log.warning("the engine did not stop in time", container=self._container)
        session, began_ms, is_killed = engine.process.pid, self._clock.boot_ms(), False
        while is_session_alive(session):
            kill_session(session)
            is_killed = True
            threading.Event().wait(0.05)
        engine.process.wait()
        if is_killed:
            took_ms, margin_ms = self._clock.boot_ms() - began_ms, margin_of(self._profile)
            self._kill_times.add(took_ms)
            if took_ms > margin_ms:
                log.warning(
                    "the kill took too long", container=self._container, took_ms=took_ms, margin_ms=margin_ms
                )
        assert engine.process.stdin is not None and engine.process.stdout is not None
        engine.process.stdout.close()
        with contextlib.suppress(OSError):
            engine.process.stdin.close()


KILL_TIMES_MAX = 5  # stored measurements: old ones may be of a slower machine
SLOW_KILLS_MIN = 2  # this many slow kills are not bad luck


class KillTimes:
    """How long the last kills of an engine and its processes took, stored in the container's folder.

    All processes must be dead within the margin between the container's deadline and its fail-over. How long
    a kill takes depends on the machine, so it is measured, and a profile with a shorter margin is refused.
    One slow kill is not enough for that: a refused container never measures again.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "kill_times.json"

    def read(self) -> tuple[Millis, ...]:
        """The stored times, oldest first; empty if there is no readable file."""
        try:
            found = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return ()
        return tuple(item for item in found if isinstance(item, int)) if isinstance(found, list) else ()

    def add(self, took_ms: Millis) -> None:
        """Store one more time."""
        times = [*self.read(), took_ms][-KILL_TIMES_MAX:]
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(times))
        temporary.replace(self._path)

    def check(self, profile: Profile) -> None:
        """Refuse a profile whose margin is shorter than the second longest of the stored times."""
        margin_ms, slowest = margin_of(profile), sorted(self.read())[-SLOW_KILLS_MIN:]
        longest_ms = slowest[0] if len(slowest) == SLOW_KILLS_MIN else 0
        if longest_ms > margin_ms:
            raise EnvironmentProblem(
                "this machine is too slow for the container's heartbeat profile",
                why=f"{SLOW_KILLS_MIN} of the last {KILL_TIMES_MAX} kills took {longest_ms} ms or more, but "
                f"other containers may start its tasks after {margin_ms} ms",
                fix="use a profile with longer times (--profile paper), or remove "
                f"{self._path.name} from the container's folder once the machine is faster",
            )


def margin_of(profile: Profile) -> Millis:
    """How long a kill may take with this profile."""
    return profile.failover_ms - profile.deadline_ms
