"""The task list of a container: waited for at the Task Service, kept on disk for when that is away."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from pathlib import Path

import structlog

from penstock.client import Client
from penstock.core.clock import Clock
from penstock.core.errors import PenstockError
from penstock.core.loop import Loop
from penstock.tasks.task_manager import TaskManager
from penstock.tasks.task_service import TaskList

WAIT_S, PAUSE_MS = 3.0, 20  # an answer waits so long for a newer list; then we ask again

log = structlog.get_logger(__name__)


class TaskLists:
    """Fetches newer lists in a thread of its own; the engine takes what came into its Task Manager."""

    def __init__(self, client: Client, cache: Path, clock: Clock, on_news: Callable[[], None]) -> None:
        self._client, self._cache, self._clock, self._on_news = client, cache, clock, on_news
        self._found: queue.Queue[tuple[TaskList, bool]] = queue.Queue()  # and whether it is the kept one
        self._version: int | None = None  # of the newest list that the service gave
        self._has_list = False
        self._loop = Loop("task list", self._fetch, every_ms=1_000)

    def start(self) -> TaskLists:
        """Begin to ask."""
        self._loop.start()
        return self

    def on_version(self, version: int) -> None:
        """Somebody said that there is a list of this version."""
        if version > (self._version or 0):
            self._loop.poke()

    def give(self, manager: TaskManager, now_ms: int) -> None:
        """Hand over what came."""
        while not self._found.empty():
            news, is_kept = self._found.get()
            if manager.on_task_list(news, now_ms, cached=is_kept):
                self._keep(manager.task_list)
            else:
                self._version = None  # it does not fit: fetch the whole list

    def _fetch(self) -> None:
        """Ask for a newer list; the answer waits until there is one, so the next question follows at once."""
        since, began_ms = self._version, self._clock.boot_ms()
        try:
            found = self._client.task_list(since, wait_s=WAIT_S)
            if found is not None or self._clock.boot_ms() - began_ms > WAIT_S * 500:
                self._loop.poke_after(PAUSE_MS)
            if found is None:
                return  # it is the newest
            news = TaskList.from_json(found)
        except (PenstockError, ValueError) as error:
            said = error.what if isinstance(error, PenstockError) else f"it cannot be read: {error}"
            log.warning("no task list", error=said)
            if not self._has_list:
                self._has_list = True  # once: go on with what was known, until the service answers
                self._use_kept()
            return
        if since is None or news.version != since:
            self._version, self._has_list = news.version, True
            self._found.put((news, False))
            self._on_news()

    def _use_kept(self) -> None:
        try:
            self._found.put((TaskList.from_json(json.loads(self._cache.read_text())), True))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            log.info("no usable task list on disk either")

    def _keep(self, whole: TaskList | None) -> None:
        if whole is not None:
            temporary = self._cache.with_suffix(".new")
            temporary.write_text(json.dumps(whole.to_json()))
            temporary.replace(self._cache)
