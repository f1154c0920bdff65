"""What the State Syncer needs of the layers above it. Every call may be repeated, and may be cut off
anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class TaskActuator(Protocol):
    """The task layer, as the syncer needs it."""

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        """True when no task of `job` with a generation <= `generation` runs any more.

        Proof is one of: every container with a live lease acknowledged a task list >= `list_version` and
        reaped what it no longer holds; or its lease is over. Never a guess, never a timeout.
        """


class DataPlane(Protocol):
    """The bus and the row store, as the syncer needs them."""

    def prepare(self, job: str, birth: str, config: Mapping[str, Any]) -> None:
        """Create what tasks of this config will open: categories, intervals, producer registrations."""

    def unread(
        self, job: str, birth: str, config: Mapping[str, Any], category: str, *, is_stopped: bool
    ) -> str:
        """Why the tasks of `config` are not at the end of this input yet; "" once they are.

        It has an end when nobody is registered as its producer any more, or its producers are stopped.
        """

    def fence(self, job: str, birth: str, config: Mapping[str, Any], *, generation: int) -> None:
        """Raise every interval of `config` to (generation, 0) with a new token, and its producers with it."""

    def retire(self, job: str, birth: str, old: Mapping[str, Any], new: Mapping[str, Any] | None) -> None:
        """Unregister the producers that `old` had and `new` has not (None: the job is gone).

        NotYet while something that was promised to an output under `old` is not there yet.
        """
