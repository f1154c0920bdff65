"""Runs any command as a task: passes its place in the job, measures it, stops or kills its whole process
tree.

The kernel enforces the memory limit where control groups are available. Elsewhere memory is measured, and a
task above its reservation is killed; its error names the peak.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import shutil
import signal
import subprocess
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from penstock.core.clock import Clock, Millis
from penstock.jobs.config import COMMAND_FIELD
from penstock.jobs.tasks import RunState, RunStatus, TaskSpec

LOG_BYTES_MAX = 8 * 1024 * 1024
LOGS_KEPT = 3
_CHUNK = 64 * 1024


class RotatedFile:
    """A log file with rotation: when it is full it is renamed to `.1`, `.1` to `.2`, up to `kept`
    old files.
    """

    def __init__(self, path: Path, *, bytes_max: int = LOG_BYTES_MAX, kept: int = LOGS_KEPT) -> None:
        self._path, self._bytes_max, self._kept = path, bytes_max, kept
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def write(self, data: bytes) -> None:
        if self._file.tell() + len(data) > self._bytes_max and self._file.tell():
            self._rotate()
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        for number in range(self._kept, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path if number == 1 else self._path.with_name(f"{self._path.name}.{number - 1}")
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self._file = self._path.open("ab")


class LogPump:
    """Copies the output of running processes from their pipes to their log files, until each pipe ends."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def follow(self, pipe: int, file: RotatedFile) -> None:
        """Start to copy a pipe; owns its reading end from now on."""
        os.set_blocking(pipe, False)
        with self._lock:
            self._selector.register(pipe, selectors.EVENT_READ, file)
        os.write(self._wake_write, b"x")

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake_read, _CHUNK)
                else:
                    self._copy(key.fd, key.data)

    def _copy(self, pipe: int, file: RotatedFile) -> None:
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            # A full disk must not stop a task: output that cannot be written is lost.
            with contextlib.suppress(OSError):
                file.write(data)
            return
        with self._lock:
            self._selector.unregister(pipe)
        os.close(pipe)
        file.close()


ROOT = Path("/sys/fs/cgroup")
PREFIX = "penstock-"


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """The names of files in one version of cgroups."""

    limit: str
    swap_limit: str
    peak: str
    events: str
    used: str  # the line of memory.stat with a task's own memory, without the file cache
    swap_counts_memory: bool  # whether the swap limit is for memory and swap together


CGROUP_VERSIONS = {
    1: CgroupFiles("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes",
             "memory.oom_control", "total_rss", True),
    2: CgroupFiles("memory.max", "memory.swap.max", "memory.peak", "memory.events", "anon", False),
}  # fmt: skip


