"""Frames: their newest minutes."""

from __future__ import annotations

import numpy as np

from penstock.scaling.metrics.frames import METRICS, Frame


def test_the_tail_of_a_frame_is_its_newest_minutes():
    frame = Frame(job="a", first_minute=100, values={"busy": np.arange(5.0), "cpu": np.arange(5.0) * 2})
    tail = frame.tail(2)
    assert (tail.first_minute, tail.minutes, tail.last("busy"), tail.last("cpu")) == (103, 2, 4.0, 8.0)
    assert frame.tail(9).first_minute == 100 and frame.tail(9).minutes == 5
    assert Frame(job="a", first_minute=0, values={}).minutes == 0


def test_every_metric_is_named_once_and_has_a_unit():
    assert all(name == metric.name and metric.unit for name, metric in METRICS.items())
