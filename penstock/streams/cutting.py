"""Which jobs a checked graph becomes: cut where records of a key must come together (Turbine II). Pure.

Between two cuts everything runs in one job, in one pass. A job reads and carries only what somebody uses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.core.errors import PipelineError
from penstock.streams.bus.log import LOW_COLUMN, has_dead_letters
from penstock.streams.compiled import (
    Branch,
    CompiledJob,
    JobInput,
    Output,
    PackageRef,
    SelectStage,
    Stage,
)
from penstock.streams.graph import (
    DEFAULT_STREAM,
    Aggregate,
    Columns,
    Dedup,
    Edge,
    Join,
    KeyBy,
    Process,
    Sink,
    Source,
    Stateful,
    Step,
    Union,
    Window,
)
from penstock.streams.kept_shape import operator_shape
from penstock.streams.keyed_jobs import computation_json, put_aside
from penstock.streams.optimize import Rewrite, needs_shuffle
from penstock.streams.roads import Path, Road, plain_steps, without_keys
from penstock.streams.schemas import Schemas, key_columns
from penstock.streams.stages import argument_stage, build_stages, names_of, needed_before, side_stage
from penstock.streams.step import DEAD_COLUMNS, dead_stream


class Cutter:
    """Cuts one graph; each question is asked of the graph."""

    def __init__(self, schemas: Schemas, package: PackageRef) -> None:
        self._schemas, self._graph, self._package = schemas, schemas.graph, package
        self._keys = [step for step in self._graph.steps if isinstance(step, KeyBy)]
        self._cuts = frozenset(step.name for step in self._keys if needs_shuffle(self._graph, step))
        self._shuffles: dict[str, Output] = {}  # found so far

    def jobs(self) -> tuple[CompiledJob, ...]:
        """Writers before readers."""
        found = []
        for step in self._graph.ordered():
            if isinstance(step, KeyBy) and step.name in self._cuts:
                found.append(self._shuffle_job(step))
            elif isinstance(step, Stateful):
                found.append(self._stateful_job(step))
            elif isinstance(step, Sink) and not self._is_direct(step):
                found.append(self._sink_job(step))
        return tuple(found)

    def notes(self, jobs: Sequence[CompiledJob]) -> Iterator[Rewrite]:
        """What cutting saved, for people."""
        for key in self._keys:
            if key.name not in self._cuts:
                reason = (
                    "nothing behind it needs the records of a key together: whoever writes them places them"
                )
                yield Rewrite(rule="drop shuffle", steps=(key.name,), reason=reason)
        for step in self._graph.steps:
            if isinstance(step, Source):
                there, category = self._schemas.sources[step.name].columns, step.category
            elif isinstance(step, KeyBy) and step.name in self._cuts:
                there = self._schemas.columns[step.name, DEFAULT_STREAM]
                category = self._shuffle_output(step).category
            else:
                continue
            used = {
                name for job in jobs for one in job.inputs if one.category == category for name in one.reads
            }
            if unused := [name for name, _ in there if name not in used]:
                doing = "decoded" if isinstance(step, Source) else "written"
                reason = f"nobody reads {', '.join(unused)}, so it is not {doing}"
                yield Rewrite(rule="prune columns", steps=(step.name,), reason=reason)
        for job in jobs:
            if len(job.steps) > 2:
                reason = f"one pass over the records, in job {job.name}"
                yield Rewrite(rule="fuse", steps=job.steps, reason=reason)

    # --- the three kinds of jobs

    def _shuffle_job(self, step: KeyBy) -> CompiledJob:
        output = self._shuffle_output(step)
        road = self._road(self._graph.input_of(step.name), _own(output))
        key = self._schemas.keys[step.name].text
        return replace(self._stateless(step, without_keys(road), output, key), spread=step.spread)

    def _sink_job(self, step: Sink) -> CompiledJob:
        output = self._sink_output(step)
        road, key = self._with_last_key(self._road(self._graph.input_of(step.name), output.columns))
        return self._stateless(step, road, output, key)

    def _stateless(self, end: Step, road: Road, output: Output, key: str | None) -> CompiledJob:
        inputs = self._inputs([road])
        branches: tuple[Branch, ...] = ()
        if len(road.paths) == 1:
            (path,) = road.paths
            start = self._read_columns(path, inputs)
            stages = build_stages(self._schemas, (*path.steps, *road.common), start, road.kept)
        else:
            together = self._together(road)
            branches = tuple(self._branch(path, inputs, together) for path in road.paths)
            stages = build_stages(self._schemas, road.common, together, road.kept)
        sources = [path.origin.name for path in road.paths if isinstance(path.origin, Source)]
        return CompiledJob(
            name=self._job_name(end),
            pipeline=self._graph.name,
            kind="stateless",
            package=self._package,
            inputs=inputs,
            branches=branches,
            stages=stages,
            key=key,
            computation=None,
            late="process",  # a late record keeps its flag; the computation that reads it decides
            outputs=(output, *self._dead_letters(road, inputs)),
            steps=(*dict.fromkeys(sources), *road.crossed, end.name),
        )

    def _stateful_job(self, step: Stateful) -> CompiledJob:
        edges = self._graph.inputs_of(step.name)
        roads = [self._road(edge, self._kept(step, edge)) for edge in edges]
        inputs = self._inputs(roads)
        sinks = [edge.target for edge in self._graph.readers_of(step.name)]
        branches: tuple[Branch, ...] = ()
        stages: tuple[Stage, ...] = ()
        if isinstance(step, Process) and len(roads) > 1:
            branches = self._side_by_side(step, roads, inputs)
        elif isinstance(step, Join):
            branches = tuple(
                replace(branch, stages=(*branch.stages, side_stage(side, [road.kept for road in roads])))
                for side, road in enumerate(roads)
                for branch in [self._branch(road.paths[0], inputs, road.kept, road.common)]
            )
        else:
            ((path,), common) = roads[0].paths, roads[0].common
            start = self._read_columns(path, inputs)
            stages = build_stages(self._schemas, (*path.steps, *common), start, roads[0].kept)
            if isinstance(step, Aggregate) and step.phase != "combine":
                stages = (*stages, *argument_stage(self._schemas, step.name))
        return CompiledJob(
            name=self._job_name(step),
            pipeline=self._graph.name,
            kind="stateful",
            package=self._package,
            inputs=inputs,
            branches=branches,
            stages=stages,
            key=None,
            computation=computation_json(step, self._schemas, self._kept),
            late=step.late,
            outputs=(
                *(self._stateful_output(step, stream) for stream, _ in self._streams(step)),
                *put_aside(step, self._job_name(step), self._graph.partitions),
            ),
            settings=dict(step.settings) if isinstance(step, Process) else {},
            steps=(
                *(name for road in roads for name in road.crossed),
                step.name,
                *(name for name in sinks if self._is_direct(self._graph.step(name))),
            ),
        )

    def _side_by_side(
        self, step: Process, roads: Sequence[Road], inputs: Sequence[JobInput]
    ) -> tuple[Branch, ...]:
        """One branch for each input of a computation: all columns of all inputs, null where it has none."""
        if len(inputs) < len(roads):
            raise PipelineError(
                f"{step.place}: two inputs of step {step.name!r} come from the same shuffle",
                why="they are the same records under the same key, and could not be told apart",
                fix="make one stream of them, with a column that tells them apart",
            )
        together = dict(column for road in roads for column in road.kept)
        found = []
        for road in roads:
            own, branch = dict(road.kept), self._branch(road.paths[0], inputs, road.kept, road.common)
            if own != together:
                columns = tuple(
                    (name, f"`{name}`" if name in own else f"CAST(NULL AS {kind})", kind)
                    for name, kind in together.items()
                )
                branch = replace(branch, stages=(*branch.stages, SelectStage(columns=columns)))
            found.append(branch)
        return tuple(found)

    # --- roads

    def _road(self, edge: Edge, kept: Columns) -> Road:
        paths = list(self._paths(edge))
        longest = paths[0].steps  # all share what is behind the last union
        unions = [number for number, step in enumerate(longest) if isinstance(step, Union)]
        behind = len(longest) - unions[-1] - 1 if unions else 0
        crossed = {step.name for path in paths for step in path.steps}
        return Road(
            paths=tuple(
                Path(origin=p.origin, stream=p.stream, steps=plain_steps(p.steps, behind)) for p in paths
            ),
            union=longest[unions[-1]].name if unions else None,
            common=plain_steps(longest[len(longest) - behind :], 0),
            kept=kept,
            crossed=tuple(step.name for step in self._graph.ordered() if step.name in crossed),
        )

    def _paths(self, edge: Edge) -> Iterator[Path]:
        step = self._graph.step(edge.source)
        if isinstance(step, Source | Stateful) or (isinstance(step, KeyBy) and step.name in self._cuts):
            yield Path(origin=step, stream=edge.stream, steps=())
            return
        for before in self._graph.inputs_of(step.name):
            for path in self._paths(before):
                yield Path(origin=path.origin, stream=path.stream, steps=(*path.steps, step))

    def _with_last_key(self, road: Road) -> tuple[Road, str | None]:
        """The key of a sink's records: computed at the end if its columns are there, else on the way."""
        steps = (*(road.paths[0].steps if len(road.paths) == 1 else ()), *road.common)
        keys = [number for number, step in enumerate(steps) if isinstance(step, KeyBy)]
        if not keys:
            return road, None
        last = steps[keys[-1]]
        key = self._schemas.keys[last.name]
        if self._schemas.passes(key.columns, steps[keys[-1] :]):
            return without_keys(road), key.text
        return without_keys(road, except_for=last), None

    def _together(self, road: Road) -> Columns:
        """The columns of a union that are used behind it."""
        assert road.union is not None, "several paths come together in a union"
        there = self._schemas.columns[road.union, DEFAULT_STREAM]
        needed = needed_before(self._schemas, road.common, names_of(road.kept))
        return tuple(column for column in there if column[0] in needed) or there[:1]

    def _branch(
        self, path: Path, inputs: Sequence[JobInput], kept: Columns, common: tuple[Step, ...] = ()
    ) -> Branch:
        number = [source.category for source in inputs].index(self._category(path)[0])
        start = self._read_columns(path, inputs)
        return Branch(input=number, stages=build_stages(self._schemas, (*path.steps, *common), start, kept))

    def _inputs(self, roads: Sequence[Road]) -> tuple[JobInput, ...]:
        """Each category once, with the columns that any branch reads."""
        found: dict[str, JobInput] = {}
        for road in roads:
            for path in road.paths:
                category, partitions = self._category(path)
                needed = self._needed(road, path)
                there = self._category_columns(path)
                before = found.get(category)
                start = path.origin.start if isinstance(path.origin, Source) else "earliest"
                if before is not None:
                    _check_start(path.origin, before, start)
                    needed |= set(before.reads)
                reads = tuple(name for name, _ in there if name in needed) or (there[0][0],)
                is_outside = isinstance(path.origin, Source)
                found[category] = JobInput(
                    category=category,
                    partitions=partitions,
                    start=start,
                    reads=reads,
                    writer="" if is_outside else self._job_name(path.origin),
                )
        return tuple(found.values())

    def _needed(self, road: Road, path: Path) -> frozenset[str]:
        kept = names_of(road.kept if len(road.paths) == 1 else self._together(road))
        steps = (*path.steps, *road.common) if len(road.paths) == 1 else path.steps
        needed = needed_before(self._schemas, steps, kept)
        if isinstance(path.origin, Source):
            spec = self._schemas.sources[path.origin.name]
            if spec.format != "typed" and spec.ts_column:
                needed |= {spec.ts_column}  # the record's event time
        return needed

    def _read_columns(self, path: Path, inputs: Sequence[JobInput]) -> Columns:
        category, _ = self._category(path)
        reads = next(source.reads for source in inputs if source.category == category)
        return tuple(column for column in self._category_columns(path) if column[0] in reads)

    def _category_columns(self, path: Path) -> Columns:
        if isinstance(path.origin, KeyBy):
            return _own(self._shuffle_output(path.origin))
        return self._schemas.columns[path.origin.name, path.stream]

    def _category(self, path: Path) -> tuple[str, int]:
        """Name and partitions of the category a path begins with."""
        match path.origin:
            case Source() as source:
                return source.category, self._schemas.sources[source.name].partitions
            case KeyBy() as step:
                output = self._shuffle_output(step)
            case _ as step:
                output = self._stateful_output(step, path.stream)
        return output.category, output.partitions

    # --- what is written

    def _kept(self, end: Step, edge: Edge) -> Columns:
        """What an end uses of a stream it reads."""
        there = self._schemas.at(edge)
        if isinstance(end, KeyBy):
            return _own(self._shuffle_output(end))
        if isinstance(end, Process) and end.wants:
            place = self._graph.inputs_of(end.name).index(edge)
            wanted = dict(dict(end.wants)[end.inputs[place]])
            return tuple(column for column in there if column[0] in wanted)
        if isinstance(end, Aggregate) and end.phase != "combine":
            used = set(key_columns(self._schemas, edge))
            for _, value in self._schemas.summed[end.name]:
                used |= set() if value.argument is None else value.argument.columns
            return tuple(column for column in there if column[0] in used)
        return there

    def _shuffle_output(self, step: KeyBy) -> Output:
        """The internal category of a shuffle: the key's columns and what somebody behind it uses."""
        if step.name in self._shuffles:
            return self._shuffles[step.name]
        key = self._schemas.keys[step.name]
        needed = set(key.columns)
        for end in self._graph.steps:
            if isinstance(end, Sink | Stateful) or end.name in self._cuts:
                for edge in self._graph.inputs_of(end.name):
                    if all(path.origin != step for path in self._paths(edge)):
                        continue
                    road = self._road(edge, self._kept(end, edge))
                    for path in road.paths:
                        if path.origin == step:
                            needed |= self._needed(road, path)
        there = self._schemas.columns[step.name, DEFAULT_STREAM]
        columns = tuple(column for column in there if column[0] in needed) or there[:1]
        if self._says_lows(step):
            columns = (*columns, LOW_COLUMN)
        self._shuffles[step.name] = self._internal(
            step, columns, key.normal + " spread" * step.spread, DEFAULT_STREAM
        )
        return self._shuffles[step.name]

    def _says_lows(self, step: KeyBy) -> bool:
        """True if somebody behind this shuffle must know how late a late record is."""
        for end in self._graph.steps:
            if isinstance(end, Aggregate):
                window = self._graph.step(self._graph.input_of(end.name).source)
                asks = isinstance(window, Window) and window.firing.late == "update"
            else:
                asks = isinstance(end, KeyBy) and end != step and end.name in self._cuts
            reads = asks and any(path.origin == step for path in self._paths(self._graph.input_of(end.name)))
            if reads and (not isinstance(end, KeyBy) or self._says_lows(end)):
                return True
        return False

    def _streams(self, step: Stateful) -> tuple[tuple[str, Columns], ...]:
        if isinstance(step, Process):
            return step.outputs
        return ((DEFAULT_STREAM, self._schemas.columns[step.name, DEFAULT_STREAM]),)

    def _stateful_output(self, step: Stateful, stream: str) -> Output:
        """A sink right behind a stream is its category; whoever else reads the stream reads it there."""
        for edge in self._graph.readers_of(step.name):
            reader = self._graph.step(edge.target)
            if edge.stream == stream and isinstance(reader, Sink):
                return self._sink_output(reader, stream)
        meaning = f"stream {stream}"
        if isinstance(step, Dedup):  # who reads it may rely on the key that it leaves as it is
            keyed, _ = self._graph.key_of(self._graph.input_of(step.name))
            meaning += f" by {self._schemas.keys[keyed.name].normal}" if keyed else ""
        if isinstance(step, Aggregate) and step.phase == "partial":  # its columns do not show what is in them
            meaning += json.dumps(operator_shape(step, self._schemas))
        return self._internal(step, dict(self._streams(step))[stream], meaning, stream)

    def _is_direct(self, step: Step) -> bool:
        """True if a job with state writes this sink itself: the first right behind one of its streams."""
        if not isinstance(step, Sink):
            return False
        edge = self._graph.input_of(step.name)
        producer = self._graph.step(edge.source)
        return isinstance(producer, Stateful) and (
            self._stateful_output(producer, edge.stream).category == step.category
        )

    def _sink_output(self, step: Sink, stream: str = DEFAULT_STREAM) -> Output:
        return Output(
            stream=stream,
            category=step.category,
            partitions=step.partitions or self._graph.partitions,
            columns=self._schemas.into(step.name),
            internal=False,
        )

    def _dead_letters(self, road: Road, inputs: Sequence[JobInput]) -> Iterator[Output]:
        specs = {
            path.origin.category: self._schemas.sources[path.origin.name]
            for path in road.paths
            if isinstance(path.origin, Source)
        }
        for number, source in enumerate(inputs):
            if source.category in specs and has_dead_letters(specs[source.category]):
                # As many partitions as the source: what a category is must not depend on who reads it.
                yield Output(
                    stream=dead_stream(number),
                    category=f"{source.category}.dead",
                    partitions=source.partitions,
                    columns=DEAD_COLUMNS,
                    internal=False,
                )

    def _internal(self, step: Step, columns: Columns, key: str, stream: str) -> Output:
        partitions = self._graph.partitions
        # What the bytes mean is part of the name: a change makes a new category, never mixes with the old.
        meaning = json.dumps([partitions, columns, key, "typed"], separators=(",", ":"))
        name = f"{self._job_name(step)}.{hashlib.sha256(meaning.encode()).hexdigest()[:8]}"
        return Output(stream=stream, category=name, partitions=partitions, columns=columns, internal=True)

    def _job_name(self, step: Step) -> str:
        return f"{self._graph.name}.{step.name}"


def _own(output: Output) -> Columns:
    """The columns that steps know of: not that of the lows, which is beside them."""
    return tuple(column for column in output.columns if column != LOW_COLUMN)


def _check_start(origin: Step, before: JobInput, start: str) -> None:
    if before.start != start:
        raise PipelineError(
            f"{origin.place}: category {before.category!r} is read from two places at once",
            why=f"one source of this job starts at {before.start!r}, this one at {start!r}",
            fix="use one source for both branches",
        )
