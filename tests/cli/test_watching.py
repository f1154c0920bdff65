"""Claims about `--watch`: it looks when something happened, falls back to the clock, and waits out an absence."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rich.text import Text

from penstock.cli.output import Form, connect
from penstock.cli.watching import SETTLE_MS, ChangeWait, watch
from penstock.core.errors import PenstockError, StoreUnavailable
from tests.cli.world import COUNT, World
from tests.waiting import join, until

NOTHING: dict[str, Any] = {"jobs": []}


class Looks:
    """Answers in turn: a value, or an absence; the wait after the last one is a Ctrl-C."""

    def __init__(self, *answers: dict[str, Any] | StoreUnavailable) -> None:
        self.answers = list(answers)

    def look(self) -> dict[str, Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, StoreUnavailable):
            raise answer
        return answer

    def wait(self) -> None:
        if not self.answers:
            raise KeyboardInterrupt


def render(found: Any) -> Text:
    return Text(f"{len(found['jobs'])} jobs")


def test_a_watch_waits_out_an_absence_and_says_so(capsys: pytest.CaptureFixture[str]):
    looks = Looks(NOTHING, StoreUnavailable("nobody answers"), NOTHING)
    with pytest.raises(KeyboardInterrupt):
        watch(looks.look, render, looks.wait, form=Form.TABLE)
    assert looks.answers == [] and "0 jobs" in capsys.readouterr().out


def test_what_was_seen_last_stays_with_the_reason(capsys: pytest.CaptureFixture[str]):
    looks = Looks(NOTHING, StoreUnavailable("nobody answers"))
    with pytest.raises(KeyboardInterrupt):
        watch(looks.look, render, looks.wait, form=Form.TABLE)
    said = capsys.readouterr().out
    assert "0 jobs" in said and "nobody answers; showing the last known state" in said


def test_a_watch_as_json_is_a_line_per_look(capsys: pytest.CaptureFixture[str]):
    looks = Looks(NOTHING, StoreUnavailable("nobody answers"), NOTHING)
    with pytest.raises(KeyboardInterrupt):
        watch(looks.look, render, looks.wait, form=Form.JSON)
    lines = capsys.readouterr().out.strip().splitlines()
    assert [json.loads(line) for line in lines] == [NOTHING, NOTHING]


def test_a_watch_as_yaml_is_a_document_per_look(capsys: pytest.CaptureFixture[str]):
    looks = Looks(NOTHING, NOTHING)
    with pytest.raises(KeyboardInterrupt):
        watch(looks.look, render, looks.wait, form=Form.YAML)
    assert capsys.readouterr().out == "---\njobs: []\n---\njobs: []\n"


def test_a_watch_does_not_begin_with_an_absence():
    looks = Looks(StoreUnavailable("nobody answers"))
    with pytest.raises(StoreUnavailable):
        watch(looks.look, render, looks.wait, form=Form.TABLE)


class Stream:
    """A client with events of its own."""

    def __init__(self, *answers: list[int] | PenstockError) -> None:
        self.answers, self.asked = list(answers), list[dict[str, Any]]()

    def journal(self, *, limit: int) -> list[dict[str, Any]]:
        return [{"id": 5}]

    def events(self, **asked: Any) -> Iterator[dict[str, Any]]:
        self.asked.append(asked)
        answer = self.answers.pop(0)
        if isinstance(answer, PenstockError):
            raise answer
        return iter([{"id": number} for number in answer])


def test_news_are_awaited_through_events_and_a_burst_is_one():
    stream, pauses = Stream([6], [7, 8], []), list[int]()
    news = ChangeWait(stream, subject="a.b", every_s=2, pause=pauses.append)  # type: ignore[arg-type]
    news.wait()
    assert [ask["since"] for ask in stream.asked] == [5, 6] and pauses == [SETTLE_MS]
    assert (stream.asked[0]["wait_s"], stream.asked[0]["subject"]) == (2, "a.b")
    news.wait()
    assert stream.asked[-1]["since"] == 8 and pauses == [SETTLE_MS]


def test_without_events_it_looks_by_the_clock():
    stream, pauses = Stream(StoreUnavailable("no events")), list[int]()
    ChangeWait(stream, every_s=2, pause=pauses.append).wait()  # type: ignore[arg-type]
    assert pauses == [2000]


def test_a_change_is_seen_at_once(world: World):
    """Plan: wait for news of a job at rest, for up to an hour; the wait goes on until somebody changes the job."""
    until(lambda: all(view.is_in_sync for view in world.plane.jobs.every_view()), "the job to be at rest")
    with connect(world.folder, role="reader") as reader, connect(world.folder, role="oncall") as oncall:
        news = ChangeWait(reader, subject=COUNT, every_s=3600)
        thread = threading.Thread(target=news.wait, daemon=True)
        thread.start()
        until(lambda: news._since is not None, "it to know what was decided last")
        assert thread.is_alive()
        oncall.patch_layer(COUNT, "oncall", {"priority": 3}, why="x", key="k")
        join(thread, "the wait")
