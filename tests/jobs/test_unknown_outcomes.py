"""A write whose outcome nobody knows is repeated with its key: it is done once, and the answer is the first one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, KeyReused, OutcomeUnknown, StoreUnavailable
from penstock.db.database import Database
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import KEY_RETENTION_MS, JobStore
from tests.builders import ADMIN, DEVELOPER, ONCALL, a_body, a_job, a_pipeline
from tests.core.test_postgres_store import cutting_proxy
from tests.jobs.asking import asked, everything

JOB = "demo.count"
Act = Callable[[JobService, str], Any]


def submit(service: JobService, key: str) -> dict[str, int]:
    births = itertools.count()
    compiled = a_pipeline(a_body("demo.count"), a_body("demo.new"))
    return service.submit_pipeline(
        compiled, new_birth=lambda: f"birth{next(births)}", **asked(DEVELOPER, key)
    )


# Every kind of write there is.
ACTS: dict[str, Act] = {
    "create": lambda s, key: s.create("demo.new", a_body("demo.new"), birth="b", **asked(DEVELOPER, key)),
    "apply a new one": lambda s, key: s.apply(
        "demo.new", a_body("demo.new"), expected_version=None, birth="b", **asked(DEVELOPER, key)
    ),
    "apply": lambda s, key: s.apply(
        JOB, a_body(JOB, threads=2), expected_version=2, birth="b", **asked(DEVELOPER, key)
    ),
    "write": lambda s, key: s.write_layer(
        JOB, "oncall", {"threads": 5}, expected_version=2, **asked(ONCALL, key)
    ),
    "patch": lambda s, key: s.patch_layer(JOB, "oncall", {"threads": 5}, **asked(ONCALL, key)),
    "clear": lambda s, key: s.clear(JOB, "oncall", **asked(ONCALL, key)),
    "rollback": lambda s, key: s.rollback(
        JOB, "oncall", to_version=1, expected_version=2, **asked(ONCALL, key)
    ),
    "set_state": lambda s, key: s.set_state(JOB, "paused", **asked(ONCALL, key)),
    "remove": lambda s, key: s.remove(JOB, **asked(DEVELOPER, key)),
    "restore": lambda s, key: s.restore("demo.gone", **asked(DEVELOPER, key)),
    "add_layer_kind": lambda s, key: s.add_layer_kind("doctor", 15, ["scaler"], **asked(ADMIN, key)),
    "submit": submit,
}


class Fault:
    """Raises once, at the point it is armed for."""

    def __init__(self) -> None:
        self.point = ""

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.point = ""
            raise OutcomeUnknown(f"fault at {point}", why="a test", fix="repeat it with the same key")


def prepared(database: Database) -> JobService:
    service = JobService(JobStore(database))
    a_job(service)
    service.patch_layer(JOB, "oncall", {"threads": 4}, **asked(ONCALL))
    a_job(service, "demo.gone")
    service.remove("demo.gone", **asked(DEVELOPER))
    return service


def rows(database: Database) -> dict[str, Any]:
    return {name: found for name, found in everything(database).items() if name != "counters"}


@pytest.mark.parametrize("name", ACTS)
def test_a_write_that_was_committed_unheard_is_not_done_twice(
    ready_place: Path | str | None, name: str
) -> None:
    """Plan: the fault strikes after the commit; the repeat, and a third try, find everything as the first left it."""
    fault = Fault()
    database = Database(ready_place, fault=fault)
    service = prepared(database)
    fault.point = "committed"
    with pytest.raises(OutcomeUnknown):
        ACTS[name](service, "k")
    after_first = everything(database)
    answer = ACTS[name](service, "k")
    assert everything(database) == after_first
    assert ACTS[name](service, "k") == answer
    assert everything(database) == after_first
    database.close()


@pytest.mark.parametrize("point", ["begin", "commit"])
@pytest.mark.parametrize("name", ACTS)
def test_a_write_that_was_not_committed_changes_nothing_and_its_repeat_does_it(
    ready_place: Path | str | None, name: str, point: str
) -> None:
    fault = Fault()
    database = Database(ready_place, fault=fault)
    service = prepared(database)
    before = everything(database)
    fault.point = point
    with pytest.raises(OutcomeUnknown):
        ACTS[name](service, "k")
    assert everything(database) == before
    ACTS[name](service, "k")
    assert everything(database) != before
    database.close()


def test_the_answer_is_the_same_as_without_trouble(ready_place: Path | str | None) -> None:
    """Plan: two databases with the same history, one with an unheard commit in each write."""
    fault = Fault()
    troubled, calm = Database(ready_place, fault=fault), Database(None)
    services = prepared(troubled), prepared(calm)
    for name in ("apply", "patch", "set_state", "submit", "remove", "restore", "add_layer_kind"):
        fault.point = "committed"
        with pytest.raises(OutcomeUnknown):
            ACTS[name](services[0], name)
        assert ACTS[name](services[0], name) == ACTS[name](services[1], name)
    troubled.close()
    calm.close()


def test_a_key_that_stands_for_another_request_is_refused_and_nothing_changes(
    any_service: JobService, database: Database
) -> None:
    service = any_service
    a_job(service)
    service.patch_layer(JOB, "oncall", {"threads": 2}, **asked(ONCALL, "k"))
    before = everything(database)
    attempts: list[Callable[[], Any]] = [
        lambda: service.patch_layer(JOB, "oncall", {"threads": 3}, **asked(ONCALL, "k")),
        lambda: service.patch_layer(JOB, "oncall", {"threads": True}, **asked(ONCALL, "k")),
        lambda: service.patch_layer(JOB, "oncall", {"threads": 2}, expected_version=1, **asked(ONCALL, "k")),
        lambda: service.write_layer(
            JOB, "oncall", {"threads": 2}, expected_version=None, **asked(ONCALL, "k")
        ),
        lambda: service.clear(JOB, "oncall", **asked(ONCALL, "k")),
        lambda: service.set_state(JOB, "paused", **asked(ONCALL, "k")),
    ]
    for attempt in attempts:
        with pytest.raises(KeyReused, match="another request") as caught:
            attempt()
        assert caught.value.what and caught.value.why and caught.value.fix
    assert everything(database) == before
    # Somebody else's key of the same name is another key.
    service.patch_layer(JOB, "oncall", {"threads": 3}, **asked(ADMIN, "k"))
    assert service.view(JOB).config.threads == 3


def test_a_refused_write_leaves_its_key_free(any_service: JobService) -> None:
    service = any_service
    a_job(service)
    with pytest.raises(ConfigError):
        service.patch_layer(JOB, "oncall", {"threads": 0}, **asked(ONCALL, "k"))
    assert service.patch_layer(JOB, "oncall", {"threads": 2}, **asked(ONCALL, "k")) == 2


def test_a_key_is_kept_for_a_week(any_service: JobService) -> None:
    service = any_service
    a_job(service)
    first = service.patch_layer(JOB, "oncall", {"threads": 2}, **asked(ONCALL, "k", now_ms=0))
    for now_ms in (1, KEY_RETENTION_MS):
        service.patch_layer(JOB, "scaler", {"threads": 2}, **asked(ADMIN, f"at {now_ms}", now_ms=now_ms))
        again = service.patch_layer(JOB, "oncall", {"threads": 2}, **asked(ONCALL, "k", now_ms=now_ms))
        assert again == first
    late_ms = KEY_RETENTION_MS + 2
    service.patch_layer(JOB, "scaler", {"threads": 3}, **asked(ADMIN, "late", now_ms=late_ms))
    assert service.patch_layer(JOB, "oncall", {"threads": 2}, **asked(ONCALL, "k", now_ms=late_ms)) > first


@pytest.mark.parametrize("name", ACTS)
def test_a_line_cut_in_the_commit_leaves_the_outcome_open_until_the_key_tells(
    emptied_url: str, name: str
) -> None:
    """Plan: a proxy before a real PostgreSQL passes COMMIT on and cuts the line, so that no answer comes back."""
    with cutting_proxy(emptied_url) as proxy:
        database, direct = Database(proxy.url), Database(emptied_url)
        service = prepared(database)
        before = rows(direct)
        proxy.cut_after(b"COMMIT\x00")
        with pytest.raises(OutcomeUnknown) as caught:
            ACTS[name](service, "k")
        assert "same idempotency key" in caught.value.fix
        # Asked elsewhere: another connection, another process as it were.
        answer = ACTS[name](JobService(JobStore(direct)), "k")
        after = rows(direct)
        assert after != before
        assert ACTS[name](service, "k") == answer and rows(direct) == after
        database.close()
        direct.close()


def test_a_line_cut_before_the_commit_writes_nothing_and_the_repeat_does(emptied_url: str) -> None:
    """Plan: the line is cut once in the middle of the transaction, once before COMMIT is passed on."""
    with cutting_proxy(emptied_url) as proxy:
        database, direct = Database(proxy.url), Database(emptied_url)
        service = prepared(database)
        before = rows(direct)
        ask = asked(ONCALL, "k", why="the words to cut at")
        for text, kind in ((b"the words to cut at", StoreUnavailable), (b"COMMIT\x00", OutcomeUnknown)):
            proxy.cut_before(text)
            with pytest.raises(kind):
                service.patch_layer(JOB, "oncall", {"threads": 5}, **ask)
            assert rows(direct) == before
        assert service.patch_layer(JOB, "oncall", {"threads": 5}, **ask) == 3
        database.close()
        direct.close()
