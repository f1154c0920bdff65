"""Reads the stored states and timers of jobs, decoded, in pages, for operators.

Reads take no locks and no tokens: tasks continue to write, and one read of an interval sees one version.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from penstock.core.errors import ConfigError, IntervalMissing, NotFound
from penstock.jobs.config import JobConfig
from penstock.jobs.provision import STATEFUL
from penstock.jobs.tasks import interval_birth
from penstock.streams.bus.log import LOW_MIN, NULL_KEY, Log, partition_of
from penstock.streams.dsl.windows import RANK, Firing
from penstock.streams.operators.aggregates import KEY
from penstock.streams.operators.blocks import INDEX, table_of
from penstock.streams.rows.row_store import (
    PAGE_BYTES,
    PREFIX,
    IntervalRef,
    IntervalView,
    RowStore,
    ScannedState,
    ScannedTimer,
    is_of_ids,
    key_after,
)

_IN_BLOCKS = ("aggregate", "partial", "combine")
_SIDES = ("left", "right")
_Sessions = tuple[list[str], list[list[Any]], dict[str, Any]]


def is_in_blocks(computation: Mapping[str, Any]) -> bool:
    """True if its rows are blocks of many keys, as windows other than sessions have them."""
    window = computation.get("window") or {}
    return computation.get("operator") in _IN_BLOCKS and window.get("kind") != "session"


def decode_state(
    computation: Mapping[str, Any], name: str, value: bytes, columns: Sequence[str] = ()
) -> dict[str, Any]:
    """{"state": …}; if it does not match the plan, the state is its bytes, with a `problem`.

    `columns`: of the job's output, for operators that store output records.
    """
    if is_of_ids(name):
        return {"state": {"record_ids": name.removeprefix(PREFIX)}}
    try:
        if is_in_blocks(computation):
            return {"state": _block_summary(name, value)}
        return {"state": to_json_value(_decoded(computation, value, columns))}
    except (msgspec.MsgspecError, pa.ArrowException, ValueError, TypeError, LookupError) as error:
        return {"state": to_json_value(value), "problem": f"it does not match the job's plan: {error}"}


def decode_block(name: str, value: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """The keys of a block with their values. Raises ValueError or similar if it is not a block."""
    if name == INDEX:
        return
    cell, fired, *_ = name.split(":")
    tables = {part: table_of(data) for part, data in _parts(value).items()}
    long: dict[str, dict[str, list[Any]]] = {}
    for part, table in tables.items():
        for row in table.to_pylist() if part else ():
            long.setdefault(str(row.pop(KEY)), {}).setdefault(part, []).append(row)
    for row in tables[""].to_pylist():
        key = str(row.pop(KEY))
        found = {"window_cell": int(cell), "fired": fired == "1", **row, **long.get(key, {})}
        yield key, to_json_value(found)


def to_json_value(value: Any) -> Any:
    """A value that JSON can represent."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"hex": bytes(value).hex(), "bytes": len(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, msgspec.msgpack.Ext):
        data = bytes(value.data)
        return {"hex": data.hex(), "bytes": len(data), "extension": value.code}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _decoded(computation: Mapping[str, Any], value: bytes, columns: Sequence[str]) -> Any:
    operator = computation.get("operator")
    if operator == "join":
        return {"waiting": [_joined(computation, row) for row in _listed(value)]}
    if operator == "aggregate":
        if Firing(**computation.get("firing") or {}).is_plain:
            return _sessions(msgspec.msgpack.decode(value, type=_Sessions))
        new, given = msgspec.msgpack.decode(value, type=tuple[_Sessions, _Sessions])
        return {"new": _sessions(new), "given": _sessions(given)}
    if operator == "dedup":
        until, rows = msgspec.msgpack.decode(value, type=tuple[int, list[list[Any]]])
        waiting = [{"ts": ts, "record": dict(zip(columns, own, strict=True))} for ts, *own in rows]
        return {"given_until": None if until == LOW_MIN else until, "waiting": waiting}
    if operator == "top":
        names = [name for name in columns if name != RANK]
        rows = msgspec.msgpack.decode(value, type=list[list[Any]])
        return {"top": [{RANK: n, **dict(zip(names, row, strict=True))} for n, row in enumerate(rows, 1)]}
    if computation.get("vectorised"):
        names, values = list(computation.get("state") or {}), _listed(value)
        missing = len(names) - len(values)  # columns that were added since
        return dict(zip(names, [*values, *([None] * missing)], strict=True))
    return msgspec.msgpack.decode(value, type=dict[str, Any])