class MemoryGroup:
    """The control group of one run: its processes and their children share one memory limit."""

    def __init__(self, folder: Path, files: CgroupFiles) -> None:
        self._folder, self._files = folder, files

    @property
    def procs_file(self) -> str:
        """The file to which a process writes its pid to join the group."""
        return str(self._folder / "cgroup.procs")

    def members(self) -> list[int]:
        """The pids of its processes."""
        with contextlib.suppress(OSError):
            return [int(pid) for pid in Path(self.procs_file).read_text().split()]
        return []

    def kills(self) -> int:
        """How many of its processes the kernel's out-of-memory killer has killed."""
        return self._line(self._files.events, "oom_kill")

    def used_mb(self) -> float:
        """Its memory now, without the file cache."""
        return self._line("memory.stat", self._files.used) / 2**20

    def peak_mb(self) -> float:
        """Its peak memory; 0 if the kernel does not report it."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / self._files.peak).read_text()) / 2**20
        return 0.0

    def _line(self, file: str, name: str) -> int:
        with contextlib.suppress(OSError):
            found = re.search(rf"^{name} (\d+)$", (self._folder / file).read_text(), re.M)
            return int(found[1]) if found else 0
        return 0

    def remove(self) -> None:
        """Remove it if it is empty; otherwise a later engine removes it."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class MemoryGroups:
    """Creates control groups below a parent in which this process may create them."""

    def __init__(self, parent: Path, version: int) -> None:
        self._parent, self._files, self._made = parent, CGROUP_VERSIONS[version], count(1)
        self._sweep()

    def make(self, name: str, limit_mb: float) -> MemoryGroup | None:
        """Create a group with a memory limit; None if the kernel refuses."""
        folder = self._parent / f"{PREFIX}{os.getpid()}-{next(self._made)}-{name}"
        limit = int(limit_mb * 2**20)
        try:
            folder.mkdir()
            (folder / self._files.limit).write_text(str(limit))
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap accounting
                swap = limit if self._files.swap_counts_memory else 0
                (folder / self._files.swap_limit).write_text(str(swap))
            with contextlib.suppress(
                FileNotFoundError
            ):  # version 2: kill the whole group, not only its largest process
                _write_existing(folder / "memory.oom.group", "1")
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            return None
        return MemoryGroup(folder, self._files)

    def _sweep(self) -> None:
        """Remove empty groups of earlier engines; a group with processes cannot be removed."""
        for folder in self._parent.glob(f"{PREFIX}*"):
            owner = re.match(rf"{PREFIX}(\d+)-", folder.name)
            if owner and not psutil.pid_exists(int(owner[1])):
                with contextlib.suppress(OSError):
                    folder.rmdir()


def find_groups(root: Path = ROOT, own: str | None = None) -> MemoryGroups | None:
    """Find where this process may create groups with a memory limit; None: nowhere, memory is measured
    instead.

    `own`: the text of /proc/self/cgroup.
    """
    try:
        lines = (own if own is not None else Path("/proc/self/cgroup").read_text()).splitlines()
    except OSError:
        return None
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if "memory" in controllers.split(","):
            parent = root / "memory" / path.lstrip("/")
            return MemoryGroups(parent, 1) if _is_writable(parent) else None
        if not controllers:
            # Version 2 allows limits below a group that has no processes itself: our own group, or one that a
            # service manager delegated, with the service in a group below it.
            here = root / path.lstrip("/")
            for parent in (here, here.parent) if here != root else (here,):
                if _has_memory(parent) and _is_writable(parent):
                    return MemoryGroups(parent, 2)
    return None


def _has_memory(parent: Path) -> bool:
    control = parent / "cgroup.subtree_control"
    try:
        if "memory" not in control.read_text().split():
            _write_existing(control, "+memory")
        return "memory" in control.read_text().split()
    except OSError:
        return False


def _is_writable(parent: Path) -> bool:
    return parent.is_dir() and os.access(parent, os.W_OK)


def _write_existing(path: Path, text: str) -> None:
    with open(path, "r+") as file:
        file.write(text)


MEASURE_MS: Millis = 1_000
# The environment variables that a task inherits. No credentials: neither tokens nor the database.
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "JAVA_HOME", "PYTHONPATH")


class UnknownField(ValueError):
    """A command names a field that a task does not have."""


def fields_of(spec: TaskSpec) -> dict[str, str]:
    """The fields that a command may name in braces."""
    return {
        "job": spec.job,
        "task": spec.task_id,
        "index": str(spec.index),
        "count": str(spec.config.task_count),
        "generation": str(spec.generation),
        "partitions": ",".join(str(partition) for partition in spec.partitions),
        **{f"arguments.{name}": str(value) for name, value in spec.config.arguments.items()},
    }


def command_of(spec: TaskSpec) -> list[str]:
    """The command of the job with every `{field}` replaced; UnknownField if one does not exist."""
    known = fields_of(spec)

    def fill(match: re.Match[str]) -> str:
        if match.group(1) not in known:
            raise UnknownField(
                f"{{{match.group(1)}}} is not a field; known fields: {', '.join(sorted(known))}"
            )
        return known[match.group(1)]

    return [COMMAND_FIELD.sub(fill, part) for part in spec.config.command]


