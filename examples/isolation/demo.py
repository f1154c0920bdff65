"""The isolation example of Turbine III, live: a job with 10 tasks, and three who want to change that.

At the same time the auto scaler writes 15 and two people on call write 20 and 30, each decided on the version
they saw. The scaler and a person write different layers, and neither loses what it wrote; of the two people
one is told that the other was first. Then a conflict and what it says, a rollback, and everything that was
written.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.cli.connection import connect, endpoint_file
from penstock.client import Client
from penstock.core.errors import EnvironmentProblem, VersionConflict

JOB = "shop.count"
CONFIG = {
    "pipeline": "shop",
    "kind": "stateless",
    "package": {"name": "shop", "version": "1", "hash": "0" * 64, "entry": "pipeline"},
    "task_count": 10,
    "partitions": 32,
    "inputs": [{"category": "orders"}],
    "outputs": [
        {
            "stream": "out",
            "category": "counts",
            "partitions": 4,
            "columns": [["n", "bigint"]],
            "internal": False,
        }
    ],
    "plan": {"stages": []},
    "state": "stopped",  # only its config is looked at here
}
console = Console(highlight=False)


class Failure(Exception):
    """The example did not go as it must."""


def main() -> int:
    """Run it on a control plane of its own; exit code 0 when everything was as it must be."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-isolation-"))
    up = subprocess.Popen(
        [
            *(sys.executable, "-m", "penstock.cli.main", "up"),
            *("--folder", str(folder), "--port", "0", "--containers", "0"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(folder, up)
        tell(folder)
    except Failure as failure:
        console.print(f"[bold red]failed[/] {failure}")
        return 1
    finally:
        up.terminate()
        up.wait(20)
        shutil.rmtree(folder, ignore_errors=True)
    console.print(
        "[bold green]isolation holds[/]: no write was lost, and nobody overwrote what they had not seen\n"
    )
    return 0


def tell(folder: Path) -> None:
    """The story."""
    with connect(folder, role="admin") as admin:
        console.rule("isolation: 10 tasks, and three who want to change that", align="left")
        admin.apply_job(JOB, CONFIG, why="first version", key="create")
        version = int(admin.job(JOB)["expected_version"])
        console.print(f"{JOB} has 10 tasks, at version {version}. Three write at the same time:")
        outcomes = race(admin, folder, version)
        for who, outcome in outcomes.items():
            console.print(f"  {who:<10} {outcome}")
        job = admin.job(JOB)
        layers = {row["layer"]: row["body"].get("task_count") for row in job["layers"]}
        show(job, layers)
        winner = layers.get("oncall")
        if winner not in (20, 30) or job["config"]["task_count"] != winner:
            raise Failure(f"the top layer says {winner}, the job {job['config']['task_count']}")
        if layers.get("scaler") != 15:
            raise Failure("the scaler's write is lost")
        conflict(admin, version)
        roll_back(admin)
        history(admin)


def race(admin: Client, folder: Path, version: int) -> dict[str, str]:
    """Everybody at once; a loser reads again and decides again, unless somebody has done it already."""
    outcomes: dict[str, str] = {}
    start = threading.Barrier(3)

    url = json.loads(endpoint_file(folder).read_text())["url"]

    def write(who: str, layer: str, count: int) -> None:
        token = admin.issue_token(who, layer, days=1, why="the example", key=f"token-{who}")["token"]
        with Client(url, token) as client:
            start.wait()
            for attempt in range(1, 20):
                seen = version if attempt == 1 else int(client.job(JOB)["expected_version"])
                if attempt > 1 and layer == "oncall" and _oncall_says(client):
                    outcomes[who] = f"was second: reads that oncall is {_oncall_says(client)}, and lets it be"
                    return
                try:
                    at = client.patch_layer(
                        JOB, layer, {"task_count": count}, why=f"{who} wants {count}", key=f"{who}-{attempt}",
                        expected_version=seen,
                    )  # fmt: skip
                    outcomes[who] = (
                        f"wrote {count} into the {layer} layer at version {at}, at attempt {attempt}"
                    )
                    return
                except VersionConflict:
                    continue

    people = [("scaler", "scaler", 15), ("oncall1", "oncall", 20), ("oncall2", "oncall", 30)]
    threads = [threading.Thread(target=write, args=person) for person in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {who: outcomes.get(who, "never got through") for who, *_ in people}


def conflict(admin: Client, stale: int) -> None:
    console.rule("a decision on an old version is refused, and changes nothing", align="left")
    before = admin.job(JOB)["expected_version"]
    try:
        admin.patch_layer(
            JOB, "oncall", {"task_count": 5}, why="too late", key="stale", expected_version=stale
        )
    except VersionConflict as error:
        console.print(f"[red]{error.what}[/]\n  why         {error.why}\n  what to do  {error.fix}")
    else:
        raise Failure("a stale write was taken")
    if admin.job(JOB)["expected_version"] != before:
        raise Failure("a refused write changed the version")


def roll_back(admin: Client) -> None:
    console.rule("a bad change, and the way back", align="left")
    good = int(admin.patch_layer(JOB, "base", {"threads": 2}, why="two threads each", key="good"))
    admin.patch_layer(JOB, "base", {"threads": 64, "trigger_ms": 60_000}, why="a mistake", key="bad")
    console.print(f"base layer: threads 2 (version {good}), then by mistake 64 and a trigger of a minute")
    at = admin.rollback(JOB, "base", to_version=good, why="back to what worked", key="back")
    config = admin.job(JOB)["config"]
    console.print(f"rolled back to version {good}, which is now version {at}: threads {config['threads']}")
    if config["threads"] != 2 or config["trigger_ms"] == 60_000:
        raise Failure("the rollback did not bring back the layer")


def show(job: dict, layers: dict[str, int | None]) -> None:
    table = Table(title="layers, lowest first", title_justify="left")
    for name in ("layer", "task_count", "by", "why"):
        table.add_column(name)
    for row in sorted(job["layers"], key=lambda row: row["precedence"]):
        count = layers.get(row["layer"])
        table.add_row(row["layer"], "" if count is None else str(count), row["actor"], row["reason"])
    table.add_row(
        "[bold]merged", f"[bold]{job['config']['task_count']}", "", "the top layer that says something wins"
    )
    console.print(table)


def history(admin: Client) -> None:
    table = Table(title="every write, newest first", title_justify="left")
    for name in ("version", "layer", "by", "why"):
        table.add_column(name)
    for row in admin.history(JOB):
        table.add_row(str(row["version"]), row["layer"], row["actor"], row["reason"])
    console.print(table)


def _oncall_says(client: Client) -> int | None:
    rows = client.job(JOB)["layers"]
    return next((row["body"].get("task_count") for row in rows if row["layer"] == "oncall"), None)


def _wait_for(folder: Path, up: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not endpoint_file(folder).exists():
        if up.poll() is not None or time.monotonic() > deadline:
            raise EnvironmentProblem(
                "the control plane did not start",
                why=f"see `penstock up --folder {folder}`",
                fix="start it by hand",
            )
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
