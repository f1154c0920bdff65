"""How Python runs a process that serves many requests beside loops over much data."""

from __future__ import annotations

import gc
import sys

ALLOCATIONS = 50_000  # more objects than before, not 700: a round over 100,000 jobs makes millions that stay
# Where somebody waits for an answer: to look through 50,000 takes up to 0.1 s, in which all wait.
SERVING = (2_000, 5, 1_000)
TURN_S = 0.0005  # not 5 ms: a thread that asks SQLite for ten rows gives its turn away ten times


def tune_process(*, serving: bool = False) -> None:
    """Garbage in cycles is looked for rarely, never in what is loaded by now; threads take short turns.

    Measured in a release of 100,000 jobs: an eighth of the time went into collections that found nothing; and
    under 600 requests a second beside the State Syncer: reads waited four times as long for their turns.
    `serving`: it only answers requests. Collections are short and frequent.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(SERVING if serving else (ALLOCATIONS, 20, 50)))
    sys.setswitchinterval(TURN_S)