@dataclass(slots=True)
class _Run:
    process: subprocess.Popen[bytes]
    memory_max_mb: float
    group: MemoryGroup | None = None
    state: RunState = RunState.RUNNING
    error: str = ""
    is_stopping: bool = False
    peak_mb: float = 0.0
    cpu_s: float = 0.0
    cpu_total_s: float = 0.0
    started_ms: Millis = 0
    measured_ms: Millis = 0
    metrics: dict[str, float] = field(default_factory=dict)


class ProcessRunner:
    """Runs tasks of kind `process`, in the container's session, so that the warden can kill them."""

    def __init__(self, folder: Path, clock: Clock, groups: MemoryGroups | None = None) -> None:
        self._folder, self._clock, self._groups, self._pump = folder, clock, groups, LogPump()
        self._runs: dict[str, _Run | RunStatus] = {}

    def start(self, spec: TaskSpec, *, shard_epoch: int, command: Sequence[str] | None = None) -> None:
        """Start a run. If it cannot start, the run fails.

        `command`: what to run in place of the command that the job's config names, without its environment.
        """
        assert spec.task_id not in self._runs, f"{spec.task_id} already has a run"
        try:
            self._runs[spec.task_id] = self._spawn(spec, shard_epoch, command)
        except (OSError, ValueError) as error:
            shown = " ".join(command or spec.config.command)
            self._runs[spec.task_id] = RunStatus(
                task_id=spec.task_id, state=RunState.FAILED, error=f"cannot start `{shown[:200]}`: {error}"
            )

    def _spawn(self, spec: TaskSpec, shard_epoch: int, given: Sequence[str] | None) -> _Run:
        command = command_of(spec) if given is None else list(given)
        if not command:
            raise UnknownField("the job has no command")
        name = spec.task_id.replace("/", "_")
        work = self._folder / "work" / name
        work.mkdir(parents=True, exist_ok=True)
        environment = self._environment(spec, shard_epoch, spec.config.environment if given is None else {})
        memory = float(spec.config.resources.memory_mb)
        _check_command(command[0], work, environment)
        group = self._groups.make(name, memory) if self._groups is not None and memory > 0 else None
        if group is not None:
            # The process joins the group before it executes the command, so none of its children is outside.
            command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', group.procs_file, *command]
        reading, writing = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, reading)
            if group is not None:
                undo.callback(group.remove)
            try:
                process = subprocess.Popen(
                    command,
                    cwd=work,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=writing,
                    stderr=writing,
                    process_group=0,
                )
            finally:
                os.close(writing)
            undo.pop_all()
        self._pump.follow(reading, RotatedFile(self._folder / "logs" / f"{name}.log"))
        started_ms = self._clock.boot_ms()
        return _Run(process=process, memory_max_mb=memory, group=group, started_ms=started_ms)

    def _environment(self, spec: TaskSpec, shard_epoch: int, named: Mapping[str, Any]) -> dict[str, str]:
        return {
            **{name: os.environ[name] for name in INHERITED if name in os.environ},
            **{name: str(value) for name, value in named.items()},
            **{
                f"PENSTOCK_{name.upper()}": value
                for name, value in fields_of(spec).items()
                if not name.startswith("arguments.")
            },
            "PENSTOCK_EPOCH": str(shard_epoch),
        }

    def stop(self, task_id: str) -> None:
        """Send SIGTERM to the task's process group."""
        run = self._runs.get(task_id)
        if isinstance(run, _Run):
            run.is_stopping = True
            _signal_group(run.process.pid, signal.SIGTERM)

    def kill(self, task_id: str) -> None:
        """Send SIGKILL to the task's whole process tree, other process groups included."""
        run = self._runs.get(task_id)
        if isinstance(run, _Run):
            run.is_stopping = True
            _kill_tree(run)

    def poll(self) -> tuple[RunStatus, ...]:
        """The status of every run that was not dropped by `forget`."""
        now_ms = self._clock.boot_ms()
        return tuple(self._status(task_id, run, now_ms) for task_id, run in list(self._runs.items()))

    def _status(self, task_id: str, run: _Run | RunStatus, now_ms: Millis) -> RunStatus:
        if isinstance(run, RunStatus):
            return run
        code = run.process.poll()
        if code is not None and not _is_group_alive(run.process.pid):
            return self._final(task_id, run, code)
        if code is not None:
            # Its children have outlived it: kill them, the task has ended.
            _signal_group(run.process.pid, signal.SIGKILL)
        elif now_ms - run.measured_ms >= MEASURE_MS:
            self._measure(run, now_ms)
        state = RunState.STOPPING if run.is_stopping else RunState.RUNNING
        return RunStatus(task_id=task_id, state=state, metrics=run.metrics)

    def _final(self, task_id: str, run: _Run, code: int) -> RunStatus:
        self._check_memory(run)
        if run.group is not None:
            run.group.remove()
        if run.error:
            state, error = RunState.FAILED, run.error
        elif run.is_stopping:
            state, error = RunState.STOPPED, ""
        elif code < 0:
            state, error = RunState.FAILED, f"it was ended by {signal.Signals(-code).name}{_peak(run)}"
        else:
            state, error = RunState.FAILED, f"it ended with code {code}{_peak(run)}"
        status = RunStatus(task_id=task_id, state=state, error=error, metrics=run.metrics)
        self._runs[task_id] = status
        return status

    def _measure(self, run: _Run, now_ms: Millis) -> None:
        memory_mb, cpu_s = 0.0, 0.0
        for process in _process_tree(run):
            with contextlib.suppress(psutil.Error):
                memory_mb += process.memory_info().rss / 2**20
                times = process.cpu_times()
                cpu_s += times.user + times.system
        if run.group is not None:
            memory_mb = run.group.used_mb()
        passed_s = (now_ms - run.measured_ms) / 1000
        # When a child ends, its CPU time is missing from the sum: do not count that as negative.
        grown_s = max(0.0, cpu_s - run.cpu_s)
        run.cpu_total_s += grown_s
        cpu = grown_s / passed_s if run.measured_ms else 0.0
        run.peak_mb, run.cpu_s, run.measured_ms = max(run.peak_mb, memory_mb), cpu_s, now_ms
        run.metrics = {
            "cpu": cpu,
            "cpu_ms_total": run.cpu_total_s * 1000,
            "cpu_at_ms": float(now_ms),
            "cpu_started_ms": float(run.started_ms),
            "memory_mb": memory_mb,
            "memory_peak_mb": run.peak_mb,
        }
        self._check_memory(run)
        if run.error:
            _kill_tree(run)

    def _check_memory(self, run: _Run) -> None:
        """Set the error if the run used more memory than it reserved. In a control group the kernel detects
        that.
        """
        if run.group is None:
            is_above = 0 < run.memory_max_mb < run.peak_mb
        else:
            is_above = run.group.kills() > 0
            if is_above:
                run.peak_mb = run.metrics["memory_peak_mb"] = run.group.peak_mb() or run.memory_max_mb
        if is_above and not run.error:
            run.error = (
                f"out of memory: it used {run.peak_mb:.0f} MB and had reserved {run.memory_max_mb:.0f} MB"
            )

    def forget(self, task_id: str) -> None:
        """Drop a run that has ended."""
        run = self._runs.pop(task_id, None)
        assert run is None or isinstance(run, RunStatus), f"{task_id} still runs"


