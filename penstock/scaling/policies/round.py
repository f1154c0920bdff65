"""Which of several policies' decisions is applied to a job: one a round, by priority (StreamOps 4.1). Pure.

An action is followed up: if its symptom is still there when it is looked at again, it is taken back,
remembered as useless for a while, and somebody is told. Everything that is not done has a reason.
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

USELESS_MS: Millis = 6 * 3_600_000  # so long an action that did not help is not tried again
FIGHT_MS: Millis = 3_600_000  # so long one policy does not bring back what another one changed


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """What the whole fleet allows now."""

    rescales_running: int = 0
    rescales_max: int = 10
    advice_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundJob:
    """The job that a round is about."""

    name: str
    config: JobConfig  # what runs
    layer: Mapping[str, Any]  # what the scaler layer says: what an action replaces, and a way back restores
    is_settled: bool = True
    oncall: frozenset[str] = frozenset()
    advice_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One policy's part in a round."""

    verdict: Verdict | Broken
    priority: int
    settings: ControlSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Do this, in the name of a policy."""

    policy: str
    action: Action
    reason: str
    is_undo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What became of one policy's answer, in a word, and why."""

    policy: str
    outcome: str  # applied | advised | held | nothing | alert | broken | kept | undone | useless | fights
    reason: str
    bound: str = ""  # what held it back


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDecision:
    """What a round ends with."""

    apply: Apply | None
    said: tuple[Said, ...]
    alerts: tuple[tuple[str, RaiseAlert], ...]  # (policy, alert)
    record: JobRecord


def decide_round(
    rivals: Sequence[Rival], job: RoundJob, record: JobRecord, fleet: FleetState, *, now_ms: Millis
) -> RoundDecision:
    """One round on one job."""
    ranked = sorted(rivals, key=lambda rival: (-rival.priority, rival.verdict.policy))
    said: list[Said] = []
    alerts: list[tuple[str, RaiseAlert]] = []
    useless = {key: until for key, until in record.useless.items() if now_ms < until <= now_ms + USELESS_MS}
    record = _replace(record, useless=useless)
    record, apply = _follow_up(ranked, job, record, said, alerts, now_ms)
    for rival in ranked:
        policy, verdict = rival.verdict.policy, rival.verdict
        if isinstance(verdict, Broken):
            said.append(Said(policy=policy, outcome="broken", reason=f"{verdict.how}: {verdict.text}"))
            if verdict.how != "metrics":  # a job without numbers is the metrics' trouble, and often a start
                alerts.append((policy, _alert_of(verdict)))
            continue
        match verdict.resolution:
            case Nothing(reason=reason):
                said.append(Said(policy=policy, outcome="nothing", reason=reason))
            case RaiseAlert() as alert:
                alerts.append((policy, alert))
                said.append(Said(policy=policy, outcome="alert", reason=alert.text))
            case ChangeLayer() | ExcludeContainers() | MoveTasks() as action:
                held = _held_because(rival, action, job, record, fleet, apply, now_ms)
                if held is None:
                    apply = Apply(policy=policy, action=action, reason=_reason(verdict, action))
                    record = _with_action(record, rival, action, job, now_ms)
                    said.append(Said(policy=policy, outcome="applied", reason=apply.reason))
                    continue
                reason = f"{action.text}: {held[1]}"
                said.append(Said(policy=policy, outcome=held[0], reason=reason, bound=held[1]))
                if held[0] in ("fights", "useless"):
                    alerts.append(
                        (policy, RaiseAlert(key=f"action_{held[0]}", text=f"{action.text}: {held[1]}"[:2000]))
                    )
    return RoundDecision(apply=apply, said=tuple(said), alerts=tuple(alerts), record=record)


