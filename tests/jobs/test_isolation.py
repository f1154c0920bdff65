"""The paper's example (Turbine III-A): a scaler and two oncalls write one job at the same moment."""

from __future__ import annotations

import threading

import pytest

from penstock.core.errors import VersionConflict
from penstock.jobs.job_service import Actor, JobService
from tests.builders import SCALER, a_job
from tests.jobs.asking import asked


def at_the_same_time(*calls: object) -> list[object]:
    """Run all calls in threads that start together; what each returned or raised."""
    barrier, outcomes = threading.Barrier(len(calls)), [None] * len(calls)

    def run(number: int) -> None:
        barrier.wait()
        try:
            outcomes[number] = calls[number]()
        except VersionConflict as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("turn", range(3))
def test_neither_oncall_nor_scaler_is_lost_and_only_one_oncall_wins(
    any_service: JobService, turn: int
) -> None:
    """10 tasks; the scaler writes 15, one oncall 20, another 30; each oncall decided on what it saw.

    Plan: the oncalls read, decide and write until they are told that the other was first. Whoever loses sees
    the current version; the scaler's wish waits under the oncall's and shows when that is taken back.
    """
    service, job = any_service, a_job(any_service, task_count=10, partitions=32)
    lost: list[VersionConflict] = []

    def oncall(name: str, task_count: int) -> bool:
        actor = Actor(name=name, role="oncall")
        while True:
            view = service.view(job)
            if any(row.layer == "oncall" for row in view.layers):
                return False  # somebody on call has decided: this one looks first
            try:
                service.write_layer(
                    job,
                    "oncall",
                    {"task_count": task_count},
                    expected_version=view.expected_version,
                    **asked(actor),
                )
                return True
            except VersionConflict as error:
                assert error.actual > error.expected == view.expected_version
                lost.append(error)

    one, two, version = at_the_same_time(
        lambda: oncall("oncall1", 20),
        lambda: oncall("oncall2", 30),
        lambda: service.patch_layer(job, "scaler", {"task_count": 15}, **asked(SCALER)),
    )
    assert {one, two} == {True, False} and isinstance(version, int)
    view = service.view(job)
    assert view.config.task_count == (20 if one else 30)
    assert view.provenance["task_count"].actor == ("oncall1" if one else "oncall2")
    assert {row.layer: row.body.get("task_count") for row in view.layers}["scaler"] == 15
    # Created, then two writes: nothing else came through.
    assert view.expected_version == 3 and len(service.history(job)) == 4
    service.clear(job, "oncall", **asked(Actor(name="oncall1", role="oncall")))
    assert service.view(job).config.task_count == 15


def test_of_two_oncalls_who_decided_on_one_version_one_is_refused_and_told_the_current_one(
    any_service: JobService,
) -> None:
    service, job = any_service, a_job(any_service, task_count=10, partitions=32)
    seen = service.view(job).expected_version

    def oncall(name: str, task_count: int) -> int:
        return service.write_layer(
            job,
            "oncall",
            {"task_count": task_count},
            expected_version=seen,
            **asked(Actor(name=name, role="oncall")),
        )

    outcomes = at_the_same_time(lambda: oncall("oncall1", 20), lambda: oncall("oncall2", 30))
    (won,) = [outcome for outcome in outcomes if isinstance(outcome, int)]
    (lost,) = [outcome for outcome in outcomes if isinstance(outcome, VersionConflict)]
    assert (lost.expected, lost.actual) == (seen, won)
    assert service.view(job).config.task_count == (20 if outcomes[0] == won else 30)
