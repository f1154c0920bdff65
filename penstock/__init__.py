"""Penstock: a service management platform for stream processing on Spark."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import penstock.former_names  # noqa: F401  # finds modules by the names they had before

if TYPE_CHECKING:
    from penstock.streams.dsl.computation import (
        Computation,
        Context,
        ListState,
        MapState,
        Opaque,
        Record,
        Timer,
        Value,
    )
    from penstock.streams.dsl.injector import Injector
    from penstock.streams.dsl.pipeline import Pipeline
    from penstock.streams.dsl.windows import session, sliding, tumbling
    from penstock.streams.places import open_log
    from penstock.streams.step.vectorised import VectorComputation

__version__ = "0.1.0"
__all__ = [
    "Computation",
    "Context",
    "Injector",
    "ListState",
    "MapState",
    "Opaque",
    "Pipeline",
    "Record",
    "Timer",
    "Value",
    "VectorComputation",
    "open_log",
    "session",
    "sliding",
    "tumbling",
]

_HOMES = {
    "Computation": "penstock.streams.dsl.computation",
    "Context": "penstock.streams.dsl.computation",
    "Injector": "penstock.streams.dsl.injector",
    "ListState": "penstock.streams.dsl.computation",
    "MapState": "penstock.streams.dsl.computation",
    "Opaque": "penstock.streams.dsl.computation",
    "Pipeline": "penstock.streams.dsl.pipeline",
    "Record": "penstock.streams.dsl.computation",
    "Timer": "penstock.streams.dsl.computation",
    "Value": "penstock.streams.dsl.computation",
    "VectorComputation": "penstock.streams.step.vectorised",
    "open_log": "penstock.streams.places",
    "session": "penstock.streams.dsl.windows",
    "sliding": "penstock.streams.dsl.windows",
    "tumbling": "penstock.streams.dsl.windows",
}


def __getattr__(name: str) -> Any:
    # When first used: the control plane imports `penstock` too, and needs neither Arrow nor a SQL parser.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
