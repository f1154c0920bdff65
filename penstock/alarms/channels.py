"""Sends alarms to mail, chat and pagers through the library apprise, an optional dependency.

Addresses are secrets: they appear in no log and no message.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from penstock.alarms.decide import Notice
from penstock.core.errors import ConfigError, EnvironmentProblem, PenstockError

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]{1,29})://")
# Their log messages contain addresses.
LOGGERS_WITH_ADDRESSES = ("apprise", "urllib3", "urllib3.connectionpool", "requests")
COLOURS = {"info": "info", "warning": "warning", "critical": "failure"}


class ChannelRoute:
    """A `Route` to one address that apprise supports. Its name is the scheme, which is not secret."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        library = _apprise()
        for logger in LOGGERS_WITH_ADDRESSES:
            logging.getLogger(logger).disabled = True
        # Uses apprise and not a plugin directly, because apprise catches the errors of plugins.
        self._channel = library.Apprise()
        if not self._channel.add(url):
            raise ConfigError(
                f"the address of the alarm channel {name} is not valid",
                why=f"apprise does not accept this {scheme_of(url)}:// address",
                fix="see the apprise documentation for the format; `apprise --details` lists the channels",
            )

    def send(self, notice: Notice, notice_id: int) -> None:
        """Send a notice. The error gives no reason, because apprise's reasons contain addresses."""
        alarm = notice.alarm
        kind = "success" if notice.kind == "resolved" else COLOURS[alarm.severity]
        if not self._channel.notify(title=title_of(notice), body=body_of(notice), notify_type=kind):
            raise PenstockError(
                f"the alarm channel {self.name} did not accept a notice",
                why="apprise could not deliver it",
                fix="check the address and the network; the notice will be sent again",
            )


def scheme_of(url: str) -> str:
    """The scheme of an address, the only part that may be shown; ConfigError if it has none."""
    found = SCHEME.match(url)
    if found is None:
        raise ConfigError(
            "an address of an alarm channel is not valid",
            why="it does not begin with a scheme such as mailto://",
            fix="give apprise addresses, separated by spaces or, in a file, one per line",
        )
    return found[1].lower()


def title_of(notice: Notice) -> str:
    """One line: what happened to which job."""
    alarm = notice.alarm
    return f"[{alarm.severity}] {alarm.job}: {alarm.key} {notice.kind}"


def body_of(notice: Notice) -> str:
    """The text of the alarm, its evidence, and what to do."""
    alarm = notice.alarm
    lines = [alarm.text, *(f"{name}: {value}" for name, value in alarm.evidence.items())]
    if alarm.what_to_do:
        lines.append(f"what to do: {alarm.what_to_do}")
    return "\n".join([*lines, f"alarm {alarm.id}, reported by {alarm.source}"])


def _apprise() -> Any:
    try:
        import apprise
    except ImportError:
        raise EnvironmentProblem(
            "alarms cannot be sent to channels",
            why="the library apprise is not installed",
            fix='install it with `pip install "penstock[alarms]"`, or remove the setting alarm_channels',
        ) from None
    return apprise
