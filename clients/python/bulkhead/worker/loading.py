"""Finds an engine's class, and locates errors in the engine's own code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from ..engine import Method, MissingModel, methods_of
from ..errors import Error

STATUS_CONFIG = 78  #: EX_CONFIG of sysexits.h: the supervisor does not retry
STATUS_FAILED = 1


class Engine:
    """An engine's class, from ``import_engine``; ``make`` and the methods are used on
    the main thread."""

    def __init__(self, text: str, made: type) -> None:
        self.text, self.type = text, made
        self.methods: dict[str, Method] = methods_of(made)
        module = sys.modules.get(made.__module__)
        file = getattr(module, "__file__", None)
        self._folder = str(Path(file).parent) if file else ""

    def place(self, error: BaseException) -> str:
        """ "engine.py:31 in speak": the innermost frame of the engine's own code, else the
         innermost frame."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if self._folder and frame.filename.startswith(self._folder + "/")]
        chosen = own or list(frames)
        return f"{chosen[-1].filename}:{chosen[-1].lineno} in {chosen[-1].name}" if chosen else "no place"

    def error(self, error: BaseException, attempt: str, otherwise: str) -> Error:
        """The error for a client, or for the caller of a load; ``otherwise`` is the code if the
        exception has none."""
        if isinstance(error, Error):
            return error
        if ran_out_of_memory(error):
            return Error("out_of_memory", f"{attempt}: {words(error)} ({self.place(error)})", "send smaller inputs, or give the worker more memory")
        return Error(otherwise, f"{attempt}: {words(error)} ({self.place(error)})", "see the traceback in `bulkhead logs`")


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether this process did; an ``Error`` may come from the worker of another model."""
    return isinstance(error, MemoryError) or any(one.__name__ == "OutOfMemoryError" for one in type(error).__mro__)


def words(error: BaseException) -> str:
    """Type and first line of the error's text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def import_engine(text: str) -> Engine:
    """Imports ``module:Class`` or ``/path/file.py:Class``. Raises ``config_invalid`` if a
    retry cannot help."""
    where, _, name = text.rpartition(":")
    attempt = f"importing engine {text}"
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ImportError as error:
        missing = f"install {error.name} in that venv" if error.name and error.name != where else "correct `engine`"
        raise Error("config_invalid", f"{attempt} with {sys.executable}: {words(error)} ({_line(error)})", f"{missing}, or name another `interpreter`") from error
    except BaseException as error:  # noqa: BLE001  whatever an engine's file does
        raise Error("config_invalid", f"{attempt}: {words(error)} ({_line(error)})", "correct the engine's file") from error
    made = getattr(module, name, None)
    if not isinstance(made, type):
        classes = [one for one, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__]
        raise Error("config_invalid", f"{attempt}: {where} has no class {name}", f"its classes: {', '.join(classes) or 'none'}")
    try:
        return Engine(text, made)
    except TypeError as error:
        raise Error("config_invalid", f"{attempt}: {error}", "see docs/python-engines.md") from None


def status_of(error: BaseException) -> int:
    """The worker's exit status after a load that failed with this error."""
    fault = isinstance(error, (MissingModel, ImportError)) or (isinstance(error, Error) and error.code in ("config_invalid", "package_incompatible"))
    return STATUS_CONFIG if fault else STATUS_FAILED


def _import_file(path: Path) -> Any:
    """Imports a file; it can import modules beside it, as a script can."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"no file {path}", name=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _line(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no place"
