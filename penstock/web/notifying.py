"""The routes by which people are told of alarms, as settings name them: the log, a webhook, channels."""

from __future__ import annotations

from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.resources.alarm_sender import LogRoute, Route
from penstock.web.channels import ChannelRoute, scheme_of
from penstock.web.webhooks import WebhookRoute

FILE = "file:"
SECRET_LENGTH_MAX = 100_000
CHANNELS_MAX = 20


def routes_of(*, webhook: str, channels: str) -> tuple[Route, ...]:
    """The log, and what else is set. Each channel is a route of its own: one that is away costs no other."""
    routes: list[Route] = [LogRoute()]
    if webhook:
        routes.append(WebhookRoute(read_secret("the webhook's address", webhook).strip()))
    urls = _lines(read_secret("the channels' addresses", channels)) if channels else []
    if len(urls) > CHANNELS_MAX:
        raise ConfigError(
            f"{len(urls)} channels are too many",
            why=f"up to {CHANNELS_MAX} are told of alarms",
            fix="leave some out",
        )
    taken = {route.name for route in routes}
    for url in urls:
        name = _free_name(scheme_of(url), taken)
        taken.add(name)
        routes.append(ChannelRoute(url, name))
    return tuple(routes)


def read_secret(what: str, value: str) -> str:
    """A secret as it is given, or what is in the file that `file:<path>` names."""
    if not value.startswith(FILE):
        return value
    path = Path(value.removeprefix(FILE))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {what}", why=f"{path}: {why}", fix="name a file of text") from None
    if not text.strip() or len(text) > SECRET_LENGTH_MAX:
        raise ConfigError(f"cannot read {what}", why=f"{path} is empty or too long", fix="write it there")
    return text


def _lines(text: str) -> list[str]:
    """Addresses with white space between; a line that begins with # is a remark."""
    kept = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [part for line in kept for part in line.split()]


def _free_name(scheme: str, taken: set[str]) -> str:
    numbers = (f"{scheme}{number}" for number in range(2, CHANNELS_MAX + 2))
    return scheme if scheme not in taken else next(name for name in numbers if name not in taken)
