"""Which world does a seed describe? Size, profile, and which faults exist in it at all (swarm testing)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from penstock.core.clock import Millis

# A kind is on in some of the seeds only: a fault that is always on hides what its absence lets happen.
FAULT_KINDS = (
    "control crash",
    "control crash in a transaction",
    "control pause",
    "control zombie",
    "control zombie in a round",
    "container crash",
    "container loss",
    "warden crash",
    "engine crash",
    "engine pause",
    "warden pause",
    "container pause",
    "link cut",
    "link cut one way",
    "slow replies",
    "bad weather",
    "store down",
    "store errors",
    "written but timed out",
    "data plane errors",
    "data plane timeouts",
    "task crash",
    "slow stops",
    "control outage",
    "syncer down",
    "task service down",
    "same identity",
    "stubborn task",
    "planned work",
    "slow engine starts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything a run is made from, besides the dice."""

    seed: int
    profile: str
    containers: int
    shard_count: int
    jobs: int
    faults: tuple[str, ...]
    fault_every_ms: Millis
    write_every_ms: Millis
    poison_jobs: int
    safety_ms: Millis
    task_counts: tuple[int, int] = (1, 5)  # of a job, from and to
    is_large: bool = False  # fewer events per container, so that a large fleet can be run for hours

    def describe(self) -> str:
        """One line, printed before the run."""
        return (
            f"seed {self.seed}: {self.profile} profile, {self.containers} containers, "
            f"{self.shard_count} shards, "
            f"{self.jobs} jobs ({self.poison_jobs} poison), a fault each {self.fault_every_ms / 1000:.0f} s, "
            f"a write each {self.write_every_ms / 1000:.0f} s; faults: {', '.join(self.faults) or 'none'}"
        )


def draw_options(seed: int) -> Options:
    """The world of a seed."""
    # A stream of its own: a change in the options' draw must not shift the events of every seed.
    rng = Random(f"options {seed}")
    profile = rng.choice(("paper", "fast"))
    share = rng.choice((0.15, 0.4, 0.6, 0.9))
    scale = 4 if profile == "paper" else 1
    return Options(
        seed=seed,
        profile=profile,
        containers=rng.randint(3, 8),
        shard_count=rng.choice((8, 16, 24)),
        jobs=rng.randint(4, 10),
        faults=tuple(kind for kind in FAULT_KINDS if rng.random() < share),
        fault_every_ms=rng.choice((4_000, 8_000, 15_000)) * scale,
        write_every_ms=rng.choice((5_000, 10_000, 20_000)) * scale,
        poison_jobs=rng.choice((0, 0, 0, 1, 2)),
        safety_ms=900_000 if profile == "paper" else 180_000,
    )


def draw_fleet_options(seed: int) -> Options:
    """Two hours of 30 containers and about 300 tasks, in the paper's profile: what `--profile tasks` runs."""
    rng = Random(f"fleet options {seed}")
    share = rng.choice((0.15, 0.4, 0.6, 0.9))
    kinds = [kind for kind in FAULT_KINDS if not kind.startswith("data plane")]
    return Options(
        seed=seed,
        profile="paper",
        containers=30,
        shard_count=rng.choice((48, 60)),
        jobs=60,
        faults=tuple(kind for kind in kinds if rng.random() < share),
        fault_every_ms=rng.choice((45_000, 90_000, 180_000)),
        write_every_ms=rng.choice((60_000, 120_000, 240_000)),
        poison_jobs=0,
        safety_ms=7_200_000,
        task_counts=(3, 7),
        is_large=True,
    )


DRAWS = {"jobs": draw_options, "tasks": draw_fleet_options}