def _check_command(name: str, work: Path, environment: Mapping[str, str]) -> None:
    """Raise the error that starting the command without a shell would raise."""
    found = str(work / name) if "/" in name else shutil.which(name, path=environment.get("PATH", os.defpath))
    if found is None or not os.path.exists(found):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    if os.path.isdir(found) or not os.access(found, os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)


def _peak(run: _Run) -> str:
    return f" (memory: {run.peak_mb:.0f} MB at most)" if run.peak_mb else ""


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill_tree(run: _Run) -> None:
    tree = _process_tree(run)  # read while the leader lives: afterwards the parents are unknown
    _signal_group(run.process.pid, signal.SIGKILL)
    for process in tree:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _process_tree(run: _Run) -> list[psutil.Process]:
    """The task's process group, and descendants in other groups, such as Spark's Python workers."""
    found = {process.pid: process for process in _group(run.process.pid)}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(run.process.pid).children(recursive=True):
            found.setdefault(process.pid, process)
    for pid in run.group.members() if run.group is not None else ():
        with contextlib.suppress(psutil.Error):
            found.setdefault(pid, psutil.Process(pid))
    return list(found.values())


def _is_group_alive(group: int) -> bool:
    return any(True for _ in _group(group))


def _group(group: int) -> list[psutil.Process]:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    except PermissionError:
        pass
    found = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == group:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return found


