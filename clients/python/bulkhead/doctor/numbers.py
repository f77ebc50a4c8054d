"""Finds Python numbers that become part of a captured graph, by comparing the
operators of two calls."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
import re
import sys
import types
from dataclasses import dataclass
from typing import Any, Callable, Collection, ContextManager, Iterator, Mapping, Sequence

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from . import findings
from .calls import Step, called
from .coverage import nodes
from .draws import Draws
from .fake.watch import Kernel, Watch
from .findings import Findings
from .source import absolute, is_users, tree, use_of

_NUMBERS_MAX = 32  #: maximum of varied numbers, each in its own call
_DEPTH_MAX = 4  #: of objects within objects
_ARGUMENT = "comes from an argument"
#: Parameters of sampling and guidance, which users change from call to call wherever
#: they keep them.
_SAMPLING = frozenset(
    "temperature top_p top_k min_p typical_p repetition_penalty presence_penalty frequency_penalty length_penalty "
    "guidance_scale cfg_scale cfg_weight exaggeration strength noise_scale length_scale".split()
)
#: Numbers of a model, also in a configuration that is given.
_FIXED = re.compile(r"(^|_)(eps|epsilon|dim|dims|size|theta|id|ids)$|^(d|n|num)_")
_NUDGE = 1.0625
_VALUE = "pass it as a tensor of the device: torch.full((), value, device=x.device) before the step, then value.fill_(new)"
_POSITION = (
    "keep the position in a tensor of the device: x.index_copy_(dim, position, new), x.index_select(dim, position), "
    "position.add_(1)"
)
#: With integers these compare with a token id or a vocabulary size, which are fixed in the model.
_COMPARISONS = frozenset(
    "eq ne lt le gt ge clamp clamp_min clamp_max remainder where masked_fill masked_fill_ index_put_ full fill_".split()
)


def tell_differences(found: Findings, before: Sequence[Kernel], after: Sequence[Kernel]) -> None:
    for one, other in zip(before, after):
        if one.where != other.where:
            return
        if one.shapes == other.shapes:
            _tell(found, one, other, "differs from call to call")


def _tell(found: Findings, one: Kernel, other: Kernel, why: str) -> None:
    # NaN equals NaN here.
    number = next((a for a, b in zip(one.scalars, other.scalars) if a != b and not (a != a and b != b)), None)
    if number is not None and one.location is not None:
        use = use_of(one.location)
        found.add(findings.BAKED_CONSTANT, findings.STALE, one.location,
                  f"`{use.text}` takes a number ({number!r}) that {why}: the graph keeps the one of its capture",
                  _POSITION if one.name in ("slice", "select") else _VALUE, use.kind)


def vary(found: Findings, watch: Watch, draws: Draws, call: Step, variables: Mapping[str, Any], files: Collection[str],
         earlier: Sequence[Kernel], last: Sequence[Kernel]) -> None:  # fmt: skip
    """Makes one more call for each number that a caller may change, with that number changed. A
    number that changes shapes, or the count of operators, only selects a graph. Shapes and numbers
    that differ between the first two calls (a growing cache) are ignored.

    ``variables``: what the step can reach beside its arguments. ``files``: those of the
    user that ran."""
    if [one.where for one in earlier] != [one.where for one in last]:
        earlier = last
    step, args, kwargs = call
    numbers = [*_given(step, args, kwargs), *_kept(variables, args, kwargs, files)]
    if len(numbers) > _NUMBERS_MAX:
        told = f"the arguments have {len(numbers)} numbers: whether a kernel takes one was asked of the first {_NUMBERS_MAX}"
        watch.skipped.append(told)
    for number in numbers[:_NUMBERS_MAX]:
        for other in _others(number.value):
            with number.changed(other) as (new_args, new_kwargs):
                changed_run = trace(watch, draws, step, new_args, new_kwargs)
            if changed_run is None:
                continue
            runs = list(zip(earlier, last, changed_run))
            if len(changed_run) == len(last) and all(
                two.where == new.where and new.shapes == two.shapes for one, two, new in runs if one.shapes == two.shapes
            ):
                for one, two, new in runs:
                    if one.scalars == two.scalars and not (_is_whole(number.value) and two.name in _COMPARISONS):
                        _tell(found, two, new, number.why)
            break


@dataclass(frozen=True)
class _Number:
    """``changed`` gives the arguments of a call for which the number is another one."""

    value: Any
    why: str
    changed: Callable[[Any], ContextManager[tuple[Any, Any]]]


def _given(step: Any, args: Any, kwargs: Any) -> Iterator[_Number]:
    """The numbers among the arguments, and those of their defaults that are
    parameters of a sampler."""
    leaves, spec = tree_flatten((args, kwargs))
    for index, leaf in enumerate(leaves):
        if _is_number(leaf):
            yield _Number(leaf, _ARGUMENT, functools.partial(_in_place_of, leaves, index, spec))
    with contextlib.suppress(TypeError, ValueError):  # of a builtin
        signature = inspect.signature(step.forward if isinstance(step, torch.nn.Module) else step)
        bound = signature.bind(*args, **kwargs).arguments
        for name, default in ((one.name, one.default) for one in signature.parameters.values() if one.name not in bound):
            if name in _SAMPLING and _is_number(default):
                yield _Number(default, _ARGUMENT, functools.partial(_beside, args, kwargs, name))


def _kept(variables: Mapping[str, Any], args: Any, kwargs: Any, files: Collection[str]) -> Iterator[_Number]:
    """The numbers that a caller may change in objects: those among the arguments, and those that
    the step keeps."""
    assigned = frozenset[str]().union(*(_assigned_in(file) for file in files if "-packages" + os.sep not in file))
    seen: set[int] = set()
    for is_given, roots in ((True, tree_leaves((args, kwargs))), (False, variables.values())):
        waiting = [(root, is_given, 0) for root in roots]
        for owner, is_given, depth in waiting:  # which grows
            if id(owner) in seen or depth > _DEPTH_MAX or not _has_parts(owner, depth):
                continue
            seen.add(id(owner))
            is_given = is_given and not isinstance(owner, torch.nn.Module)
            for name, value in _parts(owner):
                if not _is_number(value):
                    waiting.append((value, is_given, depth + 1))
                elif _may_change(owner, name, is_given, assigned):
                    why = _ARGUMENT if is_given else f"is kept in `{name}`, which a caller may change"
                    yield _Number(value, why, functools.partial(_with, owner, name, (args, kwargs)))


def _has_parts(owner: Any, depth: int) -> bool:
    """Whether it is a container, or an object of the user's class. What an installed package keeps
    is fixed with the model."""
    if isinstance(owner, (list, tuple, dict)):
        return depth > 0  # the arguments' own are gone through by their leaves
    return isinstance(owner, (types.SimpleNamespace, torch.nn.Module)) or is_of_user(owner)


def _parts(owner: Any) -> list[tuple[Any, Any]]:
    if isinstance(owner, dict):
        return [(name, value) for name, value in owner.items() if isinstance(name, str)]
    if isinstance(owner, (list, tuple)):
        return [("", one) for one in owner if not _is_number(one)]
    named_slots = [vars(kind).get("__slots__", ()) for kind in type(owner).__mro__]
    slots = [name for names in named_slots if not isinstance(names, str) for name in names if hasattr(owner, name)]
    modules = owner._modules.items() if isinstance(owner, torch.nn.Module) else ()
    return [*getattr(owner, "__dict__", {}).items(), *((name, getattr(owner, name)) for name in slots), *modules]


def _may_change(owner: Any, name: Any, is_given: bool, assigned: Collection[str]) -> bool:
    """Whether a caller may change the number from call to call; others, such as eps, a dimension or
    a scale, are the model's."""
    if name in _SAMPLING:
        return "attention" not in type(owner).__name__.lower()
    if is_given:
        return _FIXED.search(name) is None
    return not isinstance(owner, dict) and is_of_user(owner) and (name in assigned or name in _set_by_methods(owner.__class__))


