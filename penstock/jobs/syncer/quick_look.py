"""Does a job need nothing, or nothing but another package? Seen without a full look at its config.

A release on SQLite takes 30 µs of processor time per job with it and 178 µs without it (3,000 jobs, both on
the same busy machine): without it what runs and what is expected is parsed and validated for every job, and
`python -m bench.syncer --check` allows 100 µs.

Only defaults are filled in here, in C; values are not validated. So it answers when everything but the fields
of a release is as it runs, and the new values of those were validated in full with another job. Anything else
is left to `plan_sync`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from types import GenericAlias
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from pydantic import BaseModel

from penstock.core import text as json_text
from penstock.jobs.config import LATER_FIELDS, LATER_PART_FIELDS, PROCESS_FIELDS, Input, JobConfig
from penstock.jobs.layers import LayerRow, merge_layers
from penstock.jobs.syncer.sync_plan import diff_json, explain, needs_restart

# What a release changes. Whether a value of these is valid depends on nothing else in the config.
RELEASE_FIELDS = ("package", "arguments")
_KNOWN_MAX = 10_000
_LATER: dict[Any, tuple[str, ...]] = {
    **{JobConfig.model_fields[part].annotation: names for part, names in LATER_PART_FIELDS.items()},
    Input: ("writer",),
}
_LEFT_OUT = PROCESS_FIELDS | {*LATER_FIELDS}  # of the stored form, at their defaults


class Difference(NamedTuple):
    """What a release means for jobs that have the same values of its fields before and after."""

    reason: str
    paths: tuple[str, ...]
    restarts: bool
    values: Mapping[str, Any]  # the new ones, as they were validated


class Quick(NamedTuple):
    """What differs (None: nothing), and the whole config as it should run, as JSON text."""

    difference: Difference | None
    target: str


@dataclass(slots=True)
class QuickLook:
    """Remembers which values of the release's fields were found valid, and what they became."""

    _valid: dict[tuple[str, bytes], Any] = field(default_factory=dict)
    _differences: dict[bytes, Difference | None] = field(default_factory=dict)

    def compare(self, job: str, bodies: Sequence[tuple[int, str]], running: str) -> Quick | None:
        """What to change in `running` to have what the layers (precedence, body) say; None: look closer."""
        try:
            new, old = _expected(bodies), _RUNNING.decode(running)
        except (msgspec.MsgspecError, UnicodeError):
            return None  # what is wrong with it is said by the full look
        if "process" in (new.kind, old.kind):
            return None  # its JSON has fields that other kinds leave out
        wanted, runs = _values(new), _values(old)
        if new.name not in (None, job) or _rest(wanted) != _rest(runs):
            return None
        if _encode(_loose(wanted)) != _encode(_loose(runs)):
            return None  # the same to Python only, to which true is 1
        wanted, runs = _release(wanted), _release(runs)
        if wanted == runs:
            return Quick(None, running)
        key = _encode((wanted, runs))
        if key not in self._differences and not self._compare_release(key, wanted, runs):
            return None
        difference = self._differences[key]
        if difference is None:
            return Quick(None, running)
        return Quick(difference, _encode(_replace(old, **difference.values)).decode())

    def _compare_release(self, key: bytes, wanted: Sequence[Any], runs: Sequence[Any]) -> bool:
        """Work out a difference and remember it; False when a value was not seen valid yet."""
        before, after = dict(zip(RELEASE_FIELDS, runs, strict=True)), {}
        for name, value in zip(RELEASE_FIELDS, wanted, strict=True):
            valid = self._valid.get((name, _encode(value)))
            if valid is None and value != before[name]:
                return False
            after[name] = before[name] if valid is None else valid
        changed = diff_json(before, after)
        self._make_room()
        self._differences[key] = None
        if changed:
            paths = tuple(change.path for change in changed)
            self._differences[key] = Difference(explain(changed), paths, needs_restart(changed), after)
        return True

    def learn(self, layers: Sequence[LayerRow], target: JobConfig) -> None:
        """`target` is what these layers became when they were validated in full."""
        merged, found = merge_layers(layers), target.to_json({*RELEASE_FIELDS})
        self._make_room()
        for name in RELEASE_FIELDS:
            if name in merged:
                self._valid[name, _encode(merged[name])] = found[name]

    def _make_room(self) -> None:
        for memory in (self._valid, self._differences):
            if len(memory) >= _KNOWN_MAX:
                memory.clear()


def _expected(bodies: Sequence[tuple[int, str]]) -> Any:
    if len(bodies) == 1:
        return _EXPECTED.decode(bodies[0][1])
    rows = [
        LayerRow(layer="", precedence=precedence, body=json_text.loads(body)) for precedence, body in bodies
    ]
    return msgspec.convert(merge_layers(rows), _EXPECTED.type)


@cache
def _twin(model: type[BaseModel], *, with_defaults: bool = True) -> type[msgspec.Struct]:
    """A model's fields and defaults without its rules. What is no model itself is compared as it is."""
    fields: list[Any] = []
    for name, info in model.model_fields.items():
        kind = Any if model is JobConfig and name in RELEASE_FIELDS else _kind(info.annotation)
        if model is JobConfig and name == "name":  # the job's key, whether or not a layer says it
            fields.append((name, kind, None))
        elif name in _LATER.get(model, ()):
            fields.append((name, kind | msgspec.UnsetType, msgspec.UNSET))  # what was left out stays out
        elif info.is_required() or (not with_defaults and name not in _LEFT_OUT):
            fields.append((name, kind))
        else:
            default = json_text.loads(json_text.dumps(info.get_default(call_default_factory=True)))
            for later in _LATER.get(info.annotation, ()):
                del default[later]
            fields.append((name, kind, msgspec.convert(default, kind)))
    return msgspec.defstruct(
        model.__name__,
        fields,
        kw_only=True,
        forbid_unknown_fields=True,
        frozen=True,
        omit_defaults=not with_defaults,  # so that what was left out stays out
    )


def _kind(annotation: Any) -> Any:
    if annotation in (bool, int, float, str) or get_origin(annotation) is Literal:
        return annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _twin(annotation)
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple and arguments[1:] == (...,):
        return GenericAlias(list, (_kind(arguments[0]),))
    return Any


def _is_loose(kind: Any) -> bool:
    """Whether values of it may have types that nobody declared."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return any(_is_loose(item.type) for item in msgspec.structs.fields(kind))
    return kind is Any or any(map(_is_loose, get_args(kind) if get_origin(kind) is list else ()))


def _pick(names: Iterable[str]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    picked: Callable[[tuple[Any, ...]], tuple[Any, ...]] = itemgetter(*map(_FIELDS.index, names))
    return picked


_EXPECTED: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_twin(JobConfig))
_RUNNING: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_twin(JobConfig, with_defaults=False))
_FIELDS = tuple(JobConfig.model_fields)
_REST = tuple(name for name in _FIELDS if name not in ("name", *RELEASE_FIELDS))
_release, _rest = _pick(RELEASE_FIELDS), _pick(_REST)
_loose = _pick(name for name in _REST if _is_loose(_kind(JobConfig.model_fields[name].annotation)))
_encode, _values, _replace = msgspec.json.encode, msgspec.structs.astuple, msgspec.structs.replace
