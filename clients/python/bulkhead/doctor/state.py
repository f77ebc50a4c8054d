"""Finds Python objects that change from call to call, which a replayed graph would not change."""

from __future__ import annotations

import ast
import sys
import types
from collections import deque
from dataclasses import dataclass
from typing import Any, Iterator

import torch

from . import findings
from .coverage import Executed, nodes
from .findings import Findings
from .source import Location, node_location, one_line

_OBJECTS_MAX, _DEPTH_MAX, _ARRAY_MAX = 50_000, 10, 4096
_CHANGES = frozenset(
    "append extend insert pop popleft appendleft remove clear update setdefault add discard popitem reverse sort put".split()
)
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True)
class Seen:
    """What can change in one object; holds a tensor itself, so that its id is not reused."""

    summary: Any
    tensor: Any = None
    text: str = ""  #: for a reader, of what has no readable summary
    is_container: bool = False


Path = tuple[str, ...]  #: how it is reached, the names of attributes with a dot in front


def snapshot(roots: dict[str, Any]) -> dict[Path, Seen]:
    seen: dict[Path, Seen] = {}
    numpy = sys.modules.get("numpy")
    arrays = () if numpy is None else (numpy.ndarray, numpy.generic)
    for path, value in reached(roots):
        if isinstance(value, torch.Tensor):
            seen[path] = Seen(tuple(value.shape), value)
        elif isinstance(value, _PLAIN):
            seen[path] = Seen(value)
        elif isinstance(value, (list, tuple, dict, set, frozenset, deque)):
            seen[path] = Seen(len(value), is_container=True)
        elif isinstance(value, arrays) and value.size <= _ARRAY_MAX and not value.dtype.hasobject:
            seen[path] = Seen((value.shape, value.tobytes()), text=str(value.tolist()))
        elif type(value).__module__ == "itertools":  # itertools.count says where it is
            seen[path] = Seen(repr(value))
    return seen


