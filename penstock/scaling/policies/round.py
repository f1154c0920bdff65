"""Which of several policies' decisions is applied to a job: one a round, by priority (StreamOps 4.1). Pure.

After `check_after_s` an action is checked: if its symptom is still there, the action is undone, not repeated
for some hours, and an alert is raised. Every decision not to act has a reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.jobs.config import JobConfig
from penstock.scaling.policies.policy import (
    Action,
    Broken,
    ChangeLayer,
    ControlSettings,
    ExcludeContainers,
    MoveTasks,
    Nothing,
    RaiseAlert,
    Verdict,
)
from penstock.scaling.scaler.observation import ScalerMemory

USELESS_MS: Millis = 6 * 3_600_000  # for this time an action that did not help is not repeated
FIGHT_MS: Millis = 3_600_000  # for this time no policy reverts a change of another policy


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """Limits of the whole fleet, and how much of them is in use."""

    rescales_running: int = 0
    rescales_max: int = 10
    advice_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundJob:
    """The job that a round decides on."""

    name: str
    config: JobConfig  # the running config
    layer: Mapping[str, Any]  # the scaler layer: an action writes it, an undo restores it
    is_settled: bool = True
    oncall: frozenset[str] = frozenset()
    advice_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy's verdict that takes part in a round."""

    verdict: Verdict | Broken
    priority: int
    settings: ControlSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAction:
    """The one action that a round applies, and its policy."""

    policy: str
    action: Action
    reason: str
    is_undo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """What the round did with one policy's verdict, and why."""

    policy: str
    outcome: str  # applied | advised | held | nothing | alert | broken | kept | undone | useless | fights
    reason: str
    bound: str = ""  # the limit or rule that prevented the action


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDecision:
    """The result of a round."""

    apply: ChosenAction | None
    outcomes: tuple[PolicyOutcome, ...]
    alerts: tuple[tuple[str, RaiseAlert], ...]  # (policy, alert)
    record: PolicyRecord


def decide_round(
    rivals: Sequence[Candidate], job: RoundJob, record: PolicyRecord, fleet: FleetState, *, now_ms: Millis
) -> RoundDecision:
    """Choose at most one action for a job and check the last one."""
    ranked = sorted(rivals, key=lambda rival: (-rival.priority, rival.verdict.policy))
    outcomes: list[PolicyOutcome] = []
    alerts: list[tuple[str, RaiseAlert]] = []
    useless = {key: until for key, until in record.useless.items() if now_ms < until <= now_ms + USELESS_MS}
    record = _replace(record, useless=useless)
    record, apply = _check_last_action(ranked, job, record, outcomes, alerts, now_ms)
    for rival in ranked:
        policy, verdict = rival.verdict.policy, rival.verdict
        if isinstance(verdict, Broken):
            outcomes.append(
                PolicyOutcome(policy=policy, outcome="broken", reason=f"{verdict.how}: {verdict.text}")
            )
            if verdict.how != "metrics":  # missing metrics have alarms of their own, and are usual at a start
                alerts.append((policy, _alert_of(verdict)))
            continue
        match verdict.resolution:
            case Nothing(reason=reason):
                outcomes.append(PolicyOutcome(policy=policy, outcome="nothing", reason=reason))
            case RaiseAlert() as alert:
                alerts.append((policy, alert))
                outcomes.append(PolicyOutcome(policy=policy, outcome="alert", reason=alert.text))
            case ChangeLayer() | ExcludeContainers() | MoveTasks() as action:
                held = _held_because(rival, action, job, record, fleet, apply, now_ms)
                if held is None:
                    apply = ChosenAction(policy=policy, action=action, reason=_reason(verdict, action))
                    record = _with_action(record, rival, action, job, now_ms)
                    outcomes.append(PolicyOutcome(policy=policy, outcome="applied", reason=apply.reason))
                    continue
                reason = f"{action.text}: {held[1]}"
                outcomes.append(PolicyOutcome(policy=policy, outcome=held[0], reason=reason, bound=held[1]))
                if held[0] in ("fights", "useless"):
                    alerts.append(
                        (policy, RaiseAlert(key=f"action_{held[0]}", text=f"{action.text}: {held[1]}"[:2000]))
                    )
    return RoundDecision(apply=apply, outcomes=tuple(outcomes), alerts=tuple(alerts), record=record)


