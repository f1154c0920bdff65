"""I7: concurrent writes of a job happen one after another, also when clients do not hear what became of them.

8 clients, 300 calls on three jobs, with time-outs before and after the commit; each job's history must fit some
order of single calls. The checker itself is checked against histories that fit none.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import OutcomeUnknown, StoreUnavailable, VersionConflict
from penstock.db.database import Database
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_store import JobStore
from tests.builders import a_job
from tests.jobs.asking import asked
from tests.jobs.linearizability import (
    Conflict,
    Op,
    Patch,
    Read,
    State,
    Value,
    Write,
    Written,
    is_linearizable,
    run,
)
from tests.jobs.mutants import ForgetsKeys, IgnoresVersions, PatchesWhatItSawBefore, ReadsAreOld

CLIENTS, CALLS = 8, 300
HISTORIES_MIN = 10  # in a plain run; `--seeds 50` asks for all


class Faults(threading.local):
    """Time-outs of this thread's writes, before and after the commit; none unless it has a source of chance."""

    rng: random.Random | None = None

    def __call__(self, point: str) -> None:
        if self.rng is None:
            return
        if point == "committed" and self.rng.random() < 0.12:
            raise OutcomeUnknown("timed out", why="a test", fix="repeat")
        if point == "commit" and self.rng.random() < 0.06:
            raise OutcomeUnknown("timed out", why="a test", fix="repeat")
        if point == "begin" and self.rng.random() < 0.03:
            raise StoreUnavailable("not there", why="a test", fix="repeat")


class Store:
    """One store with two services on it, as two control planes would have."""

    def __init__(self, place: Path | str, kind: type[JobService] = JobService) -> None:
        self.faults = Faults()
        self._databases = [Database(place, fault=self.faults) for _ in range(2)]
        self.services = [kind(JobStore(database)) for database in self._databases]

    def close(self) -> None:
        for database in self._databases:
            database.close()


