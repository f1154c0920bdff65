"""Does a history of concurrent calls fit some order of single calls? A search after Wing and Gong, with a memory.

A history is of one job: `Op`s with the moments of call and return. An op whose outcome stayed open may have
happened at any moment after its call, or never.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

Value = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class State:
    """What one job says: its version, and its oncall layer."""

    version: int
    value: Value


@dataclass(frozen=True, slots=True)
class Read:
    """Sees version and value."""


@dataclass(frozen=True, slots=True)
class Write:
    """Replaces the value if the version is still the one decided on."""

    expected: int
    value: Value


@dataclass(frozen=True, slots=True)
class Patch:
    """Sets one field, whatever the version is."""

    field: str
    number: int


@dataclass(frozen=True, slots=True)
class Written:
    """A write was done, and made this version."""

    version: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """A write came too late, and saw this version."""

    actual: int


@dataclass(frozen=True, slots=True)
class Op:
    """One call of one client. Without a result its outcome stayed open."""

    call: float
    end: float
    request: Read | Write | Patch
    result: State | Written | Conflict | None


def run(state: State, request: Read | Write | Patch) -> tuple[State, Any]:
    """What one call alone does: the state after it, and its answer."""
    match request:
        case Read():
            return state, state
        case Write(expected=expected) if expected != state.version:
            return state, Conflict(state.version)
        case Write(value=value):
            after = State(state.version + 1, value)
        case Patch(field=field, number=number):
            after = State(state.version + 1, tuple(sorted({**dict(state.value), field: number}.items())))
    return after, Written(after.version)


def is_linearizable(ops: Sequence[Op], initial: State) -> bool:
    """Whether some order of the ops, in which none comes before one that ended before its call, gives all results."""
    ordered = sorted(ops, key=lambda op: op.call)
    wanted = sum(1 << number for number, op in enumerate(ordered) if op.result is not None)
    seen: set[tuple[int, State]] = set()
    stack = [(0, initial)]
    while stack:
        done, state = stack.pop()
        if done & wanted == wanted:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        stack.extend(_next(ordered, done, state))
    return False


def _next(ordered: Sequence[Op], done: int, state: State) -> list[tuple[int, State]]:
    """Each op that may come next, and the state after it."""
    pending, first_end = [], inf
    for number, op in enumerate(ordered):
        if op.call > first_end:
            break  # something that is not done yet had ended before this was called
        if not done >> number & 1:
            pending.append(number)
            if op.result is not None:
                first_end = min(first_end, op.end)
    found = []
    for number in pending:
        op = ordered[number]
        if op.call > first_end:
            continue
        after, result = run(state, op.request)
        if op.result == result or (op.result is None and after != state):
            found.append((done | 1 << number, after))
    return found
