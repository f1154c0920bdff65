"""The data plane as plans use it: create categories, intervals and producers before tasks start, fence old
tasks. A process job has none of these, so nothing is created for it and it cannot be fenced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from penstock.core.errors import ConfigError, NotFound, NotYet, StoreUnavailable, TaskActionFailed
from penstock.jobs.config import Input, JobConfig, Output, StreamJob, skip_problem
from penstock.jobs.tasks import TaskSpec, interval_birth, producer_of
from penstock.streams.bus.log import LOW_MIN, Category, CategorySpec, Log
from penstock.streams.places import checkpoint_folder
from penstock.streams.rows.row_store import IntervalRef, IntervalRow, RowStore
from penstock.streams.step.outbox import send_unsent, unsent_categories
from penstock.streams.step.step import (
    DEAD_COLUMNS,
    InputSpec,
    OutputSpec,
    OwnedInterval,
    dead_category,
    dead_stream,
    input_of,
    is_dead,
    open_interval,
)


class StreamDataPlane:
    """The bus and the row store, as the State Syncer uses them. Every call may be repeated."""

    def __init__(self, log: Log, rows: RowStore, *, rows_place: str = "") -> None:
        """`rows_place`: the place of the rows; "": unknown, and places of checkpoints are not checked."""
        self._log, self._rows, self._rows_place = log, rows, rows_place

    def prepare(self, job: str, birth: str, config: JobConfig) -> None:
        """Create outputs, intervals with initial offsets (resolved once), and producer registrations."""
        if config.kind == "process":
            return
        if config.kind == "spark":
            if self._rows_place:
                checkpoint_folder(self._rows_place, job, config)
            # Its offsets are in its own checkpoint; the row records its owner.
            for ref in intervals_of(job, birth, config):
                self._rows.create(ref, offsets={}, low=LOW_MIN)
            return
        for output in outputs_of(job, config):
            self._log.create(_spec_of(output))
        sources = self._inputs(job, config)
        starts = [self._starts(item, source) for item, source in zip(config.inputs, sources, strict=True)]
        for ref in intervals_of(job, birth, config):
            offsets = {
                source.birth: first[ref.partition]
                for source, first in zip(sources, starts, strict=True)
                if ref.partition < source.spec.partitions
            }
            self._rows.create(ref, offsets=offsets, low=LOW_MIN)
        for category, producer in self._registrations(birth, config, sources):
            self._log.register_producer(category, producer)

    def unread(self, job: str, birth: str, config: JobConfig, category: str, *, is_stopped: bool) -> str:
        """Why the tasks of this config have not read an abandoned input to its end; "" once they have."""
        if not self._existing({category}):
            return ""
        source = self._log.describe(category)
        # Before the ends are read: a producer that is unregistered adds no more records.
        if not is_stopped and self._log.producers(category):
            return "the job that writes it is still registered as its producer"
        ends, left = self._log.end_offsets(category), 0
        for ref in intervals_of(job, birth, config):
            if ref.partition < len(ends) and self._rows.exists(ref):
                done = self._rows.peek(ref).offsets.get(source.birth, ends[ref.partition])
                left += done < ends[ref.partition]
        return f"{left} of its {len(ends)} partitions are not read to their end yet" if left else ""

    def fence(self, job: str, birth: str, config: JobConfig, *, generation: int) -> None:
        """Fence every interval's old owner, and its producers on all outputs."""
        if config.kind == "process":
            raise TaskActionFailed(
                f"the tasks of {job} cannot be fenced",
                why="it is a process job: its output does not go through Penstock",
                fix="wait until its containers confirm that it stopped, or their leases expire; "
                "`penstock task ls` shows where it runs",
            )
        if config.kind == "spark":
            for ref in intervals_of(job, birth, config):
                self._rows.fence(ref, generation=generation)
            return
        sources = self._inputs(job, config)
        for ref in intervals_of(job, birth, config):
            token = self._rows.fence(ref, generation=generation)
            for producer in _producers(birth, config, sources, ref.partition):
                for output in config.outputs:
                    self._log.fence(output.category, producer, token)

    def retire(self, job: str, birth: str, old: JobConfig, new: JobConfig | None) -> None:
        """Unregister producers that the new config no longer has. A stopped job keeps its producers, which
        hold the watermark.
        """
        before = self._left_by(job, birth, old)
        after = set() if new is None else self._registered(job, birth, new)
        gone = sorted(before - after)
        self._check_sent(job, birth, old, {category for category, _ in gone}, is_removed=new is None)
        for category, producer in gone:
            self._log.unregister_producer(category, producer)

    def _check_sent(
        self, job: str, birth: str, old: JobConfig, categories: set[str], *, is_removed: bool
    ) -> None:
        """NotYet if the outbox has unsent rows for these categories, which the job's next tasks will send.
        A removed job has no more tasks, so its unsent rows are sent here.
        """
        if not categories:
            return
        for ref in intervals_of(job, birth, old):
            if not self._rows.exists(ref):
                continue
            if is_removed:
                send_unsent(ref, rows=self._rows, log=self._log)
            elif found := unsent_categories(ref, rows=self._rows) & categories:
                raise NotYet(
                    f"{job} has unsent output for {', '.join(map(repr, sorted(found)))}",
                    why="its tasks ended before they sent it; its next tasks send it first",
                    fix="wait until its tasks run; `penstock job get` shows them",
                )

    def _left_by(self, job: str, birth: str, old: JobConfig) -> set[tuple[str, str]]:
        """The producers that the old config may have registered. None if its inputs do not exist or do not
        fit; outputs that were never created are left out, so that a removal always completes.
        """
        inputs = {item.category for item in old.inputs}
        if inputs - self._existing(inputs):
            return set()
        try:
            found = self._registered(job, birth, old)
        except ConfigError:
            return set()
        there = self._existing({category for category, _ in found})
        return {(category, producer) for category, producer in found if category in there}

    def _existing(self, names: set[str]) -> set[str]:
        """Those of these categories that exist."""
        found = set()
        for name in names.intersection(self._log.names()):
            with suppress(NotFound):  # its creation is not complete
                found.add(self._log.describe(name).spec.name)
        return found

    def _registered(self, job: str, birth: str, config: JobConfig) -> set[tuple[str, str]]:
        if not isinstance(config, StreamJob):
            return set()
        return set(self._registrations(birth, config, self._inputs(job, config)))

    def _inputs(self, job: str, config: JobConfig) -> list[Category]:
        found = [self._input(job, item.category) for item in config.inputs]
        most = max(category.spec.partitions for category in found)
        if most != config.partitions:
            names = ", ".join(repr(category.spec.name) for category in found)
            raise ConfigError(
                f"job {job} expects {config.partitions} partitions of {names}",
                why=f"the {'category has' if len(found) == 1 else 'largest of them has'} {most}",
                fix="submit the pipeline again: the planner reads the number from the category",
            )
        return found

    def _input(self, job: str, name: str) -> Category:
        try:
            return self._log.describe(name)
        except NotFound as error:
            # Another job of the pipeline may create it a moment later, so this is not this job's failure.
            raise StoreUnavailable(
                f"job {job} waits for its input {name!r}", why=str(error), fix="submit the job that writes it"
            ) from error

    def _starts(self, item: Input, source: Category) -> tuple[int, ...]:
        if item.start == "latest":
            return self._log.end_offsets(source.spec.name)
        return self._log.start_offsets(source.spec.name)  # the oldest that retention has kept

    def _registrations(
        self, birth: str, config: JobConfig, sources: Sequence[Category]
    ) -> Iterator[tuple[str, str]]:
        for output in config.outputs:
            if is_dead(output.stream):
                continue  # dead letters have no watermark
            for partition in range(config.partitions):
                for producer in _producers(birth, config, sources, partition):
                    yield output.category, producer


