"""Task descriptors that name only what a test is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.jobs.config import JobConfig
from penstock.jobs.tasks import single_task
from penstock.streams.step.step import TaskDescriptor


def a_descriptor(
    kind: str = "stateless", plan: Mapping[str, Any] | None = None, **fields: Any
) -> TaskDescriptor:
    """A task of one partition that reads and writes nothing, unless `fields` say so."""
    package = {"name": "p", "version": "1", "hash": "0", "entry": "p.py"}
    config = JobConfig.from_stored(
        {"name": "j", "pipeline": "p", "kind": kind, "package": package, "plan": plan or {}}
    )
    nothing: dict[str, Any] = {"intervals": (), "inputs": (), "outputs": ()}
    bare = TaskDescriptor(spec=single_task("j", "b", config), bus="", rows="", package_folder="", **nothing)
    return replace(bare, **fields)
