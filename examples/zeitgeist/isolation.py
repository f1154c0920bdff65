"""Turbine's example of isolation: a job of 10 tasks, and three who decide on it at the same moment.

The scaler wants 15, one oncall 20, another 30. Nobody's wish is lost without a word: each layer keeps its
own, the top one wins, and whoever wrote later than somebody else is told so and decides again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from penstock.client import Client, new_key
from penstock.core.errors import VersionConflict

JOB = "isolation.example"
CONFIG: dict[str, Any] = {
    "name": JOB,
    "pipeline": "isolation",
    "kind": "stateless",
    "state": "stopped",  # it is about decisions: no task has to run for it
    "package": {"name": "none", "version": "1", "hash": hashlib.sha256(b"").hexdigest(), "entry": "none"},
    "task_count": 10,
    "partitions": 32,
    "inputs": [{"category": "queries"}],
    "outputs": [],
    "plan": {"stages": []},
}


def show_isolation(admin: Client, hold: Callable[[str], Client], say: Callable[[str], None]) -> Iterator[str]:
    """Play it through; `hold` makes a client of a token. Yields what did not go as it should."""
    with ExitStack() as stack:
        people = {
            name: stack.enter_context(hold(_token(admin, name, role)))
            for name, role in (("scaler-1", "scaler"), ("oncall-1", "oncall"), ("oncall-2", "oncall"))
        }
        admin.put_package(CONFIG["package"]["hash"], b"")
        seen: int = admin.apply_job(JOB, CONFIG, why="the paper's example", key=new_key())["version"]
        say(f"{JOB} has 10 tasks at version {seen}; the scaler and two oncalls look at it now")
        people["scaler-1"].patch_layer(
            JOB, "scaler", {"task_count": 15}, why="lag", key=new_key(), expected_version=seen
        )
        say("the scaler writes 15 into its layer")
        first = _decide(people["oncall-1"], 20, seen, say)
        _decide(people["oncall-2"], 30, seen, say)
        found = admin.job(JOB)
        counts = {row["layer"]: row["body"].get("task_count") for row in found["layers"] if row["body"]}
        say(f"layers: {', '.join(f'{layer} {count}' for layer, count in counts.items())}")
        if counts != {"provisioner": 10, "scaler": 15, "oncall": 30} or _expected(found) != (30, "oncall-2"):
            yield f"isolation: the layers are {counts}, expected is {_expected(found)}"
        people["oncall-2"].rollback(JOB, "oncall", to_version=first, why="30 was too many", key=new_key())
        say(
            f"oncall-2 rolls its layer back to version {first}: {_expected(admin.job(JOB))[0]} tasks expected"
        )
        if _expected(admin.job(JOB))[0] != 20:
            yield "isolation: the rollback did not bring 20 back"
        people["oncall-1"].clear_layer(JOB, "oncall", why="the incident is over", key=new_key())
        say(f"oncall takes everything back: {_expected(admin.job(JOB))[0]} tasks, as the scaler wished")
        if _expected(admin.job(JOB)) != (15, "scaler-1"):
            yield "isolation: the scaler's wish was lost"
        admin.remove_job(JOB, why="the example is over", key=new_key())


def _decide(oncall: Client, task_count: int, seen: int, say: Callable[[str], None]) -> int:
    """Write on the version that was looked at; told of another, look again and decide again."""
    name = "oncall-1" if task_count == 20 else "oncall-2"
    change = {"task_count": task_count}
    try:
        return oncall.patch_layer(
            JOB, "oncall", change, why=f"{task_count} are needed", key=new_key(), expected_version=seen
        )
    except VersionConflict as conflict:
        say(f"{name} writes {task_count} on version {seen}: refused, version {conflict.actual} is current")
        now, by = _expected(oncall.job(JOB))
        version = oncall.patch_layer(
            JOB,
            "oncall",
            change,
            why=f"{task_count} are needed, more than the {now} of {by}",
            key=new_key(),
            expected_version=conflict.actual,
        )
        say(f"{name} looks again, sees {now} from {by}, and writes {task_count} as version {version}")
        return version


def _expected(job: dict[str, Any]) -> tuple[int, str]:
    return job["config"]["task_count"], job["provenance"]["task_count"]["actor"]


def _token(admin: Client, name: str, role: str) -> str:
    return str(admin.issue_token(name, role, days=1, why="the demo", key=new_key())["token"])
