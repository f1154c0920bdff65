"""What must fit together in a job's config, beyond the types of its fields. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.jobs.config import JobConfig

ISOLATED_MEMORY_MB_MIN = 1024
# What a command may name in braces; `arguments.<name>` too. A task's container fills them in.
COMMAND_FIELDS = frozenset({"job", "task", "index", "count", "generation", "partitions"})
COMMAND_FIELD = re.compile(r"\{([a-z_]+(?:\.[A-Za-z0-9_.\-]+)?)\}")
# Fields that only a process has, and those that only work on streams has.
PROCESS_FIELDS = frozenset({"command", "environment"})
# What a stateful job may run instead of a user's class.
OPERATORS = frozenset({"aggregate", "combine", "dedup", "join", "partial", "top"})
STREAM_FIELDS = ("package", "partitions", "inputs", "outputs", "plan")


def misfits(config: JobConfig) -> Iterator[str]:
    """Path and reason of each; none: it fits together."""
    rules = {"process": _process_problems, "spark": _query_problems}.get(config.kind, _stream_problems)
    yield from rules(config)


def _stream_problems(config: JobConfig) -> Iterator[str]:
    for name in STREAM_FIELDS:
        if name not in config.model_fields_set or (name == "package" and config.package is None):
            yield f"{name}: Field required"
    if not config.inputs and "inputs" in config.model_fields_set:
        yield f"inputs: a {config.kind} job reads at least one category"
    if len({source.category for source in config.inputs}) < len(config.inputs):
        yield "inputs: a category is there twice"
    branches = [branch.input for branch in config.plan.branches]
    if (branches or len(config.inputs) > 1) and set(branches) != set(range(len(config.inputs))):
        yield "plan.branches: each input needs a branch, and each branch an input"
    if len(config.plan.reads) not in (0, len(config.inputs)):
        yield "plan.reads: there is one list of columns for each input"
    for name in sorted(PROCESS_FIELDS):
        if getattr(config, name):
            yield f"{name}: only a job of kind `process` has one"
    if config.isolation == "process" and config.resources.memory_mb < ISOLATED_MEMORY_MB_MIN:
        yield f"resources.memory_mb: with isolation `process` it is at least {ISOLATED_MEMORY_MB_MIN}"
    computation = config.plan.computation
    if config.kind == "stateful" and not ((computation or {}).get("class") or _operator(computation)):
        yield "a stateful job needs plan.computation with a class"
    if config.kind == "stateless" and computation is not None:
        yield "a stateless job may not have a plan.computation"
    for what in ("stream", "category"):
        names = [getattr(output, what) for output in config.outputs]
        if len(set(names)) < len(names):
            yield f"two outputs have the same {what}"


def _operator(computation: Mapping[str, Any] | None) -> bool:
    return computation is not None and computation.get("operator") in OPERATORS


def _query_problems(config: JobConfig) -> Iterator[str]:
    """A query brought as it is: code and the function that starts it, nothing that only our steps have."""
    if config.package is None:
        yield "package: Field required"
    if not (config.plan.computation or {}).get("function"):
        yield "plan.computation.function: the function that starts the query is needed"
    for name in ("inputs", "outputs", *sorted(PROCESS_FIELDS)):
        if getattr(config, name):
            yield f"{name}: a job of kind `spark` has none, its query reads and writes by itself"
    if config.partitions != 1:
        yield "partitions: a query brought as it is runs as one task"
    if config.plan.stages or config.plan.key or config.plan.branches:
        yield "plan: only `computation` means something to a job of kind `spark`"


def _process_problems(config: JobConfig) -> Iterator[str]:
    if not config.command or not config.command[0]:
        yield "command: a process needs a program to run"
    for name in STREAM_FIELDS:
        value, field = getattr(config, name), type(config).model_fields[name]
        if name != "partitions" and value != field.get_default(call_default_factory=True):
            yield f"{name}: a process has none, it is told its place by its command and environment"
    if config.isolation != "shared":
        yield "isolation: a process is one already"
    known = COMMAND_FIELDS | {f"arguments.{name}" for name in config.arguments}
    for number, part in enumerate(config.command):
        if "\x00" in part:
            yield f"command[{number}]: no program can be given a NUL"
        for field in COMMAND_FIELD.findall(part):
            if field not in known:
                near = difflib.get_close_matches(field, known, n=1)
                hint = f", did you mean {{{near[0]}}}?" if near else ""
                yield f"command[{number}]: {{{field}}} is not one of {', '.join(sorted(known))}{hint}"
    for name in sorted(config.environment):
        if name.startswith("PENSTOCK_"):
            yield f"environment.{name}: names with PENSTOCK_ are for what the container tells the task"
