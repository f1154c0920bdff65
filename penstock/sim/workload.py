"""What people want, at random moments: jobs created, rescaled, released, overridden, paused, removed.

Every write goes through the real Job Service, inside whichever control plane answers, and is repeated with
the same idempotency key until its outcome is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.errors import StoreUnavailable, UserError
from penstock.jobs.job_service import Actor, JobService

if TYPE_CHECKING:
    from penstock.sim.scenario import World

DEVELOPER = Actor(name="dev", role="developer")
ONCALL = Actor(name="olga", role="oncall")
SCALER = Actor(name="scaler", role="scaler")

Write = Callable[[JobService, str, int], None]  # (service, idempotency key, now)


@dataclass(slots=True)
class Workload:
    """Clients that keep changing their minds until `is_over`."""

    world: World
    done: Counter[str] = field(default_factory=Counter)
    is_over: bool = False
    names: list[str] = field(default_factory=list)
    _requests: int = 0

    def begin(self) -> None:
        """Create some jobs at once, the others over time, and arm the first change."""
        options, rng = self.world.options, self.world.sim.rng
        self.names = [f"p.j{number}" for number in range(options.jobs)]
        for name in self.names:
            late_ms = 60_000 if options.is_large else options.safety_ms // 2
            within_ms = rng.choice((1_000, 1_000, late_ms))
            self.world.sim.after(rng.randrange(within_ms), "create", partial(self._create, name))
        self._arm()

    def touch(self, name: str) -> None:
        """An oncall looks at a job: a new expected version, which lifts a quarantine."""
        label = str(self.world.sim.rng.randrange(10**6))
        self._patch("touch", name, "oncall", ONCALL, {"labels.looked": label})

    def _arm(self) -> None:
        rng, mean_ms = self.world.sim.rng, self.world.options.write_every_ms
        self.world.sim.after(1 + int(rng.expovariate(1 / mean_ms)), "somebody writes", self._change)

    def _change(self) -> None:
        if self.is_over:
            return
        rng = self.world.sim.rng
        name, count = rng.choice(self.names), rng.randint(*self.world.options.task_counts)
        if self.world.options.is_large and rng.random() < 0.05:
            self._release_all()
        changes: tuple[Callable[[], None], ...] = (
            lambda: self._patch("rescale", name, "scaler", SCALER, {"task_count": count}),
            lambda: self._patch("rescale", name, "scaler", SCALER, {"task_count": count}),
            lambda: self._patch("provision", name, "provisioner", DEVELOPER, {"task_count": count}),
            lambda: self._patch(
                "release", name, "provisioner", DEVELOPER, {"package.version": str(rng.randrange(10**6))}
            ),
            lambda: self._patch(
                "live change", name, "provisioner", DEVELOPER, {"priority": rng.randrange(10)}
            ),
            lambda: self._patch("override", name, "oncall", ONCALL, {"task_count": count}),
            lambda: self._patch("override", name, "oncall", ONCALL, {"batch_rows_max": 1000 + count}),
            lambda: self._patch("take back", name, "oncall", ONCALL, {"task_count": None}),
            lambda: self._patch("stop", name, "oncall", ONCALL, {"state": "stopped"}),
            lambda: self._patch("pause", name, "oncall", ONCALL, {"state": "paused"}),
            lambda: self._patch("start", name, "oncall", ONCALL, {"state": None}),
            lambda: self._patch("start", name, "oncall", ONCALL, {"state": None}),
            lambda: self._patch(
                "reset", name, "provisioner", DEVELOPER, {"lineage": rng.randrange(1, 10**6)}
            ),
            lambda: self._remove(name) if rng.random() < 0.5 else None,
            lambda: self._create(name),
            lambda: self._create(name),
        )
        rng.choice(changes)()
        self._arm()

    def _release_all(self) -> None:
        """A new engine for everybody, within a few seconds."""
        rng, version = self.world.sim.rng, str(self.world.sim.rng.randrange(10**6))
        for name in self.names:
            release = partial(
                self._patch, "release of all", name, "provisioner", DEVELOPER, {"package.version": version}
            )
            self.world.sim.after(rng.randrange(5_000), "release of all", release)

    def _create(self, name: str) -> None:
        rng = self.world.sim.rng
        low, high = self.world.options.task_counts
        birth, partitions, count = f"{rng.getrandbits(64):016x}", rng.randint(2, 6), rng.randint(low, high)
        if self.world.options.is_large:
            partitions = rng.randint(high, high + 3)
        body: dict[str, Any] = {
            "pipeline": "p",
            "kind": "stateless",
            "package": {"name": "p", "version": "1", "hash": "0" * 64, "entry": "m"},
            "task_count": count,
            "partitions": partitions,
            "inputs": [{"category": "in"}],
            "outputs": [],
            "plan": {},
        }

        def write(service: JobService, key: str, now_ms: int) -> None:
            service.create(
                name, body, birth=birth, actor=DEVELOPER, reason="new", idempotency_key=key, now_ms=now_ms
            )

        self._request("create", write)

    def _remove(self, name: str) -> None:
        def write(service: JobService, key: str, now_ms: int) -> None:
            service.remove(name, actor=DEVELOPER, reason="not needed", idempotency_key=key, now_ms=now_ms)

        self._request("remove", write)

    def _patch(self, kind: str, name: str, layer: str, actor: Actor, changes: dict[str, Any]) -> None:
        def write(service: JobService, key: str, now_ms: int) -> None:
            service.patch_layer(
                name, layer, changes, actor=actor, reason=kind, idempotency_key=key, now_ms=now_ms
            )

        self._request(kind, write)

    def _request(self, kind: str, write: Write) -> None:
        self._requests += 1
        self._attempt(kind, f"request {self._requests}", write)

    def _attempt(self, kind: str, key: str, write: Write) -> None:
        world = self.world

        def again() -> None:
            world.sim.after(1_000, f"{key} ({kind}) again", lambda: self._attempt(kind, key, write))

        life = world.control.answering()
        if life is None or life.process.is_paused:
            again()
            return

        def serve() -> None:
            try:
                write(life.job_service, key, life.process.clock.now_ms())
            except StoreUnavailable:
                again()
            except UserError as error:
                self.done[f"{kind}: {type(error).__name__}"] += 1
            else:
                self.done[kind] += 1
                world.control.poke()

        life.process.run(f"{key} ({kind})", serve)
        if not life.process.is_alive:
            again()  # it died over it: nobody knows whether it was written
