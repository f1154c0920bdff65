"""Types that several threads decode: made known to msgspec while their module is imported. Pure.

What msgspec needs of a type it gathers at the first use, and two first uses at once end the process: a
control plane was seen to die of a read of NULL as its loops began (msgspec 0.22). Imports are one thread's.
"""

from __future__ import annotations

from typing import Any

import msgspec


def make_known(*kinds: Any) -> None:
    """Have msgspec gather what it needs of these types, and of those that they hold, now."""
    for kind in kinds:
        msgspec.json.Decoder(kind)
