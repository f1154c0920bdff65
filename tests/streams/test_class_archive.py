"""The archive of Spark's classes: which one fits, and that none, or a damaged one, stops nobody."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from penstock.streams.spark.java import QUIET, archive_key, archive_of, archive_options, link_home
from tests.waiting import LIMIT_S

JARS = (("spark-core.jar", 10, 1), ("spark-sql.jar", 20, 2))
HOME = os.environ.get("JAVA_HOME")
JAVA = str(Path(HOME, "bin", "java")) if HOME else "java"
SAID = 'openjdk version "17.0.1"'


@pytest.mark.parametrize(
    ("java", "jars"),
    [
        ('openjdk version "17.0.2"', JARS),
        (SAID, JARS[:1]),
        (SAID, (JARS[0], ("spark-sql.jar", 21, 2))),
        (SAID, (JARS[0], ("spark-sql.jar", 20, 3))),
        (SAID, (JARS[0], ("spark-sql-2.jar", 20, 2))),
    ],
)
def test_another_java_or_another_jar_is_another_archive(java, jars):
    assert archive_key(java, jars) != archive_key(SAID, JARS)
    assert archive_key(SAID, tuple(reversed(JARS))) == archive_key(SAID, JARS)


def test_a_session_maps_the_archive_of_its_java_and_no_other(tmp_path):
    assert archive_options(SAID, None, tmp_path) == ""
    archive = archive_of(SAID, tmp_path)
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"classes")
    assert f"-XX:SharedArchiveFile={archive}" in shlex.split(archive_options(SAID, None, tmp_path))
    assert archive_options("another Java", None, tmp_path) == ""
    recorded = tmp_path / "with a space" / "new.jsa"
    assert f"-XX:ArchiveClassesAtExit={recorded}" in shlex.split(archive_options(SAID, recorded, tmp_path))


def test_sessions_that_start_together_find_one_home_without_zips(tmp_path):
    home = link_home(tmp_path)
    assert link_home(tmp_path) == home
    assert {link.name for link in home.iterdir()} == {"bin", "jars", "sbin"}
    assert all(link.is_dir() for link in home.iterdir())


@pytest.mark.parametrize("content", [b"", b"no archive", b"\0" * 100_000])
def test_java_starts_without_a_word_when_the_archive_is_damaged(tmp_path: Path, content: bytes):
    archive = tmp_path / "damaged.jsa"
    archive.write_bytes(content)
    command = [JAVA, *shlex.split(QUIET), f"-XX:SharedArchiveFile={archive}", "-version"]
    plain = subprocess.run([JAVA, "-version"], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert (done.stdout, done.stderr.replace(", sharing", "")) == ("", plain.stderr.replace(", sharing", ""))
