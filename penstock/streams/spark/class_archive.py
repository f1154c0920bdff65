"""Spark's classes as a JVM has them in memory, in a file that every later JVM maps instead of reading jars.

Made once for a Java and a Spark: `python -m penstock.streams.spark.class_archive`, the last step of `make
setup`. Without it, or where it fits no more, sessions start as ever, a third later.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pyspark

from penstock.core.errors import EnvironmentProblem, PenstockError
from penstock.streams.spark.java import require_java

KEY_CHARS = 16
NAME = "spark-classes-{key}.jsa"
# The JVM checks by itself that jars and Java are those of the archive; a mismatch is no news to anybody.
QUIET = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"


def archive_key(java: str, jars: Iterable[tuple[str, int, int]]) -> str:
    """Which archive belongs to a Java (what it says of itself) and jars (name, bytes, time of change)."""
    text = "\n".join((java, *(f"{name} {size} {changed}" for name, size, changed in sorted(jars))))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARS]


def archive_of(java: str, environment: Path | None = None) -> Path:
    """Where the archive for this Java and this Spark is, or would be: in the environment it belongs to."""
    found = []
    for jar in (Path(pyspark.__file__).parent / "jars").iterdir():
        seen = jar.stat()
        found.append((jar.name, seen.st_size, seen.st_mtime_ns))
    return (
        (environment or Path(sys.prefix)) / "share" / "penstock" / NAME.format(key=archive_key(java, found))
    )


def spark_home(java: str, scratch: Path, *, is_recorded: bool) -> Path:
    """Spark's folder for a session: beside the archive if there is one: a JVM compares the jars' paths."""
    archive = archive_of(java)
    return link_home(archive.parent if is_recorded or archive.exists() else scratch)


def link_home(folder: Path) -> Path:
    """Spark's folder, seen through links in `folder`, without its zipped copy of pyspark.

    Python workers would put those zips first on their path and compile pyspark anew in every process: one
    second of CPU each, instead of a quarter with the installed package and its byte code.
    """
    original, home = Path(pyspark.__file__).parent, folder / "spark-home"
    home.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "jars", "sbin"):
        with suppress(FileExistsError):  # sessions may start together
            (home / name).symlink_to(original / name)
    return home


def archive_options(java: str, recorded: Path | None, environment: Path | None = None) -> str:
    """What tells a JVM to map the archive if there is one, or to write what it loaded to `recorded`."""
    if recorded is not None:
        return f'{QUIET} "-XX:ArchiveClassesAtExit={recorded}"'
    archive = archive_of(java, environment)
    return f'{QUIET} "-XX:SharedArchiveFile={archive}"' if archive.exists() else ""


def make_archive() -> Path:
    """Run a session through its first batch and keep the classes it loaded. Nothing is half-written."""
    # Imported here: a session asks this module for its options.
    from penstock.streams.spark.session import build_session, end_session

    target = archive_of(require_java())
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        recorded = Path(folder) / "classes.jsa"
        session = build_session("classes", 2, Path(folder) / "scratch", recorded=recorded)
        end_session(session, wait_s=300)
        if not recorded.exists():
            raise EnvironmentProblem(
                "Java wrote no archive of Spark's classes",
                why="it ended without it: the disk may be full, or this Java cannot make one",
                fix="go on without: sessions start some seconds later; or make room and type `make setup`",
            )
        for old in target.parent.glob(NAME.format(key="*")):
            old.unlink()
        os.replace(recorded, target)
    return target


def main() -> int:
    """Make it; 1 and the reason if that was not possible."""
    try:
        print(make_archive())
    except (PenstockError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
