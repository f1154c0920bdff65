"""The session that containers use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.streams.spark.java import archive_of, require_java


def test_its_jvm_maps_the_archive_of_sparks_classes(spark: Any) -> None:
    """Java takes an archive or leaves it without a word; what it took is among its mapped files."""
    archive = archive_of(require_java())
    assert archive.exists(), "make setup leaves one"
    mapped = Path(f"/proc/{spark.sparkContext._gateway.proc.pid}/maps").read_text()
    assert str(archive) in mapped
