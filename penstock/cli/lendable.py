"""The host of a container that joined: runs it at home, or for another cluster while that one needs it.

It asks the cluster that its container works for. Before it goes it looks whether it could work there. It
comes home by itself when the other cluster does not want it, or falls silent. Started again, it is at home.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import structlog

from penstock.client import Client
from penstock.container import ContainerSettings, folder_id, join_settings
from penstock.core.clock import Clock, Millis
from penstock.core.errors import EnvironmentProblem, NotFound, PenstockError
from penstock.settings import ROWS_VARIABLE

log = structlog.get_logger(__name__)

ASK_MS: Millis = 10_000  # thousands of hosts ask: seldom, while nothing is wanted of them
UNDER_WAY_MS: Millis = 2_000  # while one is about to go, or has just come
HOME_AFTER_MS: Millis = 60_000  # so long another cluster may be silent, or not have it


AT_REST = ("", "here")


class Host(Protocol):
    """Whoever runs one container's processes."""

    def start(self) -> None:
        """Start it."""

    def stop(self) -> None:
        """End it, and make sure that nothing of it is left."""


class Stop(Protocol):
    """What a signal sets."""

    def wait(self, timeout: float) -> bool:
        """Whether it is set by then."""


@dataclass(slots=True)
class _Place:
    """Where the container works now."""

    settings: ContainerSettings
    client: Client
    host: Host
    owner: str = ""  # as that cluster has it; "": it is at home
    heard_ms: Millis = 0


@dataclass(slots=True)
class LendableHost:
    """Runs one container, at home or elsewhere."""

    home: ContainerSettings
    make_host: Callable[[ContainerSettings, Client], Host]  # with a client for its cluster
    clock: Clock
    _place: _Place | None = field(default=None, repr=False)

    def run(self, stop: Stop) -> None:
        """Work until told to stop; leaves nothing running."""
        self._enter(self.home)
        try:
            pause_ms = UNDER_WAY_MS
            while not stop.wait(pause_ms / 1000):
                pause_ms = ASK_MS if self.look() in AT_REST else UNDER_WAY_MS
        finally:
            self._leave()

    def look(self) -> str:
        """Ask once, and do as told; returns what the cluster has it for, "": nothing."""
        place, now_ms = self._place, self.clock.boot_ms()
        assert place is not None
        try:
            said = place.client.ask_order(place.settings.name, owner=place.owner)
        except NotFound:
            return ""  # a control plane that does not lend
        except PenstockError as error:
            if place.owner and now_ms - place.heard_ms >= HOME_AFTER_MS:
                self._go_home(f"its cluster did not answer: {error.what}")
            return ""
        if said["state"] in ("here", "asked", "draining", "ordered"):
            place.heard_ms = now_ms
        elif place.owner and now_ms - place.heard_ms >= HOME_AFTER_MS:
            self._go_home("its cluster does not take it")
            return ""
        order = said["order"]
        if order is not None:
            self._obey(place, order)
        return str(said["state"])

    def _obey(self, place: _Place, order: Mapping[str, Any]) -> None:
        try:
            if order["kind"] not in ("check", "go"):
                raise EnvironmentProblem(
                    f"this host does not know the order {order['kind'][:100]!r}",
                    why="its cluster runs a newer version",
                    fix="start the container again with that version",
                )
            settings = self._settings_for(order)
        except (PenstockError, OSError) as error:
            self._refuse(place, order, error)
            return
        if order["kind"] == "check":
            self._answer(place, order, accepted=True)
            return
        log.info("container goes", container=self.home.name, to=order["to"], url=order["url"])
        self._leave()
        if not self._answer(place, order, accepted=True):
            # It does not stand any more, or nobody answers: nothing has changed.
            self._enter(place.settings, owner=place.owner)
            return
        try:
            self._enter(settings, owner=str(order["owner"]))
        except (PenstockError, OSError) as error:
            self._go_home(f"it cannot start there: {error}")

    def _refuse(self, place: _Place, order: Mapping[str, Any], error: PenstockError | OSError) -> None:
        what, why = (error.what, error.why) if isinstance(error, PenstockError) else (str(error), "")
        log.warning("container cannot go", container=self.home.name, to=order["to"], error=what, why=why)
        self._answer(place, order, accepted=False, why=f"{what}: {why}" if why else what)

    def _answer(self, place: _Place, order: Mapping[str, Any], *, accepted: bool, why: str = "") -> bool:
        try:
            with _client(place.settings) as client:
                client.answer_order(self.home.name, number=order["number"], accepted=accepted, why=why)
        except PenstockError as error:
            log.warning("an answer was not taken", container=self.home.name, error=error.what, why=error.why)
            return False
        return True

    def _settings_for(self, order: Mapping[str, Any]) -> ContainerSettings:
        """How it works there; raises what keeps it from that."""
        if not order["owner"]:
            return self.home
        url = str(order["url"])
        # A folder of its own: what one cluster's tasks left must mean nothing to another's.
        folder = self.home.folder / "lent" / hashlib.sha256(url.encode()).hexdigest()[:12]
        settings = join_settings(
            self.home.name,
            url=url,
            token_file=keep_token(folder, str(order["token"])),
            folder=folder,
            engine=self.home.engine,
            capacity=self.home.capacity,
            region=self.home.region,
            rows=os.environ.get(ROWS_VARIABLE, ""),
        )
        # A database that is known by a variable is that of home.
        return replace(settings, store="") if settings.store.startswith("env:") else settings

    def _go_home(self, reason: str) -> None:
        log.warning("container goes home", container=self.home.name, reason=reason)
        self._leave()
        self._enter(self.home)

    def _enter(self, settings: ContainerSettings, *, owner: str = "") -> None:
        client = _client(settings)
        host = self.make_host(settings, client)
        host.start()
        heard_ms = self.clock.boot_ms()
        self._place = _Place(settings=settings, client=client, host=host, owner=owner, heard_ms=heard_ms)

    def _leave(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.host.stop()
            tell_dead(place.client, place.settings)
            place.client.close()


def _client(settings: ContainerSettings) -> Client:
    return Client(settings.url, settings.token_file.read_text().strip(), timeout_s=5, retries=0)


def tell_dead(client: Client, settings: ContainerSettings) -> None:
    """Nothing of it is left; if nobody hears that, its lease runs out by itself."""
    try:
        client.container_dead(settings.name, folder_id(settings.folder))
    except PenstockError as error:
        log.warning("the control plane was not told", container=settings.name, error=error.what)


def keep_token(folder: Path, token: str) -> Path:
    """The token in a file that only this user can read, for the engine: arguments are seen by everybody."""
    path = folder / "token"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(token)
        path.chmod(0o600)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot use the folder {folder}", why=str(error), fix="name another one with --dir"
        ) from error
    return path
