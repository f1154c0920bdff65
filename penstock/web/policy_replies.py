"""What goes out over HTTP about policies, for the API's description of itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PolicySaid(_Reply):
    """One policy's answer, what became of it, and the numbers behind it."""

    policy: str
    outcome: str
    reason: str
    symptom: str
    cause: str
    confidence: float | None
    inputs: dict[str, Any]
    formula: str
    bound: str


class PolicyChange(_Reply):
    """The one change of a round."""

    policy: str
    what: str
    why: str
    outcome: Literal["done", "not done", "would be done"]
    refused: str


class PolicyAlert(_Reply):
    """What somebody is told."""

    policy: str
    key: str
    severity: str
    text: str
    what_to_do: str


class ManagedJob(_Reply):
    """What a look at a job came to."""

    job: str
    at_ms: int
    is_dry: bool
    change: PolicyChange | None
    said: list[PolicySaid]
    alerts: list[PolicyAlert]


class Decision(_Reply):
    """One decision about a job: by whom, what, why, and what each policy said where policies decided."""

    id: int
    at_ms: int
    actor: str
    kind: str
    subject: str
    decision: str
    reason: str
    data: dict[str, Any]


class Decisions(_Reply):
    """Decisions about a job, newest first; `next`, if there are more, to be given as `before`."""

    job: str
    decisions: list[Decision]
    next: int | None


class Readmitted(_Reply):
    """How many exclusions ended."""

    job: str
    lifted: int
