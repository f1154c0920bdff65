"""What ended a run, as its user should read it, and whether a successor did."""

from __future__ import annotations

import re

from penstock.core.errors import Fenced, PenstockError
from penstock.streams.engine.poison import error_class

_NAMED = re.compile(
    r"penstock\.(?:core\.errors|streams\.\w+)\.(\w+): (.*?)"
    r"(?=\s+SQLSTATE: |\n\s*\n|\n\tat |\nDriver stacktrace|\Z)",
    re.S,
)


def readable(error: BaseException) -> str:
    """Our own error's three parts where there is one inside, else what Spark says, its error class first."""
    if isinstance(error, PenstockError):
        return str(error)
    text = str(error)
    named = _NAMED.search(text)
    if named is not None:
        return named.group(2).strip()
    name = error_class(error)
    return "\n".join(text[text.index(f"[{name}]") if name else 0 :].strip().splitlines()[:12])


def is_fenced(error: BaseException) -> bool:
    """A successor owns an interval of this task: told by type, or by name when it comes out of a worker's
    traceback.
    """
    if isinstance(error, Fenced):
        return True
    named = _NAMED.search(str(error))
    return named is not None and named.group(1) == "Fenced"
