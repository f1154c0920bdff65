"""What people should know of a pipeline before they rely on its results: event times that are not in the
records, and computations that may give something else in a backfill than in the stream. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType

from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import Catalogue
from penstock.streams.compiled import CompiledJob
from penstock.streams.computation import Computation


def notes_on(
    jobs: Sequence[CompiledJob], catalogue: Catalogue, computations: Mapping[str, type]
) -> Iterator[str]:
    """All there is to say; `computations`: by the names of their classes."""
    timed = [job.name for job in jobs if job.kind == "stateful"]
    outside = {source.category for job in jobs for source in job.inputs if not source.writer}
    for name in sorted(outside if timed else ()):
        spec = catalogue.describe(name)
        if has_no_times(spec):
            yield f"{no_time_note(spec)} Windows, joins and timers of {', '.join(timed)} go by these times."
    for job in jobs:
        kind = computations.get((job.computation or {}).get("class", ""))
        if kind is not None:
            yield from _order_notes(job.name, kind)


def has_no_times(spec: CategorySpec) -> bool:
    """True if records from outside do not say when they happened."""
    return spec.watermark in ("event_time", "injector") and spec.format != "typed" and not spec.ts_column


def no_time_note(spec: CategorySpec) -> str:
    """Which event times the records of such a category get."""
    return (
        f"{spec.name} has no time column: the event time of a record is the stamp that an Injector gives it; "
        "what comes from files gets the moment at which it is published, in a backfill 0. If records carry "
        "their time, name its column: `ts_column`, or --ts of `penstock category --create`."
    )


def _order_notes(job: str, kind: type) -> Iterator[str]:
    """How a computation may see in a backfill what it does not see in the stream."""
    name = kind.__name__
    called = _called_in(kind)
    is_of_clock_alone = "set_wall_timer" in called and "set_timer" not in called
    sets_timers = issubclass(kind, Computation) and kind.process_timer is not Computation.process_timer
    if sets_timers and not is_of_clock_alone:
        yield (
            f"{job}: {name} uses timers. In the stream a timer fires when the low watermark reaches it, so "
            "records of its key with later times may come before; in a backfill it fires before the first of "
            "them. The results are the same only if such a record changes nothing of what the timer does: it "
            "must not set it anew, delete it, or add to what it gives out (docs/pipelines.md, Stream and "
            "backfill)."
        )
    else:
        yield (
            f"{job}: {name} gets the records of a key in the order in which they arrive, in a backfill in "
            "the order of their event times. The results are the same only if that order makes no difference "
            "to it (docs/pipelines.md, Stream and backfill)."
        )
    if "set_wall_timer" in called:
        yield f"{job}: {name} sets timers of the clock. In a backfill they do not fire."


def _called_in(kind: type) -> set[str]:
    """Names that the methods of a computation use; what helpers outside of it use is not seen."""
    bases = [base for base in reversed(kind.__mro__) if base not in (Computation, object)]
    members = {name: value for base in bases for name, value in vars(base).items()}  # as they are overridden
    methods = [value for value in members.values() if isinstance(value, FunctionType)]
    return set().union(*(_names(method.__code__) for method in methods))


def _names(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*(_names(one) for one in inner))
