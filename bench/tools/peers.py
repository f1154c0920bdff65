"""Peers of `bench.stateful`: other systems, each in an environment of its own, made once under `build/peers`.

A peer reads CSV files and is timed as a process, once over all of its records and once over a fifth of them;
the difference is what the records cost, without the start.
"""

from __future__ import annotations

import csv
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
PLACE = HERE.parents[1] / "build" / "peers"
PARTS, FIFTH = 2, 5
INSTALL_S, RUN_S = 900, 600
PACKAGES = {"bytewax": "bytewax==0.21.1", "PyFlink": "apache-flink==2.3.0"}
Rows = Sequence[tuple[str, int]]


def time_peer(name: str, rows: Rows, repeats: int) -> list[float] | str:
    """Seconds for these records, so often; or in a line why there is no such time."""
    try:
        python = _installed(name)
        with tempfile.TemporaryDirectory(prefix="peer-") as folder:
            whole, part = Path(folder) / "whole", Path(folder) / "part"
            _write(whole, rows)
            _write(part, rows[: len(rows) // FIFTH])
            return [
                (_timed(name, python, whole) - _timed(name, python, part)) * FIFTH / (FIFTH - 1)
                for _ in range(repeats)
            ]
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or b"").decode(errors="replace").split("\n")
        return f"it failed: {next((line for line in reversed(lines) if line.strip()), error)}"
    except subprocess.TimeoutExpired as error:
        return f"it took longer than {error.timeout:.0f} s"


def _installed(name: str) -> Path:
    folder = PLACE / PACKAGES[name]
    python = folder / "bin" / "python"
    if not python.exists():
        made = folder.with_name(f"{folder.name}.making")
        shutil.rmtree(made, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(made)], check=True, capture_output=True)
        install = [str(made / "bin" / "python"), "-m", "pip", "install", "-q", PACKAGES[name]]
        subprocess.run(install, check=True, capture_output=True, timeout=INSTALL_S)
        made.rename(folder)  # `python -m` is all that is used of it: it may have another name
    return python


def _write(folder: Path, rows: Rows) -> None:
    folder.mkdir()
    for part in range(PARTS):
        with (folder / f"{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows[part::PARTS])


def _timed(name: str, python: Path, folder: Path) -> float:
    run: Callable[[Path, Mapping[str, str]], None] = {"bytewax": _bytewax, "PyFlink": _flink}[name]
    began = time.monotonic()
    run(python, {**os.environ, "FOLDER": str(folder)})
    return time.monotonic() - began


def _flink(python: Path, environment: Mapping[str, str]) -> None:
    script = [str(python), str(HERE / "peer_flink.py")]
    subprocess.run(script, check=True, capture_output=True, timeout=RUN_S, env=environment)


def _bytewax(python: Path, environment: Mapping[str, str]) -> None:
    """Two processes, since its workers share an interpreter's lock within one."""
    with tempfile.TemporaryDirectory(prefix="peer-") as recovery:
        make = [str(python), "-m", "bytewax.recovery", recovery, str(PARTS)]
        subprocess.run(make, check=True, capture_output=True)
        addresses = ";".join(f"127.0.0.1:{port}" for port in _free_ports(PARTS))
        command = [str(python), "-m", "bytewax.run", "peer_bytewax:flow", "-a", addresses]
        command += ["-r", recovery, "-s", "1", "-b", "0"]
        processes = [
            subprocess.Popen(
                [*command, "-i", str(part)],
                cwd=HERE,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for part in range(PARTS)
        ]
        try:
            for process in processes:
                _, error = process.communicate(timeout=RUN_S)
                if process.returncode:
                    raise subprocess.CalledProcessError(process.returncode, command, stderr=error)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(found.getsockname()[1]) for found in sockets]
    for found in sockets:
        found.close()
    return ports
