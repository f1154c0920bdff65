"""Which rows of an interval are about the ids of records, and no key's state. Pure."""

from __future__ import annotations

PREFIX = "\x00ids\x00"
PREFIX_END = "\x00ids\x01"  # the first name behind them


def is_of_ids(name: str) -> bool:
    """True for rows of ids."""
    return name.startswith(PREFIX)
