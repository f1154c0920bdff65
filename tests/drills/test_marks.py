"""The judge of the drills is itself judged: it must see every overlap, and none where there is none."""

from __future__ import annotations

from pathlib import Path

from tests.drills.marks import Run, epochs_out_of_order, overlaps_in, read_runs, recovery_s


def a_run(pid: int, *marks: float, task: str = "a_0", place: str = "c1", epoch: int = 1) -> Run:
    return Run(task=task, place=place, epoch=epoch, pid=pid, marks=marks)


def test_one_after_another_is_no_overlap():
    assert not list(overlaps_in([a_run(1, 1.0, 2.0), a_run(2, 2.1, 3.0), a_run(3, 1.5, task="a_1")]))


def test_a_frozen_process_overlaps_only_with_what_it_does_after_it_wakes():
    (overlap,) = overlaps_in([a_run(1, 1.0, 2.0, 20.0, 20.3), a_run(2, 10.0, 30.0, place="c2")])
    assert overlap.marks == 2 and round(overlap.seconds, 3) == 0.3
    assert "beside 2 on c2" in str(overlap)


def test_a_third_process_is_compared_with_the_first():
    runs = [a_run(1, 1.0, 9.0), a_run(2, 2.0, 3.0), a_run(3, 5.0, 6.0)]
    assert [(overlap.older.pid, overlap.newer.pid) for overlap in overlaps_in(runs)] == [(1, 2), (1, 3)]


def test_an_epoch_that_does_not_grow_is_named():
    runs = [a_run(1, 1.0, epoch=5), a_run(2, 2.0, place="c2", epoch=5), a_run(3, 3.0, place="c3", epoch=6)]
    assert list(epochs_out_of_order(runs)) == ["a_0: epoch 5 on c2 after 5 on c1"]


def test_recovery_counts_to_the_first_mark_of_a_new_process():
    runs = [a_run(1, 1.0, 20.0), a_run(2, 12.0, 13.0), a_run(3, 15.0)]
    assert recovery_s(runs, "a_0", 10.0) == 2.0
    assert recovery_s(runs, "a_0", 16.0) is None


def test_a_line_that_is_half_written_is_not_read(tmp_path: Path):
    (tmp_path / "a_0~c1~7~42").write_text("1.000\n1.050\n1.1")
    (tmp_path / "a_1~c1~7~43").write_text("")
    assert read_runs(tmp_path) == [a_run(42, 1.0, 1.05, epoch=7)]