def _sessions(stored: _Sessions) -> dict[str, Any]:
    names, rows, long = stored
    return {"sessions": [dict(zip(names, row, strict=True)) for row in rows], **long}


def _joined(computation: Mapping[str, Any], row: Any) -> dict[str, Any]:
    ts, side, matched, *values = row
    left, right = ([name for name, _ in columns] for columns in computation["columns"])
    own = dict(zip(left, values[: len(left)], strict=True))
    other = dict(zip(right, values[len(left) :], strict=True))
    return {"side": _SIDES[side], "ts": ts, "matched": matched, "record": other if side else own}


def _listed(value: bytes) -> list[Any]:
    return msgspec.msgpack.decode(value, type=list[Any])


def _parts(value: bytes) -> dict[str, bytes]:
    return msgspec.msgpack.decode(value, type=dict[str, bytes])


def _block_summary(name: str, value: bytes) -> dict[str, Any]:
    if name == INDEX:
        return {"blocks": len(_listed(value))}
    cell, fired, level, version = (int(part) for part in name.split(":"))
    keys = table_of(_parts(value)[""]).num_rows
    return {"window_cell": cell, "fired": bool(fired), "level": level, "of_version": version, "keys": keys}


ROWS_PER_READ = 1000
_FITS = {
    "bigint": re.compile(r"-?[0-9]{1,19}"),
    "int": re.compile(r"-?[0-9]{1,10}"),
    "boolean": re.compile("true|false"),
    "double": re.compile(r"-?([0-9.]+(E-?[0-9]+)?|Infinity)|NaN"),
}
_FITS["float"] = _FITS["double"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulJob:
    """A job with its running or last config, which decodes its state."""

    name: str
    birth: str
    config: JobConfig

    @property
    def computation(self) -> Mapping[str, Any]:
        """`computation` of its plan, which describes the state."""
        return self.config.computation

    @property
    def columns(self) -> tuple[str, ...]:
        """The column names of its first output: an operator has one stream."""
        return tuple(name for output in self.config.outputs[:1] for name, _ in output.columns)

    @property
    def partitions(self) -> int:
        """The number of its intervals."""
        return self.config.partitions


class PageStart(NamedTuple):
    """The row after which a page starts."""

    partition: int
    key: str | None = None
    tag: str | None = None

    @staticmethod
    def of(text: str, length: int) -> PageStart:
        """Parse the `next` of an earlier page; ConfigError if it is not valid."""
        try:
            kind: Any = tuple[int, str] if length == 2 else tuple[int, str, str]
            partition, *rest = msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeError) as error:
            example = '[0,"north"]' if length == 2 else '[0,"north","t"]'
            raise ConfigError(
                f"{text[:200]!r} is not the position of a page",
                why=f"it must be the `next` of an earlier page, such as {example}",
                fix="copy it as it was printed, in quotes, or leave it out to read the first page",
            ) from error
        return PageStart(max(0, partition), *rest)


