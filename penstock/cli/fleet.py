"""`penstock container`, `shard`, `task`, `top`, `capacity` and `lend`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from penstock.cli.jobs import Why
from penstock.cli.output import EXIT_CODES, FOLDER, Folder, Form, Output, connect, err, out, show, show_line
from penstock.cli.tables import lag, new_table, printable, state_text, text, when
from penstock.cli.watching import ChangeWait, stop_on_signals, until_ctrl_c, watch
from penstock.client.client import Client
from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, NotFound, StoreUnavailable
from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.fleet.messages import summarize_error

container = typer.Typer(
    name="container",
    help="Containers: list, drain, cordon and uncordon them.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)
shard = typer.Typer(
    name="shard",
    help="Shards: list, explain, move and release them.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)
task = typer.Typer(
    name="task",
    help="Tasks: list and restart them, read their logs.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)

ContainerName = Annotated[str, typer.Argument(help="A container, e.g. c1.")]
ShardNumber = Annotated[int, typer.Argument(help="A shard's number.", min=0, max=2**31 - 1)]
TaskId = Annotated[str, typer.Argument(metavar="TASK", help="A task: JOB/INDEX, e.g. shops.by_shop/0.")]
FOLLOW_MS: Millis = 500


@container.command("ls", epilog=EXIT_CODES)
def list_containers(folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """List every container that ever registered."""
    with connect(folder, role="reader") as client:
        rows = client.containers()
    show(rows, output, lambda: containers_table(rows, SystemClock().now_ms()))


@container.command(epilog=EXIT_CODES)
def drain(name: ContainerName, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Move all shards away from a container, a few at a time, and place no new ones there."""
    with connect(folder, role="oncall") as client:
        row = client.drain(name, why=why)
    line = (
        f"[green]draining[/] {name}: {row['shards']} shards to move; `penstock container ls` shows progress"
    )
    show(row, output, lambda: line)


