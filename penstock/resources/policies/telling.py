"""What people are told of a round: every policy's answer with its numbers, and whether that is news. Pure.

A policy that names `formula` and `bound` in its evidence has them shown apart from its other numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.resources.policies.policy import Broken, RaiseAlert, Verdict
from penstock.resources.policies.round import RoundDecision, Said

ACTOR = "policies"
KIND = "policy"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")

Verdicts = Mapping[str, Verdict | Broken]


def said_to_json(said: Said, verdict: Verdict | Broken | None) -> dict[str, Any]:
    """One policy's answer: what became of it and why, what it saw, and the numbers behind that."""
    symptom = verdict.symptom if isinstance(verdict, Verdict) else None
    cause = verdict.cause if isinstance(verdict, Verdict) else None
    seen = {**(symptom.evidence if symptom else {}), **(cause.evidence if cause else {})}
    if isinstance(verdict, Verdict) and isinstance(verdict.resolution, RaiseAlert):
        seen |= verdict.resolution.evidence
    formula, bound = str(seen.pop("formula", "")), str(seen.pop("bound", ""))
    return {
        "policy": said.policy,
        "outcome": said.outcome,
        "reason": said.reason,
        "symptom": symptom.text if symptom else "",
        "cause": cause.text if cause else "",
        "confidence": cause.confidence if cause else None,
        "inputs": seen,
        "formula": formula,
        "bound": said.bound or bound,
    }


def keys_of(decision: RoundDecision, verdicts: Verdicts) -> dict[str, str]:
    """By policy: its answer without its numbers. The same key is no news."""
    found: dict[str, str] = {}
    for said in decision.said:
        key = " ".join((said.outcome, _names(verdicts.get(said.policy)), _NUMBER.sub("#", said.bound)))
        found[said.policy] = " + ".join(filter(None, (found.get(said.policy), key.strip())))
    return found


def entry_of(
    job: str,
    decision: RoundDecision,
    verdicts: Verdicts,
    *,
    refused: str,
    asked_by: str,
    now_ms: Millis,
) -> Entry:
    """A round for the journal. `refused`: why what was decided could not be done."""
    apply = decision.apply
    if apply is None:
        words = sorted({said.outcome for said in decision.said} - {"nothing"})
        done = f"nothing done: {', '.join(words)}" if words else "nothing"
        reason = "; ".join(f"{said.policy}: {said.reason}" for said in decision.said)
    else:
        done = f"{apply.policy}: {apply.action.text}"
        reason = f"not done, {refused}" if refused else apply.reason
    said = [said_to_json(said, verdicts.get(said.policy)) for said in decision.said]
    data = {"said": said} | ({"asked_by": asked_by} if asked_by else {})
    return Entry(at_ms=now_ms, actor=ACTOR, kind=KIND, subject=job, decision=done, reason=reason, data=data)


def _names(verdict: Verdict | Broken | None) -> str:
    match verdict:
        case Broken(how=how):
            return how
        case Verdict(symptom=symptom, cause=cause, resolution=resolution):
            key = resolution.key if isinstance(resolution, RaiseAlert) else ""
            return " ".join(found.name for found in (symptom, cause) if found) + (f" {key}" if key else "")
    return ""
