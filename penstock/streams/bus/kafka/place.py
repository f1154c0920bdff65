"""The place of a Kafka bus: `kafka://host:port[,host:port…]/prefix[?setting=value…]`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from penstock.core.errors import ConfigError

FORM = "kafka://<host>:<port>/<prefix>"
_CONTROL = "_control."  # no category's name starts so
# Further settings of a connection. Secrets are given as names of environment variables, never as values.
_SETTINGS = (
    "security.protocol",
    "sasl.mechanism",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
)
_SECRETS = ("sasl.password", "ssl.key.password")


@dataclass(frozen=True, slots=True)
class KafkaPlace:
    """Brokers, the prefix of our topics and ids, and connection settings."""

    brokers: str
    prefix: str = ""
    options: tuple[tuple[str, str], ...] = ()

    def topic(self, category: str) -> str:
        """The topic of a category's records."""
        return f"{self.prefix}{category}"

    def control(self, category: str) -> str:
        """The category's control topic."""
        return f"{self.prefix}{_CONTROL}{category}"

    def category_names(self, topics: Iterable[str]) -> list[str]:
        """The categories whose two topics are among these."""
        there = set(topics)
        begin = f"{self.prefix}{_CONTROL}"
        names = sorted(name.removeprefix(begin) for name in there if name.startswith(begin))
        return [name for name in names if self.topic(name) in there]

    def settings(self, environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """The configuration of a client."""
        found = {"bootstrap.servers": self.brokers}
        for name, value in self.options:
            if name in _SECRETS:
                found[name] = (environment or {}).get(value, "")
                if not found[name]:
                    raise ConfigError(
                        f"the Kafka setting {name} is not there",
                        why=f"it is read from the environment variable {value!r}, which is not set",
                        fix="set the variable where the control plane and the containers start",
                    )
            else:
                found[name] = value
        return found


def parse_place(place: str) -> KafkaPlace:
    """Parse a place. ConfigError names the valid form."""
    parts = urlsplit(place)
    options = tuple(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted({name for name, _ in options} - set(_SETTINGS))
    prefix = parts.path.removeprefix("/")
    complaints = [
        (parts.scheme != "kafka" or not parts.netloc, "it names no broker"),
        ("@" in parts.netloc, "users and passwords do not belong there"),
        (not all(_is_broker(broker) for broker in parts.netloc.split(",")), "a broker is <host>:<port>"),
        ("/" in prefix or not _is_prefix(prefix), f"{prefix!r} cannot begin the name of a topic"),
        (bool(unknown), f"settings {unknown} are not known, only {list(_SETTINGS)}"),
    ]
    for is_wrong, why in complaints:
        if is_wrong:
            shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
            raise ConfigError(f"no such bus: {shown!r}", why=why, fix=f"write it as {FORM}")
    return KafkaPlace(parts.netloc, prefix, options)


def _is_broker(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit()


def _is_prefix(text: str) -> bool:
    return len(text) <= 64 and all(c.isascii() and (c.isalnum() or c in "._-") for c in text)
