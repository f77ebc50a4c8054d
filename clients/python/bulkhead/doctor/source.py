"""Locates user code: the innermost user line, its column, and the use of a value there."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib.util
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Iterator

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_OWN = tuple(os.path.join(_PACKAGE, one) for one in ("doctor" + os.sep, "worker" + os.sep, "recording.py"))
_torch = importlib.util.find_spec("torch")  # not imported: its absence is reported
_TORCH = tuple(os.path.abspath(folder) + os.sep for folder in _torch.submodule_search_locations or ()) if _torch else ()
#: Modules that call a target.
_CALLERS = tuple(os.path.join(os.path.dirname(os.path.abspath(__file__)), name) for name in ("run.py", "numbers.py"))
_PATH_LENGTH_MAX = 12
_LIBRARIES = ("numpy", "triton", "functorch", "torchgen")


@functools.lru_cache(maxsize=None)
def is_users(file: str) -> bool:
    """Whether the file is user code: a real file, not PyTorch's, the doctor's, or the
    standard library's."""
    if file.startswith("<"):
        return False
    path = os.path.abspath(file)
    if os.path.realpath(file).startswith(_OWN) or path.startswith(_TORCH):
        return False
    parts = path.split(os.sep)
    for site in ("site-packages", "dist-packages"):
        if site in parts:
            return parts[len(parts) - parts[::-1].index(site)] not in _LIBRARIES
    return not is_standard(file)


def is_standard(file: str) -> bool:
    """Of Python's own library."""
    return file.startswith("<frozen") or os.path.abspath(file).startswith(sysconfig.get_path("stdlib") + os.sep)


def location_of_target(target: Any, name: str) -> Location:
    """The line that defines a target; if that is not user code, the target by its ``name``."""
    function = code_of(target)
    if function is not None and is_users(function.__code__.co_filename):
        file, line = absolute(function.__code__.co_filename), function.__code__.co_firstlineno
        for node in ast.walk(tree(file)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and line in (
                node.lineno,
                *(one.lineno for one in node.decorator_list),
            ):
                return Location(file, node.lineno, node.col_offset + 1, 0, name_of(function.__code__))
        return Location(file, line, 1, 0, name_of(function.__code__))
    return Location(name, 0, 0, 0, getattr(target, "__qualname__", type(target).__name__))


def code_of(step: Any) -> Any:
    """The Python function that a callable runs; None if there is none."""
    while isinstance(step, functools.partial):
        step = step.func
    if not inspect.isfunction(step) and not inspect.ismethod(step):
        step = getattr(type(step), "forward", None) or getattr(type(step), "__call__", None)
    function = inspect.unwrap(getattr(step, "__func__", step)) if step is not None else None
    return function if inspect.isfunction(function) else None


@dataclass(frozen=True)
class Location:
    """A location in user code. ``column`` counts from 1; ``end_column`` is 0 if unknown or
    on another line."""

    file: str
    line: int
    column: int
    end_column: int
    function: str
    path: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).rstrip("\n")

    @property
    def columns(self) -> tuple[int, int]:
        """``column`` and ``end_column`` in characters: Python counts in bytes of UTF-8."""
        line = self.text.encode()
        column, end = (len(line[: one - 1].decode(errors="replace")) + 1 if one else 0 for one in (self.column, self.end_column))
        return column, end

    def __str__(self) -> str:
        return f"{short(self.file)}:{self.line}" if self.line else short(self.file)


def node_location(file: str, node: Any, function: str) -> Location:
    end = (node.end_col_offset or 0) + 1 if node.end_lineno == node.lineno else 0
    return Location(file, node.lineno, node.col_offset + 1, end, function)


def line_location(file: str, line: int, function: str, path: tuple[str, ...] = ()) -> Location:
    """A whole line of a file, from its first character after the indentation."""
    text = linecache.getline(file, line).rstrip()
    return Location(file, line, len(text) - len(text.lstrip()) + 1, len(text.encode()) + 1, function, path)


