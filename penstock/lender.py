"""The lending loop, which moves containers between clusters, and the file that lists the clusters."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.client.client import Client
from penstock.container.host import StopSignal
from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, EnvironmentProblem, PenstockError, StoreUnavailable
from penstock.jobs.config import NAME_PATTERN
from penstock.scaling.lending import (
    ClusterStatus,
    LendingPlan,
    Transfer,
    cluster_room,
    decide_reclaim,
    has_spare,
    plan_lending,
    read_cluster,
)

_FIELDS = {"name", "url", "token_env", "token_file", "ca"}
EXAMPLE = '[[cluster]] name = "east", url = "https://east:7337", token_env = "EAST_TOKEN"'


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """One cluster in the file."""

    name: str
    url: str
    token: str = field(repr=False)
    ca: str | None = None


def read_clusters(path: Path, variables: Mapping[str, str]) -> tuple[ClusterFile, ...]:
    """Read the clusters of a file; their tokens come from variables or other files."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot read {path}", why=error.strerror or str(error), fix="name the file with --clusters"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML", why=str(error), fix=f"e.g. {EXAMPLE}") from error
    rows = found.get("cluster")
    if set(found) - {"cluster"} or not isinstance(rows, list) or len(rows) < 2:
        raise ConfigError(
            f"{path} is not a list of clusters",
            why="it needs at least two tables [[cluster]], and nothing else",
            fix=f"e.g. {EXAMPLE}",
        )
    clusters = tuple(_cluster(path, row, variables) for row in rows)
    for what, values in (("name", [c.name for c in clusters]), ("url", [c.url for c in clusters])):
        if len({*values}) < len(values):
            raise ConfigError(
                f"{path} names a cluster twice",
                why=f"each {what} belongs to one cluster: {', '.join(values)}",
                fix="remove one",
            )
    return clusters


def _cluster(path: Path, row: Any, variables: Mapping[str, str]) -> ClusterFile:
    unknown = sorted({*row} - _FIELDS) if isinstance(row, dict) else ["it"]
    if unknown or not all(isinstance(value, str) for value in row.values()):
        raise ConfigError(
            f"{path} has an invalid cluster",
            why=f"unknown fields: {', '.join(unknown)}" if unknown else "every field must be a string",
            fix=f"the fields are {', '.join(sorted(_FIELDS))}, e.g. {EXAMPLE}",
        )
    name, url = row.get("name", ""), row.get("url", "").rstrip("/")
    if re.fullmatch(NAME_PATTERN, name) is None or re.fullmatch(r"https?://[!-~]+", url) is None:
        raise ConfigError(
            f"{path} has a cluster without a valid name and url",
            why=f"name is {name[:100]!r}, url is {url[:100]!r}",
            fix=f"e.g. {EXAMPLE}",
        )
    return ClusterFile(name=name, url=url, token=_token(path, name, row, variables), ca=row.get("ca"))


def _token(path: Path, name: str, row: Mapping[str, str], variables: Mapping[str, str]) -> str:
    variable, file = row.get("token_env"), row.get("token_file")
    if (variable is None) == (file is None):
        raise ConfigError(
            f"{path} does not say where the token of cluster {name} is",
            why="it needs exactly one of token_env and token_file",
            fix=f"e.g. {EXAMPLE}",
        )
    try:
        token = variables.get(variable, "") if variable else (path.parent / str(file)).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentProblem(
            f"cannot read the token of cluster {name}", why=str(error), fix="name a text file with one line"
        ) from error
    if not token or not token.isascii() or not token.isprintable():
        raise EnvironmentProblem(
            f"there is no token for cluster {name}",
            why=f"{variable or file} is not set, empty or not plain text",
            fix="issue one in that cluster: `penstock token new lender --role admin --why …`",
        )
    return token


