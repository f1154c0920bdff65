"""Injectors whose publish was written and not answered: nothing lost, nothing twice, nothing guessed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, EpochUsed, Fenced, StoreUnavailable
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.log import CategorySpec, Log, Published
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.injector import Injector, PublishUnheard, SequencesTaken, dismiss_injector
from tests.contracts.buses import assert_three_parts
from tests.waiting import LIMIT_S

SPEC = CategorySpec(name="in", partitions=4, columns=(("n", "bigint"),), format="json", watermark="injector")
KEYS = [f"key {n}" for n in range(12)]


class Unanswered:
    """A bus that loses the answer to its next publish. `lets` says what of it is written before."""

    def __init__(self, log: Log) -> None:
        self.log, self.lets, self.answers = log, _all, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)

    def lose(self, lets: Callable[[dict[int, Any]], dict[int, Any]]) -> None:
        self.lets, self.answers = lets, False

    def publish(self, category: str, *, batches: Any, **how: Any) -> Published:
        if self.answers:
            return self.log.publish(category, batches=batches, **how)
        self.answers = True
        written = self.lets(dict(batches))
        if written:
            self.log.publish(category, batches=written, **how)
        raise StoreUnavailable("the bus did not answer", why="timed out", fix="try again")


def _all(batches: dict[int, Any]) -> dict[int, Any]:
    return batches


def _none(batches: dict[int, Any]) -> dict[int, Any]:
    return {}


def _some_partitions(batches: dict[int, Any]) -> dict[int, Any]:
    return dict(list(batches.items())[:1])


def _first_records(batches: dict[int, Any]) -> dict[int, Any]:
    return {partition: batch.slice(0, 1) for partition, batch in batches.items()}


@pytest.fixture(params=["memory", "embedded"])
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> Unanswered:
    log: Log = MemoryLog() if request.param == "memory" else EmbeddedLog(tmp_path)
    log.create(SPEC)
    return Unanswered(log)


def send(injector: Injector, first: int, keys: list[str] = KEYS) -> None:
    numbers = range(first, first + len(keys))
    injector.publish(keys, list(numbers), [b'{"n": %d}' % n for n in numbers])


def there(bus: Unanswered) -> list[int]:
    """The event times of everything in the category, which are numbers of records here."""
    return sorted(
        ts
        for partition, end in enumerate(bus.end_offsets("in"))
        for batch in bus.read("in", partition, 0, end)
        for ts in batch.column("_ts").to_pylist()
    )


def lost(bus: Unanswered, injector: Injector, first: int, lets: Any = _all) -> None:
    bus.lose(lets)
    with pytest.raises(StoreUnavailable):
        send(injector, first)


@pytest.mark.parametrize("lets", [_all, _none, _some_partitions, _first_records])
def test_the_same_records_again_are_there_once_however_much_was_written(bus: Unanswered, lets: Any):
    injector = Injector(bus, "in", "me", epoch=1)
    send(injector, 0)
    lost(bus, injector, 12, lets)
    send(injector, 12)
    send(injector, 24)
    assert there(bus) == list(range(36))


@pytest.mark.parametrize("lets", [_all, _none, _some_partitions, _first_records])
def test_other_records_are_refused_by_name_until_the_open_ones_went_through(bus: Unanswered, lets: Any):
    injector = Injector(bus, "in", "me", epoch=1)
    lost(bus, injector, 0, lets)
    before = there(bus)
    for keys in (KEYS, KEYS[:3], KEYS[::-1]):
        with pytest.raises(PublishUnheard, match="12 records") as caught:
            send(injector, 12, keys)
        assert_three_parts(caught.value)
    assert there(bus) == before
    send(injector, 0)
    send(injector, 12)
    assert there(bus) == list(range(24))


def test_an_answer_that_is_lost_twice_changes_nothing(bus: Unanswered):
    injector = Injector(bus, "in", "me", epoch=1)
    lost(bus, injector, 0)
    lost(bus, injector, 0, _none)
    with pytest.raises(PublishUnheard):
        send(injector, 12)
    send(injector, 0)
    assert there(bus) == list(range(12))


def test_records_that_the_bus_refuses_stay_open_for_nothing(bus: Unanswered):
    injector = Injector(bus, "in", "me", epoch=1)
    with pytest.raises(ConfigError):
        injector.publish(["a"], [None], [b"{}"])  # type: ignore[list-item]
    send(injector, 0)
    assert there(bus) == list(range(12))


def test_a_refusal_of_a_repeat_tells_nothing_of_the_attempt_before(bus: Unanswered):
    injector = Injector(bus, "in", "me", epoch=1)
    lost(bus, injector, 0)
    bus.fence("in", "me", 2)
    with pytest.raises(Fenced):
        send(injector, 0)
    with pytest.raises(PublishUnheard):
        send(injector, 12)


def test_the_next_life_goes_on_behind_what_has_arrived(bus: Unanswered):
    lost(bus, Injector(bus, "in", "me", epoch=1), 0)
    send(Injector(bus, "in", "me", epoch=2), 12)
    assert there(bus) == list(range(24))


@pytest.mark.parametrize("again", [1, 0])
def test_a_second_start_with_an_epoch_that_was_used_is_refused_and_doubles_nothing(
    bus: Unanswered, again: int
):
    """A script that sends a file is started twice as it is: before, its 12 records were there 24 times."""
    one = Injector(bus, "in", "me", epoch=1)
    send(one, 0)
    with pytest.raises(EpochUsed, match=f"epoch {again}") as caught:
        send(Injector(bus, "in", "me", epoch=again), 0)
    assert_three_parts(caught.value)
    assert there(bus) == list(range(12))
    send(one, 12)  # the first one goes on
    assert there(bus) == list(range(24))


def test_a_start_that_is_refused_does_not_hold_the_watermark_of_a_dismissed_one(bus: Unanswered):
    Injector(bus, "in", "me", epoch=1)
    dismiss_injector(bus, "in", "me", now_ms=0)
    with pytest.raises(EpochUsed):
        Injector(bus, "in", "me", epoch=1)
    assert bus.producers("in") == {}


def test_two_processes_with_one_epoch_do_not_both_write(tmp_path: Path):
    """As two tills on one machine that were started from the same script."""
    EmbeddedLog(tmp_path).create(SPEC)
    script = """
