"""What a job with state promises about its productions, in words. Pure: its config in, sentences out."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.jobs.config import JobConfig


def guarantees_of(config: JobConfig) -> Iterator[str]:
    """One for each word of its config that decides it; without a word the defaults. Other kinds have none."""
    if config.kind != "stateful":
        return
    is_weak, is_off = config.productions == "weak", config.dedup == "off"
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
    if config.poison == "skip" and not why_no_skip(config):
        yield "poison skip: records at which the computation raises become dead letters"


def why_no_skip(config: JobConfig) -> str:
    """Why `poison: skip` cannot put aside records at which user code raises; "" if it can."""
    if config.computation.get("vectorised"):
        return "process_batch gets a whole batch at once, so the record that fails is not known"
    return "it runs no user code per record" if config.computation.get("operator") else ""
