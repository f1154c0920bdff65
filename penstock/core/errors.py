"""Every error that Penstock raises on purpose: what happened, why, and what to do.

PenstockError
├── UserError                  the caller can fix it
│   ├── ConfigError            a job config or layer is not valid
│   ├── PipelineError          a pipeline file, graph or expression is not valid
│   ├── VersionConflict        a concurrent write came first: read again and decide again
│   ├── NotFound               no job, category, package or container of that name
│   ├── Refused                not allowed: wrong token, role, or state
│   │   ├── EpochUsed          an earlier life of this writer used this epoch, or a larger one
│   │   └── NeedsConsent       a submit would stop jobs that the caller did not name
│   ├── KeyReused              the idempotency key belongs to another request
│   └── EnvironmentProblem     no Java, a port or folder in use, a broken installation
├── Fenced                     a successor owns this now: stop, do not retry
├── StoreUnavailable           a store did not respond: retry
│   └── OutcomeUnknown         the write may or may not be committed: retry with the same key
├── DiskFull                   no space left: nothing was partially written
├── CorruptData                a checksum or format does not match: stop, never guess
├── RecordsExpired             the bus deleted records before they were read
├── IntervalError              the rows of an interval do not match the plan
│   ├── IntervalMissing        absent, or of another birth: plans create intervals, tasks only open them
│   ├── OffsetAhead            a planned start is above the committed offset
│   ├── RowsOlderThanBus       the bus has records that these rows never sent
│   ├── IntentStands           another range or plan has an open intent, which must be replayed first
│   └── StateMismatch          stored state does not match the declaration of the computation
├── SequenceGap                a publish skipped sequences that were never sent
├── VersionMoved               a twin committed first: read the snapshot again
├── ComputationFailed          user code raised, or broke a rule
│   ├── ProductionRefused      a production with an early timestamp, an unknown stream or wrong columns
│   ├── TimerRefused           a timer with an early hold, or an endless chain of timers
│   ├── StateRefused           a state of another type than declared, or one that cannot be serialized
│   └── PoisonRecord           a record that cannot be processed, in a job with `poison: fail`
├── NotYet                     a precondition is missing: the next round retries
└── TaskActionFailed           a container did not carry out an action: the next round retries
"""

from __future__ import annotations


class PenstockError(Exception):
    """What happened, why, and what to do about it."""

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        parts = [self.what]
        if self.why:
            parts.append(f"Why: {self.why}")
        if self.fix:
            parts.append(f"What to do: {self.fix}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (Spark's Python workers pickle them).
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(kind: type[PenstockError], data: dict[str, object]) -> PenstockError:
    error = kind.__new__(kind)
    Exception.__init__(error, data.get("what", ""))
    error.__dict__.update(data)
    return error


class UserError(PenstockError):
    """The caller can fix it."""


class ConfigError(UserError):
    """A job config or layer is not valid."""


class PipelineError(UserError):
    """A pipeline file, graph or expression is not valid."""


class VersionConflict(UserError):
    """A compare-and-set failed: a concurrent write came first."""

    def __init__(self, key: str, *, expected: int, actual: int) -> None:
        super().__init__(
            f"{key} was changed by another writer",
            why=f"your change is based on version {expected}, the current version is {actual}",
            fix="read it again and repeat your change on the current version",
        )
        self.key, self.expected, self.actual = key, expected, actual


class NotFound(UserError):
    """Nothing has that name."""


class Refused(UserError):
    """The caller may not do this, or not in this state."""


class EpochUsed(Refused):
    """An earlier life of this writer used this epoch, or a larger one."""


class NeedsConsent(Refused):
    """A submit would stop jobs, or replace another file's pipeline, without the caller's consent."""

    def __init__(self, pipeline: str, *, stops: list[str], replaces: str, origin: str) -> None:
        jobs, reasons = ", ".join(stops), []
        if replaces:
            reasons.append(f"it was submitted from {replaces} before, now from {origin}")
        if stops:
            reasons.append(f"this version does not contain {jobs}")
        what = "would stop " + jobs if stops else "would be replaced by another file"
        super().__init__(
            f"the pipeline {pipeline!r} {what}; nothing was changed",
            why="; ".join(reasons),
            fix="if it is a different pipeline, rename it; if you want this change, submit with --yes"
            " (API: list the jobs in `stops` and the file in `replaces`)",
        )
        self.stops, self.replaces = stops, replaces


class KeyReused(UserError):
    """An idempotency key was used again for another request."""


class EnvironmentProblem(UserError):
    """The machine or its configuration does not meet a requirement of Penstock."""


class Fenced(PenstockError):
    """A successor owns this now. It is not a crash: do not restart."""


class StoreUnavailable(PenstockError):
    """A store did not respond."""


class OutcomeUnknown(StoreUnavailable):
    """The write may or may not be committed."""


class DiskFull(PenstockError):
    """No space left; nothing was partially written."""


class CorruptData(PenstockError):
    """A checksum or a format does not match."""


class RecordsExpired(PenstockError):
    """The bus deleted records before they were read."""


class IntervalError(PenstockError):
    """The rows of an interval do not match the plan."""


class IntervalMissing(IntervalError):
    """The interval is absent, or of another birth."""


class OffsetAhead(IntervalError):
    """A planned start is above the committed offset."""


class RowsOlderThanBus(IntervalError):
    """The bus has records that these rows never sent."""


class IntentStands(IntervalError):
    """Another range or plan has an open intent, which must be replayed first."""


class StateMismatch(IntervalError):
    """Stored state does not match the declaration of the computation."""


class SequenceGap(PenstockError):
    """A publish skipped sequences that were never sent."""


class VersionMoved(PenstockError):
    """A twin committed first."""


class ComputationFailed(PenstockError):
    """User code raised, or broke a rule; with the job, the key and the offset of the record."""

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        fix: str = "",
        job: str = "",
        key: str = "",
        offset: int | None = None,
    ) -> None:
        super().__init__(what, why=why, fix=fix)
        self.job, self.key, self.offset = job, key, offset


class ProductionRefused(ComputationFailed):
    """A production with an early timestamp, an unknown stream or wrong columns."""


class TimerRefused(ComputationFailed):
    """A timer with an early hold, or an endless chain of timers."""


class StateRefused(ComputationFailed):
    """A state of another type than declared, or one that cannot be serialized."""


class PoisonRecord(ComputationFailed):
    """A record that cannot be processed, in a job with `poison: fail`."""


class NotYet(PenstockError):
    """A precondition is missing; the next round retries."""


class TaskActionFailed(PenstockError):
    """A container did not carry out an action."""


def translate_sqlite(error: BaseException | None, text: str) -> PenstockError:
    """The PenstockError for a SQLite error."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return DiskFull(
            "the disk is full",
            why=text,
            fix="free disk space; nothing was partially written, and work continues by itself",
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return CorruptData("a database file is damaged", why=text, fix="restore the file from a backup")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreUnavailable("the database is busy", why=text, fix="try again")
    if name.startswith("SQLITE_IOERR"):
        return OutcomeUnknown(
            "the database could not be written", why=text, fix="check the disk, then try again"
        )
    return StoreUnavailable(
        "the database refused the request", why=text, fix="try again; if it happens again, report it"
    )
