"""Modules that users import and that had other names in earlier versions.

Packages of pipelines and policies are kept for as long as a job runs, and their files say the former names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# A former name -> the module now; "": a folder that is gone.
FORMER = {
    "penstock.resources": "",
    "penstock.resources.policies": "",
    "penstock.resources.policies.facts": "penstock.scaling.policies.facts",
    "penstock.resources.policies.policy": "penstock.scaling.policies.policy",
    "penstock.streams.computation": "penstock.streams.dsl.computation",
    "penstock.streams.injector": "penstock.streams.dsl.injector",
    "penstock.streams.pipeline": "penstock.streams.dsl.pipeline",
    "penstock.streams.windows": "penstock.streams.dsl.windows",
}


class FormerNames(MetaPathFinder, Loader):
    """Finds modules by their former names, after everybody else was asked."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in FORMER:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=not FORMER[name])

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        now = FORMER[spec.name]
        if not now:
            return None
        warnings.warn(f"{spec.name} is called {now} now", DeprecationWarning, stacklevel=2)
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        now = FORMER[module.__name__]
        if now:
            sys.modules[module.__name__] = importlib.import_module(now)


sys.meta_path.append(FormerNames())