@functools.lru_cache(maxsize=None)
def _assigned_in(file: str) -> frozenset[str]:
    """The attributes that a file assigns of what has a name of its own: `model.scale = …`, unless
    an `__init__` does."""
    return frozenset(
        node.attr
        for node, function in nodes(file)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
        and node.value.id not in ("self", "cls") and not function.endswith("__init__")
    )  # fmt: skip


@functools.lru_cache(maxsize=None)
def _set_by_methods(kind: type) -> frozenset[str]:
    """The attributes that methods of the class are there to set: `set_scale`, and setters
    of properties."""
    found: set[str] = set()
    for one in kind.__mro__:
        codes = [value.__code__ for value in vars(one).values() if inspect.isfunction(value)]
        file = absolute(codes[0].co_filename) if codes else ""
        for node in ast.walk(tree(file)) if file and is_users(file) else ():
            if isinstance(node, ast.ClassDef) and node.name == one.__name__:
                methods = [method for method in node.body if isinstance(method, ast.FunctionDef) and _is_setter(method)]
                parts = [part for method in methods for part in ast.walk(method) if isinstance(part, ast.Attribute)]
                found |= {part.attr for part in parts if isinstance(part.ctx, ast.Store)}
    return frozenset(found)


def _is_setter(method: ast.FunctionDef) -> bool:
    return method.name.startswith("set_") or any(ast.unparse(one).endswith(".setter") for one in method.decorator_list)