class StateView:
    """Reads states and timers of jobs."""

    def __init__(self, log: Log, rows: RowStore) -> None:
        self._log, self._rows = log, rows

    def get(self, job: StatefulJob, key: str) -> dict[str, Any]:
        """One key: its state and its timers, or NotFound."""
        check_has_state(job)
        stored = self._stored_key(job, key)
        home = partition_of(stored, job.partitions)
        # Producers of a source may use another partitioner, so check the other partitions too.
        for partition in sorted(range(job.partitions), key=lambda other: other != home):
            with self._snapshot(job, partition) as snapshot:
                states = _states_of(job, snapshot, stored)
                timers = list(_timers_of(snapshot, stored))
                if states or timers:
                    return {
                        "job": job.name,
                        "key": stored,
                        "partition": partition,
                        "version": snapshot.row.version,
                        "states": states,
                        "timers": [timer_json(partition, found) for found in timers],
                    }
        raise NotFound(
            f"job {job.name!r} stores nothing for the key {stored[:200]!r}",
            why="it has neither state nor timers; a state equal to the default is not stored",
            fix=f"`penstock state scan {job.name}` lists the keys with state",
        )

    def scan(
        self, job: StatefulJob, *, prefix: str = "", after: str = "", limit: int = 100
    ) -> dict[str, Any]:
        """States by interval and key: {states, versions, next}; `next`: the `after` of the next page."""
        check_has_state(job)

        def rows(snapshot: IntervalView, place: PageStart) -> Iterator[tuple[PageStart, dict[str, Any], int]]:
            start = prefix if place.key is None else max(prefix, key_after(place.key))
            for found in _all_states(snapshot, start):
                if not found.key.startswith(prefix):
                    return
                there = PageStart(place.partition, found.key)
                yield there, state_json(job, place.partition, found), len(found.value or b"")

        return self._page(job, "states", rows, PageStart.of(after, 2) if after else PageStart(0), limit)

    def timers(self, job: StatefulJob, *, key: str = "", after: str = "", limit: int = 100) -> dict[str, Any]:
        """Timers by interval, key and tag, of all keys or of one: {timers, versions, next}."""
        check_has_state(job)
        stored = self._stored_key(job, key) if key else None

        def rows(snapshot: IntervalView, place: PageStart) -> Iterator[tuple[PageStart, dict[str, Any], int]]:
            start = (stored or "", "")
            if place.key is not None and place.tag is not None:
                start = max(start, (place.key, key_after(place.tag)))
            for found in _all_timers(snapshot, start):
                if stored is not None and found.key != stored:
                    return
                yield PageStart(place.partition, found.key, found.tag), timer_json(place.partition, found), 0

        return self._page(job, "timers", rows, PageStart.of(after, 3) if after else PageStart(0), limit)

    def export(self, job: StatefulJob, partition: int) -> Iterator[dict[str, Any]]:
        """Every state of one interval at one version; blocks of windows key by key."""
        check_has_state(job)
        if not 0 <= partition < job.partitions:
            raise NotFound(
                f"job {job.name!r} has no partition {partition}",
                why=f"it has {job.partitions}, from 0 on",
                fix="use one of these",
            )
        with self._snapshot(job, partition) as snapshot:
            version = snapshot.row.version
            for found in _all_states(snapshot, ""):
                for line in _exploded(job, partition, found):
                    yield {**line, "version": version}

    def _page(
        self,
        job: StatefulJob,
        what: str,
        rows: Callable[[IntervalView, PageStart], Iterator[tuple[PageStart, dict[str, Any], int]]],
        begin: PageStart,
        limit: int,
    ) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        versions: dict[str, int] = {}
        size, last = 0, begin
        for partition in range(begin.partition, job.partitions):
            with self._snapshot(job, partition) as snapshot:
                versions[str(partition)] = snapshot.row.version
                place = begin if partition == begin.partition else PageStart(partition)
                for there, line, weight in rows(snapshot, place):
                    if len(found) == limit or size >= PAGE_BYTES:
                        return _page_json(job, what, found, versions, last)
                    found.append(line)
                    size, last = size + weight, there
        return _page_json(job, what, found, versions, None)

    @contextmanager
    def _snapshot(self, job: StatefulJob, partition: int) -> Iterator[IntervalView]:
        birth = interval_birth(job.birth, job.config.kind, job.config.lineage, partition)
        ref = IntervalRef(job=job.name, job_birth=job.birth, partition=partition, birth=birth)
        try:
            with self._rows.view(ref) as snapshot:
                yield snapshot
        except IntervalMissing as error:
            raise NotFound(
                f"job {job.name!r} has no rows in partition {partition}",
                why=f"{error.what}: {error.why}",
                fix="wait until its plan has created them; `penstock status` shows the progress",
            ) from error

    def _stored_key(self, job: StatefulJob, key: str) -> str:
        keys: Sequence[Any] = job.computation.get("keys") or []
        if job.computation.get("operator") == "join":
            keys = keys[0]
        several = job.computation.get("inputs") is not None  # of each input its key, as one text
        names = str(keys[0]).split(", ") if several and keys else [str(name) for name in keys]
        return key_text(job.name, names, self._key_types(job), key)

    def _key_types(self, job: StatefulJob) -> dict[str, str]:
        columns = dict(column for output in job.config.outputs for column in output.columns)
        for source in job.config.inputs:
            try:
                columns |= dict(self._log.describe(source.category).spec.columns)
            except NotFound:
                continue
        return columns


def check_has_state(job: StatefulJob) -> None:
    """ConfigError if the job is not stateful."""
    kind = job.config.kind
    if kind != STATEFUL:
        raise ConfigError(
            f"job {job.name!r} has no state",
            why=f"its kind is {kind}: only jobs of kind {STATEFUL} have state",
            fix="`penstock job ls` shows the kind of each job",
        )


