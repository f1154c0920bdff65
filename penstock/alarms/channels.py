"""Alarms to the usual channels (mail, chat, pagers), through the library apprise. Addresses are secrets.

It is an extra: an installation that has no such channel does not need it.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from penstock.alarms.decide import Notice
from penstock.core.errors import ConfigError, EnvironmentProblem, PenstockError

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]{1,29})://")
# They would tell addresses.
LOGGERS_WITH_ADDRESSES = ("apprise", "urllib3", "urllib3.connectionpool", "requests")
COLOURS = {"info": "info", "warning": "warning", "critical": "failure"}


class ChannelRoute:
    """A `Route` of alarms: one address that apprise knows, named after its scheme, which is no secret."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        library = _apprise()
        for logger in LOGGERS_WITH_ADDRESSES:
            logging.getLogger(logger).disabled = True
        # The whole of apprise, not its plugin: it catches whatever a plugin raises.
        self._channel = library.Apprise()
        if not self._channel.add(url):
            raise ConfigError(
                f"the channel {name} has no good address",
                why=f"apprise knows no such {scheme_of(url)}:// address",
                fix="see its documentation for the form: `apprise --details` lists the channels",
            )

    def send(self, notice: Notice, notice_id: int) -> None:
        """Apprise says yes or no, not why: its reasons hold addresses."""
        alarm = notice.alarm
        kind = "success" if notice.kind == "resolved" else COLOURS[alarm.severity]
        if not self._channel.notify(title=title_of(notice), body=body_of(notice), notify_type=kind):
            raise PenstockError(
                f"the channel {self.name} did not take a notice",
                why="apprise could not deliver it",
                fix="check the address and the network; the notice is sent again",
            )


def scheme_of(url: str) -> str:
    """What sort of channel an address is; ConfigError if it is none. Nothing else of it is ever shown."""
    found = SCHEME.match(url)
    if found is None:
        raise ConfigError(
            "an address of the alarms' channels is none",
            why="it does not begin with a scheme, e.g. mailto://",
            fix="give addresses as apprise knows them, with spaces between, or one a line in a file",
        )
    return found[1].lower()


def title_of(notice: Notice) -> str:
    """One line: what happened to which job."""
    alarm = notice.alarm
    return f"[{alarm.severity}] {alarm.job}: {alarm.key} {notice.kind}"


def body_of(notice: Notice) -> str:
    """What is known, and what to do."""
    alarm = notice.alarm
    lines = [alarm.text, *(f"{name}: {value}" for name, value in alarm.evidence.items())]
    if alarm.what_to_do:
        lines.append(f"what to do: {alarm.what_to_do}")
    return "\n".join([*lines, f"alarm {alarm.id}, seen by {alarm.source}"])


def _apprise() -> Any:
    try:
        import apprise
    except ImportError:
        raise EnvironmentProblem(
            "alarms cannot be sent to channels",
            why="the library apprise is not installed here",
            fix='install it with `pip install "penstock[alarms]"`, or leave --alarm-channels out',
        ) from None
    return apprise