def _check_last_action(
    ranked: Sequence[Candidate],
    job: RoundJob,
    record: PolicyRecord,
    outcomes: list[PolicyOutcome],
    alerts: list[tuple[str, RaiseAlert]],
    now_ms: Millis,
) -> tuple[PolicyRecord, ChosenAction | None]:
    """Check whether the last action helped, once `check_ms` has passed."""
    done = record.open
    # If now is before `at_ms` the clock was set back: check at once.
    if done is None or (now_ms < done.check_ms and now_ms >= done.at_ms):
        return record, None
    if isinstance(done.action, ChangeLayer) and not _still_says(job.config, done.action.changes):
        if not job.is_settled:
            return record, None  # the change is still being rolled out
        reason = "its fields were changed by another writer since; the effect of the action is unknown"
        outcomes.append(PolicyOutcome(policy=done.policy, outcome="kept", reason=reason))
        return _replace(record, open=None), None
    now = next((rival.verdict for rival in ranked if rival.verdict.policy == done.policy), None)
    if now is None and now_ms - done.check_ms > FIGHT_MS:
        outcomes.append(
            PolicyOutcome(
                policy=done.policy,
                outcome="kept",
                reason="the policy was not run again, so the effect of the action is unknown",
            )
        )
        return _replace(record, open=None), None
    if now is None or isinstance(now, Broken):
        return record, None  # no verdict to compare with yet
    if now.symptom is None or now.symptom.name != done.symptom:
        outcomes.append(
            PolicyOutcome(policy=done.policy, outcome="kept", reason=f"it helped: {done.action.text}")
        )
        return _replace(record, open=None), None
    key = fingerprint(done.policy, done.symptom, done.action)
    record = _replace(record, open=None, useless=record.useless | {key: now_ms + USELESS_MS})
    text = f"{done.action.text}: this did not help, the symptom is still there: {now.symptom.text}"
    alerts.append((done.policy, RaiseAlert(key="action_useless", text=text[:2000], severity="warning")))
    if done.undo is None or _touched(done.undo, job.oncall) or not job.is_settled:
        outcomes.append(PolicyOutcome(policy=done.policy, outcome="useless", reason=text))
        return record, None
    outcomes.append(PolicyOutcome(policy=done.policy, outcome="undone", reason=text))
    back = ChangeLayer(changes=done.undo, text=f"restore the values from before: {text}"[:2000])
    return record, ChosenAction(policy=done.policy, action=back, reason=back.text, is_undo=True)


def _held_because(
    rival: Candidate,
    action: Action,
    job: RoundJob,
    record: PolicyRecord,
    fleet: FleetState,
    apply: ChosenAction | None,
    now_ms: Millis,
) -> tuple[str, str] | None:
    """(outcome, reason) if the action must not be applied; None: apply it."""
    policy, verdict = rival.verdict.policy, rival.verdict
    assert isinstance(verdict, Verdict)
    symptom = verdict.symptom.name if verdict.symptom else ""
    if fleet.advice_only or job.advice_only or rival.settings.advice_only:
        whose = "the fleet" if fleet.advice_only else "this job" if job.advice_only else "this policy"
        return "advised", f"advice only for {whose}"
    if apply is not None:
        return "held", f"one action per round, and this round applies that of {apply.policy}"
    if not job.is_settled:
        return "held", "a change of the job is in progress"
    changed = flat(action.changes) if isinstance(action, ChangeLayer) else {}
    theirs = sorted(_touched(changed, job.oncall))
    if theirs:
        return "held", f"the oncall layer sets {', '.join(theirs)}"
    if changed and _still_says(job.config, changes_of(action)):
        return "held", "the config has these values already"
    acted = record.acted.get(policy)
    if acted is not None and 0 <= now_ms - acted < rival.settings.cooldown_s * 1000:
        left_s = rival.settings.cooldown_s - (now_ms - acted) / 1000
        return (
            "held",
            f"{policy} acted {(now_ms - acted) / 1000:.0f} s ago, its cooldown lasts {left_s:.0f} s more",
        )
    if record.open is not None and rival.priority <= record.open.priority:
        return "held", f"the last action is not checked yet: {record.open.action.text}"
    if fingerprint(policy, symptom, action) in record.useless:
        return "useless", "this was tried in the last hours and did not help"
    rival_change = _fought(policy, changed, record, now_ms)
    if rival_change is not None:
        return "fights", (
            f"{policy} would set {rival_change.path} back to {rival_change.old!r}, which "
            f"{rival_change.policy} changed {(now_ms - rival_change.at_ms) / 1000:.0f} s ago"
        )
    is_rescale = isinstance(action, ChangeLayer) and action.is_rescale
    if is_rescale and fleet.rescales_running >= fleet.rescales_max:
        return (
            "held",
            f"{fleet.rescales_running} jobs of the fleet are being rescaled; no more may be at a time",
        )
    return None