def _unreadable(cluster: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(
        f"the response of cluster {cluster} cannot be read",
        why=f"{type(error).__name__}: {error}",
        fix="check its URL, and whether it runs a compatible version of penstock",
    )


class Lender:
    """The rounds of the lending loop: observe all clusters, decide, act. Requires: one round at a time."""

    def __init__(
        self,
        clusters: Sequence[ClusterFile],
        clients: Mapping[str, Client],
        *,
        advice: bool,
        report: Callable[[str], None],
        now_ms: Callable[[], Millis],
    ) -> None:
        self._clusters, self._clients = tuple(clusters), dict(clients)
        self._urls = {cluster.name: cluster.url for cluster in clusters}
        self._advice, self._report, self._now_ms = advice, report, now_ms
        self._seen: dict[str, ClusterStatus] = {}
        self._reported: dict[str, str] = {}  # by key: the last text, reported once, not every round
        self._spare_since: dict[str, Millis] = {}

    def round(self) -> tuple[str, ...]:
        """One round; returns the names of the clusters that did not answer."""
        seen, silent = [], []
        for cluster in self._clusters:
            try:
                seen.append(self._read(cluster))
                self._reported.pop(cluster.name, None)
            except PenstockError as error:
                silent.append(cluster.name)
                self._report_once(cluster.name, f"{cluster.name} is left out: {error.what} ({error.why})")
        self._seen = {cluster.name: cluster for cluster in seen}
        plan = plan_lending(seen)
        for name, reason in plan.left_out.items():
            self._report_once(f"out {name}", f"{name} is left out: {reason}")
        self._execute(plan)
        self._report_reclaims(seen)
        return tuple(silent)

    def run(self, every_s: float, stop: StopSignal) -> None:
        """Run rounds until `stop` is set."""
        while True:
            self.round()
            if stop.wait(every_s):
                return

    def _read(self, cluster: ClusterFile) -> ClusterStatus:
        client = self._clients[cluster.name]
        try:
            loans, containers, capacity = client.loans(), client.containers(), client.capacity()
            return read_cluster(
                cluster.name, cluster.url, containers=containers, loans=loans, capacity=capacity
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(cluster.name, error) from error

    def _execute(self, plan: LendingPlan) -> None:
        for keep in plan.cancels:
            text = f"{keep.container} stays with {keep.cluster}: {keep.reason}"
            call = self._clients[keep.cluster].keep_container
            self._attempt(text, partial(call, keep.container, version=keep.version, why=keep.reason))
        for gone in plan.drops:
            text = f"{gone.cluster} no longer expects {gone.container}: {gone.reason}"
            forget = self._clients[gone.cluster].forget_container
            self._attempt(text, partial(forget, gone.container, version=gone.version, why=gone.reason))
        for transfer in plan.transfers:
            verb = "goes back" if transfer.is_return else "is lent"
            way = f"from {transfer.source} to {transfer.target}"
            text = f"{transfer.container} {verb} {way}: {transfer.reason}"
            self._attempt(text, partial(self._transfer, transfer))

    def _transfer(self, transfer: Transfer) -> None:
        """Write the loan records of both clusters, the target's first; the container's host does the rest."""
        source, target = self._clients[transfer.source], self._clients[transfer.target]
        owner = "" if transfer.is_return else transfer.source
        container, why = transfer.container, transfer.reason
        known = self._seen[transfer.target].loans.get(container)
        version = 0 if known is None else known.version
        expected = target.expect(container, lender=transfer.source, owner=owner, version=version, why=why)
        try:
            token, expected_version = str(expected["token"]), int(expected["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(transfer.target, error) from error
        try:
            source.lend(
                container,
                home=transfer.source,
                to=transfer.target,
                url=self._urls[transfer.target],
                token=token,
                why=why,
            )
        except PenstockError:
            target.forget_container(container, version=expected_version, why="it was not lent")
            raise

    def _attempt(self, text: str, act: Callable[[], object]) -> None:
        if self._advice:
            self._report_once(text, f"advice: {text}")
            return
        try:
            act()
        except (
            PenstockError
        ) as error:  # a concurrent change, or a cluster fell silent: the next round decides
            self._report(f"failed: {text}; {error.what} ({error.why})")
        else:
            self._report(text)

    def _report_reclaims(self, seen: Sequence[ClusterStatus]) -> None:
        now_ms = self._now_ms()
        for cluster in seen:
            room = cluster_room(cluster)
            if not has_spare(room):
                self._spare_since.pop(cluster.name, None)
                continue
            since_ms = self._spare_since.setdefault(cluster.name, now_ms)
            found = decide_reclaim(room, spare_since_ms=since_ms, now_ms=now_ms)
            if found is not None:
                names = ", ".join(found.containers)
                text = f"{names} of {cluster.name} can be removed: {found.reason}"
                self._report_once(f"reclaim {cluster.name} {names}", text)

    def _report_once(self, key: str, text: str) -> None:
        if self._reported.get(key) != text:
            self._reported[key] = text
            self._report(text)
