"""Penstock: a service management platform for stream processing on Spark."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.streams.computation import Computation, Context, Record, Timer
    from penstock.streams.pipeline import Pipeline
    from penstock.streams.state import ListState, MapState, Opaque, Value
    from penstock.streams.vectorised import VectorComputation
    from penstock.streams.windows import session, sliding, tumbling

__version__ = "0.1.0"
__all__ = [
    "Computation",
    "Context",
    "ListState",
    "MapState",
    "Opaque",
    "Pipeline",
    "Record",
    "Timer",
    "Value",
    "VectorComputation",
    "session",
    "sliding",
    "tumbling",
]

_HOMES = {
    "Computation": "penstock.streams.computation",
    "Context": "penstock.streams.computation",
    "ListState": "penstock.streams.state",
    "MapState": "penstock.streams.state",
    "Opaque": "penstock.streams.state",
    "Pipeline": "penstock.streams.pipeline",
    "Record": "penstock.streams.computation",
    "Timer": "penstock.streams.computation",
    "Value": "penstock.streams.state",
    "VectorComputation": "penstock.streams.vectorised",
    "session": "penstock.streams.windows",
    "sliding": "penstock.streams.windows",
    "tumbling": "penstock.streams.windows",
}


def __getattr__(name: str) -> Any:
    # When first used: the control plane imports `penstock` too, and needs neither Arrow nor a SQL parser.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
