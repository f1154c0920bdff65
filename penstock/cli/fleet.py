"""`penstock container`, `shard`, `task` and `top`: where things run, and what operators ask of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from penstock.cli import fleet_tables
from penstock.cli.cells import printable
from penstock.cli.connection import FOLDER, Folder, connect
from penstock.cli.jobs import Why
from penstock.cli.output import EXIT_CODES, Form, Output, err, show, show_line
from penstock.cli.stopping import until_ctrl_c
from penstock.cli.watching import News, watch
from penstock.client import Client
from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, NotFound, StoreUnavailable
from penstock.core.system_clock import SystemClock, sleep_ms

container = typer.Typer(
    name="container",
    help="Containers: list them, take work away from them, give it back.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)
shard = typer.Typer(
    name="shard",
    help="Shards: who owns which, why, and moving them.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)
task = typer.Typer(
    name="task", help="Tasks: where they are and what they print.", epilog=EXIT_CODES, no_args_is_help=True
)

ContainerName = Annotated[str, typer.Argument(help="A container, e.g. c1.")]
ShardNumber = Annotated[int, typer.Argument(help="A shard's number.", min=0, max=2**31 - 1)]
TaskId = Annotated[str, typer.Argument(metavar="TASK", help="A task: JOB/INDEX, e.g. shops.by_shop/0.")]
FOLLOW_MS: Millis = 500


@container.command("ls", epilog=EXIT_CODES)
def list_containers(folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Every container ever heard of."""
    with connect(folder, role="reader") as client:
        rows = client.containers()
    show(rows, output, lambda: fleet_tables.containers_table(rows, SystemClock().now_ms()))


