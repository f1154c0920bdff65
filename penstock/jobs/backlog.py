"""Which inputs the old tasks of a job must read to their end before new code takes over. Pure.

What a job hands to the next one of its pipeline lies in a category whose name says what the records are. A
release that changes them makes a new category; what lies in the old one is for the old code, which alone can
read it. So the reader's plan waits: its writer moves on, the old one gets an end, the old tasks reach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from penstock.jobs.sync_plan import is_active

Json = Mapping[str, Any]


def left_inputs(old: Json, target: Json | None) -> Iterator[tuple[str, str]]:
    """Category and writer of each input that was made for this job and that `target` has no more.

    None if its backlog is given up, on purpose or together with its state, or if nothing is to run.
    """
    if target is None or not is_active(target) or target.get("backlog") == "leave":
        return
    if (old.get("kind"), old.get("lineage", 0)) != (target.get("kind"), target.get("lineage", 0)):
        return
    kept = {item["category"] for item in target.get("inputs", ())}
    for item in old.get("inputs", ()):
        if item.get("writer") and item["category"] not in kept:
            yield item["category"], item["writer"]


class End(StrEnum):
    """When a category that a job writes comes to its end."""

    NEVER = "never"  # it goes on: its reader just turns to something else
    RETIRED = "retired"  # once its producers are unregistered
    STOPPED = "stopped"  # once its tasks have stopped: a stopped job stays registered


def end_of(expected: Json | None, category: str) -> End:
    """When what a job (None: it is removed) has written to a category is all of it."""
    if expected is None or all(item["category"] != category for item in expected.get("outputs", ())):
        return End.RETIRED
    return End.STOPPED if expected["state"] == "stopped" else End.NEVER
