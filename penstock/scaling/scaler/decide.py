"""One decision about one job: the generation its settings name, on one observation. Pure.

`decide` never raises for what metrics may say. The history of 14 days is asked for only when a job would get
less, so the caller passes how to get it, not the history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

from penstock.scaling.metrics.frames import Frame, NoFrame
from penstock.scaling.scaler.load import (
    COST_MIN,
    STAGING_MIN,
    Load,
    adjust_rate,
    assess,
    bootstrap_rate,
    dearest_rate,
    inputs_of,
    known_thread_rate,
)
from penstock.scaling.scaler.observation import (
    Action,
    Decision,
    Hold,
    Learnt,
    Observation,
    Resize,
    Shape,
    Step,
)
from penstock.scaling.scaler.outcome import judge, record
from penstock.scaling.scaler.pattern import RECENT_MIN, History, analyse
from penstock.scaling.scaler.plan_generator import plan
from penstock.scaling.scaler.reactive import after_oom, react
from penstock.scaling.scaler.shrink import plan_down
from penstock.scaling.scaler.window import Window, read_window

LookBack = Callable[[], History | NoFrame]


def decide(observation: Observation, look_back: LookBack | None = None) -> Decision:
    """What to do about a job now."""
    window = read_window(observation)
    frame = observation.frame
    if isinstance(window, Hold):
        return after_oom(observation, window)
    assert isinstance(frame, Frame)  # there is no window without one
    load = assess(observation, window)
    generation = observation.settings.generation
    if generation == "reactive":
        return react(observation, frame, window, load)
    learnt, undo = judge(observation, window, load) if observation.past else (None, None)
    if undo is not None:
        return undo if generation == "preactive" else _without_rate(undo)
    if generation == "proactive":
        decision = plan(observation, frame, window, load)
    else:
        decision = _preactive(observation, frame, window, load, look_back)
    if learnt is None or learnt.judged is None:
        return decision
    rate = decision.learnt.thread_rate if decision.learnt.thread_rate is not None else learnt.thread_rate
    return replace(decision, learnt=replace(learnt, thread_rate=rate if generation == "preactive" else None))


def record_applied(decision: Step, applied: Shape, observation: Observation) -> Action | None:
    """What to keep of a decision that was carried out: `applied` is the shape after all clamping."""
    window = read_window(observation)
    if isinstance(window, Hold):
        return None
    return record(decision, applied, observation, window, assess(observation, window))


def _without_rate(undo: Step) -> Step:
    return replace(undo, learnt=replace(undo.learnt, thread_rate=None))


def _preactive(
    observation: Observation, frame: Frame, window: Window, load: Load, look_back: LookBack | None
) -> Decision:
    """The plan, with P kept true and smaller shapes held against the past."""
    known = known_thread_rate(observation)
    if known is not None and not load.is_lagging and not window.lag_grows:
        adjusted = adjust_rate(
            p=known, x=window.processed_rate, slots=load.parallel, measured=load.measured_rate
        )
        if adjusted is not None:
            return Hold(
                reason=f"no lag at {window.processed_rate:.3g} records/s: one thread can do {adjusted:.3g}, "
                f"not {known:.3g}",
                bound="P adjusted",
                formula="n' = ceil(X/P) > n => P = X/n",
                inputs=inputs_of(observation, window, load),
                learnt=Learnt(thread_rate=adjusted),
            )
    decision = plan(observation, frame, window, load)
    if isinstance(decision, Resize) and decision.direction == "down":
        return _held_against_past(observation, frame, window, load, decision, look_back)
    if known is None and isinstance(decision, Hold) and not load.is_lagging:
        return _bootstrapped(observation, frame, window, decision)
    return decision


def _bootstrapped(observation: Observation, frame: Frame, window: Window, decision: Hold) -> Hold:
    """The staging period: once enough minutes under one shape were seen, they give the first P."""
    job, settings = observation.job, observation.settings
    begin = max(job.changed_minute, job.updated_minute if job.updated_minute is not None else 0)
    settled = window.end_minute - 1 - begin - settings.settle_min
    if settled < STAGING_MIN:
        return decision
    rate = bootstrap_rate(frame, job, minutes=settled)
    if rate is None:
        return decision
    return Hold(
        reason=decision.reason,
        bound=decision.bound,
        formula=decision.formula,
        inputs=decision.inputs,
        learnt=Learnt(thread_rate=rate),
    )


def _held_against_past(
    observation: Observation,
    frame: Frame,
    window: Window,
    load: Load,
    decision: Resize,
    look_back: LookBack | None,
) -> Decision:
    history = look_back() if look_back is not None else None
    if history is None or isinstance(history, NoFrame):
        why = "nobody gave one" if history is None else history.reason
        return replace(decision, bounds=(*decision.bounds, f"history off: {why}"))
    settings = observation.settings
    seen: dict[str, float] = {}
    dearest = dearest_rate(
        history.last_day, observation.job, load, input_rate=decision.inputs.get("X max", window.input_rate)
    )
    if dearest is not None:
        seen["P dearest"] = dearest
        again = plan_down(observation, frame, window, load, dearest=dearest)
        if not isinstance(again, Resize):
            return Hold(
                reason=f"{decision.task_count} tasks would do now, but within the last day one thread gave "
                f"only {dearest:.3g} records/s of like input for {COST_MIN} min",
                bound="cost",
                formula=decision.formula,
                inputs={**decision.inputs, **seen},
            )
        held = ("cost",) if again.shape != decision.shape else ()
        decision = replace(again, bounds=(*again.bounds, *held))
    pattern = analyse(
        history,
        frame.values["ingest_rate"][-RECENT_MIN:],
        end_minute=window.end_minute,
        settings=settings,
    )
    if pattern.off:
        return replace(decision, bounds=(*decision.bounds, f"history off: {pattern.off}"))
    # What is asked of a shape: that the peak of the next hours does not make it short again.
    again = plan_down(
        observation,
        frame,
        window,
        load,
        input_floor=pattern.input_peak * settings.target / settings.up_at,
        key_floor=pattern.key_peak,
        dearest=inf if dearest is None else dearest,
    )
    seen |= {
        "X peak ahead": pattern.input_peak,
        "days": float(pattern.days),
        "hours": settings.history_hours,
        "X usual": pattern.usual_rate,
    }
    if isinstance(again, Resize):
        bounds = tuple(dict.fromkeys((*decision.bounds, *again.bounds)))
        held = ("history",) if again.shape != decision.shape else ()
        return replace(again, bounds=(*bounds, *held), inputs={**again.inputs, **seen})
    return Hold(
        reason=f"{decision.task_count} tasks would do now, but in the next {settings.history_hours:g} h "
        f"{pattern.input_peak:.3g} records/s came on the {pattern.days} days before",
        bound="history",
        formula=decision.formula,
        inputs={**decision.inputs, **seen},
    )
