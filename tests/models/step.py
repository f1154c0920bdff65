"""Can two lives of one interval, or two attempts of one batch, lose or double an effect? A model of the step.

Three records: 0 touches key a, 1 touches the keys a and b, 2 is filtered out. Container A (assignment 1, two
workers) owns the interval first, container B (assignment 2, one worker) is its successor; nobody tells A to
stop. A row write sets the rows of the touched keys to what the attempt computed from its snapshot, as a real
one does. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

RECORDS = 3
WORKERS_OF = ((0, 1), (2,))
DRIVER_OF = (0, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All True is the protocol; each one can be taken away."""

    acquire_counts_token: bool = True  # taking the interval issues a new token
    acquire_compares_assignment: bool = True  # an older assignment cannot take it back
    token_checked_in_write: bool = True  # not only when the snapshot is read
    token_must_equal: bool = True  # not: any token that was ever issued
    row_locked: bool = True  # check and write are one transaction on a locked row
    version_checked: bool = True  # the write is refused when somebody wrote since the snapshot
    committed_records_skipped: bool = True  # records below the committed offset are not applied again
    start_above_refused: bool = True  # a range that begins above the committed offset is a named error
    position_is_planned_end: bool = True  # not: one past the last record that came through the filter
    cache_carries_version: bool = True  # a worker's cached state is used only at the version it was read at
    cache_carries_token: bool = True  # and by the life that read it: a restored row counts its versions again


class Effects(NamedTuple):
    """How often each record's effect is in each key's state."""

    a0: int = 0
    a1: int = 0
    b1: int = 0


class Row(NamedTuple):
    """The interval in the row store."""

    assignment: int = 0
    token: int = 0
    version: int = 0
    offset: int = 0
    effects: Effects = Effects()


class Driver(NamedTuple):
    """A container's driver: what it has acquired and the batch it plans."""

    token: int = 0  # 0: has not acquired
    life: int = 0  # which acquire this was, in order; no protocol looks at it
    next_start: int = 0
    batch_end: int = 0  # 0: no batch open
    acquires_left: int = 0


class Attempt(NamedTuple):
    """One try of one batch: launched, then its snapshot read and user code run."""

    driver: Driver
    phase: str = "launched"  # then "ran"; "checked" only without the row lock
    version: int = 0
    effects: Effects = Effects()  # of the touched keys, after user code
    first: int = 0
    position: int = 0


class Cache(NamedTuple):
    """A worker's copy of the states, with where it was taken."""

    token: int
    version: int
    effects: Effects


class State(NamedTuple):
    """Everything: the row, the two drivers, the three workers with their caches, and what we watch."""

    row: Row
    drivers: tuple[Driver, Driver]
    attempts: tuple[Attempt | None, ...] = (None, None, None)
    caches: tuple[Cache | None, ...] = (None, None, None)
    lives: int = 0
    assignment_max: int = 0
    copy: Row | None = None  # an older copy of the row, taken once
    restored: bool = False
    crashes_left: int = 1
    alarmed: bool = False  # a start above the committed offset was refused
    broken: str = ""


