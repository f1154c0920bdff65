"""Former names of modules that users import.

A package of a pipeline or policy is stored as long as its job runs, and may import the former names.
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

# Former name -> current module; "": a package that no longer exists.
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
    """Imports modules by their former names, after all other finders failed."""

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
        warnings.warn(f"{spec.name} was renamed to {now}", DeprecationWarning, stacklevel=2)
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        now = FORMER[module.__name__]
        if now:
            sys.modules[module.__name__] = importlib.import_module(now)


sys.meta_path.append(FormerNames())
