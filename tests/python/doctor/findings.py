"""What a corpus file says of itself: its cases, and for each the findings that its comments expect.

A line's `# finds: CODE …` belongs to each case whose function or class has the line, or names,
directly or through others, one that has it; outside of all functions and classes, to every case of
the file. CASES maps a case to a factory, which is given the device and returns the arguments of one
call; for a class, (those of its constructor, those of the call).
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class Case(NamedTuple):
    file: Path
    name: str
    target: Callable[..., Any]
    factory: Callable[[Any], tuple[Any, ...]]
    expected: set[tuple[int, str]]  # line, code


def cases(file: Path) -> Iterator[Case]:
    module = imported(file)
    text = file.read_text()
    marks = {
        (number, code)
        for number, line in enumerate(text.splitlines(), 1)
        if (found := re.search(r"# finds: ([a-z_ ]+)$", line))
        for code in found[1].split()
    }
    parts = {node.name: node for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    outside = {mark for mark in marks if not any(has(node, mark[0]) for node in parts.values())}
    for name, factory in module.CASES.items():
        reached = reached_from(name, parts)
        inside = {mark for mark in marks if any(has(parts[part], mark[0]) for part in reached)}
        yield Case(file, name, getattr(module, name), factory, inside | outside)


def imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def reached_from(name: str, parts: dict[str, Any]) -> set[str]:
    reached, waiting = set(), [name]
    while waiting:
        part = waiting.pop()
        if part in parts and part not in reached:
            reached.add(part)
            waiting += [node.id for node in ast.walk(parts[part]) if isinstance(node, ast.Name)]
    return reached
