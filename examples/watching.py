"""What a demo looks at: containers, tasks, and what is on the bus."""

from __future__ import annotations

from typing import Any

from penstock.client import Client


def ready(client: Client) -> set[str]:
    return {row["name"] for row in client.status()["containers"] if row["ready"] and row["state"] == "live"}


def line_of(client: Client, job: str) -> dict[str, Any]:
    return next(line for line in client.jobs() if line["name"] == job)


def running(client: Client, job: str, *, without: int = 0) -> int:
    """How many tasks of a settled job run; 0 while it changes. `without`: not counting a dead engine's last
    words.
    """
    dead = {
        row["name"]
        for row in client.status()["containers"]
        if row["pid"] == without or row["state"] != "live"
    }
    line = line_of(client, job)
    if line["state"] != "running":
        return 0
    tasks = [
        task
        for task in line["tasks"]
        if task["generation"] == line["generation"] and task["container"] not in dead
    ]
    return sum(1 for task in tasks if task["state"] == "running")


def size(log: Any, category: str) -> int:
    return int(sum(log.end_offsets(category)))


def records(log: Any, category: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for partition, end in enumerate(log.end_offsets(category)):
        for batch in log.read(category, partition, 0, end):
            found += batch.to_pylist()
    return found


def runs_version(client: Client, job: str, version: str) -> bool:
    """Whether every task of a settled job runs that version of its package."""
    view = client.job(job)
    config = view["running"]["config"]
    if not view["is_in_sync"] or config["package"]["version"] != version:
        return False
    new = view["running"]["restart_version"]
    up = [task for task in view["tasks"] if (task["state"], task["running_version"]) == ("running", new)]
    return len(up) == config["task_count"]