def short(file: str) -> str:
    """A path as readers know it: relative to the working directory, unless that is /, or to where
    Python found the module."""
    for site in ("site-packages/", "dist-packages/"):
        if site in file:
            return file.rsplit(site, 1)[1]
    return _shortened(file, os.getcwd(), tuple(sys.path))


@functools.lru_cache(maxsize=None)
def _shortened(file: str, folder: str, path: tuple[str, ...]) -> str:
    relative = os.path.relpath(file, folder)
    if os.sep + relative == file:
        return file
    if file.startswith("<") or not relative.startswith(".."):
        return file if file.startswith("<") else relative
    roots = [root for root in path if root and file.startswith(root + os.sep)]
    return file[len(max(roots, key=len)) + 1 :] if roots else file


_told: list[Location] = []
#: .location: where this thread, or its work, was started; None of the step's own.
_thread = threading.local()


@contextlib.contextmanager
def as_if(location: Location) -> Iterator[None]:
    """Attributes what runs meanwhile to it: a node of an exported program has no frame."""
    _told.append(location)
    try:
        yield
    finally:
        _told.pop()


@contextlib.contextmanager
def started_at(location: Location | None) -> Iterator[None]:
    """Attributes what runs meanwhile in this thread, and comes from no line of the user's, to the
    location that started it."""
    before, _thread.location = getattr(_thread, "location", None), location
    try:
        yield
    finally:
        _thread.location = before


def here(frame: FrameType | None = None) -> Location | None:
    """The innermost location of user code on the stack, or from ``frame`` outwards; None if
    there is none."""
    if _told:
        return _told[-1]
    users, started = frames(frame), getattr(_thread, "location", None)
    if not users:
        return started
    inner = users[0]
    line, column, end = _asked(inner)
    outer = [f"{short(one.f_code.co_filename)}:{one.f_lineno} {name_of(one.f_code)}" for one in users[1:_PATH_LENGTH_MAX]]
    before = (*started.path, f"{started} {started.function}") if started is not None else ()
    return Location(absolute(inner.f_code.co_filename), line, column, end, name_of(inner.f_code), (*before, *reversed(outer)))


#: By the identity of a code, whose own hash reads all of it, and the offset of its instruction. The
#: code is kept, so that no other gets its identity.
_known: dict[tuple[int, int], tuple[CodeType, tuple[int, int, int]]] = {}


def _asked(frame: FrameType) -> tuple[int, int, int]:
    """Line, column and end column of what a frame runs."""
    code, at = frame.f_code, (id(frame.f_code), frame.f_lasti)
    if at not in _known:
        _known[at] = code, tested(code.co_filename, *position(code, frame.f_lasti, frame.f_lineno))
    return _known[at][1]


def frames(frame: FrameType | None = None) -> list[FrameType]:
    """The user's frames below the doctor, innermost first, from ``frame`` outwards. If none has a
    file, those of executed text."""
    users: list[FrameType] = []
    of_text: list[FrameType] = []
    at: FrameType | None = frame or sys._getframe(1)
    while at is not None and at.f_code.co_filename not in _CALLERS:
        file = at.f_code.co_filename
        if is_users(file):
            users.append(at)
        elif (
            file.startswith("<") and not file.startswith("<frozen") and not str(at.f_globals.get("__name__")).startswith("torch.")
        ):
            of_text.append(at)
        at = at.f_back
    return users or of_text


def absolute(file: str) -> str:
    return file if file.startswith("<") else os.path.abspath(file)


def location_of(error: BaseException) -> Location | None:
    """The innermost user line that the error came through."""
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    if not users:
        return None
    frame = users[-1]
    return Location(absolute(frame.filename), frame.lineno or 0, (getattr(frame, "colno", None) or 0) + 1, 0, frame.name,
                    tuple(f"{short(one.filename)}:{one.lineno} {one.name}" for one in users[:-1]))  # fmt: skip


def name_of(code: CodeType) -> str:
    return str(getattr(code, "co_qualname", code.co_name)).replace("<locals>.", "")


