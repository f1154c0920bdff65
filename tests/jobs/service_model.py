"""What the Job Service should do, in plain Python: dictionaries of paths, no store, no concurrency.

A body here is a flat map of paths. `FULL` stands for everything that only a whole provisioner layer has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import ConfigError, KeyReused, NotFound, Refused, VersionConflict
from tests.builders import a_body

FULL = "FULL"
ORDER = ("base", "provisioner", "scaler", "oncall")
Body = dict[str, Any]


def real_body(job: str, body: Body) -> dict[str, Any]:
    """A body of the model as the service takes it."""
    whole: dict[str, Any] = a_body(job) if FULL in body else {}
    for path, value in body.items():
        head, _, rest = path.partition(".")
        if path == FULL:
            continue
        if rest:
            whole.setdefault(head, {})[rest] = value
        else:
            whole[head] = value
    return whole


def merged(layers: dict[str, Body]) -> Body:
    """The top wins, path by path."""
    found: Body = {}
    for layer in ORDER:
        found |= layers.get(layer, {})
    return found


def is_valid(config: Body) -> bool:
    return FULL in config and config.get("threads", 1) >= 1


@dataclass
class Life:
    """One name, with all its lives."""

    birth: str = ""
    alive: bool = False
    version: int = -1  # the first life begins with 0
    layers: dict[str, Body] = field(default_factory=dict)
    past: list[tuple[int, str, dict[str, Body]]] = field(default_factory=list)  # version, birth, layers


@dataclass
class ServiceModel:
    """Every job, every key, and what the audit must say."""

    jobs: dict[str, Life] = field(default_factory=dict)
    keys: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)
    audit: list[tuple[str, str, int]] = field(default_factory=list)  # action, subject, version

    def once(self, key: tuple[str, str], request: Any, act: Callable[[], Any]) -> Any:
        """The answer of a call, or the error it must raise; a repeat gets the first answer."""
        if key in self.keys:
            kept, answer = self.keys[key]
            if kept != request:
                raise KeyReused("")
            return answer
        answer = act()
        self.keys[key] = (request, answer)
        return answer

    def _living(self, job: str, version: int | None) -> Life:
        life = self.jobs.get(job)
        if life is None or not life.alive:
            raise NotFound("")
        if version is not None and version != life.version:
            raise VersionConflict("", expected=0, actual=0)
        return life

    def _keep(self, life: Life) -> None:
        life.past.append((life.version, life.birth, {name: dict(body) for name, body in life.layers.items()}))

    def write(self, job: str, layer: str, body: Body, version: int | None) -> int:
        life = self._living(job, version)
        layers = {**life.layers, layer: dict(body)}
        if not is_valid(merged(layers)):
            raise ConfigError("")
        life.layers, life.version = layers, life.version + 1
        self._keep(life)
        self.audit.append((f"layer.{layer}", job, life.version))
        return life.version

    def patch(self, job: str, layer: str, changes: Body, version: int | None) -> int:
        body = dict(self._living(job, version).layers.get(layer, {}))
        for path, value in changes.items():
            body.pop(path, None)
            if value is not None:
                body[path] = value
        return self.write(job, layer, body, version)

    def create(self, job: str, body: Body, birth: str) -> int:
        life = self.jobs.get(job) or Life()
        if life.alive:
            raise Refused("")
        if not is_valid(body):
            raise ConfigError("")
        self.jobs[job] = life
        life.birth, life.alive, life.layers = birth, True, {"base": {}}
        life.version += 1
        self._keep(life)
        self.audit.append(("job.created", job, life.version))
        return self.write(job, "provisioner", body, None)

    def apply(self, job: str, body: Body, version: int | None, birth: str) -> tuple[int, bool]:
        life = self.jobs.get(job)
        if life is not None and life.alive:
            return self.write(job, "provisioner", body, version), False
        if version not in (None, 0, 0 if life is None else life.version):
            raise VersionConflict("", expected=0, actual=0)
        return self.create(job, body, birth), True

    def rollback(self, job: str, layer: str, to_version: int, version: int | None) -> int:
        life = self._living(job, version)
        if not 0 <= to_version <= life.version:
            raise NotFound("")
        # A removal or a restore wrote no layer: the one before it counts.
        _, birth, layers = [item for item in life.past if item[0] <= to_version][-1]
        if birth != life.birth:
            raise Refused("")
        return self.write(job, layer, layers.get(layer, {}), version)

    def set_state(self, job: str, state: str, layer: str, version: int | None) -> tuple[int, str, str]:
        life = self._living(job, version)
        body = {path: value for path, value in life.layers.get(layer, {}).items() if path != "state"}
        below = {name: life.layers.get(name, {}) for name in ORDER[: ORDER.index(layer)]}
        if state != "running" or merged(below).get("state", "running") != "running":
            body["state"] = state
        written = self.write(job, layer, body, version)
        return written, layer, merged(life.layers).get("state", "running")

    def remove(self, job: str, version: int | None) -> int:
        life = self._living(job, version)
        life.alive, life.version = False, life.version + 1
        self.audit.append(("job.removed", job, life.version))
        return life.version

    def restore(self, job: str, version: int | None) -> int:
        life = self.jobs.get(job)
        if life is None or life.alive:
            raise NotFound("")
        if version is not None and version != life.version:
            raise VersionConflict("", expected=0, actual=0)
        life.alive, life.version = True, life.version + 1
        self.audit.append(("job.restored", job, life.version))
        return life.version
