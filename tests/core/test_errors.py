"""Errors say three things and survive a process border."""

from __future__ import annotations

import inspect
import pickle

import pytest

from penstock.core import errors
from penstock.core.errors import ConfigError, PenstockError, StoreUnavailable, UserError, VersionConflict

KINDS = sorted(
    (kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PenstockError)),
    key=lambda kind: kind.__name__,
)


def an_error(kind: type[PenstockError]) -> PenstockError:
    if kind is VersionConflict:
        return VersionConflict("job 'a'", expected=3, actual=5)
    if kind is errors.NeedsConsent:
        return errors.NeedsConsent("demo", stops=["demo.a"], replaces="a/b.py", origin="c/d.py")
    return kind("it broke", why="it was old", fix="buy a new one")


def test_an_error_tells_what_why_and_what_to_do_in_this_order():
    assert str(PenstockError("it broke", why="it was old", fix="buy a new one")) == (
        "it broke\nWhy: it was old\nWhat to do: buy a new one"
    )


def test_a_part_that_is_not_known_leaves_no_empty_line():
    assert str(PenstockError("it broke")) == "it broke"
    assert str(PenstockError("it broke", fix="buy a new one")) == "it broke\nWhat to do: buy a new one"


def test_a_lost_race_names_both_versions():
    error = VersionConflict("job 'a'", expected=3, actual=5)
    assert (error.key, error.expected, error.actual) == ("job 'a'", 3, 5)
    assert "version 3" in error.why and "version is 5" in error.why and error.fix


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_comes_back_whole_from_pickle(kind: type[PenstockError], protocol: int):
    error = an_error(kind)
    again = pickle.loads(pickle.dumps(error, protocol=protocol))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_drawing_on_top_of_the_file_shows_every_error(kind: type[PenstockError]):
    assert errors.__doc__ is not None
    words = errors.__doc__.replace("│", " ").replace("├──", " ").replace("└──", " ").split()
    assert kind.__name__ in words


def test_the_drawing_shows_nothing_that_does_not_exist():
    assert errors.__doc__ is not None
    drawn = {
        line.split()[line.split().index(sign) + 1]
        for line in errors.__doc__.splitlines()
        for sign in ("├──", "└──")
        if sign in line.split()
    }
    assert drawn == {kind.__name__ for kind in KINDS} - {"PenstockError"}


def test_what_a_user_can_fix_is_told_apart_from_operating_trouble():
    assert issubclass(ConfigError, UserError)
    assert not issubclass(StoreUnavailable, UserError)
