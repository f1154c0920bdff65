"""Without a network, without Java or without PySpark there is no broker, and the tests say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import kafka


def test_jars_that_cannot_be_fetched_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kafka, "JARS", tmp_path / "kafka" / "0")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(kafka.NoBroker, match=r"kafka_2\.13.*could not be fetched"):
        kafka.fetch_jars()
    assert not kafka.JARS.exists()


def test_what_ivy_does_not_find_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A Java that says what Ivy says without a network."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'Server access error at url: unknown host'\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setattr(kafka, "JARS", tmp_path / "kafka" / "0")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(kafka.NoBroker, match="unknown host"):
        kafka.fetch_jars()
