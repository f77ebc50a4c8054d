"""Loads what the command line's TARGET and --inputs name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from ..errors import Error
from .calls import Method
from .failures import described
from .run import Expired
from .source import one_line


def load(text: str, what: str) -> Any:
    """``package.module:name`` or ``file.py:name``, where name may have dots.

    Errors: input_invalid, which says what is missing."""
    place, _, name = text.rpartition(":")
    wrong = "" if place and name else " names no function"
    if not wrong and not place.endswith(".py") and not all(map(str.isidentifier, place.split("."))):
        wrong = f": {place} is neither a file of Python (.py) nor a package"
    if wrong:
        remedy = f"write {what} as file.py:function or package.module:function"
        raise Error("input_invalid", f"{what} {text!r}{wrong}", remedy)
    value = _from_file(Path(place), what) if place.endswith(".py") else _from_module(place, what)
    owner: Any = None
    for part in name.split("."):
        try:
            owner, value = value, getattr(value, part)
        except AttributeError:
            names = getattr(value, "__dict__", {})
            here = ", ".join(sorted(one for one, it in names.items() if callable(it) and not one.startswith("_")))
            remedy = f"it has: {one_line(here, 200)}" if here else ""
            raise Error("input_invalid", f"{what} {text!r}: there is no {part!r} in {place}", remedy) from None
    if not callable(value):
        raise Error("input_invalid", f"{what} {text!r} is not callable: {type(value).__name__}", "name a function or a class")
    if inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, part)):
        return Method(owner, part)
    return value


def _from_file(file: Path, what: str) -> Any:
    if not file.is_file():
        raise Error("input_invalid", f"{what}: there is no file {file}", "name a file of Python that is there")
    if str(file.parent.resolve()) not in sys.path:
        # So that it can import its neighbours, as a script can.
        sys.path.insert(0, str(file.parent.resolve()))
    name = f"doctored_{abs(hash(str(file.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _refused(error, f"{what} {file}") from None
    return module


def _from_module(name: str, what: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except BaseException as error:
        raise _refused(error, f"{what} {name}") from None


def _refused(error: BaseException, target: str) -> BaseException:
    if isinstance(error, (KeyboardInterrupt, Expired)):
        return error
    attempt, remedy = described(error, target)
    if isinstance(error, ImportError) and "relative import" in str(error):
        remedy = "it is part of a package: write package.module:function, from the folder that has the package"
    elif not isinstance(error, (Error, ModuleNotFoundError)):
        remedy = "correct the file first: it must load"
    return Error("input_invalid", attempt, remedy)
