"""Claims about `penstock job metrics`: bars, gaps, numbers that fit."""

from __future__ import annotations

import pytest
from rich.console import Console

from penstock.cli.jobs import WIDTH, metrics_table, short, sparkline
from penstock.scaling.metrics.frames import METRICS


def test_bars_grow_from_nothing_and_a_gap_is_a_dot():
    assert sparkline([0.0, None, 4.0, 8.0]) == "▁·▄█"
    assert sparkline([0.0, 0.0]) == "▁▁" and sparkline([]) == "" and sparkline([None]) == "·"


def test_more_minutes_than_bars_are_their_means():
    values = [float(minute // 100) for minute in range(400)]
    line = sparkline(values, width=4)
    assert len(line) == 4 and line[0] == "▁" and line[3] == "█" and line == "".join(sorted(line))
    assert sparkline([None] * 100 + values[:300], width=4)[0] == "·"
    assert len(sparkline([1.0] * 20_160)) == WIDTH


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (0.1234, "0.123"), (12.0, "12"), (1234.5, "1234"), (56_789.0, "56.8 k"), (3.21e6, "3.21 M"), (5e9, "5 G"), (2e13, "20 T")],
)  # fmt: skip
def test_numbers_are_short(value: float | None, text: str):
    assert short(value) == text


def test_the_table_has_a_line_per_metric():
    values = [None, 1.0, 3.0]
    found = {
        "job": "shops.total",
        "first_ms": 1_700_000_000_000,
        "minutes": 3,
        "metrics": {
            "busy": {"unit": "share", "values": values},
            "cpu": {"unit": "cores", "values": [None] * 3},
        },
    }
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(metrics_table(found))
        console.print(metrics_table({**found, "metrics": {}}))
    shown = capture.get()
    assert "shops.total, 3 min from" in shown and "·▃█" in shown and "···" in shown
    (busy,) = [line.split() for line in shown.splitlines() if line.split()[:1] == ["busy"]]
    assert busy[:5] == ["busy", "3", "1", "2", "3"]
    assert "no metrics yet" in shown


def test_no_number_is_cut_on_a_narrow_terminal():
    line = {"unit": "x", "values": [123_456.0, 9_876.5, 0.1234] * 20}
    found = {"job": "j", "first_ms": 0, "minutes": 60, "metrics": dict.fromkeys(METRICS, line)}
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(metrics_table(found))
    assert "…" not in capture.get() and all(name in capture.get() for name in METRICS)
