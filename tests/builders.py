"""Valid things with defaults, so that a test names only what it is about."""

from __future__ import annotations

import hashlib
from typing import Any

from penstock.jobs.config import JobConfig, validate_config
from penstock.jobs.job_service import Actor, JobService

# What every job here names; a control plane in a test has it.
CODE = b"the code"
PACKAGE = hashlib.sha256(CODE).hexdigest()
ADMIN = Actor(name="root", role="admin")
DEVELOPER = Actor(name="dana", role="developer")
SCALER = Actor(name="scaler", role="scaler")
ONCALL = Actor(name="olga", role="oncall")


def a_body(name: str = "demo.count", **changes: Any) -> dict[str, Any]:
    """The provisioner layer of a stateless job with 8 partitions."""
    return {
        "name": name,
        "pipeline": name.split(".")[0],
        "kind": "stateless",
        "package": {"name": "demo", "version": "1", "hash": PACKAGE, "entry": "demo"},
        "partitions": 8,
        "inputs": [{"category": "queries"}],
        "outputs": [an_output()],
        "plan": {"stages": [], "key": None, "computation": None, "late": "drop"},
        **changes,
    }


def a_process(name: str = "demo.tick", **changes: Any) -> dict[str, Any]:
    """The provisioner layer of a plain process."""
    command = ["sh", "-c", "echo {task}; sleep 600"]
    return {"name": name, "pipeline": name.split(".")[0], "kind": "process", "command": command, **changes}


def an_output(**changes: Any) -> dict[str, Any]:
    """One data output."""
    columns = [["query", "string"]]
    return {
        "stream": "out",
        "category": "counts",
        "partitions": 8,
        "columns": columns,
        "internal": False,
        **changes,
    }


def a_config(name: str = "demo.count", **changes: Any) -> JobConfig:
    """A valid merged config."""
    return validate_config(name, a_body(name, **changes))


def config_of(body: dict[str, Any]) -> JobConfig:
    """The config of a job whose only layer is this one."""
    return validate_config(body["name"], body)


def a_stored_config(**fields: Any) -> JobConfig:
    """A config that says only what a test is about: read as from the store, so nothing has to fit together."""
    return JobConfig.from_stored({"name": "demo.count", "pipeline": "demo", "kind": "stateful", **fields})


def a_job(service: JobService, name: str = "demo.count", *, now_ms: int = 0, **changes: Any) -> str:
    """A job that was just created; returns its name."""
    service.create(
        name,
        a_body(name, **changes),
        birth=f"birth-{name}",
        actor=DEVELOPER,
        reason="new",
        idempotency_key=None,
        now_ms=now_ms,
    )
    return name


def a_pipeline(*bodies: dict[str, Any], name: str = "demo") -> dict[str, Any]:
    """A compiled pipeline of these jobs."""
    package = {"name": name, "version": "1", "hash": PACKAGE, "entry": name}
    return {"pipeline": name, "package": package, "jobs": list(bodies), "graph": {"nodes": [], "edges": []}}