@container.command(epilog=EXIT_CODES)
def drain(name: ContainerName, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Move everything away from a container, a few shards at a time, and give it nothing new."""
    with connect(folder, role="oncall") as client:
        row = client.drain(name, why=why)
    said = f"[green]draining[/] {name}: {row['shards']} shards to move; `penstock container ls` shows how far"
    show(row, output, lambda: said)


@container.command(epilog=EXIT_CODES)
def cordon(name: ContainerName, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Give a container no new shards; it keeps what it has."""
    with connect(folder, role="oncall") as client:
        row = client.cordon(name, why=why)
    show(row, output, lambda: f"[green]cordoned[/] {name}: it keeps its {row['shards']} shards")


@container.command(epilog=EXIT_CODES)
def uncordon(name: ContainerName, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Take a cordoned or drained container back."""
    with connect(folder, role="oncall") as client:
        row = client.uncordon(name, why=why)
    show(row, output, lambda: f"[green]uncordoned[/] {name}: it takes shards again")


@shard.command("ls", epilog=EXIT_CODES)
def list_shards(
    container: Annotated[str, typer.Option(help="Only those that this one has or gets.")] = "",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Every shard: its owner, its tasks, where it goes."""
    with connect(folder, role="reader") as client:
        rows = client.shards(container=container or None)
    show(rows, output, lambda: fleet_tables.shards_table(rows))


@shard.command(epilog=EXIT_CODES)
def explain(number: ShardNumber, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Why a shard is where it is, and what would be done with it next."""
    with connect(folder, role="reader") as client:
        found = client.shard(number)
    show(found, output, lambda: fleet_tables.shard_tables(found))


@shard.command(epilog=EXIT_CODES)
def move(
    number: ShardNumber, name: ContainerName, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE
) -> None:
    """Move one shard to a container. It stays there until balancing finds a better place."""
    with connect(folder, role="oncall") as client:
        found = client.move_shard(number, name, why=why)
    is_there = found["container"] == name and not found["target"]
    said = f"shard {number} is on {name}" if is_there else f"shard {number} goes to {name}"
    show(found, output, lambda: f"[green]done[/] {said}")


@shard.command(epilog=EXIT_CODES)
def release(number: ShardNumber, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Let a quarantined shard be placed again."""
    with connect(folder, role="oncall") as client:
        found = client.release_shard(number, why=why)
    show(found, output, lambda: f"[green]released[/] shard {number}")


@task.command("ls", epilog=EXIT_CODES)
def list_tasks(
    job: Annotated[str, typer.Argument(help="A job; none: all of them.")] = "",
    container: Annotated[str, typer.Option(help="Only those of this container.")] = "",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Tasks: where they are, what they do, what they use."""
    with connect(folder, role="reader") as client:
        rows = client.tasks(job=job or None, container=container or None)
    show(rows, output, lambda: fleet_tables.tasks_table(rows))


@task.command(epilog=EXIT_CODES)
def restart(task_id: TaskId, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """End one task and start it again where it is, at once, whatever its backoff says."""
    job, index = split_task(task_id)
    with connect(folder, role="oncall") as client:
        found = client.restart_task(job, index, why=why)
    show(found, output, lambda: f"[green]asked[/] {found['container']} to restart {found['task_id']}")


@task.command(epilog=EXIT_CODES)
def logs(
    task_id: TaskId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what it prints, until Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="The last so many.", min=1, max=10_000)] = 100,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """What a plain process printed, and with -f what it prints, wherever it goes."""
    job, index = split_task(task_id)

    def say(piece: dict[str, Any]) -> None:
        if output is Form.TABLE:
            say_log(piece["text"])
        elif piece["text"]:
            show_line(piece, output)

    with connect(folder, role="oncall") as client:

        def read(after: str | None) -> dict[str, Any]:
            return client.task_log(job, index, lines=lines, after=after)

        with until_ctrl_c() if follow else contextlib.nullcontext():
            found = read(None)
            say(found)
            if follow:
                follow_log(read, found, say, sleep_ms)


def top(
    once: Annotated[bool, typer.Option("--once", help="One frame, then end.")] = False,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """What uses what, live: containers, the busiest tasks, the last decisions."""
    with connect(folder, role="reader") as client:
        if once:
            found = look(client)
            show(found, output, lambda: fleet_tables.top_tables(found))
            return
        with until_ctrl_c():
            watch(lambda: look(client), fleet_tables.top_tables, News(client).wait, form=output)


def look(client: Client) -> dict[str, Any]:
    """Everything that `top` shows."""
    return {
        "now_ms": SystemClock().now_ms(),
        "jobs": [{"name": job["name"], "state": job["state"]} for job in client.jobs()],
        "containers": client.containers(),
        "tasks": client.tasks(),
        "journal": client.journal(limit=fleet_tables.DECISIONS_MAX),
    }


def split_task(text: str) -> tuple[str, int]:
    """A task's job and index."""
    job, slash, index = text.rpartition("/")
    if not slash or not job or re.fullmatch("[0-9]{1,9}", index) is None:
        raise ConfigError(
            f"not a task: {text[:200]!r}",
            why="a task is named by its job and its index",
            fix=f"e.g. {job or text or 'shops.by_shop'}/0; `penstock task ls` lists them",
        )
    return job, int(index)


def follow_log(
    read: Callable[[str], dict[str, Any]],
    found: dict[str, Any],
    say: Callable[[dict[str, Any]], None],
    pause: Callable[[Millis], None],
) -> None:
    """Print what comes, without end. A task on its way, or a control plane that is away, is waited for."""
    while True:
        try:
            news = read(found["place"])
        except (NotFound, StoreUnavailable):
            pause(FOLLOW_MS)
            continue
        if news["container"] != found["container"]:
            err.print(f"{news['task_id']} is on {news['container']} now", style="bold", markup=False)
        elif news["is_gap"]:
            err.print("some lines were gone before they were read", style="bold")
        found = news
        say(news)
        if not news["text"]:
            pause(FOLLOW_MS)


def say_log(text: str) -> None:
    """A task's own words, without what would steer the terminal."""
    print("".join(letter if letter in "\n\t" else printable(letter) for letter in text), end="", flush=True)