def _follow_up(
    ranked: Sequence[Rival],
    job: RoundJob,
    record: JobRecord,
    said: list[Said],
    alerts: list[tuple[str, RaiseAlert]],
    now_ms: Millis,
) -> tuple[JobRecord, Apply | None]:
    """See whether the last action helped, once its time has come."""
    done = record.open
    # A time that lies further ahead than it was set is of a clock that jumped back.
    if done is None or (now_ms < done.check_ms and now_ms >= done.at_ms):
        return record, None
    if isinstance(done.action, ChangeLayer) and not _still_says(job.config, done.action.changes):
        if not job.is_settled:
            return record, None  # it is still on its way
        reason = "somebody else has changed it since; what became of it cannot be told"
        said.append(Said(policy=done.policy, outcome="kept", reason=reason))
        return _replace(record, open=None), None
    now = next((rival.verdict for rival in ranked if rival.verdict.policy == done.policy), None)
    if now is None and now_ms - done.check_ms > FIGHT_MS:
        said.append(Said(policy=done.policy, outcome="kept", reason="nobody looked whether it helped"))
        return _replace(record, open=None), None
    if now is None or isinstance(now, Broken):
        return record, None  # nobody can tell yet
    if now.symptom is None or now.symptom.name != done.symptom:
        said.append(Said(policy=done.policy, outcome="kept", reason=f"it helped: {done.action.text}"))
        return _replace(record, open=None), None
    key = fingerprint(done.policy, done.symptom, done.action)
    record = _replace(record, open=None, useless=record.useless | {key: now_ms + USELESS_MS})
    text = f"{done.action.text}: this did not help, {now.symptom.text}"
    alerts.append((done.policy, RaiseAlert(key="action_useless", text=text[:2000], severity="warning")))
    if done.undo is None or _touched(done.undo, job.oncall) or not job.is_settled:
        said.append(Said(policy=done.policy, outcome="useless", reason=text))
        return record, None
    said.append(Said(policy=done.policy, outcome="undone", reason=text))
    back = ChangeLayer(changes=done.undo, text=f"back to what was before: {text}"[:2000])
    return record, Apply(policy=done.policy, action=back, reason=back.text, is_undo=True)


def _held_because(
    rival: Rival,
    action: Action,
    job: RoundJob,
    record: JobRecord,
    fleet: FleetState,
    apply: Apply | None,
    now_ms: Millis,
) -> tuple[str, str] | None:
    """(outcome, reason) for not doing it; None: do it."""
    policy, verdict = rival.verdict.policy, rival.verdict
    assert isinstance(verdict, Verdict)
    symptom = verdict.symptom.name if verdict.symptom else ""
    if fleet.advice_only or job.advice_only or rival.settings.advice_only:
        whose = "the fleet" if fleet.advice_only else "this job" if job.advice_only else "this policy"
        return "advised", f"advice only for {whose}"
    if apply is not None:
        return "held", f"one change a round, and {apply.policy} had its turn"
    if not job.is_settled:
        return "held", "a change is under way"
    changed = flat(action.changes) if isinstance(action, ChangeLayer) else {}
    theirs = sorted(_touched(changed, job.oncall))
    if theirs:
        return "held", f"oncall set {', '.join(theirs)}"
    if changed and _still_says(job.config, changes_of(action)):
        return "held", "it is so already"
    acted = record.acted.get(policy)
    if acted is not None and 0 <= now_ms - acted < rival.settings.cooldown_s * 1000:
        left_s = rival.settings.cooldown_s - (now_ms - acted) / 1000
        return (
            "held",
            f"{policy} acted {(now_ms - acted) / 1000:.0f} s ago, {left_s:.0f} s of its cool-down are left",
        )
    if record.open is not None and rival.priority <= record.open.priority:
        return "held", f"waits to see whether this helps: {record.open.action.text}"
    if fingerprint(policy, symptom, action) in record.useless:
        return "useless", "it was tried and did not help"
    rival_change = _fought(policy, changed, record, now_ms)
    if rival_change is not None:
        return "fights", (
            f"{policy} would bring back {rival_change.path} = {rival_change.old!r}, which "
            f"{rival_change.policy} changed {(now_ms - rival_change.at_ms) / 1000:.0f} s ago"
        )
    is_rescale = isinstance(action, ChangeLayer) and action.is_rescale
    if is_rescale and fleet.rescales_running >= fleet.rescales_max:
        return "held", f"{fleet.rescales_running} jobs of the fleet are being rescaled, the limit"
    return None


def changes_of(action: Action) -> dict[str, Any]:
    """The partial config of an action, if it is one."""
    return action.changes if isinstance(action, ChangeLayer) else {}


def _fought(policy: str, changed: Mapping[str, Any], record: JobRecord, now_ms: Millis) -> Change | None:
    """The newest change of another policy that this one would take back."""
    for change in reversed(record.changes):
        recent = 0 <= now_ms - change.at_ms < FIGHT_MS
        if recent and change.policy != policy and changed.get(change.path, change) == change.old:
            return change
    return None


