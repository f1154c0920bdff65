"""Imports a user's file and its neighbour modules under a unique module name, and converts import errors.

A process may load several versions of one package. So `import helpers` in a package must find its own
helpers: its import statements are resolved in its folder first, and none of its modules is in `sys.modules`
under its plain name.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Literal

from penstock.core.errors import PenstockError, PipelineError
from penstock.core.system_clock import TookTooLong, time_limit
from penstock.streams.dsl.computation import USER_FOLDERS

IMPORT_S = 30.0  # how long a file's import may take, with all that it imports


class UserCode:
    """A folder of user code, and the module name under which it is imported."""

    def __init__(self, root: str, folder: Path, entry: str) -> None:
        self.root, self.folder, self.entry = root, folder, folder / entry
        self.files: list[Path] = []  # executed files, in order
        self.builtins = {**vars(builtins), "__import__": self._import}

    def load(self) -> ModuleType:
        """Import the entry file, unless it is imported already; PipelineError if that fails."""
        _finder.folders[self.root] = self
        USER_FOLDERS.add(self.folder)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        try:
            with _ImportErrors(self), time_limit(IMPORT_S):
                return importlib.import_module(self.root)
        except PenstockError:
            self.forget()  # the next attempt must execute the file again
            raise

    def forget(self) -> None:
        """Remove every module of this folder from the process."""
        for name in [name for name in sys.modules if name == self.root or name.startswith(f"{self.root}.")]:
            del sys.modules[name]
        self.files.clear()

    def find(self, name: str) -> Path | None:
        """The file or folder of a dotted module name inside this code."""
        path = self.folder.joinpath(*name.split("."))
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
        return path if path.is_dir() and any(path.glob("*.py")) else None

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        # `penstock` is never resolved in the user's folder, even if the pipeline is beside Penstock's source.
        if level or top == "penstock" or self.find(top) is None:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        if name == self.entry.stem:
            return sys.modules[self.root]
        if fromlist:
            return builtins.__import__(f"{self.root}.{name}", globals, locals, fromlist, 0)
        importlib.import_module(f"{self.root}.{name}")
        return sys.modules[f"{self.root}.{top}"]


class _Loader(importlib.abc.Loader):
    def __init__(self, code: UserCode, path: Path) -> None:
        self._code, self._path = code, path

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # Compiled here, because Python's loader takes cached bytecode if the mtime in seconds is equal.
        compiled = _compile(self._path)
        module.__dict__["__builtins__"] = self._code.builtins
        self._code.files.append(self._path)
        exec(compiled, module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.folders: dict[str, UserCode] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        code = self.folders.get(root)
        found = None if code is None else code.find(rest) if rest else code.entry
        if code is None or found is None:
            return None
        if found.is_dir():
            folder = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            folder.submodule_search_locations = [str(found)]
            return folder
        places = [str(found.parent)] if not rest or found.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, found, loader=_Loader(code, found), submodule_search_locations=places
        )


_finder = _Finder()


def _compile(path: Path) -> CodeType:
    source = importlib.util.decode_source(path.read_bytes())
    return compile(source, str(path), "exec", dont_inherit=True)


class _ImportErrors:
    """Converts exceptions during the import of a user's file into a PipelineError, except interrupts."""

    def __init__(self, code: UserCode) -> None:
        self._code = code

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, Exception | SystemExit | TookTooLong) and not isinstance(error, PenstockError):
            raise self._describe(error, trace) from error
        return False

    def _describe(self, error: BaseException, trace: TracebackType | None) -> PipelineError:
        if isinstance(error, SyntaxError) and self._is_ours(error.filename):
            return _syntax_error(error)
        if isinstance(error, FileNotFoundError | UnicodeDecodeError | ValueError) and not self._frames(trace):
            return PipelineError(
                f"{self._code.entry.name} cannot be read",
                why=str(error),
                fix="save the file as UTF-8 text without null bytes",
            )
        frames = self._frames(trace)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else self._code.entry.name
        line = (frames[-1].line if frames else "") or ""
        if isinstance(error, TookTooLong):
            what = f"the import did not end within {IMPORT_S:g} s"
            fix = "remove loops and waits from the file's top level"
        elif isinstance(error, SystemExit):
            what, fix = "the file calls sys.exit()", "remove sys.exit(): the file must only define a pipeline"
        else:
            what = f"{type(error).__name__}: {error}"
            fix = "correct this line; `python` with the file's name shows the whole traceback"
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            missing = error.name.removeprefix(f"{self._code.root}.")
            what = f"there is no module {missing!r}"
            fix = (
                f"install {missing!r} where tasks run; if it is your own module, put "
                "it beside the file and include it"
            )
        return PipelineError(
            f"{place}: {what}", why=f"raised during the import, by this line: {line}", fix=fix
        )

    def _is_ours(self, filename: str | None) -> bool:
        return filename is not None and Path(filename).is_relative_to(self._code.folder)

    def _frames(self, trace: TracebackType | None) -> list[traceback.FrameSummary]:
        return [frame for frame in traceback.extract_tb(trace) if self._is_ours(frame.filename)]


def _syntax_error(error: SyntaxError) -> PipelineError:
    line = (error.text or "").rstrip("\n")
    shown = line.lstrip()
    caret = " " * max((error.offset or 1) - 1 - (len(line) - len(shown)), 0) + "^"
    return PipelineError(
        f"{Path(error.filename or '').name}:{error.lineno}: syntax error: {error.msg}",
        why=f"Python cannot parse line {error.lineno}:\n    {shown}\n    {caret}",
        fix="correct this line, or the one before it",
    )