@container.command(epilog=EXIT_CODES)
def cordon(name: ContainerName, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Place no new shards on a container; it keeps those it has."""
    with connect(folder, role="oncall") as client:
        row = client.cordon(name, why=why)
    show(row, output, lambda: f"[green]cordoned[/] {name}: it keeps its {row['shards']} shards")


@container.command(epilog=EXIT_CODES)
def uncordon(name: ContainerName, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Use a cordoned or drained container for placement again."""
    with connect(folder, role="oncall") as client:
        row = client.uncordon(name, why=why)
    show(row, output, lambda: f"[green]uncordoned[/] {name}: it takes shards again")


@shard.command("ls", epilog=EXIT_CODES)
def list_shards(
    container: Annotated[
        str, typer.Option(help="Only those that this container owns or is the target of.")
    ] = "",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """List shards: owner, tasks, target."""
    with connect(folder, role="reader") as client:
        rows = client.shards(container=container or None)
    show(rows, output, lambda: shards_table(rows))


@shard.command(epilog=EXIT_CODES)
def explain(number: ShardNumber, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Why a shard is on its container, and what placement would do with it next."""
    with connect(folder, role="reader") as client:
        found = client.shard(number)
    show(found, output, lambda: shard_tables(found))


@shard.command(epilog=EXIT_CODES)
def move(
    number: ShardNumber, name: ContainerName, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE
) -> None:
    """Move one shard to a container. It stays there until balancing moves it."""
    with connect(folder, role="oncall") as client:
        found = client.move_shard(number, name, why=why)
    is_there = found["container"] == name and not found["target"]
    line = f"shard {number} is on {name}" if is_there else f"shard {number} is moving to {name}"
    show(found, output, lambda: f"[green]done[/] {line}")


@shard.command(epilog=EXIT_CODES)
def release(number: ShardNumber, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Allow a quarantined shard to be placed again."""
    with connect(folder, role="oncall") as client:
        found = client.release_shard(number, why=why)
    show(found, output, lambda: f"[green]released[/] shard {number}")


@task.command("ls", epilog=EXIT_CODES)
def list_tasks(
    job: Annotated[str, typer.Argument(help="A job; default: all.")] = "",
    container: Annotated[str, typer.Option(help="Only those of this container.")] = "",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """List tasks: container, state, lag, resources."""
    with connect(folder, role="reader") as client:
        rows = client.tasks(job=job or None, container=container or None)
    show(rows, output, lambda: tasks_table(rows))


@task.command(epilog=EXIT_CODES)
def restart(task_id: TaskId, why: Why, folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """Restart one task in its container at once, without waiting for its backoff."""
    job, index = split_task(task_id)
    with connect(folder, role="oncall") as client:
        found = client.restart_task(job, index, why=why)
    show(found, output, lambda: f"[green]ordered[/] {found['container']} to restart {found['task_id']}")


@task.command(epilog=EXIT_CODES)
def logs(
    task_id: TaskId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new output, until Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="The last N.", min=1, max=10_000)] = 100,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """The log of a process task; with -f also new output, also after the task moved."""
    job, index = split_task(task_id)

    def show_piece(piece: dict[str, Any]) -> None:
        if output is Form.TABLE:
            print_log(piece["text"])
        elif piece["text"]:
            show_line(piece, output)

    with connect(folder, role="oncall") as client:

        def read(after: str | None) -> dict[str, Any]:
            return client.task_log(job, index, lines=lines, after=after)

        with until_ctrl_c() if follow else contextlib.nullcontext():
            found = read(None)
            show_piece(found)
            if follow:
                follow_log(read, found, show_piece, sleep_ms)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once.")] = False,
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Live resource usage: containers, the busiest tasks, the last decisions."""
    with connect(folder, role="reader") as client:
        if once:
            found = read_top(client)
            show(found, output, lambda: top_tables(found))
            return
        with until_ctrl_c():
            watch(lambda: read_top(client), top_tables, ChangeWait(client).wait, form=output)


def read_top(client: Client) -> dict[str, Any]:
    """The data of `top`."""
    return {
        "now_ms": SystemClock().now_ms(),
        "jobs": [{"name": job["name"], "state": job["state"]} for job in client.jobs()],
        "containers": client.containers(),
        "tasks": client.tasks(),
        "journal": client.journal(limit=DECISIONS_MAX),
    }


def split_task(text: str) -> tuple[str, int]:
    """A task's job and index."""
    job, slash, index = text.rpartition("/")
    if not slash or not job or re.fullmatch("[0-9]{1,9}", index) is None:
        raise ConfigError(
            f"not a task: {text[:200]!r}",
            why="a task is named JOB/INDEX",
            fix=f"e.g. {job or text or 'shops.by_shop'}/0; `penstock task ls` lists them",
        )
    return job, int(index)


def follow_log(
    read: Callable[[str], dict[str, Any]],
    found: dict[str, Any],
    show_piece: Callable[[dict[str, Any]], None],
    pause: Callable[[Millis], None],
) -> None:
    """Print new log text without end; retries while the task moves or the control plane does not answer."""
    while True:
        try:
            piece = read(found["place"])
        except (NotFound, StoreUnavailable):
            pause(FOLLOW_MS)
            continue
        if piece["container"] != found["container"]:
            err.print(f"{piece['task_id']} is on {piece['container']} now", style="bold", markup=False)
        elif piece["is_gap"]:
            err.print("some lines were deleted before they could be read", style="bold")
        found = piece
        show_piece(piece)
        if not piece["text"]:
            pause(FOLLOW_MS)


def print_log(text: str) -> None:
    """Print log text without control characters."""
    print("".join(letter if letter in "\n\t" else printable(letter) for letter in text), end="", flush=True)


def lend(
    clusters: Annotated[Path, typer.Option(help="A TOML file that names each cluster.")],
    once: Annotated[bool, typer.Option("--once", help="Run one round only.")] = False,
    advice: Annotated[
        bool, typer.Option("--advice", help="Show what would be done; change nothing.")
    ] = False,
    every: Annotated[float, typer.Option(help="Seconds between rounds.", min=1, max=3600)] = 15,
) -> None:
    """Lend containers between clusters: from clusters with spare capacity to those that lack it, and back."""
    from penstock.lender import Lender, read_clusters

    found = read_clusters(clusters, os.environ)
    with ExitStack() as open_clients:
        clients = {
            cluster.name: open_clients.enter_context(
                Client(cluster.url, cluster.token, ca=cluster.ca, retries=1)
            )
            for cluster in found
        }
        clock = SystemClock()
        say = partial(out.print, markup=False)
        lender = Lender(found, clients, advice=advice, report=say, now_ms=clock.now_ms)
        if once:
            silent = lender.round()
            if silent:
                raise StoreUnavailable(
                    f"these clusters did not answer: {', '.join(silent)}",
                    why="see the lines above; the other clusters were processed",
                    fix="correct the cause and run it again",
                )
            return
        lender.run(every, stop_on_signals())


Rows = Sequence[Mapping[str, Any]]
BUSIEST_MAX = 20
DECISIONS_MAX = 6


def containers_table(containers: Rows, now_ms: int) -> Table:
    """One line per container, with orders for it."""
    table = new_table("containers")
    for name in ("container", "state", "takes"):
        table.add_column(name, no_wrap=True)
    for name in ("shards", "tasks", "last heartbeat"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("region", "host", "size"):
        table.add_column(name, overflow="fold")
    for row in containers:
        table.add_row(
            text(row["name"], limit=40),
            state_text(container_state(row)),
            takes(row),
            str(row["shards"]),
            str(row["tasks"]),
            f"{max(0, now_ms - row['seen_ms']) / 1000:.1f} s ago",
            text(row["region"] or "–", limit=20),
            text(row["host"] or "–", limit=40),
            text(size_text(row["capacity"]), limit=60),
        )
    if not containers:
        table.caption = "no container ever registered"
    return table


def container_state(row: Mapping[str, Any]) -> str:
    """The state of a container."""
    return "starting" if row["state"] == "live" and not row["ready"] else str(row["state"])


def takes(row: Mapping[str, Any]) -> str:
    """Whether a container takes shards."""
    if row.get("lending", "").startswith("lent to"):
        return f"nothing, {row['lending']}"
    if row["draining"]:
        return "nothing, drained" if not row["shards"] else "nothing, draining"
    line = "nothing, cordoned" if row["cordoned"] else "shards"
    return f"{line}; {row['lending']}" if row.get("lending") else line


def size_text(capacity: Mapping[str, float]) -> str:
    """The capacity that a container declared."""
    return ", ".join(f"{value:g} {kind}" for kind, value in capacity.items() if value) or "not limited"


def shards_table(shards: Rows) -> Table:
    """One line per shard."""
    table = new_table("shards")
    table.add_column("shard", justify="right", no_wrap=True)
    for name in ("container", "state", "target"):
        table.add_column(name, no_wrap=True)
    for name in ("tasks", "epoch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("remark", overflow="fold")
    for row in shards:
        table.add_row(
            str(row["shard"]),
            text(row["container"] or "–", limit=40),
            state_text(row["state"]),
            text(row["target"] or "–", limit=40),
            str(row["tasks"]),
            str(row["epoch"]),
            text(_remark(row), "red"),
        )
    if not shards:
        table.caption = "no shards"
    return table


def _remark(row: Mapping[str, Any]) -> str:
    if row["quarantined"]:
        return f"quarantined: {row['blame']} containers failed with it"
    return f"{row['blame']} container failed with it" if row["blame"] else ""


def shard_tables(shard: Mapping[str, Any]) -> RenderableType:
    """One shard: its container, its history, and what placement would do with it next."""
    facts = new_table(f"shard {shard['shard']}")
    facts.add_column("", no_wrap=True)
    facts.add_column("", overflow="fold")
    facts.show_header = False
    where = shard["container"] or "no container"
    if shard["target"]:
        where += f", moving to {shard['target']}"
    facts.add_row("owned by", text(where))
    facts.add_row("epoch", str(shard["epoch"]))
    facts.add_row("tasks", text(", ".join(shard["task_ids"]) or "none", limit=2000))
    load = ", ".join(f"{value:g} {kind}" for kind, value in shard["load"].items() if value)
    facts.add_row("load", text(load or "none"))
    if _remark(shard):
        facts.add_row("remark", text(_remark(shard), "red"))
    facts.add_row("next", text(shard["outlook"], limit=500))
    history = new_table("history")
    for name in ("when", "who", "decision"):
        history.add_column(name, no_wrap=True)
    history.add_column("why", overflow="fold")
    for moved in shard["history"]:
        history.add_row(
            when(moved["at_ms"]),
            text(moved["actor"], limit=30),
            text(moved["decision"]),
            text(moved["reason"]),
        )
    if not shard["history"]:
        history.caption = "no decisions about it in the journal"
    return Group(facts, history)


def tasks_table(tasks: Rows, title: str = "tasks") -> Table:
    """One line per task."""
    table = new_table(title)
    for name in ("task", "container", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("shard", "generation", "restarts", "lag", "cpu", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("error", overflow="fold")
    for task in tasks:
        metrics = task["metrics"]
        table.add_row(
            text(task["task_id"], limit=60),
            text(task["container"] or "–", limit=30),
            state_text(task["state"]),
            str(task["shard"]),
            str(task["generation"]),
            str(task["restarts"]),
            lag(metrics),
            f"{metrics['cpu']:.0%}" if "cpu" in metrics else "–",
            f"{metrics['memory_mb']:,.0f} MB" if "memory_mb" in metrics else "–",
            text(summarize_error(task["error"]), "red", 300),
        )
    if not tasks:
        table.caption = "no tasks"
    return table


def top_tables(found: Mapping[str, Any]) -> RenderableType:
    """Resource usage: containers with the sum of their tasks, the busiest tasks, the last decisions."""
    tasks = found["tasks"]
    busiest = sorted(tasks, key=lambda task: (-task["metrics"].get("cpu", 0.0), task["task_id"]))
    rest = len(tasks) - BUSIEST_MAX
    title = "busiest tasks" + (f" ({rest} more)" if rest > 0 else "")
    decisions = new_table("last decisions")
    for name in ("when", "who", "what about", "decision", "why"):
        decisions.add_column(name, no_wrap=True, overflow="ellipsis")
    for entry in found["journal"][-DECISIONS_MAX:]:
        decisions.add_row(
            when(entry["at_ms"]),
            text(entry["actor"], limit=20),
            text(entry["subject"], limit=30),
            text(entry["decision"], limit=40),
            text(entry["reason"], limit=60),
        )
    return Group(
        text(_summary(found), "bold"),
        _use_table(found["containers"], tasks, found["now_ms"]),
        tasks_table(busiest[:BUSIEST_MAX], title),
        decisions,
    )


def _summary(found: Mapping[str, Any]) -> str:
    jobs, tasks, containers = found["jobs"], found["tasks"], found["containers"]
    running = sum(task["state"] == "running" for task in tasks)
    live = sum(row["state"] == "live" and row["ready"] for row in containers)
    settled = sum(job["state"] == "running" for job in jobs)
    return (
        f"{settled} of {len(jobs)} jobs running, {running} of {len(tasks)} tasks running, "
        f"{live} of {len(containers)} containers live"
    )


def _use_table(containers: Rows, tasks: Rows, now_ms: int) -> Table:
    table = new_table("containers")
    for name in ("container", "state", "takes"):
        table.add_column(name, no_wrap=True)
    for name in ("shards", "tasks", "cpu", "memory", "last heartbeat"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in containers:
        mine = [task["metrics"] for task in tasks if task["container"] == row["name"]]
        cpu, memory = (sum(metrics.get(kind, 0.0) for metrics in mine) for kind in ("cpu", "memory_mb"))
        table.add_row(
            text(row["name"], limit=40),
            state_text(container_state(row)),
            takes(row),
            str(row["shards"]),
            str(row["tasks"]),
            _used(cpu, row["capacity"].get("cpu", 0.0), "{:.2f}"),
            _used(memory, row["capacity"].get("memory_mb", 0.0), "{:,.0f} MB"),
            f"{max(0, now_ms - row['seen_ms']) / 1000:.1f} s ago",
        )
    if not containers:
        table.caption = "no containers"
    return table


def _used(value: float, size: float, form: str) -> str:
    return form.format(value) + (f" of {size:g}" if size else "")


def capacity(folder: Folder = FOLDER, output: Output = Form.TABLE) -> None:
    """The cluster's resources: total, reserved, used and free; and the jobs stopped for lack of them."""
    with connect(folder, role="reader") as client:
        found = client.capacity()
    show(found, output, lambda: capacity_tables(found))


_UNITS = {"cpu": "", "memory_mb": " MB", "disk_mb": " MB", "network_mbps": " Mbit/s"}


def capacity_tables(found: Mapping[str, Any]) -> RenderableType:
    """The cluster's resources, and the jobs stopped for lack of them."""
    table = new_table("capacity")
    table.add_column("resource", no_wrap=True)
    for name in ("total", "reserved", "used", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["kinds"]:
        cells = (_amount(row[name], row["kind"]) for name in ("total", "reserved", "used", "remaining"))
        table.add_row(text(row["kind"]), *cells)
    parts: list[RenderableType] = [table, text(_capacity_summary(found), "dim")]
    for what, names in (("lent to others", found["lent"]), ("borrowed", found["borrowed"])):
        if names:
            parts.append(text(f"{what}: {', '.join(names)}", "dim"))
    if found["stopped"]:
        parts.append(_stopped_table(found["stopped"]))
    return Group(*parts)


def _capacity_summary(found: Mapping[str, Any]) -> str:
    line = f"{found['jobs']} jobs on {found['containers']} containers"
    if found["is_limited"]:
        return f"{line}; a tenth of the total stays free for failures"
    if not found["containers"]:
        return f"{line}: the capacity is unknown"
    some = ", ".join(found["boundless"][:5]) + (" …" if len(found["boundless"]) > 5 else "")
    return f"{line}; not limited: {some} declared no capacity"


def _stopped_table(stopped: Rows) -> Table:
    table = new_table("stopped for lack of capacity")
    table.add_column("job", no_wrap=True)
    table.add_column("priority", justify="right", no_wrap=True)
    table.add_column("would need", overflow="fold")
    table.add_column("why", overflow="fold")
    for row in stopped:
        needs = ", ".join(
            _amount(value, kind) + (" cpu" if kind == "cpu" else "")
            for kind, value in row["reserved"].items()
            if value
        )
        table.add_row(text(row["job"], limit=40), str(row["priority"]), text(needs), text(row["reason"]))
    return table


def _amount(value: float | None, kind: str) -> str:
    return "not limited" if value is None else f"{value:,.10g}{_UNITS.get(kind, '')}"