import sys
from penstock.core.errors import EpochUsed
from penstock.streams.dsl.injector import Injector
from penstock.streams.places import open_log
try:
    till = Injector(open_log(sys.argv[1]), "in", "till-1", epoch=1)
    till.publish(["a", "b", "c"], [1, 2, 3], [b"{}"] * 3)
except EpochUsed:
    print("refused")
"""
    command = [sys.executable, "-c", script, f"embedded:{tmp_path}"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=LIMIT_S)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(said) == ["", "refused"]
    assert sum(EmbeddedLog(tmp_path).end_offsets("in")) == 3


def test_records_that_another_of_the_same_name_pushes_out_are_told_of(bus: Unanswered):
    """Somebody writes to the bus past `Injector`: this one's records would be taken for repeats."""
    other = Injector(bus, "in", "me", epoch=1)
    sent = Unanswered(MemoryLog())
    sent.create(SPEC)
    send(Injector(sent, "in", "me", epoch=1), 0)
    for partition, end in enumerate(sent.end_offsets("in")):
        (batch,) = sent.read("in", partition, 0, end)
        bus.publish("in", producer="me", epoch=1, batches={partition: batch}, gapless=True)
    for _ in range(2):  # also again: it cannot know any more what is whose
        with pytest.raises(SequencesTaken, match="12 records") as caught:
            send(other, 12)
        assert_three_parts(caught.value)
    assert there(bus) == list(range(12))


class TriesTwice(Unanswered):
    """A bus that lost the answer to its own first try, as Kafka's may."""

    def publish(self, category: str, *, batches: Any, **how: Any) -> Published:
        self.log.publish(category, batches=batches, **how)
        again = self.log.publish(category, batches=batches, **how)
        return Published(appended=again.appended, trimmed=again.trimmed, retried=True)


def test_a_bus_that_repeats_by_itself_is_no_other_writer(bus: Unanswered):
    twice = TriesTwice(bus.log)
    injector = Injector(twice, "in", "me", epoch=1)
    send(injector, 0)
    send(injector, 12)
    assert there(twice) == list(range(24))
