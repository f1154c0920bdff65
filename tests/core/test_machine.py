"""A step that asks for nothing is the empty answer."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.core.clock import Step


def test_the_empty_step_does_nothing_and_asks_for_no_wake_up():
    step: Step[str] = Step()
    assert (step.actions, step.wake_at_ms) == ((), None)


def test_a_step_cannot_be_changed():
    step = Step(actions=("stop",), wake_at_ms=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.wake_at_ms = 6  # type: ignore[misc]
    assert step == Step(actions=("stop",), wake_at_ms=5)
