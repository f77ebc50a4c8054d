"""Records which lines of the user's files a run executes."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import sys
from collections import defaultdict
from types import FrameType
from typing import Any, Callable, Iterator

from .source import is_users, tree


@contextlib.contextmanager
def traced(called: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Calls ``called`` for each function that is called meanwhile, as `sys.settrace` does."""
    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


class Executed(defaultdict[str, set[int]]):
    """Executed lines by file."""

    def __init__(self) -> None:
        super().__init__(set)
        self._tracers: dict[str, Any] = {}  #: by a code's file name: what runs at each of its lines

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """Records while entered."""
        return traced(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in self._tracers:
            self._tracers[file] = self._tracer(self[os.path.abspath(file)]) if is_users(file) else None
        tracer = self._tracers[file]
        return None if tracer is None else tracer(frame, event, argument)

    def _tracer(self, lines: set[int]) -> Any:
        def stepped(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return stepped

        return stepped


@functools.lru_cache(maxsize=256)
def nodes(file: str) -> list[tuple[ast.AST, str]]:
    """All nodes of a file, each with its function's name; empty at module level."""
    return list(_named(tree(file), ""))


def _named(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{function}.{child.name}" if function else child.name
        yield child, inner
        yield from _named(child, inner)