ANSWER_BYTES_MAX = 256 * 1024
TAIL_BYTES_MAX = 4 * 1024 * 1024
FILE_ID_BYTES = 256


def log_file(container_folder: Path, task_id: str) -> Path:
    """The file with a task's output in its container's folder."""
    return container_folder / "tasks" / "logs" / f"{task_id.replace('/', '_')}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """Some text of a log, and the position after it: a file, and an offset in it."""

    text: str
    file: int  # its inode and a checksum of its beginning, because inodes are reused
    offset: int
    is_gap: bool = False  # text before this was rotated away before it was read


def read_tail(path: Path, lines: int) -> LogPart | None:
    """The last lines, also from rotated files; None: there is no log."""
    with _opened(path) as files:
        if not files:
            return None
        parts: list[bytes] = []
        for file in files:
            room = TAIL_BYTES_MAX - sum(map(len, parts))
            parts.insert(0, os.pread(file.handle, room, max(0, file.size - room))[: file.size])
            if sum(part.count(b"\n") for part in parts) > lines or sum(map(len, parts)) >= TAIL_BYTES_MAX:
                break
        kept = b"".join(parts).splitlines(keepends=True)[-lines:]
        return LogPart(text=_text(kept), file=files[0].file_id(files[0].size), offset=files[0].size)


def read_on(path: Path, *, file: int, offset: int) -> LogPart | None:
    """The text after a position, up to a maximum size; None: there is no log."""
    with _opened(path) as files:
        if not files:
            return None
        found = next((n for n, known in enumerate(files) if known.file_id(offset) == file), None)
        number = len(files) - 1 if found is None else found
        at = files[number]
        begin = 0 if found is None else min(offset, at.size)
        data = os.pread(at.handle, ANSWER_BYTES_MAX, begin)
        end = begin + len(data)
        if end >= at.size and number > 0:  # at its end: continue with the next file
            at, end = files[number - 1], 0
        return LogPart(text=_text([data]), file=at.file_id(end), offset=end, is_gap=found is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    handle: int
    inode: int
    size: int

    def file_id(self, offset: int) -> int:
        """Identifies this file: its inode and a checksum of its beginning, at most up to `offset`."""
        start = os.pread(self.handle, min(offset, FILE_ID_BYTES), 0)
        return (self.inode << 32) | zlib.crc32(start)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[list[_File]]:
    """Open the log and its rotated files, newest first, each once."""
    found: dict[int, _File] = {}
    with contextlib.ExitStack() as handles:
        for name in (path, *(path.with_name(f"{path.name}.{age}") for age in range(1, LOGS_KEPT + 1))):
            try:
                handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # missing or not readable
            handles.callback(os.close, handle)
            about = os.fstat(handle)
            # A file that was rotated in the meantime is already in the list.
            found.setdefault(about.st_ino, _File(handle=handle, inode=about.st_ino, size=about.st_size))
        yield list(found.values())


def _text(parts: Sequence[bytes]) -> str:
    return b"".join(parts).decode(errors="replace")