def key_text(job: str, names: Sequence[str], types: Mapping[str, str], given: str) -> str:
    """The stored text of a key; ConfigError if it is not a valid key of these columns. Pure."""
    if len(names) <= 1:
        if given == NULL_KEY:
            return given
        return _checked(job, names[0] if names else "", types, given)
    example = json.dumps([f"<{name}>" for name in names])
    try:
        parts = msgspec.json.decode(given, type=list[str | int | float | bool | None])
    except msgspec.MsgspecError as error:
        raise _bad_key(job, given, f"it is keyed by {', '.join(names)}: {error}", example) from error
    if len(parts) != len(names):
        raise _bad_key(
            job, given, f"it is keyed by {', '.join(names)}, but {len(parts)} values were given", example
        )
    texts = [
        None if part is None else _checked(job, name, types, _text_of(part))
        for name, part in zip(names, parts, strict=True)
    ]
    return json.dumps(texts, ensure_ascii=False, separators=(",", ":"))


def state_json(job: StatefulJob, partition: int, found: ScannedState) -> dict[str, Any]:
    """One stored state as JSON."""
    line: dict[str, Any] = {"partition": partition, "key": found.key}
    if found.value is None:
        return {**line, "state": None, "bytes": 0, "problem": found.damage}
    decoded = decode_state(job.computation, found.key, found.value, job.columns)
    return {**line, "bytes": len(found.value), **decoded}


def timer_json(partition: int, found: ScannedTimer) -> dict[str, Any]:
    """One timer as JSON; a damaged one has a `problem`."""
    line: dict[str, Any] = {"partition": partition, "key": found.key, "tag": found.tag}
    if found.timer is None:
        return {**line, "problem": found.damage}
    return {**line, **{name: value for name, value in asdict(found.timer).items() if name not in line}}


def _page_json(
    job: StatefulJob, what: str, found: list[dict[str, Any]], versions: dict[str, int], last: PageStart | None
) -> dict[str, Any]:
    behind = None if last is None else [part for part in last if part is not None]
    text = None if behind is None else json.dumps(behind, ensure_ascii=False, separators=(",", ":"))
    return {"job": job.name, what: found, "versions": versions, "next": text}


def _states_of(job: StatefulJob, snapshot: IntervalView, key: str) -> list[dict[str, Any]]:
    """The state of a key: one row, or its part of each block of a window."""
    if not is_in_blocks(job.computation):
        found = snapshot.states(start=key, limit=1)
        return [_without_position(state_json(job, 0, row)) for row in found if row.key == key]
    return [
        _without_position(line)
        for row in _all_states(snapshot, "")
        for line in _exploded(job, 0, row)
        if line["key"] == key
    ]


def _without_position(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("partition", "key")}


def _exploded(job: StatefulJob, partition: int, found: ScannedState) -> Iterator[dict[str, Any]]:
    if found.value is None or not is_in_blocks(job.computation):
        yield state_json(job, partition, found)
        return
    try:
        lines = list(decode_block(found.key, found.value))
    except (msgspec.MsgspecError, pa.ArrowException, ValueError, KeyError):
        yield state_json(job, partition, found)
        return
    for key, state in lines:
        yield {"partition": partition, "key": key, "state": state}


def _timers_of(snapshot: IntervalView, key: str) -> Iterator[ScannedTimer]:
    for found in _all_timers(snapshot, (key, "")):
        if found.key != key:
            return
        yield found


def _all_states(snapshot: IntervalView, start: str) -> Iterator[ScannedState]:
    while page := snapshot.states(start=start, limit=ROWS_PER_READ):
        yield from page
        start = key_after(page[-1].key)


def _all_timers(snapshot: IntervalView, start: tuple[str, str]) -> Iterator[ScannedTimer]:
    while page := snapshot.timers(start=start, limit=ROWS_PER_READ):
        yield from page
        start = (page[-1].key, key_after(page[-1].tag))


def _text_of(part: str | float | bool) -> str:
    return str(part).lower() if isinstance(part, bool) else str(part)


def _checked(job: str, name: str, types: Mapping[str, str], given: str) -> str:
    kind = types.get(name, "string")
    fits = _FITS.get(kind)
    if fits is not None and given and fits.fullmatch(given) is None:
        raise _bad_key(job, given, f"its key {name!r} is of type {kind}", f"a {kind}")
    return given


def _bad_key(job: str, given: str, why: str, expected: str) -> ConfigError:
    return ConfigError(
        f"{given[:200]!r} is not a key of job {job!r}", why=why, fix=f"use {expected}, in shell quotes"
    )