def changes_of(action: Action) -> dict[str, Any]:
    """The partial config that an action writes; empty if it writes none."""
    return action.changes if isinstance(action, ChangeLayer) else {}


def _fought(
    policy: str, changed: Mapping[str, Any], record: PolicyRecord, now_ms: Millis
) -> RecordedChange | None:
    """The newest change of another policy that this one would revert."""
    for change in reversed(record.changes):
        recent = 0 <= now_ms - change.at_ms < FIGHT_MS
        if recent and change.policy != policy and changed.get(change.path, change) == change.old:
            return change
    return None


def _with_action(
    record: PolicyRecord, rival: Candidate, action: Action, job: RoundJob, now_ms: Millis
) -> PolicyRecord:
    verdict = rival.verdict
    assert isinstance(verdict, Verdict)
    changes, before = changes_of(action), flat(pick(job.config.to_json(), changes_of(action)))
    news = tuple(
        RecordedChange(policy=verdict.policy, path=path, old=before.get(path), new=value, at_ms=now_ms)
        for path, value in flat(changes).items()
    )
    open_ = OpenAction(
        policy=verdict.policy,
        priority=rival.priority,
        symptom=verdict.symptom.name if verdict.symptom else "",
        action=action,
        undo=pick(job.layer, changes) if changes else None,
        at_ms=now_ms,
        check_ms=now_ms + int(rival.settings.check_after_s * 1000),
    )
    return _replace(
        record,
        open=open_,
        acted=record.acted | {verdict.policy: now_ms},
        changes=(*record.changes, *news)[-CHANGES_MAX:],
    )


def forget_action(record: PolicyRecord, policy: str) -> PolicyRecord:
    """The record without a policy's last action, whose write was refused."""
    open_ = None if record.open is not None and record.open.policy == policy else record.open
    at_ms = record.acted.get(policy)
    remaining = tuple(found for found in record.changes if found.policy != policy or found.at_ms != at_ms)
    return _replace(record, open=open_, changes=remaining)


def _still_says(config: JobConfig, changes: Mapping[str, Any]) -> bool:
    return flat(pick(config.to_json(), changes)) == flat(changes)


def _touched(changed: Mapping[str, Any], oncall: frozenset[str]) -> set[str]:
    """The paths of the oncall layer that an action would change."""
    paths = flat(changed)
    return {own for own in oncall for path in paths if path == own or path.startswith(f"{own}.")}


def _reason(verdict: Verdict, action: Action) -> str:
    parts = [verdict.symptom.text if verdict.symptom else "", verdict.cause.text if verdict.cause else ""]
    return "; ".join([*filter(None, parts), action.text])


def _alert_of(broken: Broken) -> RaiseAlert:
    fix = (
        "correct its settings: penstock config show JOB"
        if broken.how == "settings"
        else "check its code; to switch it off: penstock oncall set JOB "
        f'policies.{broken.policy}.enabled=false --why "…"'
    )
    text = f"the policy {broken.policy} gave no verdict ({broken.how}): {broken.text}"[:2000]
    return RaiseAlert(key=f"policy_{broken.how}", text=text, what_to_do=fix)


def _replace(record: PolicyRecord, **news: Any) -> PolicyRecord:
    values = {name: getattr(record, name) for name in PolicyRecord.__struct_fields__}
    return PolicyRecord(**(values | news))


HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The metrics that `when_lag_s` and `when_busy` are compared with; None: not known."""

    lag_s: float | None = None
    busy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """The policy runs now."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDue:
    """The policy does not run now."""

    reason: str


def decide_due(
    settings: ControlSettings,
    *,
    last_ms: Millis | None,
    signals: Signals,
    now_ms: Millis,
    asked: bool = False,
) -> Due | NotDue:
    """Whether a policy runs now. `asked`: a user requested it, so the schedule does not count."""
    if not settings.enabled:
        return NotDue(reason="disabled for this job")
    if asked:
        return Due(reason="requested")
    # A last run in the future means that the clock was set back.
    if last_ms is not None and 0 <= now_ms - last_ms < settings.every_s * 1000:
        return NotDue(reason=f"ran {(now_ms - last_ms) / 1000:.0f} s ago, runs every {settings.every_s:g} s")
    if not _is_hour(settings, now_ms):
        return NotDue(reason=f"runs only from {settings.from_hour} to {settings.to_hour} o'clock UTC")
    if settings.when_lag_s is None and settings.when_busy is None:
        return Due(reason="scheduled")
    if settings.when_lag_s is not None and (signals.lag_s or 0.0) >= settings.when_lag_s > 0:
        return Due(reason=f"it lags {signals.lag_s:.0f} s")
    if settings.when_busy is not None and (signals.busy or 0.0) >= settings.when_busy > 0:
        return Due(reason=f"a task is {signals.busy:.0%} busy")
    return NotDue(reason="neither when_lag_s nor when_busy is reached")


