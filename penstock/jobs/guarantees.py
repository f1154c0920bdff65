"""What a job with state promises about its productions, in words. Pure: its config in, sentences out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def guarantees_of(kind: str, config: Mapping[str, Any]) -> Iterator[str]:
    """One for each word of its config that decides it; without a word the defaults. Other kinds have none."""
    if kind != "stateful":
        return
    is_weak, is_off = config.get("productions") == "weak", config.get("dedup") == "off"
    if is_weak:
        yield (
            "weak productions: at least once; what is sent before a crash and not committed comes again, "
            "with other values if user code decides otherwise"
        )
    if is_off:
        yield "dedup off: at least once; what is sent again after a crash is not recognised"
    if not is_weak and not is_off:
        yield (
            "strong productions: exactly once; checkpointed with the state, then sent, and what is sent "
            "again after a crash is recognised"
        )
    if config.get("poison") == "skip" and not why_no_skip(config):
        yield "poison skip: records at which the computation raises become dead letters"


def why_no_skip(config: Mapping[str, Any]) -> str:
    """Why `poison: skip` cannot put aside records at which user code raises; "" if it can."""
    computation = (config.get("plan") or {}).get("computation") or {}
    if computation.get("vectorised"):
        return "process_batch gets a whole batch at once, so the record that fails is not known"
    return "it runs no user code per record" if computation.get("operator") else ""
