"""What every demo needs: `penstock up` in a temporary folder, steps that say what they wait for, an end."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from penstock.core.errors import EnvironmentProblem, PenstockError

console = Console(highlight=False)


class Story:
    """A demo, step by step; each step says what it waits for and how long it took."""

    patience_s = 60.0

    def __init__(self, folder: Path) -> None:
        self._folder, self._began = folder, time.monotonic()
        self._up: subprocess.Popen[bytes] | None = None
        self.failures: list[str] = []
        self.numbers: dict[str, str] = {}

    def run(self) -> None:
        """Everything, in order."""
        raise NotImplementedError

    def judge(self) -> None:
        """What is looked at once everything has ended."""

    def _start_up(self, *options: str) -> None:
        """Begin `penstock up`, and wait until its API answers."""
        command = [sys.executable, "-m", "penstock.cli.main", "up", "--folder", str(self._folder)]
        with (self._folder / "up.log").open("wb") as output:
            self._up = subprocess.Popen([*command, "--port", "0", *options], stdout=output, stderr=output)
        self._wait("the API answers", lambda: (self._folder / "endpoint.json").exists())

    def stop(self) -> None:
        """End everything that was started, and see that it has ended."""
        if self._up is None:
            return
        kin = psutil.Process(self._up.pid).children(recursive=True) if self._up.poll() is None else []
        self._up.send_signal(signal.SIGTERM)
        try:
            self._up.wait(40)
        except subprocess.TimeoutExpired:
            self._up.kill()
            self.failures.append("penstock up did not stop in 40 s")
        left = psutil.wait_procs(kin, timeout=5)[1]
        for process in left:
            process.kill()
        if left:
            self.failures.append(f"{len(left)} processes were left running")
        self._say(
            "stopped; nothing is left running" if not left else f"{len(left)} processes had to be killed"
        )

    def _say(self, text: str) -> None:
        console.print(f"[dim]{time.monotonic() - self._began:6.1f} s[/]  {text}")

    def _wait(self, what: str, condition: Callable[[], bool], *, seconds: float | None = None) -> float:
        began, limit_s = time.monotonic(), self.patience_s if seconds is None else seconds
        with console.status(f"waiting: {what}"):
            while not _holds(condition):
                if self._up is None or self._up.poll() is not None:
                    raise EnvironmentProblem(
                        "penstock up ended", why=_tail(self._folder / "up.log"), fix="see the message above"
                    )
                if time.monotonic() - began > limit_s:
                    raise EnvironmentProblem(
                        f"gave up waiting: {what}",
                        why=f"it did not happen within {limit_s:.0f} s",
                        fix="look at the logs in the folder named below",
                    )
                time.sleep(0.1)
        took = time.monotonic() - began
        self._say(f"[green]✓[/] {what} [dim]({took:.1f} s)[/]")
        return took


def tell(kind: type[Story], *, title: str, whole: str, more: Callable[[], Iterable[tuple[str, str]]]) -> int:
    """Run it, print the numbers, clear up, say whether it held: the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    story, began = kind(folder), time.monotonic()
    try:
        story.run()
    except PenstockError as error:
        story.failures.append(str(error))
    except KeyboardInterrupt:
        story.failures.append("interrupted")
    finally:
        rows = list(more())
        story.stop()
    story.judge()
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    for what, measured in [*story.numbers.items(), *rows, (whole, f"{time.monotonic() - began:.0f} s")]:
        table.add_row(what, measured)
    console.print(table)
    for failure in story.failures:
        console.print(f"[bold red]failed:[/] {failure}", markup=True)
    if story.failures:
        console.print(f"logs are kept in {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    console.print("[bold green]nothing lost, nothing doubled[/]")
    return 0


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except PenstockError:
        return False  # not there yet, or not answering for a moment


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:])
