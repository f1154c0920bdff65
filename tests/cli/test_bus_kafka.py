"""`penstock bus` on Kafka, where offsets have gaps: the same records as on disk, shown, copied and taken back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.streams.bus.log import CategorySpec
from penstock.streams.places import open_log
from tests.cli.world import Run


def a_spec(name: str, *, headers: bool) -> CategorySpec:
    columns = (("shop", "string"), ("n", "bigint"))
    return CategorySpec(
        name=name, partitions=2, columns=columns, format="json", watermark="injector", headers=headers
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_shown_copied_and_taken_back(
    kafka: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place = kafka.new_place()
    for name in ("sales", "copies"):
        open_log(place).create(a_spec(name, headers=True))
    open_log(place).create(a_spec("bare", headers=False))
    monkeypatch.setenv("PENSTOCK_BUS", place)
    records = [
        {"key": f"s{n % 5}", "ts": n, "value": {"shop": f"s{n % 5}", "n": n}, "headers": [["n", str(n)]]}
        for n in range(30)
    ]
    records[0]["headers"].append(["raw", {"base64": "/wA="}])
    given = tmp_path / "given.ndjson"
    for first in (0, 10, 20):  # three transactions, so that there are gaps
        given.write_text("".join(json.dumps(record) + "\n" for record in records[first : first + 10]))
        said = run("bus", "publish", "sales", given, "--form", "record", "-o", "json")
        assert said.code == 0 and said.json["appended"] == 10, said.err
    assert "sales" in run("bus", "ls").text
    last = run("bus", "tail", "sales", "-n", "2", "-o", "json").out.splitlines()
    assert len(last) == 4 and json.loads(last[-1])["headers"] == [["n", "29"]]

    whole = tmp_path / "whole.ndjson"
    assert run("bus", "copy", "sales", whole).code == 0
    found = lines_of(whole)
    assert sorted(row["value"]["n"] for row in found) == list(range(30))
    assert [["n", "0"], ["raw", {"base64": "/wA="}]] in [row["headers"] for row in found]
    half = tmp_path / "half.ndjson"
    half.write_text("".join(line + "\n" for line in whole.read_text().splitlines()[:12]) + '{"half')
    resumed = run("bus", "copy", "sales", half, "--resume", "-o", "json")
    assert resumed.json["appended"] == 18 and resumed.json["repeated"] == 12
    assert lines_of(half) == found

    assert run("bus", "copy", "sales", "copies", "-o", "json").json["appended"] == 30
    assert run("bus", "copy", "sales", "copies", "-o", "json").json["appended"] == 0
    assert run("bus", "copy", "copies", tmp_path / "back.ndjson").code == 0
    kept = sorted((row["value"]["n"], row["headers"]) for row in lines_of(tmp_path / "back.ndjson"))
    assert kept == sorted((row["value"]["n"], row["headers"]) for row in found)
    assert "would be lost" in run("bus", "copy", "sales", "bare").is_refused()
    assert "created without" in run("bus", "publish", "bare", given, "--form", "record").is_refused()


def test_a_broker_that_does_not_answer_is_named(run: Run):
    said = run("bus", "ls", "--bus", "kafka://127.0.0.1:1/").is_refused(5)
    assert "Kafka did not answer" in said
