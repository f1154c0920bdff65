"""Commands that run until Ctrl-C end with it, in order: also when they were started with SIGINT ignored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.output import connect
from penstock.cli.watching import stop_on_signals, until_ctrl_c
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.log import CategorySpec
from tests.cli.world import Outcome, Started, World
from tests.kin import kin_of
from tests.waiting import until

both = pytest.mark.parametrize("in_background", [False, True])
# Started in the background of a script, where SIGINT is ignored, once; other commands in `make test-all`.
mostly = pytest.mark.parametrize("in_background", [False, pytest.param(True, marks=pytest.mark.slow)])


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["usual", "ignored"])
def inherited(request: pytest.FixtureRequest) -> Iterator[object]:
    """SIGINT as whoever started this process left it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, request.param)
    yield request.param
    for number, handler in before.items():
        signal.signal(number, handler)


def test_ctrl_c_ends_the_block_and_what_was_inherited_is_kept(inherited: object):
    went_on = False
    with until_ctrl_c():
        signal.raise_signal(signal.SIGINT)
        went_on = True
    assert not went_on and signal.getsignal(signal.SIGINT) is inherited


def test_an_error_in_the_block_is_not_taken_for_ctrl_c(inherited: object):
    with pytest.raises(ZeroDivisionError), until_ctrl_c():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is inherited


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_in_order_hears_both_signals(inherited: object, number: signal.Signals):
    stop = stop_on_signals()
    assert not stop.is_set()
    signal.raise_signal(number)
    assert stop.is_set()


def ended(command: Started) -> Outcome:
    outcome = command.end(signal.SIGINT)
    assert (outcome.code, outcome.err) == (0, "")
    return outcome


@mostly
@pytest.mark.parametrize("look", [("status", "--watch"), ("job", "ls", "--watch"), ("top",)])
def test_a_watch_ends(shared: World, look: tuple[str, ...], in_background: bool):
    # As JSON: each look is a line at once, in a terminal or not.
    command = Started(*look, "--folder", shared.folder, "-o", "json", in_background=in_background)
    command.until(lambda: command.out.count("\n") > 1, "the second look")
    ended(command)


@both
def test_an_injector_that_follows_ends(tmp_path: Path, in_background: bool):
    log = EmbeddedLog(tmp_path / "plane" / "bus")
    spec = CategorySpec(
        name="in", partitions=1, columns=(("n", "bigint"),), format="json", watermark="injector"
    )
    log.create(spec)
    lines = tmp_path / "lines.ndjson"
    lines.write_text('{"n": 1}\n')
    command = Started(
        "inject", lines, "--category", "in", "-f", "--folder", tmp_path / "plane", in_background=in_background
    )
    command.until(lambda: sum(log.end_offsets("in")) == 1, "the line on the bus")
    assert "1 lines to in" in ended(command).out


@both
def test_lending_ends(tmp_path: Path, in_background: bool):
    file = tmp_path / "clusters.toml"
    away = '[[cluster]]\nname = "{}"\nurl = "http://127.0.0.1:{}"\ntoken_env = "TOKEN"\n'
    file.write_text(away.format("a", 9) + away.format("b", 10))
    env = {**os.environ, "TOKEN": "pk_x"}
    command = Started("lend", "--clusters", file, env=env, in_background=in_background)
    command.until(lambda: "b is left out" in command.out, "the first round")
    ended(command)


@pytest.mark.e2e
@both
def test_a_container_that_joined_ends(shared: World, tmp_path: Path, in_background: bool):
    with connect(shared.folder, role="reader") as reader:
        name = f"far-{in_background}".lower()
        now_ms = shared.plane.clock.now_ms()
        token = shared.plane.tokens.issue(name, "container", now_ms=now_ms, container=name)
        command = Started(
            *(
                "container",
                "--join",
                shared.url,
                "--name",
                name,
                "--dir",
                tmp_path / "far",
            ),
            env={**os.environ, "PENSTOCK_TOKEN": token},
            in_background=in_background,
        )
        command.until(lambda: name in {row["name"] for row in reader.containers()}, "its first beat")
        kin = kin_of(command.process.pid)
        outcome = command.end(signal.SIGINT)
    assert outcome.code == 0 and "stopped" in outcome.out
    until(lambda: not any(process.is_running() for process in kin), "the end of what it started")
