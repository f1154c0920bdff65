"""What somebody may have meant by a name that does not exist. Pure: names in, a line for people out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN_MAX = 10


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """A suggestion, or what to do when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean `{near[0]}`?" if near else otherwise


def some_of(names: Iterable[str]) -> str:
    """Names in a line: a few, and how many more there are."""
    every = sorted(names)
    rest = len(every) - SHOWN_MAX
    return (", ".join(every[:SHOWN_MAX]) or "none") + (f" and {rest} more" if rest > 0 else "")
