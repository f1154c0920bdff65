"""What a process and everything below it use. A worker that ends meanwhile has no part in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psutil


def cpu_of(process: psutil.Process) -> float:
    """CPU seconds so far."""
    return _sum_of(process, lambda one: sum(one.cpu_times()[:2]))


def memory_of(process: psutil.Process) -> float:
    """Resident megabytes."""
    return _sum_of(process, lambda one: one.memory_info().rss / 2**20)


def _sum_of(process: psutil.Process, measure: Callable[[psutil.Process], float]) -> float:
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += measure(one)
    return total