class StepModel:
    """Two containers, three workers, one interval."""

    def __init__(self, rules: Rules, *, with_restore: bool = False) -> None:
        self._rules, self._with_restore = rules, with_restore

    def initial(self) -> Iterator[State]:
        """Nobody owns the interval yet."""
        # With restores A's own lives are enough: one start, one crash, one stop by the named error.
        starts = (3, 0) if self._with_restore else (2, 1)
        yield State(Row(), (Driver(acquires_left=starts[0]), Driver(acquires_left=starts[1])))

    def actions(self, state: State) -> Iterator[tuple[str, State]]:
        """Acquire, plan, read, commit; crashes; a row store put back to an older copy."""
        if state.broken:
            return
        for who in (0, 1):
            yield from self._driver_actions(state, who)
        for worker in range(3):
            attempt = state.attempts[worker]
            if attempt is None:
                yield from self._launch(state, worker)
            elif attempt.phase == "launched":
                yield from self._read(state, worker, attempt.driver)
            else:
                yield from self._commit(state, worker, attempt)
        if not self._with_restore:
            return
        if state.copy is None and state.row.token and not state.restored:
            yield "fault: the row store is copied", state._replace(copy=state.row)
        # Only within one life. A copy with an older token would issue a token twice, which no rule on the row
        # alone can tell; the model makes no claim about it.
        if state.copy is not None and state.copy != state.row and state.copy.token == state.row.token:
            yield (
                "fault: the older copy is put back",
                state._replace(row=state.copy, copy=None, restored=True),
            )

    def _driver_actions(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        driver, name = state.drivers[who], "AB"[who]
        if not driver.token:
            if driver.acquires_left:
                yield f"{name} acquires", self._acquire(state, who)
            return
        if state.crashes_left and who == 0:
            crashed = state._replace(drivers=_put(state.drivers, who, _stopped(driver)), crashes_left=0)
            yield f"fault: driver {name} dies, its workers go on", crashed
        if not driver.batch_end:
            ends = list(range(driver.next_start + 1, RECORDS + 1))
            # A step runs at every trigger; an empty range is of interest only when the row stands elsewhere.
            if not ends and state.row.offset != driver.next_start:
                ends = [RECORDS]
            for end in ends:
                planned = driver._replace(batch_end=end)
                yield (
                    f"{name} plans [{driver.next_start}, {end})",
                    state._replace(drivers=_put(state.drivers, who, planned)),
                )

    def _acquire(self, state: State, who: int) -> State:
        row, driver = state.row, state.drivers[who]
        spent = driver._replace(acquires_left=driver.acquires_left - 1)
        assignment = who + 1
        if self._rules.acquire_compares_assignment and assignment < row.assignment:
            return state._replace(drivers=_put(state.drivers, who, spent))
        token = row.token + 1 if self._rules.acquire_counts_token else max(row.token, 1)
        owner = spent._replace(token=token, life=state.lives + 1, next_start=row.offset, batch_end=0)
        return state._replace(
            row=row._replace(assignment=assignment, token=token),
            drivers=_put(state.drivers, who, owner),
            lives=state.lives + 1,
            assignment_max=max(state.assignment_max, assignment),
        )

    def _launch(self, state: State, worker: int) -> Iterator[tuple[str, State]]:
        driver = state.drivers[DRIVER_OF[worker]]
        if driver.batch_end:
            launched = _put(state.attempts, worker, Attempt(driver))
            yield (
                f"worker {worker} of {'AB'[DRIVER_OF[worker]]} is launched",
                state._replace(attempts=launched),
            )

    def _read(self, state: State, worker: int, driver: Driver) -> Iterator[tuple[str, State]]:
        who, row = DRIVER_OF[worker], state.row
        idle = state._replace(attempts=_put(state.attempts, worker, None))
        label = f"worker {worker} of {'AB'[who]} reads for [{driver.next_start}, {driver.batch_end})"
        if row.token != driver.token:
            yield label + " and is fenced", _stop(idle, driver)
            return
        if self._rules.committed_records_skipped and row.offset >= driver.batch_end > driver.next_start:
            yield label + " and finds it done", _close_batch(idle, driver)
            return
        if self._rules.start_above_refused and driver.next_start > row.offset:
            alarmed = _stop(idle, driver)._replace(alarmed=True)
            yield label + " and finds its start above the committed offset", alarmed
            return
        known = self._states_known_to(worker, state)
        first = driver.next_start
        if self._rules.committed_records_skipped:
            first = max(first, row.offset)
        computed, position = self._run_user_code(known, first, driver.batch_end)
        attempt = Attempt(driver, "ran", row.version, computed, first, position)
        yield (
            label,
            state._replace(
                attempts=_put(state.attempts, worker, attempt),
                caches=_put(state.caches, worker, Cache(row.token, row.version, known)),
            ),
        )

    def _states_known_to(self, worker: int, state: State) -> Effects:
        cache, row = state.caches[worker], state.row
        if cache is None or (self._rules.cache_carries_version and cache.version != row.version):
            return row.effects
        if self._rules.cache_carries_token and cache.token != row.token:
            return row.effects
        return cache.effects

    def _run_user_code(self, known: Effects, first: int, end: int) -> tuple[Effects, int]:
        touched = range(first, end)
        computed = Effects(known.a0 + (0 in touched), known.a1 + (1 in touched), known.b1 + (1 in touched))
        last_seen = max((record + 1 for record in touched if record < 2), default=first)
        return computed, end if self._rules.position_is_planned_end else last_seen

    def _commit(self, state: State, worker: int, attempt: Attempt) -> Iterator[tuple[str, State]]:
        rules, row, driver = self._rules, state.row, attempt.driver
        label = f"worker {worker} of {'AB'[DRIVER_OF[worker]]} "
        idle = state._replace(attempts=_put(state.attempts, worker, None))
        if attempt.phase == "checked":
            yield label + "writes", self._write(idle, worker, attempt)
            return
        is_mine = row.token == driver.token if rules.token_must_equal else row.token >= driver.token
        if rules.token_checked_in_write and not is_mine:
            yield label + "is fenced", _stop(idle, driver)
        elif rules.version_checked and row.version != attempt.version:
            # Its twin did it, or the snapshot is too old and must be read again.
            done = row.offset >= driver.batch_end
            yield label + "finds a newer version", _close_batch(idle, driver) if done else idle
        elif not rules.row_locked:
            checked = attempt._replace(phase="checked")
            yield label + "checks", state._replace(attempts=_put(state.attempts, worker, checked))
        else:
            yield label + "commits", self._write(idle, worker, attempt)

    def _write(self, state: State, worker: int, attempt: Attempt) -> State:
        row, new, driver = state.row, attempt.effects, attempt.driver
        touched = range(attempt.first, driver.batch_end)
        old = row.effects
        effects = Effects(
            new.a0 if 0 in touched or 1 in touched else old.a0,
            new.a1 if 0 in touched or 1 in touched else old.a1,
            new.b1 if 1 in touched else old.b1,
        )
        written = row._replace(version=row.version + 1, offset=attempt.position, effects=effects)
        broken = ""
        if DRIVER_OF[worker] + 1 < state.assignment_max:
            broken = "zombie: a commit under an older assignment"
        elif driver.life < state.lives:
            broken = "zombie: a commit of an earlier life"
        caches = _put(state.caches, worker, Cache(driver.token, written.version, effects))
        return _close_batch(state._replace(row=written, caches=caches, broken=broken), driver)

    def violation(self, state: State) -> str | None:
        """No effect twice, none missing below the committed offset, none from an earlier life."""
        effects, offset = state.row.effects, state.row.offset
        if max(effects) > 1:
            return f"doubled: {effects}"
        if (offset > 0 and effects.a0 < 1) or (offset > 1 and min(effects.a1, effects.b1) < 1):
            return f"lost: {effects} at offset {offset}"
        return state.broken or None

    def final_violation(self, state: State) -> str | None:
        """Whatever happened, the successor reads to the end."""
        return None if state.row.offset == RECORDS else f"stuck: at offset {state.row.offset}"


def _put(items: tuple, index: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], item, *items[index + 1 :])


def _stopped(driver: Driver) -> Driver:
    return Driver(acquires_left=driver.acquires_left)


def _stop(state: State, driver: Driver) -> State:
    """The driver that started this attempt stops; a later life of its container does not notice."""
    drivers = tuple(_stopped(one) if one.life == driver.life else one for one in state.drivers)
    return state._replace(drivers=(drivers[0], drivers[1]))


def _close_batch(state: State, driver: Driver) -> State:
    """The batch is done for the driver, if it still waits for it."""
    done = driver._replace(next_start=driver.batch_end, batch_end=0)
    drivers = tuple(done if one == driver else one for one in state.drivers)
    return state._replace(drivers=(drivers[0], drivers[1]))