@contextlib.contextmanager
def _in_place_of(leaves: list[Any], index: int, spec: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    yield tree_unflatten([*leaves[:index], other, *leaves[index + 1 :]], spec)


@contextlib.contextmanager
def _beside(args: Any, kwargs: Any, name: str, other: Any) -> Iterator[tuple[Any, Any]]:
    yield args, {**kwargs, name: other}


@contextlib.contextmanager
def _with(owner: Any, name: str, given: tuple[Any, Any], other: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(owner, dict):
        change = functools.partial(owner.__setitem__, name)
        before = owner[name]
    else:
        change = functools.partial(object.__setattr__, owner, name)  # one that is frozen too
        before = getattr(owner, name)
    change(other)
    try:
        yield given
    finally:
        change(before)


def is_of_user(leaf: Any) -> bool:
    """Whether the object's class is the user's, not an installed package's."""
    name = type(leaf).__module__
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return (
        (hasattr(leaf, "__dict__") or hasattr(type(leaf), "__slots__"))
        and not isinstance(leaf, type)
        and (is_users(file) and "-packages" + os.sep not in file if file else name == "__main__" or name not in sys.modules)
    )


def _plain(leaf: Any) -> Any:
    """Converts a numpy scalar to a Python number."""
    return leaf.item() if type(leaf).__module__ == "numpy" and getattr(leaf, "ndim", 1) == 0 else leaf


def _is_number(leaf: Any) -> bool:
    return isinstance(_plain(leaf), (int, float)) and not isinstance(_plain(leaf), bool)


def _is_whole(number: Any) -> bool:
    return isinstance(_plain(number), int)


def _others(number: Any) -> Iterator[Any]:
    """Other values to try. A numpy scalar keeps its type."""
    if _is_whole(number):
        yield number + 1
        yield number - 1
    else:
        yield number * type(number)(_NUDGE) if number else type(number)(0.0625)


def trace(watch: Watch, draws: Draws, step: Any, args: Any, kwargs: Any) -> list[Kernel] | None:
    """The operators of a call with the latest call's random numbers, whose findings are discarded;
    None if it raises."""
    draws.restore()
    kept, watch.found = watch.found, Findings()
    watch.begin_call()
    watch.step = watch.recording = True
    try:
        called(step, args, kwargs)
        watch.end_call()
    except Exception:
        return None
    finally:
        watch.found, watch.step, watch.recording = kept, False, False
    return watch.trace
