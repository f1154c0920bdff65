"""`penstock alarm` and `penstock capacity`: what people type, and what they are told when it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from penstock.alarms.checks import SOURCE
from penstock.cli.alarms import seconds_of
from penstock.core.errors import ConfigError
from penstock.scaling.policies.policy import FLEET, RaiseAlert
from tests.cli.world import COUNT, PARSE, QUERIES_SIX, ZEITGEIST, Run, World, a_world
from tests.waiting import until

LAG = RaiseAlert(key="lag", text="it lags", severity="critical", evidence={"lag_s": 9.5}, what_to_do="look")


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[World, str]]:
    """A control plane with one alarm, and its id. No source of its loops has this one's name."""
    with a_world(tmp_path / "plane") as world:
        store = world.plane.alarms.store
        store.report("shops.total", {"test": (LAG,)}, world.plane.clock.now_ms())
        yield world, store.alarms("shops.total")[0].id


def test_an_alarm_is_listed_shown_and_acknowledged(told: tuple[World, str], run: Run):
    (_, alarm_id), where = told, ("--folder", told[0].folder)
    assert f"{alarm_id}" in run("alarm", "ls", *where).text
    assert [
        row["id"] for row in run("alarm", "ls", "--job", "shops.total", "-o", "json", *where).json["alarms"]
    ] == [alarm_id]
    assert run("alarm", "ls", "--job", "other", "-o", "json", *where).json["alarms"] == []
    shown = run("alarm", "show", alarm_id, *where).text
    assert "it lags" in shown and "9.5" in shown and "what to do look" in shown
    assert "acknowledged" in run("alarm", "ack", alarm_id, "--why", "mine", *where).text
    assert "acknowledged by local-oncall" in run("alarm", "ls", "--all", *where).text
    assert (
        yaml.safe_load(run("alarm", "show", alarm_id, "-o", "yaml", *where).out)["acked_by"] == "local-oncall"
    )
    assert "alarm.acknowledged" in run("audit", "shops.total", *where).text
    assert "mine" in run("journal", "shops.total", *where).text


@pytest.mark.parametrize(
    ("command", "state"),
    [(("job", "stop"), "stopped"), (("job", "rm"), "removed"), (("job", "pause"), "paused")],
    ids=["stop", "rm", "pause"],
)
def test_alarms_end_when_their_job_is_stopped_or_removed(
    empty: World, run: Run, command: tuple[str, ...], state: str
):
    """Plan: a policy's alarm and one of the fleet's levels fire for a running job; then nobody wants the job."""
    where = ("--folder", empty.folder)
    assert run(*QUERIES_SIX, *where).code == 0 and run("submit", ZEITGEIST, *where).code == 0
    until(lambda: all(job["state"] == "running" for job in run("job", "ls", "-o", "json", *where).json))
    store, now_ms = empty.plane.alarms.store, empty.plane.clock.now_ms
    stuck = RaiseAlert(key="crash_loop", text="it fails again and again", severity="critical")
    for job in (COUNT, PARSE):
        store.report(job, {"lag": (LAG,), SOURCE: (stuck,)}, now_ms())
    store.report(FLEET, {"test": (LAG,)}, now_ms())

    def firing() -> set[str]:
        rows = run("alarm", "ls", "-o", "json", *where).json["alarms"]
        return {f"{row['job']}/{row['kind']}" for row in rows if row["is_firing"]}

    others = {f"{PARSE}/lag", f"{PARSE}/crash_loop", f"{FLEET}/lag"}
    assert firing() == others | {f"{COUNT}/lag", f"{COUNT}/crash_loop"}
    assert run(*command, COUNT, "--why", "enough", *where).code == 0
    until(lambda: firing() == others)
    decided = [entry.decision for entry in empty.plane.journal.entries(subject=COUNT, limit=100)]
    assert {"lag/lag resolved", f"{SOURCE}/crash_loop resolved"} <= set(decided), decided
    views = {view.name: view.state for view in empty.plane.jobs.views(removed=True)}
    assert views[COUNT] == state


def test_alarms_are_silenced_and_told_again(told: tuple[World, str], run: Run):
    where = ("--folder", told[0].folder)
    made = run(
        "alarm", "silence", "--job", "shops.*", "--kind", "lag", "--severity", "warning", "--for", "1h30m",
        "--why", "a release", "-o", "json", *where,
    ).json  # fmt: skip
    assert made["severity"] == "warning" and made["kind"] == "lag"
    assert made["id"] in run("alarm", "silences", *where).text
    assert "ended" in run("alarm", "unsilence", made["id"], *where).text
    assert run("alarm", "silences", "-o", "json", *where).json == []
    run("alarm", "unsilence", made["id"], *where).is_refused(3)


def test_routes_are_tried(told: tuple[World, str], run: Run):
    where = ("--folder", told[0].folder)
    assert run("alarm", "test", "-o", "json", *where).json == [
        {"route": "log", "is_taken": True, "answer": ""}
    ]
    assert "log accepted" in run("alarm", "test", "--why", "again", *where).text


def test_capacity_is_shown(told: tuple[World, str], run: Run):
    where = ("--folder", told[0].folder)
    assert "memory_mb not limited" in run("capacity", *where).text
    assert run("capacity", "-o", "json", *where).json["is_limited"] is False


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("alarm", "show", "nonsense"), 3),
        (("alarm", "show", "000000000000"), 3),
        (("alarm", "ack", "000000000000", "--why", "x"), 3),
        (("alarm", "ack", "../../x", "--why", "x"), 3),
        (("alarm", "unsilence", "x"), 3),
        (("alarm", "ls", "--job", "a b"), 1),
        (("alarm", "silence", "--for", "2h", "--why", "x"), 1),
        (("alarm", "silence", "--job", "a", "--for", "soon", "--why", "x"), 1),
        (("alarm", "silence", "--job", "a", "--for", "0s", "--why", "x"), 1),
        (("alarm", "silence", "--job", "a", "--for", "-2h", "--why", "x"), 1),
        (("alarm", "silence", "--job", "a", "--for", "31d", "--why", "x"), 1),
        (("alarm", "silence", "--job", "a b", "--for", "2h", "--why", "x"), 1),
        (("alarm", "silence", "--job", "a", "--for", "2h", "--why", " "), 1),
        (("alarm", "test", "--why", ""), 1),
    ],
)
def test_bad_input_is_refused_in_three_parts(
    shared_alarms: World, run: Run, arguments: tuple[str, ...], code: int
):
    run(*arguments, "--folder", shared_alarms.folder).is_refused(code)


@pytest.fixture(scope="module")
def shared_alarms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with a_world(tmp_path_factory.mktemp("cli") / "plane") as world:
        yield world


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--alarm-webhook", "http://example.org/canary"),
        ("--alarm-webhook", "canary"),
        ("--alarm-webhook", "file:/no/such/canary-file"),
        ("--alarm-channels", "canary"),
    ],
)
def test_up_refuses_a_bad_address_before_it_makes_anything(tmp_path: Path, run: Run, option: str, value: str):
    said = run("up", "--folder", tmp_path / "new", "--containers", "0", option, value).is_refused()
    assert "canary" not in said.replace("canary-file", "") and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86_400), ("1h30m", 5400)]
)
def test_times_are_read(text: str, seconds: int):
    assert seconds_of(text, what="a time", most_s=10**6) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "2 h", "1m1h", "2w", "-1h", "1.5h", "9999999999s", "٣h"])
def test_what_is_no_time_is_refused(text: str):
    with pytest.raises(ConfigError):
        seconds_of(text, what="a time", most_s=10**6)