def own_interval(
    spec: TaskSpec,
    partition: int,
    *,
    shard_epoch: int,
    rows: RowStore,
    log: Log,
    outputs: Sequence[OutputSpec],
) -> tuple[OwnedInterval, IntervalRow]:
    """Acquire one interval of a task, and fence its former owners on the bus."""
    config = spec.config
    ref = interval_of(spec.job, spec.birth, config, partition)

    def producer_for(input_birth: str) -> str:
        return _producer(spec.birth, config, input_birth, partition)

    row = open_interval(
        ref=ref,
        generation=spec.generation,
        shard_epoch=shard_epoch,
        producer_for=producer_for,
        rows=rows,
        log=log,
        outputs=outputs,
    )
    producers = {birth: producer_for(birth) for birth in row.offsets}
    return OwnedInterval(ref=ref, token=row.token, producers=producers), row


def find_inputs(log: Log, config: JobConfig) -> tuple[InputSpec, ...]:
    """A job's inputs as its tasks read them."""
    sources = [log.describe(item.category) for item in config.inputs]
    reads = config.plan.reads or [None] * len(sources)
    return tuple(input_of(source, columns) for source, columns in zip(sources, reads, strict=True))


def find_outputs(log: Log, job: str, config: JobConfig) -> tuple[OutputSpec, ...]:
    """A job's outputs as its tasks open them.

    The plan has created their categories, except that of dead letters: an operator can switch it on without a
    plan, and then the first task creates it.
    """
    planned = {item.category for item in config.outputs}
    found = []
    for item in outputs_of(job, config):
        if item.category not in planned:
            log.create(_spec_of(item))
        found.append(
            OutputSpec(
                stream=item.stream,
                category=item.category,
                birth=log.describe(item.category).birth,
                partitions=item.partitions,
                columns=item.columns,
                watermarked=not is_dead(item.stream),
            )
        )
    return tuple(found)


