"""The outcome of the scaler's last action: actions that did not help are undone and remembered. Pure.

An action is not judged before the tasks have settled, nor if a person changed the shape since.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from penstock.core.clock import Millis
from penstock.scaling.metrics.frames import MINUTE_MS
from penstock.scaling.scaler.estimators import capacity
from penstock.scaling.scaler.growth import fits, task_range
from penstock.scaling.scaler.load import SATURATED, Load, between, inputs_of, known_thread_rate
from penstock.scaling.scaler.observation import (
    Inputs,
    JobShape,
    Learnt,
    Observation,
    Outcome,
    Rebalance,
    Resize,
    ScalingAction,
    Step,
    mapping_of,
    parallel,
)
from penstock.scaling.scaler.window import LoadWindow

# If the input grew by more than this factor since, it explains the lag, not the action.
SAME_INPUT = 1.1
# A step that did not help is tried again if the input or the processed rate is higher than then by these
# factors: what limited the job then does not limit it now.
MORE_INPUT = 1.25
MORE_PROCESSED = 1.25
GAIN = "(processed - before) / (expected - before)"


def record(
    decision: Step, applied: JobShape, observation: Observation, window: LoadWindow, load: Load
) -> ScalingAction:
    """The action to store. Its expected rate is that of the applied shape, not of the wanted one."""
    job = observation.job
    limit = capacity(applied, job.partitions, load.thread_rate)
    needed = load.input_rate + window.lag_records / observation.settings.recovery_s
    if isinstance(decision, Rebalance):
        limit = decision.rate_expected
    return ScalingAction(
        at_minute=minute_of(observation.now_ms),
        before=job.shape,
        after=applied,
        input_rate=window.input_rate,
        rate_before=window.processed_rate,
        rate_expected=min(limit, needed),
        parallel_before=load.parallel,
        # An undo is not judged, or it would be undone in turn.
        outcome="worked" if decision.direction == "undo" else "pending",
    )


def minute_of(now_ms: Millis) -> int:
    """The minute of a time."""
    return now_ms // MINUTE_MS


def judge(observation: Observation, window: LoadWindow, load: Load) -> tuple[Learnt, Step | None]:
    """The outcome of the last action if it can be judged now, and an undo if it did not help."""
    action = observation.past[-1] if observation.past else None
    if action is None or action.outcome != "pending":
        return Learnt(), None
    if action.after != observation.job.shape:
        return _judged(observation, window, action, "overruled"), None
    since = window.end_minute - 1 - action.at_minute
    if load.is_lagging and (window.processed_min <= 0 or window.failures > 0):
        # A dependency hangs or tasks fail, so the effect of the step cannot be measured.
        if since < observation.settings.observe_min:
            return Learnt(), None
        return _judged(observation, window, action, "inconclusive"), None
    if action.is_rebalance:
        return _judge_rebalance(observation, window, load, action, since)
    grew = parallel_of(action.after, observation) > action.parallel_before
    if grew:
        return _judge_up(observation, window, load, action, since)
    return _judge_down(observation, window, load, action, since)


def _judge_up(
    observation: Observation, window: LoadWindow, load: Load, action: ScalingAction, since: int
) -> tuple[Learnt, Resize | None]:
    settings = observation.settings
    if since < settings.judge_after_min + settings.settle_min:
        return Learnt(), None
    expected_gain = action.rate_expected - action.rate_before
    gain = window.processed_rate - action.rate_before
    helped = not load.is_lagging or expected_gain <= 0 or gain >= settings.effective_at * expected_gain
    if helped:
        return _judged(observation, window, action, "worked"), None
    alert = (
        f"{action.after.task_count} tasks of {action.after.task.threads} threads process "
        f"{window.processed_rate:.3g} records/s; {action.rate_expected:.3g} were expected, and it was "
        f"{action.rate_before:.3g} before: more tasks or threads do not help"
    )
    learnt = _judged(observation, window, action, "ineffective", alert=alert)
    return learnt, _undo(observation, window, load, action, learnt, alert)


def _judge_rebalance(
    observation: Observation, window: LoadWindow, load: Load, action: ScalingAction, since: int
) -> tuple[Learnt, Rebalance | None]:
    """A rebalance helped if there is no lag, if it falls, or if more is processed."""
    settings, job = observation.settings, observation.job
    if since < settings.judge_after_min + settings.settle_min:
        return Learnt(), None
    expected_gain = action.rate_expected - action.rate_before
    gain = window.processed_rate - action.rate_before
    is_falling = window.lag_growth < 0 and not window.lag_grows
    enough = expected_gain > 0 and gain >= settings.effective_at * expected_gain
    if not load.is_lagging or is_falling or enough:
        return _judged(observation, window, action, "worked"), None
    alert = (
        f"the partitions were rebalanced, and the lag is still {window.lag_s:.0f} s: "
        f"{window.processed_rate:.3g} records/s are processed, {action.rate_before:.3g} before"
    )
    learnt = _judged(observation, window, action, "ineffective", alert=alert)
    before = mapping_of(action.before, job.partitions)
    if len(before) != job.partitions:
        return learnt, None
    return learnt, Rebalance(
        mapping=before,
        direction="undo",
        reason=f"{alert}; back to the mapping before",
        formula=GAIN,
        inputs=_compared(observation, window, load, action),
        rate_expected=action.rate_before,
        learnt=learnt,
    )


def _judge_down(
    observation: Observation, window: LoadWindow, load: Load, action: ScalingAction, since: int
) -> tuple[Learnt, Resize | None]:
    shrank = parallel_of(action.after, observation) < action.parallel_before
    is_saturated = window.busy_mean >= SATURATED
    # Threads that are always busy will break the SLO, so do not wait until they do.
    broke = load.is_lagging or (is_saturated and load.used > observation.settings.up_at)
    if broke and shrank and window.input_rate <= SAME_INPUT * action.input_rate:
        # The estimate of P was too high; the rate of the larger shape is a lower bound.
        sustained = action.input_rate / action.parallel_before
        p = known_thread_rate(observation) or load.thread_rate
        measured = load.measured_rate if is_saturated else None
        alert = (
            f"{action.after.task_count} tasks broke the SLO at {window.input_rate:.3g} records/s; "
            f"{action.before.task_count} had kept it"
        )
        learnt = replace(
            _judged(observation, window, action, "broke_slo", alert=alert),
            thread_rate=between(sustained, p, measured) if isfinite(p) else None,
        )
        return learnt, _undo(observation, window, load, action, learnt, alert)
    if since >= observation.settings.observe_min:
        return _judged(observation, window, action, "worked"), None
    return Learnt(), None


def _undo(
    observation: Observation, window: LoadWindow, load: Load, action: ScalingAction, learnt: Learnt, why: str
) -> Resize | None:
    job = observation.job
    fewest, most = task_range(job)
    if not fewest <= action.before.task_count <= most or fits(job, action.before, observation.remaining):
        return None
    return Resize(
        shape=action.before,
        direction="undo",
        reason=f"{why}; back to {action.before.task_count} tasks of {action.before.task.threads} threads",
        formula=GAIN,
        inputs=_compared(observation, window, load, action),
        rate_expected=action.rate_before,
        learnt=learnt,
    )


def _compared(observation: Observation, window: LoadWindow, load: Load, action: ScalingAction) -> Inputs:
    return {
        **inputs_of(observation, window, load),
        "processed": window.processed_rate,
        "before": action.rate_before,
        "expected": action.rate_expected,
    }


def _judged(
    observation: Observation, window: LoadWindow, action: ScalingAction, outcome: Outcome, alert: str = ""
) -> Learnt:
    judged = replace(
        action,
        outcome=outcome,
        judged_minute=minute_of(observation.now_ms),
        rate_after=window.processed_rate,
    )
    return Learnt(judged=judged, alert=alert)


def parallel_of(shape: JobShape, observation: Observation) -> float:
    """The effective number of threads of a shape on this job's partitions."""
    return parallel(shape.task_count, shape.task.threads, observation.job.partitions)


