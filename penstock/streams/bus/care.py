"""Periodic maintenance of the bus by the control plane: due marks, and cleaning. Each category is processed
separately, so a damaged one does not affect marks, retention or compaction of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from penstock.core.clock import Millis
from penstock.core.errors import NotFound, PenstockError
from penstock.streams.bus.log import Log, NotAllCleaned

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingCategory:
    """A category whose last rounds failed: how many in a row, and the error."""

    name: str
    streak: int
    error: PenstockError


class BusCare:
    """A control plane's maintenance rounds over a bus."""

    def __init__(self, bus: Log, *, clean_ms: Millis, clean_after_ms: Millis) -> None:
        self._bus, self._clean_ms, self._clean_after_ms = bus, clean_ms, clean_after_ms
        self._cleaned_ms: Millis | None = None
        self._not_cleaned: Mapping[str, PenstockError] = {}  # by the last cleaning
        self._failing: Mapping[str, FailingCategory] = {}

    @property
    def failing(self) -> tuple[FailingCategory, ...]:
        """The categories for which the last round, or the last cleaning, could not do all."""
        return tuple(self._failing.values())

    def tick(self, *, now_ms: Millis, boot_ms: Millis) -> None:
        """One round. Cleaning uses `boot_ms`, the monotonic clock since boot."""
        failed: dict[str, PenstockError] = {}
        for name in self._bus.names():
            try:
                self._bus.advance(name, now_ms=now_ms)
            except NotFound:
                continue  # removed meanwhile, or its creation is not complete
            except PenstockError as error:
                failed[name] = error
        if self._cleaned_ms is None or boot_ms - self._cleaned_ms >= self._clean_ms:
            self._cleaned_ms, self._not_cleaned = boot_ms, {}
            try:
                self._bus.clean(now_ms=boot_ms, older_than_ms=self._clean_after_ms)
            except NotAllCleaned as error:
                self._not_cleaned = error.failed
        self._note({**self._not_cleaned, **failed})

    def _note(self, failed: Mapping[str, PenstockError]) -> None:
        for name in self._failing.keys() - failed.keys():
            log.info("a category has recovered", category=name)
        found = {}
        for name, error in failed.items():
            known = self._failing.get(name)
            if known is None or str(known.error) != str(error):
                log.error(
                    "maintenance of a category failed; the others are not affected",
                    category=name,
                    error=str(error),
                )
            streak = 1 if known is None else known.streak + 1
            found[name] = FailingCategory(name=name, streak=streak, error=error)
        self._failing = found
