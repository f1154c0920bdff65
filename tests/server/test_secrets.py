"""I21: no token in any log, answer, page or error. A canary goes everywhere, and is then looked for everywhere."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from penstock.cli.main import main
from penstock.client import Client
from penstock.core.errors import PenstockError
from tests.builders import a_body
from tests.server.served import Served, served
from tests.server.test_access import ROUTES, filled
from tests.server.world import JOB
from tests.waiting import LIMIT_S


@pytest.fixture
def heard() -> Iterator[io.StringIO]:
    """Everything that is logged, by us and by the libraries, at every level."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    root, names = (
        logging.getLogger(),
        ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore", "sqlalchemy"),
    )
    loggers = [root, *(logging.getLogger(name) for name in names)]
    levels = [logger.level for logger in loggers]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(text))
    root.addHandler(handler)
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
    try:
        yield text
    finally:
        root.removeHandler(handler)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        structlog.reset_defaults()


def everything_answered(world: Served, token: str) -> Iterator[str]:
    """Every route with this token, as it is and misplaced, and whatever the client raises."""
    import httpx

    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=f"{world.server.url}/api/v1", timeout=LIMIT_S) as http:
        for method, path, _, body in ROUTES:
            for extra in ({}, {"params": {"nonsense": "1"}}, {"headers": {"If-Match": "nonsense"}}):
                given = {**headers, **extra.pop("headers", {})}  # type: ignore[arg-type]
                answer = http.request(method, filled(path), json=body, headers=given, **extra)  # type: ignore[arg-type]
                yield str(answer.headers) + answer.text
        for given in (
            {"Authorization": f"Basic {token}"},
            {"Authorization": token},
            {"Authorization": f"Bearer {token}x"},
        ):
            answer = http.get("/jobs", headers=given)
            assert answer.status_code == 401
            yield str(answer.headers) + answer.text


@pytest.mark.parametrize("role", ["admin", "reader"])
def test_a_token_is_nowhere_but_with_its_holder(
    tmp_path: Path,
    heard: io.StringIO,
    role: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    with served(tmp_path / "plane") as world:
        with world.client() as client:
            client.apply_job(JOB, a_body(JOB), why="a test", key="k")
            canary = client.issue_token("canary", role, days=1, why="to be looked for", key="c")["token"]
        found = list(everything_answered(world, canary))
        errors: list[str] = []
        with Client(world.server.url, canary) as holder:
            for call in (holder.tokens, lambda: holder.job("nobody"), lambda: holder.job("..")):
                try:
                    found.append(str(call()))
                except PenstockError as error:
                    errors += [str(error), repr(error), str(error.__cause__)]
            found += [str(event) for event in holder.events(since=0, wait_s=0)]
        monkeypatch.setenv("PENSTOCK_URL", world.server.url)
        monkeypatch.setenv("PENSTOCK_TOKEN", canary)
        for command in (
            ["status"],
            ["job", "get", JOB],
            ["token", "ls"],
            ["audit"],
            ["journal"],
            ["job", "get", "nobody"],
        ):
            with (
                pytest.raises(SystemExit)
                if role == "reader" and command[0] in ("token", "audit")
                else _either()
            ):
                main([*command, "-o", "json"])
        said = capsys.readouterr()
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert found and heard.getvalue()
    for name, text in {
        "answers": "".join(found),
        "errors": "".join(errors),
        "logs": heard.getvalue(),
        "the command": said.out + said.err,
        "files": files.decode("latin-1"),
    }.items():
        assert canary not in text, name


class _either:
    """Whether a command ends well or not is not the question here."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is SystemExit
