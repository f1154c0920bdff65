"""Every error Penstock raises on purpose. Each says what happened, why, and what to do.

PenstockError
├── UserError                  whoever asked can fix it
│   ├── ConfigError            a job config or layer is not valid
│   ├── PipelineError          a pipeline file, graph or expression is not valid
│   ├── VersionConflict        somebody wrote first: read again and decide again
│   ├── NotFound               no job, category, package or container of that name
│   ├── Refused                the answer is no: wrong token, role, or state
│   │   ├── EpochUsed          an earlier life of this writer had this epoch, or a larger one
│   │   └── NeedsConsent       a submit would stop jobs that it was not told to stop
│   ├── KeyReused              an idempotency key that stands for another request
│   └── EnvironmentProblem     no Java, a port or folder in use, a broken installation
├── Fenced                     a successor owns this now: stop, do not retry
├── StoreUnavailable           a store did not answer: try again
│   └── OutcomeUnknown         it may or may not have been written: repeat with the same key
├── DiskFull                   no room: nothing was half-written
├── CorruptData                a checksum or format does not match: stop, never guess
├── RecordsExpired             the bus let records go before their reader came
├── IntervalError              the rows of an interval do not fit what was planned
│   ├── IntervalMissing        absent, or of another birth: the plan creates, a task only opens
│   ├── OffsetAhead            a planned start lies above the committed offset
│   ├── RowsOlderThanBus       the bus has seen more than these rows ever sent
│   ├── IntentStands           another range or plan was promised and must be replayed first
│   └── StateMismatch          stored state does not fit the values that the computation declares
├── SequenceGap                a publish skipped sequences that nobody sent
├── VersionMoved               a twin committed first: read the snapshot again
├── ComputationFailed          user code raised, or did what it may not
│   ├── ProductionRefused      a production with an early stamp, an unknown stream or wrong columns
│   ├── TimerRefused           a timer with an early hold, or timers without end
│   ├── StateRefused           a state of another type than declared, or that no serializer takes
│   └── PoisonRecord           a record that cannot be worked on, where the job is to stop at such
├── NotYet                     something else comes first: the next round looks again
└── TaskActionFailed           a container did not do as asked: the next round tries again
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
    """Whoever asked can fix it."""


class ConfigError(UserError):
    """A job config or layer is not valid."""


class PipelineError(UserError):
    """A pipeline file, graph or expression is not valid."""


class VersionConflict(UserError):
    """A compare-and-set lost the race."""

    def __init__(self, key: str, *, expected: int, actual: int) -> None:
        super().__init__(
            f"{key} was changed by somebody else",
            why=f"you decided on version {expected}, the current version is {actual}",
            fix="read it again and repeat your change on the current version",
        )
        self.key, self.expected, self.actual = key, expected, actual


class NotFound(UserError):
    """Nothing of that name."""


class Refused(UserError):
    """The answer is no."""


class EpochUsed(Refused):
    """An earlier life of this writer had this epoch, or a larger one."""


class NeedsConsent(Refused):
    """A submit would stop jobs, or replace a pipeline of another file, and was not told to."""

    def __init__(self, pipeline: str, *, stops: list[str], replaces: str, origin: str) -> None:
        jobs, reasons = ", ".join(stops), []
        if replaces:
            reasons.append(f"it was submitted from {replaces} before, and this is {origin}")
        if stops:
            reasons.append(f"this version does not have {jobs}")
        what = "would stop " + jobs if stops else "would be replaced by another file"
        super().__init__(
            f"the pipeline {pipeline!r} {what}; nothing was changed",
            why="; ".join(reasons),
            fix="rename the pipeline if it is another one; if this is what you want, submit with --yes"
            " (API: name the jobs in `stops` and the file in `replaces`)",
        )
        self.stops, self.replaces = stops, replaces


class KeyReused(UserError):
    """An idempotency key came again with another request."""


class EnvironmentProblem(UserError):
    """The machine is not as Penstock needs it."""


class Fenced(PenstockError):
    """A successor owns this now. Not a crash: do not restart."""


class StoreUnavailable(PenstockError):
    """A store did not answer."""


class OutcomeUnknown(StoreUnavailable):
    """The write may or may not have happened."""


class DiskFull(PenstockError):
    """No room left; nothing was half-written."""


class CorruptData(PenstockError):
    """A checksum or a format does not match."""


class RecordsExpired(PenstockError):
    """The bus let records go before their reader came."""


class IntervalError(PenstockError):
    """The rows of an interval do not fit what was planned."""


class IntervalMissing(IntervalError):
    """Absent, or of another birth."""


class OffsetAhead(IntervalError):
    """A planned start lies above the committed offset."""


class RowsOlderThanBus(IntervalError):
    """The bus has seen more than these rows ever sent."""


class IntentStands(IntervalError):
    """Another range or plan was promised and must be replayed first."""


class StateMismatch(IntervalError):
    """Stored state does not fit the values that the computation declares."""


class SequenceGap(PenstockError):
    """A publish skipped sequences."""


class VersionMoved(PenstockError):
    """A twin committed first."""


class ComputationFailed(PenstockError):
    """User code raised, or did what it may not; says for which job, key and record."""

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
    """A production with an early stamp, an unknown stream or wrong columns."""


class TimerRefused(ComputationFailed):
    """A timer with an early hold, or timers without end."""


class StateRefused(ComputationFailed):
    """A state of another type than declared, or that a serializer does not take."""


class PoisonRecord(ComputationFailed):
    """A record that cannot be worked on, and a job that is to stop at such."""


class NotYet(PenstockError):
    """Something else comes first."""


class TaskActionFailed(PenstockError):
    """A container did not do as asked."""


def translate_sqlite(error: BaseException | None, text: str) -> PenstockError:
    """Name what a SQLite failure means to us."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return DiskFull(
            "the disk is full",
            why=text,
            fix="free some space; nothing was half-written and work goes on by itself",
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return CorruptData("a database file is damaged", why=text, fix="restore the file from a backup")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreUnavailable("the database is busy", why=text, fix="try again")
    if name.startswith("SQLITE_IOERR"):
        return OutcomeUnknown(
            "the database could not be written", why=text, fix="look at the disk, then try again"
        )
    return StoreUnavailable(
        "the database refused the request", why=text, fix="try again, and report it if it stays"
    )