def position(code: CodeType, instruction: int, line: int) -> tuple[int, int, int]:
    """Line, column and end column of an instruction; of one that asks whether a value is true,
    those of the value. Python 3.10 only knows lines: then the statement's."""
    if hasattr(code, "co_positions"):
        # Its own position is that of the statement, or of another operand.
        if dis.opname[code.co_code[instruction]] in _ASKS_TRUTH:
            instruction = next(
                (one for one in range(instruction - 2, 0, -2) if dis.opname[code.co_code[one]] not in _BETWEEN), instruction
            )
        found = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
        if found is not None and found[0] is not None and found[2] is not None:
            first, last, column, end = found
            return first or line, (column or 0) + 1, (end or 0) + 1 if last == first else 0
    text = linecache.getline(code.co_filename, line)
    return line, len(text) - len(text.lstrip()) + 1, len(text.rstrip()) + 1


_ASKS_TRUTH = frozenset(
    name for name in dis.opname if re.search("JUMP.*IF_(TRUE|FALSE)", name) or name in ("UNARY_NOT", "TO_BOOL")
)
#: Instructions between the value and the question.
_BETWEEN = ("CACHE", "COPY", "EXTENDED_ARG", "NOP")


def tested(file: str, line: int, column: int, end: int) -> tuple[int, int, int]:
    """The position of the condition, which is what is read, if the location is a whole `if`,
    `while` or `assert`."""
    for statement in parsed(file).statements.get(line, ()):
        at = statement.lineno, statement.col_offset + 1
        if isinstance(statement, (ast.If, ast.While, ast.Assert)) and at == (line, column):
            test = node_location(file, statement.test, "")
            return test.line, test.column, test.end_column
    return line, column, end


@dataclass(frozen=True)
class Use:
    """The use of a value: ``kind`` is one that `remedies.py` knows, ``text`` the expression's
    source, ``around`` the source of the code that uses it."""

    kind: str
    text: str
    around: str = ""


class _File:
    def __init__(self, file: str) -> None:
        self.text = "".join(linecache.getlines(file))
        try:
            self.tree = ast.parse(self.text)
        except SyntaxError:
            self.tree = ast.parse("")
        self.expressions: dict[int, list[ast.expr]] = {}
        self.statements: dict[int, list[ast.stmt]] = {}  #: of each line, the innermost last
        for node in ast.walk(self.tree):
            if isinstance(node, ast.expr):
                self.expressions.setdefault(node.lineno, []).append(node)
            elif isinstance(node, ast.stmt):  # outer ones come first
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    self.statements.setdefault(line, []).append(node)
        self.parents: dict[ast.AST, ast.AST] = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }


@functools.lru_cache(maxsize=256)
def parsed(file: str) -> _File:
    return _File(file)


def tree(file: str) -> ast.Module:
    return parsed(file).tree


def statement_at(file: str, line: int) -> ast.stmt | None:
    """The innermost statement that has this line."""
    return parsed(file).statements.get(line, [None])[-1]


def statement_of(location: Location) -> ast.stmt | None:
    """The statement of the location's expression; for `a` in a line `if a: b`, the whole line."""
    node: ast.AST | None = expression_at(location)
    while node is not None and not isinstance(node, ast.stmt):
        node = parsed(location.file).parents.get(node)
    return node if node is not None else statement_at(location.file, location.line)


@functools.lru_cache(maxsize=None)
def tested_later(location: Location) -> tuple[str, str, int] | None:
    """If the location's value is assigned to a name, or runs through a loop under it: that name,
    and its later test, or the enclosing loop's, with the line. A name whose methods are asked is a
    tensor, whose test is a read of its own."""
    statement = statement_of(location)
    target = (
        statement.targets[0]
        if isinstance(statement, ast.Assign)
        else statement.target
        if isinstance(statement, ast.For)
        else None
    )
    if not isinstance(target, ast.Name):
        return None
    for node in ast.walk(function_around(location.file, location.line) or tree(location.file)):
        if isinstance(node, ast.While) or isinstance(node, (ast.If, ast.IfExp, ast.Assert)) and node.lineno > location.line:
            if _has_plain(node.test, target.id):
                return target.id, one_line(ast.unparse(node.test)), node.lineno
    return None