def reached(roots: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """All objects that are reached from ``roots``. A tensor and a plain value come once for each
    path, others once."""
    visited: set[int] = set()
    waiting: deque[tuple[Path, Any]] = deque(((name,), value) for name, value in roots.items())
    count = 0
    while waiting and count < _OBJECTS_MAX:
        path, value = waiting.popleft()
        if not isinstance(value, (torch.Tensor, *_PLAIN)):
            if id(value) in visited or len(path) >= _DEPTH_MAX:
                continue
            visited.add(id(value))
            waiting.extend(((*path, name), child) for name, child in _children(value))
        count += 1
        yield path, value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((repr(key), child) for key, child in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((str(index), child) for index, child in enumerate(value))
    elif isinstance(value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return
    elif isinstance(value, torch.nn.Module):
        plain = {name: child for name, child in vars(value).items() if not name.startswith("_") or name not in _MODULE_NAMES}
        yield from ((f".{name}", child) for name, child in plain.items())
        for tensors in (value._buffers, value._modules):
            yield from ((f".{name}", child) for name, child in tensors.items())
        yield from _of_class(type(value))
    elif _is_plain_object(value):
        yield from ((f".{name}", child) for name, child in list(getattr(value, "__dict__", {}).items()))
        yield from _of_class(type(value), value)


def _of_class(kind: type, value: Any = None) -> Iterator[tuple[str, Any]]:
    """Attributes of the user's class and its bases, and the slots of ``value``."""
    for one in kind.__mro__:
        if one.__module__.split(".")[0] in ("builtins", "torch"):
            continue
        for name, child in list(vars(one).items()):
            if isinstance(child, types.MemberDescriptorType):
                if hasattr(value, name):
                    yield f".{name}", getattr(value, name)
            elif not name.startswith("__") and isinstance(child, (*_PLAIN, list, dict, set, deque, torch.Tensor)):
                yield f".{name}", child


_MODULE_NAMES = frozenset(vars(torch.nn.Module()))  #: of its own


def _is_plain_object(value: Any) -> bool:
    return (hasattr(value, "__dict__") or hasattr(value, "__slots__")) and type(value).__module__.split(".")[0] not in _OTHERS


#: Modules whose objects are not examined further.
_OTHERS = (
    *("torch", "builtins", "threading", "concurrent", "logging", "re", "itertools", "random"),
    *("queue", "_queue", "asyncio", "multiprocessing"),
)


@dataclass(frozen=True)
class Change:
    path: Path
    what: str
    severity: str
    is_container: bool = False  #: a list, a set, a dictionary …, whose length changes

    @property
    def name(self) -> str:
        """The name of the attribute or variable that holds it."""
        return next((part[1:] for part in reversed(self.path) if part.startswith(".")), self.path[0].split()[-1])

    @property
    def owned(self) -> str:
        """How the code reaches it."""
        parts = (part if part.startswith(".") else f"[{part}]" for part in self.path[1:])
        return self.path[0].split()[-1] + "".join(parts)

    @property
    def is_variable(self) -> bool:
        return not any(part.startswith(".") for part in self.path)

    @property
    def is_argument(self) -> bool:
        """Whether it lies in an argument, and in no attribute: `name = …` is then
        another object."""
        return self.is_variable and self.path[0].startswith(("argument ", "default "))


def changes(before: dict[Path, Seen], after: dict[Path, Seen], used: set[int]) -> list[Change]:
    """``used``: ids of the tensors that the call in between used."""
    found: list[Change] = []
    for path, new in after.items():
        old = before.get(path)
        if old is None:
            continue  # reported for its container, which has grown
        if (old.tensor is None) != (new.tensor is None):
            found.append(Change(path, "is replaced", findings.STALE))
        elif new.tensor is not None:
            if old.summary != new.summary:
                what = f"changes its shape from {list(old.summary)} to {list(new.summary)} in a call"
                found.append(Change(path, what, findings.RECAPTURES))
            elif new.tensor is not old.tensor and id(old.tensor) in used:
                what = "becomes another tensor at each call, and the call reads the one before"
                found.append(Change(path, what, findings.STALE))
        elif old.summary != new.summary:
            was, is_now = (one_line(one.text or repr(one.summary), 30) for one in (old, new))
            what = "changes in a call" if was == is_now else f"changes from {was} to {is_now} in a call"
            found.append(Change(path, what, findings.STALE, old.is_container or new.is_container))
    return found


def tell(found: Findings, changed: list[Change], executed: Executed, target: Location) -> None:
    """Reports at the lines that write the changed name; if there is none, at the
    target's definition."""
    for change in changed:
        locations = list(_locations(change, executed))
        if not locations and change.is_argument:
            locations = list(_locations(change, executed, by_alias=True))
        for location, written in locations or [(target, change.owned)]:
            remedy = (f"keep it in a tensor of the device and of a fixed shape, changed in place: {written}.copy_(new), "
                      "index_copy_ at a position that is a tensor; or change it outside the step")  # fmt: skip
            if change.is_container:
                remedy = f"change `{written}` outside the step, after the replay"
            reason = f"`{change.name}` {change.what}; a replay runs no Python"
            found.add(findings.PYTHON_STATE, change.severity, location, reason, remedy)


def _locations(change: Change, executed: Executed, by_alias: bool = False) -> Iterator[tuple[Location, str]]:
    """With what each writes, in its own words. ``by_alias``: the lines that change an object under
    any name of a variable."""
    for file, lines in executed.items():
        for node, function in nodes(file):
            if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Call, ast.Delete)) or node.lineno not in lines:
                continue
            if written := _written(node, change, by_alias):
                yield node_location(file, node, function), one_line(written)


def _written(node: ast.AST, change: Change, by_alias: bool) -> str:
    """The source of what the node changes, if that is it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        is_it = len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and node.args[1].value == change.name
        return f"{ast.unparse(node.args[0])}.{change.name}" if is_it else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        parts = node.args[:1] if node.func.id == "next" else []
    elif isinstance(node, ast.Call):
        parts = [node.func.value] if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES else []
    else:
        parts = _targets(node, change)
    for part in parts:
        if _is_it(part, change, by_alias):
            # d[key] = …: the container, not what it holds.
            while change.is_container and isinstance(part, ast.Subscript):
                part = part.value
            return ast.unparse(part)
    return ""


def _targets(node: ast.AST, change: Change) -> list[ast.expr]:
    """Of an assignment or a `del`, one by one."""
    targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]  # type: ignore[attr-defined]
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    if change.is_argument and not isinstance(node, ast.AugAssign):
        parts = [part for part in parts if not isinstance(part, ast.Name)]
    return parts


def _is_it(node: ast.expr, change: Change, by_alias: bool) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr == change.name
    return isinstance(node, ast.Name) and change.is_variable and (by_alias or node.id == change.name)
