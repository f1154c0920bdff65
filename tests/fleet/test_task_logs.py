"""Claims about reading logs: nothing twice, nothing left out, also when files are turned over in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.container.process_runner import (
    ANSWER_BYTES_MAX,
    LogPart,
    RotatedFile,
    log_file,
    read_on,
    read_tail,
)


def on(path: Path, piece: LogPart) -> LogPart:
    found = read_on(path, file=piece.file, offset=piece.offset)
    assert found is not None
    return found


def rest(path: Path, piece: LogPart) -> str:
    """Everything after a place."""
    text = ""
    while True:
        found = on(path, piece)
        if not found.text and (found.file, found.offset) == (piece.file, piece.offset):
            return text
        assert not found.is_gap
        text, piece = text + found.text, found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return log_file(tmp_path, "demo.tick/3")


def test_a_log_lies_where_the_runner_writes_it(tmp_path: Path, path: Path):
    assert path == tmp_path / "tasks" / "logs" / "demo.tick_3.log"
    assert read_tail(path, 10) is None and read_on(path, file=1, offset=0) is None


def test_the_last_lines_then_what_comes(path: Path):
    file = RotatedFile(path)
    file.write(b"one\ntwo\nthree\n")
    tail = read_tail(path, 2)
    assert tail is not None and tail.text == "two\nthree\n"
    assert on(path, tail).text == ""
    file.write(b"four\nfi")
    news = on(path, tail)
    assert news.text == "four\nfi"
    file.write(b"ve\n")
    assert on(path, news).text == "ve\n"
    file.close()


def test_a_tail_reaches_into_older_files(path: Path):
    file = RotatedFile(path, bytes_max=10)
    for number in range(6):
        file.write(f"line {number}\n".encode())
    tail = read_tail(path, 3)
    assert tail is not None and tail.text == "line 3\nline 4\nline 5\n"
    everything = read_tail(path, 100)
    assert everything is not None and everything.text == "line 2\nline 3\nline 4\nline 5\n"  # three are kept
    file.close()


def test_following_goes_on_through_files_that_were_turned_over(path: Path):
    file = RotatedFile(path, bytes_max=20)
    file.write(b"begin\n")
    tail = read_tail(path, 10)
    assert tail is not None
    written = b""
    for number in range(7):
        line = f"line {number}\n".encode()
        file.write(line)
        written += line
    assert path.with_name(path.name + ".1").exists()
    assert rest(path, tail) == written.decode()
    file.close()


def test_what_was_turned_over_too_often_is_a_gap_and_said_so(path: Path):
    file = RotatedFile(path, bytes_max=10)
    file.write(b"first one\n")
    tail = read_tail(path, 10)
    assert tail is not None
    for number in range(9):
        file.write(f"number {number}\n".encode())
    news = on(path, tail)
    assert news.is_gap and news.text == "number 5\n"
    assert rest(path, news) == "number 6\nnumber 7\nnumber 8\n"
    file.close()


def test_an_answer_has_a_bound_and_what_is_no_text_is_shown_as_such(path: Path):
    file = RotatedFile(path)
    file.write(b"\xff\n")
    tail = read_tail(path, 1)
    assert tail is not None and tail.text == "\ufffd\n"
    file.write(b"x" * (ANSWER_BYTES_MAX + 10))
    news = on(path, tail)
    assert len(news.text) == ANSWER_BYTES_MAX and len(on(path, news).text) == 10
    file.close()


def test_a_place_beyond_the_end_is_the_end(path: Path):
    file = RotatedFile(path)
    file.write(b"one\n")
    tail = read_tail(path, 1)
    assert tail is not None
    beyond = read_on(path, file=tail.file, offset=10**9)
    assert beyond is not None and (beyond.text, beyond.offset) == ("", 4)
    file.close()
