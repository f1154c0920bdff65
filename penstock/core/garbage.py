"""When Python looks for garbage in cycles. Reference counts free the rest at once, whatever is set here."""

from __future__ import annotations

import gc

ALLOCATIONS = 50_000  # more objects than before, not 700: a round over 100,000 jobs makes millions that stay


def collect_rarely() -> None:
    """For a process that keeps much in memory: what is loaded by now is never looked through again.

    Measured in a release of 100,000 jobs: an eighth of the time went into collections that found nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, 20, 50)
