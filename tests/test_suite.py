"""`make test` runs its groups up to one that fails, and says of each how long it took and what pytest counted."""

from __future__ import annotations

import sys

import pytest

from tests.suite import Group, Row, run_groups, table


def printing(text: str, *, code: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; print({text!r}); sys.exit({code})")


def test_it_stops_where_a_group_fails_and_prints_the_table(capfd: pytest.CaptureFixture[str]):
    good = Group("good", printing("..s\n2 passed, 1 skipped in 0.52s"))
    bad = Group("bad", printing("1 failed, 4 passed in 61.00s (0:01:01)", code=3))
    never = Group("never", printing("3 passed in 0.10s"))
    assert run_groups("test", [[good], [good, bad], [never]]) == 3
    printed = capfd.readouterr().out.splitlines()
    assert printed.count("2 passed, 1 skipped in 0.52s") == 2
    assert printed.count("1 failed, 4 passed in 61.00s (0:01:01)") == 1
    head, *rows, together = printed[-5:]
    assert head.split() == ["min:s"]
    assert [row.split()[0] for row in rows] == ["good", "good", "bad"]
    assert [row.split("  ")[-1] for row in rows] == [
        *["2 passed, 1 skipped"] * 2,
        "FAILED 1 failed, 4 passed",
    ]
    assert together.startswith("make test ")


def test_the_table_has_minutes():
    rows = [Row("check", 59.6), Row("fast", 301.0, "9 passed"), Row("make test", 361.0)]
    assert table(rows).splitlines() == [
        "",
        "            min:s",
        "check        1:00",
        "fast         5:01  9 passed",
        "make test    6:01",
    ]
