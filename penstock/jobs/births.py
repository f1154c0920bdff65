"""Ids that tell two lives of one name apart. Pure: the same inputs give the same id."""

from __future__ import annotations

import hashlib


def interval_birth(job_birth: str, kind: str, lineage: int, partition: int) -> str:
    """An interval is born with its job, with each reset of its state (`lineage`) and each change of kind."""
    return hashlib.sha256(f"{job_birth}/{kind}/{lineage}/{partition}".encode()).hexdigest()[:16]


def stateless_producer(job_birth: str, input_birth: str, partition: int) -> str:
    """Named after the input partition: a stateless step's sequences are input offsets."""
    return f"{job_birth}:{input_birth}:{partition}"


def producer_of(*, job_birth: str, kind: str, lineage: int, input_birth: str, partition: int) -> str:
    """The producer id under which an interval of this job publishes."""
    if kind == "stateful":
        return interval_birth(job_birth, kind, lineage, partition)
    # A stateless job that is reset reads its input again: to the bus it must be somebody else.
    life = f"{job_birth}+{lineage}" if lineage else job_birth
    return stateless_producer(life, input_birth, partition)
