"""How long it took to end an engine and all it had started, kept in the container's folder.

Between the container's deadline and the failover lies a margin, and by its end nothing of the container may
run. Whether a kill fits into it depends on the machine, so it is measured, and a profile that it does not fit
is refused. One that was too slow may be due to a bad moment, and the container would never measure again: it
takes two of the last few.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock.core.clock import Millis
from penstock.core.errors import EnvironmentProblem
from penstock.tasks.messages import Profile

KEPT = 5  # an old measurement must not speak for a machine that has changed
BELIEVED = 2  # so many of them that are too slow are the machine


class KillTimes:
    """The last few, in a file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "kill_times.json"

    def read(self) -> tuple[Millis, ...]:
        """Oldest first; none if there is no file, or none that can be read."""
        try:
            found = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return ()
        return tuple(item for item in found if isinstance(item, int)) if isinstance(found, list) else ()

    def note(self, took_ms: Millis) -> None:
        """One more."""
        kept = [*self.read(), took_ms][-KEPT:]
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(kept))
        temporary.replace(self._path)

    def check(self, profile: Profile) -> None:
        """Refuse a profile whose margin is shorter than the longest of them but one."""
        margin_ms, slowest = margin_of(profile), sorted(self.read())[-BELIEVED:]
        longest_ms = slowest[0] if len(slowest) == BELIEVED else 0
        if longest_ms > margin_ms:
            raise EnvironmentProblem(
                "this container cannot run with these times",
                why=f"to end its tasks took {longest_ms} ms and more, {BELIEVED} times of the last {KEPT}, "
                f"and others may start them after {margin_ms} ms",
                fix="use a profile with longer times (--profile paper); once the machine is faster, remove "
                f"{self._path.name} from the container's folder",
            )


def margin_of(profile: Profile) -> Millis:
    """How long a kill may take."""
    return profile.failover_ms - profile.deadline_ms
