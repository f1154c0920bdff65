"""Checks what Spark needs to start: PySpark, a suitable Java, a reachable master. Makes the class archive."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from penstock.core.errors import ConfigError, EnvironmentProblem, PenstockError

JAVA_VERSIONS = (17, 21)
MODULES = ("pyspark", "pandas")  # the extra `spark`
MASTER_S = 5.0  # connect timeout of a master
# Masters that Spark accepts; only a standalone one can be checked by connecting to it.
MASTER_FORMS = re.compile(
    r"local(-cluster)?(\[.*\])?|yarn|k8s://.+|spark://(?P<hosts>[^/,]+:\d+(,[^/,]+:\d+)*)"
)


def require_spark(master: str = "") -> None:
    """Refuse if Spark cannot start here; `master`: the Spark cluster for its tasks, "" for none."""
    for module in MODULES:
        if not _is_installed(module):
            raise EnvironmentProblem(
                "Spark is not installed for this Python",
                why=f"{sys.executable} has no module {module!r}",
                fix="install penstock with the extra `spark`; --engine process runs commands without it",
            )
    require_java()
    require_master(master)


def require_master(master: str) -> None:
    """Refuse an invalid or unreachable master. "": each container has its own Spark."""
    form = MASTER_FORMS.fullmatch(master)
    if master and form is None:
        raise ConfigError(
            f"no such master: {master!r}",
            why="valid forms: spark://host:port, yarn, k8s://…, local[threads]",
            fix="write it as spark://host:7077, or omit --master",
        )
    hosts = form.group("hosts") if form is not None else None
    if not hosts:
        return
    problems = []
    for address in hosts.split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=MASTER_S).close()
        except (OSError, OverflowError) as error:
            problems.append(f"{address}: {error}")
        else:
            return  # one of several is enough
    raise EnvironmentProblem(
        f"no Spark master answers at {master}",
        why="; ".join(problems),
        fix="start it, or correct --master; without --master each container has a Spark of its own",
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def require_java() -> str:
    """Find Java 17 or 21 and return its version text; the error says what to install."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise EnvironmentProblem(
            "there is no Java on this machine",
            why="Spark needs it; there is no `java` on the PATH, and JAVA_HOME does not name one",
            fix="install Java 17 or 21 (Debian: apt-get install openjdk-17-jre-headless; macOS: brew install "
            "openjdk@17), or run `make setup`",
        )
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    text = answer.stderr + answer.stdout
    version = java_version(text)
    if version not in JAVA_VERSIONS:
        raise EnvironmentProblem(
            f"this Java is version {version}",
            why=f"{java} reports it; Spark 4.3 runs on Java 17 or 21",
            fix="install Java 17 or 21 and set JAVA_HOME to it",
        )
    return text


def java_version(text: str) -> int:
    """The major version in the output of `java -version`, 0 if there is none."""
    _, _, rest = text.partition('version "')
    digits = rest.split('"')[0].split(".")
    try:
        return int(digits[1] if digits[0] == "1" else digits[0])
    except (ValueError, IndexError):
        return 0


KEY_CHARS = 16
NAME = "spark-classes-{key}.jsa"
# The JVM checks that jars and Java match the archive; warnings about a mismatch are switched off.
QUIET = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"


def archive_key(java: str, jars: Iterable[tuple[str, int, int]]) -> str:
    """The key of the archive for a Java (its version text) and jars (name, bytes, modification time)."""
    text = "\n".join((java, *(f"{name} {size} {changed}" for name, size, changed in sorted(jars))))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARS]


def archive_of(java: str, environment: Path | None = None) -> Path:
    """The path of the archive for this Java and Spark, in the Python environment; it may not exist."""
    found = []
    for jar in (_pyspark_folder() / "jars").iterdir():
        seen = jar.stat()
        found.append((jar.name, seen.st_size, seen.st_mtime_ns))
    return (
        (environment or Path(sys.prefix)) / "share" / "penstock" / NAME.format(key=archive_key(java, found))
    )


def _pyspark_folder() -> Path:
    import pyspark  # may be missing; `require_spark` reports it

    return Path(pyspark.__file__).parent


def spark_home(java: str, scratch: Path, *, is_recorded: bool) -> Path:
    """SPARK_HOME of a session: beside the archive if there is one, because the JVM compares jar paths."""
    archive = archive_of(java)
    return link_home(archive.parent if is_recorded or archive.exists() else scratch)


def link_home(folder: Path) -> Path:
    """A SPARK_HOME of symbolic links in `folder`, without Spark's zipped copy of pyspark.

    Python workers would import pyspark from the zip and compile it in every process: one second of CPU each,
    instead of a quarter with the installed package and its byte code.
    """
    original, home = _pyspark_folder(), folder / "spark-home"
    home.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "jars", "sbin"):
        with suppress(FileExistsError):  # sessions may start together
            (home / name).symlink_to(original / name)
    return home


def archive_options(java: str, recorded: Path | None, environment: Path | None = None) -> str:
    """JVM options to use the archive if it exists, or to write the loaded classes to `recorded`."""
    if recorded is not None:
        return f'{QUIET} "-XX:ArchiveClassesAtExit={recorded}"'
    archive = archive_of(java, environment)
    return f'{QUIET} "-XX:SharedArchiveFile={archive}"' if archive.exists() else ""


def make_archive() -> Path:
    """Run a session's first batch and write the archive of the loaded classes, atomically."""
    # Imported here: the session's module imports this one.
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
                why="the disk may be full, or this Java does not support it",
                fix="continue without it (sessions start more slowly), or free space and run `make setup`",
            )
        for old in target.parent.glob(NAME.format(key="*")):
            old.unlink()
        os.replace(recorded, target)
    return target


def main() -> int:
    """Make the archive; on failure print the reason and return 1."""
    try:
        print(make_archive())
    except (PenstockError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
