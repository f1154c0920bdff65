"""The scaler's control settings for one job, checked when they are made. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Literal

from penstock.core.errors import ConfigError

Generation = Literal["reactive", "proactive", "preactive"]

DAY_MIN = 1440
# Between which each number must lie.
RANGES = {
    "window_min": (1, 60),
    "settle_min": (0, 60),
    "stale_min": (1, 60),
    "recovery_s": (1, 30 * 86_400),
    "target": (0.05, 0.95),
    "up_at": (0.1, 1.0),
    "down_after_min": (1, 14 * DAY_MIN),
    "reactive_quiet_min": (1, 14 * DAY_MIN),
    "reactive_step": (0.01, 10),
    "saving_min": (0.01, 0.9),
    "resource_saving_min": (0.01, 0.9),
    "imbalance_at": (0.05, 10),
    "memory_soft": (0.3, 0.99),
    "headroom": (1.0, 3.0),
    "oom_factor": (1.05, 4.0),
    "vertical_share": (0.01, 1.0),
    "update_recent_min": (0, 14 * DAY_MIN),
    "slower_at": (0.05, 0.95),
    "history_hours": (0.25, 24),
    "history_days_min": (1, 14),
    "unlike_at": (0.01, 5),
    "judge_after_min": (1, 240),
    "observe_min": (1, 14 * DAY_MIN),
    "effective_at": (0.0, 0.9),
    "remember_min": (1, 30 * DAY_MIN),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the scaler treats a job. Minutes are `_min`, shares are of one."""

    generation: Generation = "preactive"
    window_min: int = 5  # what "now" is
    settle_min: int = 1  # first minutes of changed tasks say nothing about what they can do
    stale_min: int = 3
    recovery_s: float = 1800.0  # t, within which a backlog should be gone
    target: float = 0.7  # a new shape is used to at most this share
    up_at: float = 0.85  # above this share a job is short
    down_after_min: int = 60  # for how long less must have been enough
    reactive_quiet_min: int = DAY_MIN  # no lag and no OOM for so long (Algorithm 2, line 10)
    reactive_step: float = 0.5
    saving_min: float = 0.1  # of the threads: less is not worth a restart
    resource_saving_min: float = 0.3  # of cpu or memory, where the number of threads stays
    imbalance_at: float = 0.5  # standard deviation over mean
    memory_soft: float = 0.9  # of what is reserved: above, more is reserved before it runs out
    headroom: float = 1.2  # reserved over estimated
    oom_factor: float = 1.5
    vertical_share: float = 0.2  # of a container: no task is larger (Turbine V-E)
    update_recent_min: int = 60
    slower_at: float = 0.5  # a thread that gives less than this share of P has another problem than load
    history_hours: float = 4.0  # x, for which a smaller shape must have been enough in the past
    history_days_min: int = 3  # fewer known days are no pattern
    unlike_at: float = 0.2  # last 30 minutes that differ by more from those of the past are unlike it
    judge_after_min: int = 5
    observe_min: int = 60  # a breach of the SLO so soon after going down was its doing
    effective_at: float = 0.1  # less of the expected gain: it did not help
    remember_min: int = 360

    def __post_init__(self) -> None:
        if self.generation not in ("reactive", "proactive", "preactive"):
            raise _refused("generation", self.generation, "reactive, proactive or preactive")
        for part in fields(self):
            if part.name in RANGES:
                low, high = RANGES[part.name]
                value = getattr(self, part.name)
                if not (isinstance(value, int | float) and isfinite(value) and low <= value <= high):
                    raise _refused(part.name, value, f"a number from {low:g} to {high:g}")
        if self.target >= self.up_at:
            raise _refused("target", self.target, f"below up_at, which is {self.up_at:g}")
        if self.memory_soft * self.headroom < 1:
            raise _refused("headroom", self.headroom, f"at least {1 / self.memory_soft:.2f}, 1 / memory_soft")


def _refused(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(
        f"the scaler's setting {name} is {value!r}",
        why=f"it must be {wanted}",
        fix=f"set {name} to {wanted}",
    )


DEFAULTS = Settings()
