"""How a test waits: for a condition, with a limit that no machine reaches, however slow or busy it is.

A test never sleeps for a fixed time, counts no turns, and says nothing about how long something took: a turn is
short on a fast machine, and a second is short on a busy one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Below the limit of a whole test (`timeout` in pyproject.toml), so that what was waited for is said.
LIMIT_S = 300.0
POLL_S = 0.01


def until(
    condition: Callable[[], T],
    what: object = "",
    *,
    step: Callable[[], object] | None = None,
    seconds: float = LIMIT_S,
) -> T:
    """Return what the condition says as soon as that is true; before each further look `step`, or a short sleep.

    `what` is said when it fails; a function is asked for it then.
    """
    limit = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > limit:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {seconds:.0f} s: {said or 'what this test waits for'}")
        if step is None:
            time.sleep(POLL_S)
        else:
            step()
    return found


def join(thread: threading.Thread, what: str = "") -> None:
    """Wait for the end of a thread; fail if it does not end."""
    thread.join(LIMIT_S)
    assert not thread.is_alive(), f"still running after {LIMIT_S:.0f} s: {what or thread.name}"