# --- remembered outcomes


def ups_that_did_not_help(observation: Observation, window: LoadWindow) -> ScalingAction | None:
    """The newest step up that did not help, unless the code or the job's limit changed since."""
    for action in reversed(observation.past):
        if (
            action.outcome == "ineffective"
            and not action.is_rebalance
            and window.input_rate <= MORE_INPUT * action.input_rate
            and _is_limited_as_then(window, action)
            and _is_remembered(observation, window, action)
        ):
            return action
    return None


def rebalance_that_did_not_help(observation: Observation, window: LoadWindow) -> ScalingAction | None:
    """The newest rebalance that did not help, unless the code changed since."""
    for action in reversed(observation.past):
        is_one = action.is_rebalance and action.outcome == "ineffective"
        if is_one and _is_remembered(observation, window, action):
            return action
    return None


def down_that_broke(observation: Observation, window: LoadWindow, slots: float) -> ScalingAction | None:
    """A step down that broke the SLO, to at least as many threads and with no more input than now."""
    for action in reversed(observation.past):
        if (
            action.outcome == "broke_slo"
            and slots <= parallel_of(action.after, observation)
            and window.input_rate * SAME_INPUT >= action.input_rate
            and _is_remembered(observation, window, action)
        ):
            return action
    return None


def _is_limited_as_then(window: LoadWindow, action: ScalingAction) -> bool:
    """Whether the job processes no more than after that step, so that the same limit may hold now.

    A sink with a fixed maximum limits few tasks as much as many. A dependency that was slow then and has
    recovered does not limit the job any more.
    """
    then = action.rate_after if action.rate_after is not None else action.rate_before
    return window.processed_rate <= MORE_PROCESSED * then


def _is_remembered(observation: Observation, window: LoadWindow, action: ScalingAction) -> bool:
    judged = action.judged_minute if action.judged_minute is not None else action.at_minute
    updated = observation.job.updated_minute
    if updated is not None and updated >= action.at_minute:
        return False
    return 0 <= window.end_minute - judged <= observation.settings.remember_min