def _is_hour(settings: ControlSettings, now_ms: Millis) -> bool:
    first, end = settings.from_hour, settings.to_hour
    if first is None or end is None or first == end:
        return True
    hour = now_ms // HOUR_MS % 24
    return first <= hour < end if first < end else hour >= first or hour < end


ACTOR = "policies"
KIND = "policy"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")

Verdicts = Mapping[str, Verdict | Broken]


def outcome_to_json(outcome: PolicyOutcome, verdict: Verdict | Broken | None) -> dict[str, Any]:
    """One policy's outcome with reason, symptom, cause and evidence, for the journal and the API."""
    symptom = verdict.symptom if isinstance(verdict, Verdict) else None
    cause = verdict.cause if isinstance(verdict, Verdict) else None
    seen = {**(symptom.evidence if symptom else {}), **(cause.evidence if cause else {})}
    if isinstance(verdict, Verdict) and isinstance(verdict.resolution, RaiseAlert):
        seen |= verdict.resolution.evidence
    formula, bound = str(seen.pop("formula", "")), str(seen.pop("bound", ""))
    return {
        "policy": outcome.policy,
        "outcome": outcome.outcome,
        "reason": outcome.reason,
        "symptom": symptom.text if symptom else "",
        "cause": cause.text if cause else "",
        "confidence": cause.confidence if cause else None,
        "inputs": seen,
        "formula": formula,
        "bound": outcome.bound or bound,
    }


def keys_of(decision: RoundDecision, verdicts: Verdicts) -> dict[str, str]:
    """By policy: its outcome without numbers. An outcome is journaled only when its key changes."""
    found: dict[str, str] = {}
    for outcome in decision.outcomes:
        key = " ".join(
            (outcome.outcome, _names(verdicts.get(outcome.policy)), _NUMBER.sub("#", outcome.bound))
        )
        found[outcome.policy] = " + ".join(filter(None, (found.get(outcome.policy), key.strip())))
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
    """The journal entry of a round. `refused`: why the chosen action could not be applied."""
    apply = decision.apply
    if apply is None:
        names = sorted({outcome.outcome for outcome in decision.outcomes} - {"nothing"})
        done = f"nothing done: {', '.join(names)}" if names else "nothing"
        reason = "; ".join(f"{outcome.policy}: {outcome.reason}" for outcome in decision.outcomes)
    else:
        done = f"{apply.policy}: {apply.action.text}"
        reason = f"not done, {refused}" if refused else apply.reason
    said = [outcome_to_json(outcome, verdicts.get(outcome.policy)) for outcome in decision.outcomes]
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


CHANGES_MAX = 32  # newest changes stored per job, to see when one policy reverts another


class RecordedChange(msgspec.Struct, frozen=True, kw_only=True):
    """One config field that a policy changed."""

    policy: str
    path: str
    old: Any
    new: Any
    at_ms: Millis


class OpenAction(msgspec.Struct, frozen=True, kw_only=True):
    """An applied action that is not checked yet."""

    policy: str
    priority: int
    symptom: str
    action: Action
    undo: dict[str, Any] | None  # the fields' values before; None: there is nothing to restore
    at_ms: Millis
    check_ms: Millis


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What policies store of one job between rounds."""

    acted: dict[str, Millis] = {}  # by policy: time of its last action
    open: OpenAction | None = None
    useless: dict[str, Millis] = {}  # by fingerprint of the action: until when it is not repeated
    changes: tuple[RecordedChange, ...] = ()
    said: dict[
        str, str
    ] = {}  # by policy: key of its last journaled outcome, so that repeats are not journaled
    scaler: ScalerMemory | None = None


def fingerprint(policy: str, symptom: str, action: Action) -> str:
    """Identifies an action by what it does, without its text."""
    match action:
        case ChangeLayer(changes=changes):
            what: Any = sorted(flat(changes).items())
        case _:
            what = msgspec.to_builtins(action) | {"text": ""}
    return f"{policy} {symptom} {msgspec.json.encode(what, order='sorted').decode()}"


def flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A partial config as {dotted path: value}."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def pick(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values in `config` of the fields that `changes` names, to undo them. Absent fields are null."""
    return {
        name: pick(config.get(name) or {}, value) if isinstance(value, Mapping) else config.get(name)
        for name, value in changes.items()
    }
