"""What strong, weak and not deduplicated productions promise: under a crash at every point, no more and no less."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from penstock import testing
from penstock.core.errors import PipelineError, StoreUnavailable
from penstock.jobs.config import PackageRef, validate_config
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.catalogue import StaticCatalogue, category_from_json
from penstock.streams.compile.drawing import draw_plan
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.dsl.computation import Computation
from penstock.streams.dsl.pipeline import Pipeline
from penstock.streams.dsl.windows import tumbling
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.step.outbox import Sending
from penstock.streams.step.stateful import StatefulStep
from penstock.streams.trial.run import Faults, Schedule
from tests.streams.step_world import REF, SMALL_LOG, CountPerSecond, Points, World, faulty, published


class Weak(CountPerSecond):
    productions = "weak"


class NoDedup(CountPerSecond):
    dedup = "off"


class WeakNoDedup(CountPerSecond):
    productions, dedup = "weak", "off"


def script(run: testing.Run) -> None:
    run.record("a", 100, query="a")
    run.record("b", 300, query="b")
    run.advance_watermark(1000)
    run.record("a", 1100, query="a")
    run.close()


def played(kind: type[Computation], at: int) -> tuple[dict[str, Any], Counter[str], Faults]:
    """What is stored at the end, and the bag of all that was sent, with a crash at a point."""
    run, faults = testing.Run(kind()), Faults(at=at)
    run.prepare(Schedule(), faults)
    script(run)
    sent = Counter(f"{stream} {made}" for stream in kind.outputs for made in run.productions(stream))
    stored = {name: value for name, value in run.result().items() if not name.startswith("stream ")}
    return stored, sent, faults


@pytest.mark.parametrize(
    ("kind", "doubled_after"),
    [
        (CountPerSecond, set()),
        (Weak, {"before rows.commit", "after bus.publish"}),
        (NoDedup, {"after bus.publish"}),
        (WeakNoDedup, {"before rows.commit", "after bus.publish"}),
    ],
)
def test_a_crash_at_every_point_loses_nothing_and_doubles_only_what_was_sent_and_not_yet_stored_as_sent(
    kind: type[Computation], doubled_after: set[str]
) -> None:
    stored, sent, faults = played(kind, -1)
    assert max(sent.values()) == 1 and sum(sent.values()) == 6
    doubled: set[str] = set()
    for at in range(faults.passed):
        state, found, here = played(kind, at)
        assert state == stored, here.where
        assert set(found) == set(sent), f"lost or invented {here.where}"
        if max(found.values()) > 1:
            doubled.add(here.where.rpartition(" (")[0])
    assert doubled == doubled_after


class Listening(Faults):
    """Keeps the order of effects."""

    heard: list[str] = []

    def point(self, where: str) -> None:
        self.heard.append(where)


def test_weak_productions_are_on_the_bus_before_the_commit_and_never_in_the_outbox() -> None:
    run = testing.Run(Weak())
    run.prepare(Schedule(), Listening())
    run.record("a", 100, query="a")
    heard = Listening.heard
    assert heard.index("after bus.publish") < heard.index("before rows.commit")
    assert "after rows.delivered" not in heard


class Slow(MemoryLog):
    """A bus whose every publish takes a second of the step's clock; it may refuse instead."""

    refuses = False
    now = 0

    def publish(self, category: str, **given: Any) -> Any:
        if self.refuses and "~weak" in given["producer"]:
            raise StoreUnavailable("the bus does not answer")
        self.now += 1000
        return super().publish(category, **given)


def a_step(log: Slow, **others: Any) -> tuple[World, StatefulStep]:
    world = World(rows=MemoryRows(), log=log).build(SMALL_LOG)
    token = (world.open(), world.rows.peek(REF).token)[1]
    step = StatefulStep(
        ref=REF,
        token=token,
        rows=world.rows,
        log=log,
        outputs=world.outputs(),
        computation=CountPerSecond(),
        sending=Sending(weak=True, clock=lambda: log.now, **others),
    )
    return world, step


def bag(world: World) -> Counter[str]:
    rows = published(world.log, list(world.columns))
    return Counter(
        str({name: value for name, value in row.items() if name != "_seq"})
        for parts in rows.values()
        for part in parts.values()
        for row in part
    )