class Clients:
    """Concurrent clients of one store on jobs of their own, and what they saw."""

    def __init__(self, store: Store, seed: int) -> None:
        self._store, self._seed, self._moments = store, seed, itertools.count()
        self._jobs = [f"demo{seed}.{name}" for name in "abc"]
        self.ops: dict[str, list[Op]] = {job: [] for job in self._jobs}
        self.outcomes: Counter[str] = Counter()
        for job in self._jobs:
            a_job(store.services[0], job)

    def run(self) -> None:
        barrier = threading.Barrier(CLIENTS)
        errors: list[BaseException] = []

        def client(number: int) -> None:
            barrier.wait()
            try:
                self._client(number, random.Random(f"{self._seed}/{number}"))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def is_linearizable(self) -> bool:
        return all(is_linearizable(ops, State(1, ())) for ops in self.ops.values())

    def _client(self, number: int, rng: random.Random) -> None:
        service = self._store.services[number % 2]
        known = dict.fromkeys(self._jobs, 1)
        for call in range(CALLS // CLIENTS + (number < CALLS % CLIENTS)):
            job, dice = rng.choice(self._jobs), rng.random()
            request: Read | Write | Patch = Read()
            if dice > 0.7:
                request = Patch(rng.choice(["threads", "task_count"]), rng.randrange(1, 6))
            elif dice > 0.35:
                request = Write(known[job], (("threads", rng.randrange(1, 6)),))
            began = next(self._moments)
            result = self._ask(service, job, request, f"{self._seed}/{number}/{call}", rng)
            ended = inf if result is None else next(self._moments)
            self.ops[job].append(Op(began, ended, request, result))
            match result:
                case State(version=version) | Written(version=version) | Conflict(actual=version):
                    known[job] = max(known[job], version)
            self.outcomes[type(result).__name__] += 1

    def _ask(self, service: JobService, job: str, request: Any, key: str, rng: random.Random) -> Any:
        """The answer, after repeats with the same key; None if the client gives up without one."""
        while True:
            self._store.faults.rng = None if isinstance(request, Read) else rng
            try:
                return self._once(service, job, request, key)
            except VersionConflict as error:
                return Conflict(error.actual)
            except StoreUnavailable:
                self.outcomes["timed out"] += 1
                if rng.random() < 0.3:
                    return None
            finally:
                self._store.faults.rng = None

    def _once(self, service: JobService, job: str, request: Any, key: str) -> State | Written:
        ask = asked(Actor(name="olga", role="oncall"), key)
        match request:
            case Read():
                view = service.view(job)
                body = next((row.body for row in view.layers if row.layer == "oncall"), {})
                return State(view.expected_version, tuple(sorted(body.items())))
            case Write(expected=expected, value=value):
                return Written(
                    service.write_layer(job, "oncall", dict(value), expected_version=expected, **ask)
                )
            case _:
                return Written(service.patch_layer(job, "oncall", {request.field: request.number}, **ask))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_every_history_fits_some_order_of_single_calls(
    store: str, tmp_path: Path, request: pytest.FixtureRequest, seed_count: int
) -> None:
    place = tmp_path / "store.db" if store == "sqlite" else request.getfixturevalue("postgres").new_database()
    shared = Store(place)
    outcomes: Counter[str] = Counter()
    histories = max(HISTORIES_MIN, seed_count)
    for seed in range(histories):
        clients = Clients(shared, seed)
        clients.run()
        assert sum(map(len, clients.ops.values())) == CALLS
        assert clients.is_linearizable(), f"seed {seed} on {store}: {clients.ops}"
        outcomes += clients.outcomes
    shared.close()
    # A history in which nothing happens proves nothing.
    least = {"Written": 60, "State": 50, "Conflict": 10, "timed out": 15, "NoneType": 3}
    rare = {name: outcomes[name] for name, count in least.items() if outcomes[name] < count * histories}
    assert not rare, outcomes


@pytest.mark.parametrize("mutant", [ForgetsKeys, IgnoresVersions, ReadsAreOld, PatchesWhatItSawBefore])
def test_a_planted_bug_is_found(mutant: type[JobService], tmp_path: Path) -> None:
    store = Store(tmp_path / "store.db", mutant)
    found = False
    for seed in range(10):
        clients = Clients(store, seed)
        clients.run()
        found = not clients.is_linearizable()
        if found:
            break
    store.close()
    assert found, mutant.__name__


# --- the checker


def op(call: float, end: float, request: Any, result: Any) -> Op:
    return Op(call, end, request, result)


def value(**fields: int) -> Value:
    return tuple(sorted(fields.items()))


START = State(1, ())
A, B = value(a=1), value(b=2)


@pytest.mark.parametrize(
    "ops",
    [
        [],
        [op(0, 1, Read(), START)],
        # Concurrent: the read may see either side of the write.
        [op(0, 9, Write(1, A), Written(2)), op(1, 2, Read(), START), op(3, 4, Read(), State(2, A))],
        # Two at once on one version: one of them loses, and sees the other's version.
        [op(0, 9, Write(1, A), Written(2)), op(0, 9, Write(1, B), Conflict(2))],
        # An open write that happened, late; and one that never did.
        [op(0, inf, Write(1, A), None), op(1, 2, Read(), START), op(3, 4, Read(), State(2, A))],
        [op(0, inf, Write(1, A), None), op(1, 2, Write(1, B), Written(2)), op(3, 4, Read(), State(2, B))],
        [op(0, inf, Patch("a", 1), None), op(5, 6, Patch("b", 2), Written(3))],
        [op(0, 9, Patch("a", 1), Written(3)), op(1, 8, Patch("b", 2), Written(2))],
    ],
)
def test_histories_that_fit_are_accepted(ops: list[Op]) -> None:
    assert is_linearizable(ops, START)


@pytest.mark.parametrize(
    "ops",
    [
        # Something nobody wrote.
        [op(0, 1, Read(), State(2, A))],
        # An old value after a newer one was acknowledged.
        [op(0, 1, Write(1, A), Written(2)), op(2, 3, Read(), START)],
        # Back in time between two reads.
        [
            op(0, 9, Write(1, A), Written(2)),
            op(1, 2, Read(), State(2, A)),
            op(3, 4, Read(), START),
        ],
        # Two winners on one version.
        [op(0, 9, Write(1, A), Written(2)), op(0, 9, Write(1, B), Written(2))],
        # A winner on a version that was gone.
        [op(0, 1, Write(1, A), Written(2)), op(2, 3, Write(1, B), Written(3))],
        # A lost update: the patch overwrote what it had not seen.
        [
            op(0, 1, Patch("a", 1), Written(2)),
            op(2, 3, Patch("b", 2), Written(3)),
            op(4, 5, Read(), State(3, B)),
        ],
        # Done twice: two versions for one patch, acknowledged or open.
        [op(0, 1, Patch("a", 1), Written(3))],
        [op(0, inf, Patch("a", 1), None), op(1, 2, Read(), State(3, A))],
        # Refused although nobody was first, and refused with a version nobody made.
        [op(0, 1, Write(1, A), Conflict(1))],
        [op(0, 9, Write(1, A), Written(2)), op(0, 9, Write(1, B), Conflict(3))],
        # An open write that took effect before it was called.
        [op(0, 1, Read(), State(2, A)), op(2, inf, Write(1, A), None)],
    ],
)
def test_histories_that_fit_no_order_are_rejected(ops: list[Op]) -> None:
    assert not is_linearizable(ops, START)


requests = st.one_of(
    st.just(Read()),
    st.builds(Write, st.integers(1, 4), st.sampled_from([A, B])),
    st.builds(Patch, st.sampled_from("ab"), st.integers(1, 2)),
)


@given(st.lists(requests, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_the_checker_agrees_with_trying_every_order(asked_for: list[Any], rng: random.Random) -> None:
    """Plan: a true history, stretched over time, some outcomes left open, and sometimes one result spoilt."""
    ops, state = [], START
    for moment, request in enumerate(asked_for):
        happens = rng.random() > 0.15
        after, result = run(state, request) if happens else (state, None)
        state = after
        is_open = not happens or (not isinstance(request, Read) and rng.random() < 0.2)
        call, end = moment - rng.random() * 3, moment + rng.random() * 3
        ops.append(Op(call, inf if is_open else end, request, None if is_open else result))
    assert is_linearizable(ops, START)
    if ops and rng.random() < 0.7:
        number = rng.randrange(len(ops))
        spoilt = rng.choice([State(2, A), State(3, B), Written(2), Written(4), Conflict(2), START])
        ops[number] = Op(ops[number].call, ops[number].call + 1, ops[number].request, spoilt)
    assert is_linearizable(ops, START) == fits_by_brute_force(ops)


def fits_by_brute_force(ops: list[Op]) -> bool:
    """Every subset of the open ones, in every order."""
    closed = [item for item in ops if item.result is not None]
    opened = [item for item in ops if item.result is None]
    for count in range(len(opened) + 1):
        for chosen in itertools.combinations(opened, count):
            for order in itertools.permutations([*closed, *chosen]):
                if _respects_time(order) and _gives_results(order):
                    return True
    return False


def _respects_time(order: tuple[Op, ...]) -> bool:
    return all(
        later.end >= earlier.call for number, earlier in enumerate(order) for later in order[number + 1 :]
    )


def _gives_results(order: tuple[Op, ...]) -> bool:
    state = START
    for item in order:
        state, result = run(state, item.request)
        if item.result is not None and item.result != result:
            return False
    return True