def _has_plain(node: ast.AST, name: str) -> bool:
    """Whether the expression has the name, neither before a dot nor in a call of PyTorch's."""
    if isinstance(node, ast.Name):
        return node.id == name
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return False
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
        return False
    return any(_has_plain(child, name) for child in ast.iter_child_nodes(node))


def around(file: str, line: int) -> Iterator[ast.AST]:
    """The innermost statement of a line, then its enclosing nodes."""
    node: ast.AST | None = statement_at(file, line)
    while node is not None:
        yield node
        node = parsed(file).parents.get(node)


def function_around(file: str, line: int) -> ast.AST | None:
    return next((node for node in around(file, line) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))), None)


def expression_at(location: Location) -> ast.expr | None:
    """The outermost expression that begins at the location and, if its end is known, ends there."""
    found: list[Any] = [
        node for node in parsed(location.file).expressions.get(location.line, ()) if node.col_offset == location.column - 1
        and (not location.end_column or node_location(location.file, node, "").end_column == location.end_column)
    ]  # fmt: skip
    return max(found, key=lambda node: (node.end_lineno, node.end_col_offset), default=None)


@functools.lru_cache(maxsize=None)
def use_of(location: Location, is_index: bool = False) -> Use:
    """The use of the expression's value; ``is_index`` if the expression is a subscript that
    reads its index."""
    node = expression_at(location)
    if node is None:
        return Use("value", location.text.strip() or location.function)
    text = one_line(ast.unparse(node))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "range":
        return Use("range", ", ".join(one_line(ast.unparse(argument)) for argument in node.args), text)
    if is_index and isinstance(node, ast.Subscript):
        sliced = any(isinstance(part, ast.Slice) for part in ast.walk(node.slice))
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return Use("slice" if sliced else "index", one_line(", ".join(map(ast.unparse, parts))), text)
    if kind := _own_kind(node):
        return Use(kind, text, text)
    parents = parsed(location.file).parents
    inner: ast.AST = node
    while (parent := parents.get(inner)) is not None:
        kind = _kind(parent, inner)
        if kind or isinstance(parent, ast.stmt):
            return Use(kind or "value", text, one_line(_unparsed(parent)))
        inner = parent
    return Use("value", text)


def _own_kind(node: ast.expr) -> str:
    if isinstance(node, (ast.JoinedStr, ast.FormattedValue)):
        return "f-string"
    return "print" if isinstance(node, ast.Call) and _writes_text(node) else ""


def _writes_text(node: ast.Call) -> bool:
    called = ast.unparse(node.func)
    is_log = called.split(".")[-1] in ("debug", "info", "warning", "error", "log", "tqdm")
    return called == "print" or is_log and not called.startswith("torch.")


def _kind(parent: ast.AST, inner: ast.AST) -> str:
    if isinstance(parent, (ast.If, ast.IfExp)) and parent.test is inner:
        return "if"
    if isinstance(parent, ast.While) and parent.test is inner:
        return "while"
    if isinstance(parent, ast.Assert) and parent.test is inner:
        return "assert"
    if isinstance(parent, ast.Match) and parent.subject is inner:
        return "match"
    if isinstance(parent, (ast.JoinedStr, ast.FormattedValue)):
        return "f-string"
    if isinstance(parent, ast.Slice):
        return "slice"
    if isinstance(parent, ast.Subscript) and parent.slice is inner:
        return "index"
    if isinstance(parent, ast.Call) and inner is not parent.func:
        called = ast.unparse(parent.func)
        if called == "range":
            return "range"
        if _writes_text(parent):
            return "print"
        if called in ("int", "float", "bool"):
            return ""
        return "argument"
    if isinstance(parent, ast.Return):
        return "return"
    if isinstance(parent, (ast.For, ast.comprehension)) and parent.iter is inner:
        return "loop"
    return ""


def _unparsed(node: ast.AST) -> str:
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return ast.unparse(node.test)
    if isinstance(node, ast.Match):
        return f"match {ast.unparse(node.subject)}"
    return ast.unparse(node) if isinstance(node, (ast.expr, ast.Return, ast.Assign, ast.AugAssign, ast.Expr)) else ""


def one_line(text: str, width: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
