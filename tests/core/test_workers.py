"""Work beside the rounds: parallel across keys, serial within one, and a piece that hangs costs nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from penstock.core.loop import WorkerThreads
from penstock.core.workers import InlineWorkers, Now, Workers
from tests.waiting import LIMIT_S, until


@dataclass
class SettableClock:
    ms: int = 0

    def now_ms(self) -> int:
        return 1_000_000 + self.ms

    def boot_ms(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def threads(clock: SettableClock) -> Iterator[WorkerThreads[str]]:
    workers: WorkerThreads[str] = WorkerThreads("test", clock, size=2, threads_max=4, stuck_after_ms=60_000)
    yield workers
    workers.stop()


def results(workers: Workers[str], count: int) -> dict[str, str | None]:
    found: dict[str, str | None] = {}

    def all_there() -> bool:
        found.update({finished.key: finished.result for finished in workers.take_finished()})
        return len(found) == count

    until(all_there)
    return found


def test_inline_work_is_over_when_it_was_started() -> None:
    workers: InlineWorkers[str] = InlineWorkers()
    workers.start("a", lambda now: f"at {now()}", 7)
    assert workers.busy() == frozenset() and workers.stuck() == ()
    assert [(item.key, item.result) for item in workers.take_finished()] == [("a", "at 7")]
    assert workers.take_finished() == (), "a result is given out once"


def test_an_error_of_inline_work_goes_to_whoever_started_it() -> None:
    def fail(now: Now) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        InlineWorkers[str]().start("a", fail, 0)


def test_threads_give_every_result_once_and_tell_work_the_time(threads: WorkerThreads[str]) -> None:
    for number in range(20):
        threads.start(f"k{number}", lambda now, number=number: f"{number} at {now()}", 0)
    assert results(threads, 20) == {f"k{number}": f"{number} at 1000000" for number in range(20)}
    assert threads.busy() == frozenset() and threads.take_finished() == ()


def test_work_of_two_keys_runs_side_by_side(threads: WorkerThreads[str]) -> None:
    both = threading.Barrier(2)
    for key in "ab":
        threads.start(key, lambda now: str(both.wait(LIMIT_S) >= 0), 0)
    assert results(threads, 2) == {"a": "True", "b": "True"}


def test_a_key_stays_busy_until_its_work_is_over(threads: WorkerThreads[str]) -> None:
    release = threading.Event()
    threads.start("a", lambda now: str(release.wait(LIMIT_S)), 0)
    assert threads.busy() == {"a"}
    with pytest.raises(AssertionError):
        threads.start("a", lambda now: "twice at once", 0)
    release.set()
    assert results(threads, 1) == {"a": "True"}
    threads.start("a", lambda now: "again", 0)
    assert results(threads, 1) == {"a": "again"}


def test_an_error_nobody_expected_is_given_out_and_costs_no_worker(threads: WorkerThreads[str]) -> None:
    def fail(now: Now) -> str:
        raise ZeroDivisionError("a bug")

    for key in "abc":  # more than there are workers
        threads.start(key, fail, 0)
    found = {}

    def all_there() -> bool:
        found.update({finished.key: finished for finished in threads.take_finished()})
        return len(found) == 3

    until(all_there)
    assert all(isinstance(found[key].error, ZeroDivisionError) and found[key].result is None for key in "abc")
    threads.start("d", lambda now: "fine", 0)
    assert results(threads, 1) == {"d": "fine"}


def hang(threads: WorkerThreads[str], *keys: str) -> threading.Event:
    release = threading.Event()
    entered = threading.Semaphore(0)

    def wait(now: Now) -> str:
        entered.release()
        release.wait(LIMIT_S)
        return "late"

    for key in keys:
        threads.start(key, wait, 0)
    for _ in keys:
        assert entered.acquire(timeout=LIMIT_S)
    return release


def test_hanging_work_is_written_off_and_replaced_and_its_late_result_still_counts(
    threads: WorkerThreads[str], clock: SettableClock
) -> None:
    """Both workers hang: after the limit others take their places; the hanging keys stay busy until they return."""
    release = hang(threads, "a", "b")
    threads.start("c", lambda now: "waited", 0)
    clock.ms = 59_999
    assert threads.stuck() == () and threads.take_finished() == ()
    clock.ms = 60_000
    assert {(item.key, item.for_ms) for item in threads.stuck()} == {("a", 60_000), ("b", 60_000)}
    assert results(threads, 1) == {"c": "waited"}
    assert threads.busy() == {"a", "b"}
    release.set()
    assert results(threads, 2) == {"a": "late", "b": "late"}
    assert threads.stuck() == ()
    until(lambda: threads._threads == 2)  # those that came back are too many now


def test_there_are_never_more_threads_than_the_limit(
    threads: WorkerThreads[str], clock: SettableClock
) -> None:
    release = hang(threads, "a", "b")
    clock.ms = 60_000
    threads.stuck()
    second = hang(threads, "c", "d")
    clock.ms = 120_000
    assert len(threads.stuck()) == 4
    threads.start("e", lambda now: "at last", 0)
    assert threads._threads == 4 and threads.take_finished() == ()
    release.set()
    assert results(threads, 3) == {"a": "late", "b": "late", "e": "at last"}
    second.set()
    assert results(threads, 2) == {"c": "late", "d": "late"}


def test_stopping_does_not_wait_for_what_hangs(clock: SettableClock) -> None:
    workers: WorkerThreads[str] = WorkerThreads("test", clock, size=1, stuck_after_ms=1)
    release = hang(workers, "a")
    workers.start("b", lambda now: "never begun", 0)
    workers.stop(timeout_ms=50)
    assert workers.busy() >= {"a"}, "nobody released it, and the stop is over"
    release.set()
    until(lambda: workers._threads == 0)
    assert [item.key for item in workers.take_finished()] == ["a"]
