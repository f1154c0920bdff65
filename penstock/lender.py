"""The loop that lets clusters lend each other containers, and the file that names the clusters."""

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
    ClusterSeen,
    LendingPlan,
    Transfer,
    cluster_room,
    decide_reclaim,
    decide_round,
    has_spare,
    read_cluster,
)

_FIELDS = {"name", "url", "token_env", "token_file", "ca"}
EXAMPLE = '[[cluster]] name = "east", url = "https://east:7337", token_env = "EAST_TOKEN"'


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """One cluster, as the file names it."""

    name: str
    url: str
    token: str = field(repr=False)
    ca: str | None = None


def read_clusters(path: Path, variables: Mapping[str, str]) -> tuple[ClusterFile, ...]:
    """The clusters of a file; tokens come from variables or files of their own."""
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
            f"{path} does not name clusters",
            why="it needs two tables [[cluster]] or more, and nothing else",
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
            f"{path} has a cluster that cannot be read",
            why=f"not known: {', '.join(unknown)}" if unknown else "every field is a text",
            fix=f"its fields are {', '.join(sorted(_FIELDS))}, e.g. {EXAMPLE}",
        )
    name, url = row.get("name", ""), row.get("url", "").rstrip("/")
    if re.fullmatch(NAME_PATTERN, name) is None or re.fullmatch(r"https?://[!-~]+", url) is None:
        raise ConfigError(
            f"{path} has a cluster without a good name and url",
            why=f"name is {name[:100]!r}, url is {url[:100]!r}",
            fix=f"e.g. {EXAMPLE}",
        )
    return ClusterFile(name=name, url=url, token=_token(path, name, row, variables), ca=row.get("ca"))


def _token(path: Path, name: str, row: Mapping[str, str], variables: Mapping[str, str]) -> str:
    variable, file = row.get("token_env"), row.get("token_file")
    if (variable is None) == (file is None):
        raise ConfigError(
            f"{path}: where the token of cluster {name} is, is not clear",
            why="one of token_env and token_file says it",
            fix=f"e.g. {EXAMPLE}",
        )
    try:
        token = variables.get(variable, "") if variable else (path.parent / str(file)).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentProblem(
            f"cannot read the token of cluster {name}", why=str(error), fix="name a file of one line"
        ) from error
    if not token or not token.isascii() or not token.isprintable():
        raise EnvironmentProblem(
            f"there is no token of cluster {name}",
            why=f"{variable or file} is not set or empty",
            fix="`penstock token new lender --role admin --why …` there issues one",
        )
    return token


def _unreadable(cluster: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(
        f"the answer of cluster {cluster} cannot be read",
        why=f"{type(error).__name__}: {error}",
        fix="look at its URL, and whether it runs a version that is known here",
    )


class Lender:
    """The loop's rounds: observes every cluster, decides, does. Requires: rounds come one after another."""

    def __init__(
        self,
        clusters: Sequence[ClusterFile],
        clients: Mapping[str, Client],
        *,
        advice: bool,
        say: Callable[[str], None],
        now_ms: Callable[[], Millis],
    ) -> None:
        self._clusters, self._clients = tuple(clusters), dict(clients)
        self._urls = {cluster.name: cluster.url for cluster in clusters}
        self._advice, self._say, self._now_ms = advice, say, now_ms
        self._seen: dict[str, ClusterSeen] = {}
        self._said: dict[str, str] = {}  # what is told once, not every round
        self._spare_since: dict[str, Millis] = {}

    def round(self) -> tuple[str, ...]:
        """One round; returns the clusters that did not answer."""
        seen, silent = [], []
        for cluster in self._clusters:
            try:
                seen.append(self._look(cluster))
                self._said.pop(cluster.name, None)
            except PenstockError as error:
                silent.append(cluster.name)
                self._once(cluster.name, f"{cluster.name} is left out: {error.what} ({error.why})")
        self._seen = {cluster.name: cluster for cluster in seen}
        plan = decide_round(seen)
        for who, reason in plan.left_out.items():
            self._once(f"out {who}", f"{who} is left out: {reason}")
        self._do(plan)
        self._tell_reclaims(seen)
        return tuple(silent)

    def run(self, every_s: float, stop: StopSignal) -> None:
        """Round after round, until told to stop."""
        while True:
            self.round()
            if stop.wait(every_s):
                return

    def _look(self, cluster: ClusterFile) -> ClusterSeen:
        client = self._clients[cluster.name]
        try:
            loans, containers, capacity = client.loans(), client.containers(), client.capacity()
            return read_cluster(
                cluster.name, cluster.url, containers=containers, loans=loans, capacity=capacity
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(cluster.name, error) from error

    def _do(self, plan: LendingPlan) -> None:
        for keep in plan.keeps:
            said = f"{keep.container} stays with {keep.cluster}: {keep.reason}"
            act = self._clients[keep.cluster].keep_container
            self._attempt(said, partial(act, keep.container, version=keep.version, why=keep.reason))
        for gone in plan.forgets:
            said = f"{gone.cluster} does not count on {gone.container} any more: {gone.reason}"
            forget = self._clients[gone.cluster].forget_container
            self._attempt(said, partial(forget, gone.container, version=gone.version, why=gone.reason))
        for transfer in plan.transfers:
            verb = "goes back" if transfer.is_return else "is lent"
            way = f"from {transfer.source} to {transfer.target}"
            said = f"{transfer.container} {verb} {way}: {transfer.reason}"
            self._attempt(said, partial(self._transfer, transfer))

    def _transfer(self, transfer: Transfer) -> None:
        """Both records are written, the target's first; the container's host does the rest."""
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

    def _attempt(self, said: str, act: Callable[[], object]) -> None:
        if self._advice:
            self._once(said, f"advice: {said}")
            return
        try:
            act()
        except (
            PenstockError
        ) as error:  # somebody else was first, or a cluster fell silent: the next round sees
            self._say(f"not done: {said}; {error.what} ({error.why})")
        else:
            self._say(said)

    def _tell_reclaims(self, seen: Sequence[ClusterSeen]) -> None:
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
                text = f"{names} of {cluster.name} may be taken away: {found.reason}"
                self._once(f"reclaim {cluster.name} {names}", text)

    def _once(self, key: str, text: str) -> None:
        if self._said.get(key) != text:
            self._said[key] = text
            self._say(text)
