"""Two clusters on loopback, real but for the containers' processes: hosts register and beat from the test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.client import Client
from penstock.container.container import ContainerSettings, folder_id, join_settings, read_capacity
from penstock.container.host import LendableHost, write_token_file
from penstock.core.system_clock import SystemClock
from penstock.fleet.messages import Heartbeat, ShardEntry
from penstock.lender import ClusterFile, Lender
from tests.server.served import Served, served
from tests.waiting import until

SIZE = "10,8192,0,0"


@dataclass
class Body:
    """A container's processes, as far as its cluster can tell."""

    settings: ContainerSettings
    client: Client
    sequence: int = 0
    is_up: bool = False
    held: dict[int, ShardEntry] = field(default_factory=dict)

    def start(self) -> None:
        self.settings.folder.mkdir(parents=True, exist_ok=True)
        self.incarnation = f"i{id(self)}"
        self.client.register(self.settings.name, self.incarnation, folder_id(self.settings.folder))
        self.is_up = True
        self.beat()

    def beat(self) -> None:
        """A beat that obeys at once: what is dropped is acknowledged with the next."""
        self.sequence += 1
        reply = self.client.beat(
            Heartbeat(
                container=self.settings.name,
                incarnation=self.incarnation,
                sequence=self.sequence,
                acked=tuple(self.held.values()),
                engine_ready=True,
                capacity=read_capacity(self.settings.capacity),
            )
        )
        self.held = {entry.shard: entry for entry in reply.shards}

    def stop(self) -> None:
        self.is_up = False


@dataclass
class Machine:
    """The host of one container, driven by hand."""

    host: LendableHost
    bodies: list[Body] = field(default_factory=list)

    @property
    def body(self) -> Body:
        (up,) = [body for body in self.bodies if body.is_up]
        return up

    @property
    def url(self) -> str:
        return self.body.settings.url


@dataclass
class Clock:
    """Boot time that a test moves."""

    real: SystemClock = field(default_factory=SystemClock)
    more_ms: int = 0

    def now_ms(self) -> int:
        return self.real.now_ms() + self.more_ms

    def boot_ms(self) -> int:
        return self.real.boot_ms() + self.more_ms


@dataclass
class Clusters:
    """`a` and `b`, their containers, and the lending loop between them."""

    folder: Path
    planes: dict[str, Served]
    said: list[str] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def join(self, name: str, cluster: str, *, size: str = SIZE, engine: str = "process") -> Machine:
        """A container joins a cluster, as `penstock container --join` does it."""
        plane = self.planes[cluster]
        folder = self.folder / name
        settings = join_settings(
            name,
            url=plane.server.url,
            token_file=write_token_file(folder, plane.token_of(name)),
            folder=folder,
            engine="process",
            cores=2,
            capacity=size,
            region="",
        )
        machine = Machine(host=None)  # type: ignore[arg-type]

        def make(chosen: ContainerSettings, client: Client) -> Body:
            machine.bodies.append(Body(chosen, client))
            return machine.bodies[-1]

        machine.host = LendableHost(replace(settings, engine=engine), make, self.clock)
        machine.host._enter(machine.host.home)
        self.open.callback(machine.host._leave)
        self.machines[name] = machine
        return machine

    def step(self) -> None:
        """Everybody beats, asks for orders, and the Shard Managers have a round."""
        for machine in self.machines.values():
            machine.body.beat()
            machine.host.poll_order()
        for plane in self.planes.values():
            plane.plane._tick_shards()

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Steps until it holds. A drain takes its time, on the machine's clock, however many steps that is."""
        until(holds, lambda: f"{what}; {self.said}; {self.loans()}", step=self.step)

    def lender(self, **changes: Any) -> Lender:
        """A loop that has just begun."""
        files = [
            ClusterFile(name=name, url=plane.server.url, token=plane.tokens["admin"])
            for name, plane in self.planes.items()
        ]
        clients = {
            file.name: self.open.enter_context(Client(file.url, file.token, retries=0)) for file in files
        }
        given: dict[str, Any] = {
            "advice": False,
            "report": self.said.append,
            "now_ms": self.clock.now_ms,
            **changes,
        }
        return Lender(files, clients, **given)

    def loans(self) -> dict[str, dict[str, str]]:
        """By cluster and container: what its record says."""
        return {
            name: {loan.container: str(loan.state) for loan in plane.plane.lending.loans()}
            for name, plane in self.planes.items()
        }

    def line(self, cluster: str, container: str) -> dict[str, Any]:
        with self.planes[cluster].client("reader") as client:
            return next(row for row in client.containers() if row["name"] == container)

    def told(self, cluster: str, container: str) -> list[str]:
        entries = self.planes[cluster].plane.journal.entries(container, limit=100)
        return [entry.decision for entry in entries if entry.kind == "lending"]

    def is_at(self, name: str, cluster: str) -> bool:
        """Whether it works there, and its cluster knows."""
        machine, plane = self.machines[name], self.planes[cluster]
        return machine.url == plane.server.url and self.loans()[cluster].get(name) == "here"

    def age(self, cluster: str, container: str, seconds: float) -> None:
        """Let a record be so much older."""
        store = self.planes[cluster].plane.lending._store
        loan = store.loan(container)
        assert loan is not None
        from penstock.fleet.loan_service import LoanChange

        older = replace(loan, at_ms=loan.at_ms - int(seconds * 1000))
        assert store.write(loan, LoanChange(loan=older), None)


@contextlib.contextmanager
def two_clusters(folder: Path, databases: tuple[str, str] = ("", "")) -> Iterator[Clusters]:
    with contextlib.ExitStack() as stack:
        planes = {
            name: stack.enter_context(served(folder / name, database=database))
            for name, database in zip("ab", databases, strict=True)
        }
        found = Clusters(folder=folder, planes=planes)
        stack.enter_context(found.open)
        yield found
