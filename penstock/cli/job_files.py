"""Job files: YAML or JSON that says one thing only, of a bounded size. Pure: text in, a map out.

YAML is read as plain data: no tags, no anchors and aliases (a few lines of them make gigabytes), no key
twice, and a date stays the text that it is. Errors name line and column.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from penstock.core.errors import ConfigError
from penstock.jobs.config import NAME_PATTERN
from penstock.jobs.text_rules import shown

BYTES_MAX = 1024 * 1024
DEPTH_MAX = 32
VALUES_MAX = 50_000
INT_MAX = 2**63 - 1

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_NO_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: Mapping[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_FIX = "correct the file; nothing was sent"


def read_job_text(text: str, *, name: str) -> dict[str, Any]:
    """The map that a job file holds; `name` is what it is called in errors."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _refusal(name, f"it is not text: {error}") from error
    if size > BYTES_MAX:
        raise _refusal(name, f"it is larger than {BYTES_MAX} bytes")
    value = _read_json(text, name) if name.endswith(".json") else _read_yaml(text, name)
    if not isinstance(value, dict):
        raise _refusal(name, f"it holds {_kind(value)}, not a map of fields")
    return value


def split_name(config: Mapping[str, Any], given: str, *, name: str) -> tuple[str, dict[str, Any]]:
    """The job's name, from the file or the command line, and its provisioner fields."""
    said = config.get("name", given)
    if not isinstance(said, str) or not said:
        raise _refusal(name, "it has no `name:` that is text")
    if not re.fullmatch(NAME_PATTERN, said):
        raise _refusal(name, f"no job may be called {shown(said)}: letters, digits, `_`, `.` and `-` only")
    if given and said != given:
        raise _refusal(name, f"it is of the job {said!r}, but {given!r} was asked for")
    return said, dict(config)


def _read_json(text: str, name: str) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in found]
        if len(set(keys)) < len(keys):
            twice = next(key for number, key in enumerate(keys) if key in keys[:number])
            raise _refusal(name, f"the key {twice[:100]!r} is there twice")
        return dict(found)

    try:
        value = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_constant=lambda word: _no_number(name, word, ""),
            parse_int=lambda digits: _integer(name, digits, ""),
            parse_float=lambda digits: _float(name, digits, ""),
        )
    except json.JSONDecodeError as error:
        raise _refusal(name, f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise _refusal(name, f"it is nested deeper than {DEPTH_MAX} levels") from error
    _check_depth(value, name)
    return value


def _check_depth(value: Any, name: str) -> None:
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [
            below
            for item in level
            if isinstance(item, dict | list)
            for below in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise _refusal(name, f"it is nested deeper than {DEPTH_MAX} levels")


def _read_yaml(text: str, name: str) -> Any:
    try:
        return _Reader(name).read(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{_place(mark)}: " if mark else ""
        raise _refusal(name, f"{place}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise _refusal(name, " ".join(str(error).split())) from error


class _Reader:
    """Builds values from YAML's events: what is not plain data is refused as soon as it comes."""

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0

    def read(self, text: str) -> Any:
        events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        documents = [
            self._value(event, events, 0)
            for event in events
            if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent | yaml.AliasEvent)
        ]
        if len(documents) != 1:
            raise _refusal(self._name, f"it holds {len(documents)} documents, not one")
        return documents[0]

    def _value(self, event: Any, events: Any, depth: int) -> Any:
        self._check(event, depth)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(below := next(events), yaml.SequenceEndEvent):
                items.append(self._value(below, events, depth + 1))
            return items
        found: dict[str, Any] = {}
        while not isinstance(key := next(events), yaml.MappingEndEvent):
            self._check(key, depth + 1)
            if not isinstance(key, yaml.ScalarEvent):
                raise self._wrong(key, "a key must be text")
            if key.value == "<<" and not key.style:
                raise self._wrong(key, "`<<` merges other maps, which is not taken")
            if key.value in found:
                raise self._wrong(key, f"the key {key.value[:100]!r} is there twice")
            found[key.value] = self._value(next(events), events, depth + 1)
        return found

    def _check(self, event: Any, depth: int) -> None:
        self._count += 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise self._wrong(event, "anchors and aliases (`&`, `*`) are not taken")
        if getattr(event, "tag", None):
            raise self._wrong(event, f"tags are not taken: {event.tag[:100]}")
        if depth > DEPTH_MAX:
            raise self._wrong(event, f"it is nested deeper than {DEPTH_MAX} levels")
        if self._count > VALUES_MAX:
            raise self._wrong(event, f"there are more than {VALUES_MAX} values")

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        if event.style:  # quoted, or a block: text, whatever it looks like
            return text
        if text in _WORDS:
            return _WORDS[text]
        place = f"{_place(event.start_mark)}: "
        if _INT.fullmatch(text):
            return _integer(self._name, text, place)
        if _FLOAT.fullmatch(text):
            return _float(self._name, text, place)
        if _NO_NUMBER.fullmatch(text):
            return _no_number(self._name, text, place)
        return text

    def _wrong(self, event: Any, why: str) -> ConfigError:
        return _refusal(self._name, f"{_place(event.start_mark)}: {why}")


def _integer(name: str, text: str, place: str) -> int:
    if len(text) > 20 or not -INT_MAX - 1 <= int(text) <= INT_MAX:
        raise _refusal(name, f"{place}the number {text[:40]} does not fit into 64 bits")
    return int(text)


def _float(name: str, text: str, place: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(name, text[:40], place)


def _no_number(name: str, text: str, place: str) -> float:
    raise _refusal(name, f"{place}{text} is not a finite number")


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "nothing"}.get(type(value), "a single value")


def _refusal(name: str, why: str) -> ConfigError:
    return ConfigError(f"{name} is not a job file", why=why, fix=_FIX)