def _with_action(record: JobRecord, rival: Rival, action: Action, job: RoundJob, now_ms: Millis) -> JobRecord:
    verdict = rival.verdict
    assert isinstance(verdict, Verdict)
    changes, before = changes_of(action), flat(pick(job.config.to_json(), changes_of(action)))
    news = tuple(
        Change(policy=verdict.policy, path=path, old=before.get(path), new=value, at_ms=now_ms)
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


def forget_action(record: JobRecord, policy: str) -> JobRecord:
    """The record if what it says was done was not done after all: its write was refused."""
    open_ = None if record.open is not None and record.open.policy == policy else record.open
    at_ms = record.acted.get(policy)
    kept = tuple(found for found in record.changes if found.policy != policy or found.at_ms != at_ms)
    return _replace(record, open=open_, changes=kept)


def _still_says(config: JobConfig, changes: Mapping[str, Any]) -> bool:
    return flat(pick(config.to_json(), changes)) == flat(changes)


def _touched(changed: Mapping[str, Any], oncall: frozenset[str]) -> set[str]:
    """Which of a person's settings an action would run into."""
    paths = flat(changed)
    return {own for own in oncall for path in paths if path == own or path.startswith(f"{own}.")}


def _reason(verdict: Verdict, action: Action) -> str:
    parts = [verdict.symptom.text if verdict.symptom else "", verdict.cause.text if verdict.cause else ""]
    return "; ".join([*filter(None, parts), action.text])


def _alert_of(broken: Broken) -> RaiseAlert:
    fix = (
        "correct its settings: penstock config show JOB"
        if broken.how == "settings"
        else "look at its code; to do without it: penstock oncall set JOB "
        f'policies.{broken.policy}.enabled=false --why "…"'
    )
    text = f"the policy {broken.policy} gives no answer ({broken.how}): {broken.text}"[:2000]
    return RaiseAlert(key=f"policy_{broken.how}", text=text, what_to_do=fix)


def _replace(record: JobRecord, **news: Any) -> JobRecord:
    values = {name: getattr(record, name) for name in JobRecord.__struct_fields__}
    return JobRecord(**(values | news))


HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The few numbers that conditions are made of; None: not known."""

    lag_s: float | None = None
    busy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """It is time, because."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDue:
    """It is not, because."""

    reason: str


def decide_due(
    settings: ControlSettings,
    *,
    last_ms: Millis | None,
    signals: Signals,
    now_ms: Millis,
    asked: bool = False,
) -> Due | NotDue:
    """Whether a policy looks now. `asked`: somebody wants it, whatever the schedule says."""
    if not settings.enabled:
        return NotDue(reason="switched off for this job")
    if asked:
        return Due(reason="asked for")
    # A last time in the future is of a clock that was wrong.
    if last_ms is not None and 0 <= now_ms - last_ms < settings.every_s * 1000:
        return NotDue(reason=f"looked {(now_ms - last_ms) / 1000:.0f} s ago, every {settings.every_s:g} s")
    if not _is_hour(settings, now_ms):
        return NotDue(reason=f"only from {settings.from_hour} to {settings.to_hour} o'clock UTC")
    if settings.when_lag_s is None and settings.when_busy is None:
        return Due(reason="scheduled")
    if settings.when_lag_s is not None and (signals.lag_s or 0.0) >= settings.when_lag_s > 0:
        return Due(reason=f"it lags {signals.lag_s:.0f} s")
    if settings.when_busy is not None and (signals.busy or 0.0) >= settings.when_busy > 0:
        return Due(reason=f"a task is {signals.busy:.0%} busy")
    return NotDue(reason="no condition holds")


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


CHANGES_MAX = 32  # of the past that are kept to see who fights whom


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One field that a policy changed."""

    policy: str
    path: str
    old: Any
    new: Any
    at_ms: Millis


class OpenAction(msgspec.Struct, frozen=True, kw_only=True):
    """An action whose outcome is still awaited."""

    policy: str
    priority: int
    symptom: str
    action: Action
    undo: dict[str, Any] | None  # what brings back the fields as they were; None: nothing to bring back
    at_ms: Millis
    check_ms: Millis


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one job."""

    acted: dict[str, Millis] = {}  # by policy: when it last did something
    open: OpenAction | None = None
    useless: dict[str, Millis] = {}  # by action: until when it is not tried again
    changes: tuple[Change, ...] = ()
    said: dict[str, str] = {}  # by policy: what the journal last heard, as a key: the same is not told twice
    scaler: ScalerMemory | None = None


def fingerprint(policy: str, symptom: str, action: Action) -> str:
    """Tells an action from others, by what it does and not by how it says so."""
    match action:
        case ChangeLayer(changes=changes):
            what: Any = sorted(flat(changes).items())
        case _:
            what = msgspec.to_builtins(action) | {"text": ""}
    return f"{policy} {symptom} {msgspec.json.encode(what, order='sorted').decode()}"


def flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A partial config by path."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def pick(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What `config` says of the fields that `changes` names: the way back. Absent ones are null."""
    return {
        name: pick(config.get(name) or {}, value) if isinstance(value, Mapping) else config.get(name)
        for name, value in changes.items()
    }