def strong() -> Counter[str]:
    world = World(rows=MemoryRows(), log=MemoryLog()).build(SMALL_LOG)
    world.live([100])
    return bag(world)


@pytest.mark.parametrize(
    ("straggler_ms", "refuses"), [(10**9, False), (500, False), (0, False), (10**9, True)]
)
def test_stragglers_are_checkpointed_after_the_delay_and_sent_from_there(
    straggler_ms: int, refuses: bool
) -> None:
    log = Slow()
    world, step = a_step(log, straggler_ms=straggler_ms)
    log.refuses = refuses
    end = log.end_offsets("in")[0]
    world.run(step, 0, end)
    assert bag(world) == strong()
    counted = sum(seq - 1 for seq in world.rows.peek(REF).next_seq.values())
    assert (counted > 0) == (straggler_ms < 10**9 or refuses), "only stragglers went through the outbox"


def test_a_twin_at_every_point_loses_nothing_of_weak_productions() -> None:
    expected, at = set(strong()), 0
    while True:
        world, _ = a_step(Slow(), straggler_ms=10**9)
        twin = faulty(world, Points())
        token = world.rows.peek(REF).token

        def rival(twin: World = twin, token: int = token) -> None:
            StatefulStep(
                ref=REF, token=token, rows=twin.rows, log=twin.log, outputs=twin.outputs(),
                computation=CountPerSecond(), sending=Sending(weak=True),
            ).run(*twin.input(0, 3), now_ms=5)  # fmt: skip

        points = Points(at, rival)
        slow = faulty(world, points)
        StatefulStep(
            ref=REF, token=token, rows=slow.rows, log=slow.log, outputs=slow.outputs(),
            computation=CountPerSecond(), sending=Sending(weak=True),
        ).run(*slow.input(0, world.log.end_offsets("in")[0]), now_ms=5)  # fmt: skip
        assert set(bag(world)) == expected, at
        if points.passed <= at:
            break
        at += 1
    assert at >= 8


def test_the_plan_says_what_a_job_promises_and_its_config_may_say_otherwise() -> None:
    p = Pipeline("counts", partitions=1)
    counted = p.source("words").key_by("query").process(WeakNoDedup)
    counted.sink("counts")
    counted["seen"].sink("seen")
    words = {"name": "words", "partitions": 1, "columns": [["query", "string"]]}
    package = PackageRef(name="counts", version="1", hash="0" * 64, entry="counts.py")
    compiled = compile_pipeline(p, StaticCatalogue([category_from_json(words)]), package)
    body = compiled.to_json()["jobs"][-1]
    assert (body["productions"], body["dedup"]) == ("weak", "off")
    drawn = " ".join(draw_plan(compiled).split())
    assert "weak productions: at least once" in drawn and "dedup off: at least once" in drawn
    config = validate_config(body["name"], {**body, "productions": "strong", "straggler_ms": 50}).to_json()
    assert "productions" not in config and (config["dedup"], config["straggler_ms"]) == ("off", 50)


class Strong(CountPerSecond):
    outputs = {"out": CountPerSecond.outputs["out"]}


def test_the_plan_states_what_every_job_with_state_promises() -> None:
    p = Pipeline("counts", partitions=1)
    words = p.source("words")
    words.filter("query > ''").sink("copies")
    keyed = words.key_by("query")
    keyed.process(Strong).sink("counts")
    keyed.dedup(within="1h").sink("firsts")
    keyed.window(tumbling("1h")).aggregate("count(*) AS n").sink("hours")
    asked = {"name": "words", "partitions": 1, "columns": [["query", "string"]]}
    package = PackageRef(name="counts", version="1", hash="0" * 64, entry="counts.py")
    compiled = compile_pipeline(p, StaticCatalogue([category_from_json(asked)]), package)
    stateful = [job for job in compiled.jobs if job.kind == "stateful"]
    drawn = draw_plan(compiled)
    said = [line for line in drawn.splitlines() if "promise" in line]
    assert len(stateful) == len(said) == 3 < len(compiled.jobs)
    assert all("strong productions: exactly once; checkpointed with the state, then sent" in s for s in said)


def test_another_word_for_productions_is_refused() -> None:
    with pytest.raises(PipelineError, match="productions is 'sloppy'"):
        type("Sloppy", (Computation,), {"productions": "sloppy"})
