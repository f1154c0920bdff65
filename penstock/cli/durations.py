"""How long, as people write it: 90s, 15m, 2h, 1d, 1h30m. Pure."""

from __future__ import annotations

import re

from penstock.core.errors import ConfigError

UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_FORM = re.compile(r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")


def seconds_of(text: str, *, what: str, most_s: int) -> int:
    """A time from one second to `most_s`; anything else is refused, with an example."""
    found = _FORM.fullmatch(text.strip().lower())
    parts = found.groups() if found is not None else ()
    if not any(parts):
        raise ConfigError(
            f"{text[:100]!r} is not {what}",
            why="it is a number with d, h, m or s behind it, or several of these",
            fix="e.g. 30m, 2h, 1d, 1h30m",
        )
    seconds = sum(int(part or 0) * size for part, size in zip(parts, UNITS.values(), strict=True))
    if not 1 <= seconds <= most_s:
        raise ConfigError(
            f"{text[:100]!r} is not {what}",
            why=f"it is {seconds} s, where 1 to {most_s} are allowed",
            fix=f"name at least 1s and at most {most_s // UNITS['d']}d",
        )
    return seconds
