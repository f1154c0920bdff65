"""The routes of alarms as settings name them. Addresses are secrets, whatever goes wrong."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from penstock.alarms.decide import Alarm, Notice
from penstock.alarms.delivery import CHANNELS_MAX, routes_of
from penstock.core.errors import ConfigError, EnvironmentProblem, PenstockError
from penstock.settings import Settings
from tests.server.hooks import SECRET, Hook, a_hook

ALARM = Alarm(
    job="demo.a", source="test", key="lag", severity="critical", text="it lags", evidence={"lag_s": 9},
    what_to_do="penstock doctor demo.a", first_ms=1, last_ms=1,
)  # fmt: skip
# Apprise imports a module of Python that is to go; it has another for when it is gone.
with_apprise = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
FIRED = Notice(kind="fired", alarm=ALARM, at_ms=1)


@pytest.fixture
def hook() -> Iterator[Hook]:
    with a_hook() as hook:
        yield hook


@pytest.fixture
def heard() -> Iterator[io.StringIO]:
    """Everything that is logged, at every level."""
    text, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(text), root.level
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(text))
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.removeHandler(handler)
    root.setLevel(level)
    structlog.reset_defaults()


def test_without_settings_there_is_the_log():
    assert [route.name for route in routes_of(webhook="", channels="")] == ["log"]


def test_a_webhook_is_named_by_value_or_by_file(tmp_path: Path, hook: Hook, heard: io.StringIO):
    (tmp_path / "hook").write_text(hook.url + "\n")
    for value in (hook.url, f"file:{tmp_path / 'hook'}"):
        routes_of(webhook=value, channels="")[1].send(FIRED, 7)
    assert [body["key"] for body in hook.taken] == ["7", "7"]
    assert hook.taken[0]["alarm"]["text"] == "it lags" and SECRET not in heard.getvalue()


@pytest.mark.parametrize("status", [301, 400, 500])
def test_what_is_not_a_yes_is_an_error_without_the_address(hook: Hook, heard: io.StringIO, status: int):
    hook.always = status
    with pytest.raises(PenstockError) as caught:
        routes_of(webhook=hook.url, channels="")[1].send(FIRED, 7)
    assert str(status) in str(caught.value) and SECRET not in str(caught.value) + heard.getvalue()


@pytest.mark.parametrize(
    ("webhook", "channels"),
    [
        (f"http://example.org/{SECRET}", ""),
        (f"{SECRET}://x", ""),
        ("https://", ""),
        (f"https://[{SECRET}", ""),
        (f"https://host:port/{SECRET}", ""),
        (SECRET, ""),
        ("file:/nowhere/to/be/found", ""),
        ("", SECRET),
        ("", f"1://{SECRET}"),
        ("", "file:/nowhere/to/be/found"),
        ("", " ".join(["json://localhost"] * (CHANNELS_MAX + 1))),
    ],
)
def test_a_bad_address_is_refused_in_three_parts_and_not_repeated(webhook: str, channels: str):
    with pytest.raises(ConfigError) as caught:
        routes_of(webhook=webhook, channels=channels)
    error = caught.value
    assert error.what and error.why and error.fix and f"/{SECRET}" not in str(error)
    assert SECRET not in str(error).replace(f"the webhook at {SECRET}", "")


def test_an_empty_file_is_refused(tmp_path: Path):
    (tmp_path / "hook").write_text("\n")
    with pytest.raises(ConfigError, match="cannot read"):
        routes_of(webhook=f"file:{tmp_path / 'hook'}", channels="")


def test_settings_do_not_show_addresses(tmp_path: Path):
    settings = Settings(
        folder=tmp_path, alarm_webhook=f"https://x/{SECRET}", alarm_channels=f"json://{SECRET}"
    )
    assert SECRET not in repr(settings)


def test_without_the_library_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(EnvironmentProblem) as caught:
        routes_of(webhook="", channels=f"slack://{SECRET}")
    assert "penstock[alarms]" in caught.value.fix and SECRET not in str(caught.value)


@with_apprise
def test_channels_take_notices_each_for_itself(tmp_path: Path, hook: Hook, heard: io.StringIO):
    pytest.importorskip("apprise", reason="the extra `alarms` is not installed")
    address = hook.url.replace("http://", "json://")
    (tmp_path / "channels").write_text(f"# who is on call\n{address}\n{address}?format=markdown\n")
    routes = routes_of(webhook="", channels=f"file:{tmp_path / 'channels'}")
    assert [route.name for route in routes] == ["log", "json", "json2"]
    routes[1].send(FIRED, 1)
    assert hook.taken[0]["title"] == "[critical] demo.a: lag fired"
    assert "it lags" in hook.taken[0]["message"] and hook.taken[0]["type"] == "failure"
    hook.always = 500
    with pytest.raises(PenstockError) as caught:
        routes[2].send(FIRED, 2)
    assert "json2" in caught.value.what and SECRET not in str(caught.value) + heard.getvalue()


@with_apprise
@pytest.mark.parametrize("address", [f"nonsense://{SECRET}", f"slack://{SECRET}", "mailto://"])
def test_a_channel_that_apprise_does_not_know_is_refused(address: str, heard: io.StringIO):
    pytest.importorskip("apprise", reason="the extra `alarms` is not installed")
    with pytest.raises(ConfigError) as caught:
        routes_of(webhook="", channels=address)
    assert caught.value.fix and SECRET not in str(caught.value) + heard.getvalue()