def outputs_of(job: str, config: JobConfig) -> list[Output]:
    """The outputs of a job's tasks: those of its plan, and a category of dead letters if it needs one.

    The plan has it only if the pipeline sets `poison = "skip"`; an operator may set it later.
    """
    skips = config.kind == "stateful" and config.poison == "skip" and not skip_problem(config)
    if not skips or any(is_dead(item.stream) for item in config.outputs):
        return [*config.outputs]
    dead = Output(
        stream=dead_stream(0),
        category=dead_category(job),
        partitions=config.partitions,
        columns=DEAD_COLUMNS,
        internal=False,
    )
    return [*config.outputs, dead]


def _spec_of(output: Output) -> CategorySpec:
    return CategorySpec(
        name=output.category, partitions=output.partitions, columns=output.columns, format=output.format
    )


def check_places(rows_place: str, config: JobConfig) -> None:
    """Refuse a job whose checkpoints cannot be stored at this place."""
    if config.kind == "spark":
        checkpoint_folder(rows_place, config.name, config)


def interval_of(job: str, birth: str, config: JobConfig, partition: int) -> IntervalRef:
    """The interval that has a partition's state for a job with this config."""
    interval = interval_birth(birth, config.kind, config.lineage, partition)
    return IntervalRef(job=job, job_birth=birth, partition=partition, birth=interval)


def intervals_of(job: str, birth: str, config: JobConfig) -> Iterator[IntervalRef]:
    """The intervals of a job's config, by partition."""
    return (interval_of(job, birth, config, partition) for partition in range(config.partitions))


def _producers(birth: str, config: JobConfig, sources: Sequence[Category], partition: int) -> tuple[str, ...]:
    """The producer ids of an interval: one per input, or one for all if it is stateful."""
    found = (
        _producer(birth, config, source.birth, partition)
        for source in sources
        if partition < source.spec.partitions
    )
    return tuple(dict.fromkeys(found))


def _producer(birth: str, config: JobConfig, input_birth: str, partition: int) -> str:
    return producer_of(
        job_birth=birth,
        kind=config.kind,
        lineage=config.lineage,
        input_birth=input_birth,
        partition=partition,
    )
