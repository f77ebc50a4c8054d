"""Finds Python numbers that become part of a captured graph, by comparing the operators of two calls."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from typing import Any, Callable, ContextManager, Iterator, Sequence

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import findings
from .calls import called
from .draws import Draws
from .findings import Findings
from .source import is_users, use_of
from .watch import Kernel, Watch

_NUMBERS_MAX = 32  #: maximum of varied numbers, each in its own call
_NUDGE = 1.0625
_VALUE = "pass it as a tensor of the device: torch.full((), value, device=x.device) before the step, then value.fill_(new)"
_POSITION = (
    "keep the position in a tensor of the device: x.index_copy_(dim, position, new), x.index_select(dim, position), "
    "position.add_(1)"
)
# : With integers these compare with a token id or a vocabulary size, which are fixed in the model.
_COMPARISONS = frozenset(
    "eq ne lt le gt ge clamp clamp_min clamp_max remainder where masked_fill masked_fill_ full fill_".split()
)


def tell_differences(found: Findings, before: Sequence[Kernel], after: Sequence[Kernel], why: str) -> None:
    for one, other in zip(before, after):
        if one.where != other.where:
            return
        if one.shapes == other.shapes:
            _tell(found, one, other, why)


def _tell(found: Findings, one: Kernel, other: Kernel, why: str) -> None:
    number = next((a for a, b in zip(one.scalars, other.scalars) if a != b and not (a != a and b != b)), None)  # NaN equals NaN here
    if number is not None and one.place is not None:
        use = use_of(one.place)
        found.add(findings.BAKED_CONSTANT, findings.STALE, one.place,
                  f"`{use.text}` takes a number ({number!r}) that {why}: the graph keeps the one of its capture",
                  _POSITION if one.name in ("slice", "select") else _VALUE, use.kind)


def vary(
    found: Findings,
    watch: Watch,
    draws: Draws,
    step: Any,
    args: Any,
    kwargs: Any,
    earlier: Sequence[Kernel],
    last: Sequence[Kernel],
) -> None:
    """Makes one more call for each number among the arguments, with that number changed. A number that changes
    shapes, or the count of operators, only selects a graph. Shapes and numbers that differ between the first two
    calls (a growing cache) are ignored."""
    if [one.where for one in earlier] != [one.where for one in last]:
        earlier = last
    given = list(_numbers(args, kwargs))
    if len(given) > _NUMBERS_MAX:
        watch.skipped.append(
            f"the arguments have {len(given)} numbers: whether a kernel takes one was asked of the first {_NUMBERS_MAX}"
        )
    for number, changed in given[:_NUMBERS_MAX]:
        for other in _others(number):
            with changed(other) as (new_args, new_kwargs):
                changed_run = trace(watch, draws, step, new_args, new_kwargs)
            if changed_run is None:
                continue
            runs = list(zip(earlier, last, changed_run))
            if len(changed_run) == len(last) and all(
                two.where == new.where and new.shapes == two.shapes for one, two, new in runs if one.shapes == two.shapes
            ):
                for one, two, new in runs:
                    if one.scalars == two.scalars and not (_is_whole(number) and two.name in _COMPARISONS):
                        _tell(found, two, new, "comes from an argument")
            break


_Changed = Callable[[Any], ContextManager[tuple[Any, Any]]]  #: the arguments, while one number is changed


def _numbers(args: Any, kwargs: Any) -> Iterator[tuple[Any, _Changed]]:
    """The numbers of the arguments, and of objects among them."""
    leaves, spec = tree_flatten((args, kwargs))
    for index, leaf in enumerate(leaves):
        if _is_number(leaf):
            yield leaf, functools.partial(_in_place_of, leaves, index, spec)
        elif isinstance(leaf, types.SimpleNamespace) or is_of_user(leaf):
            for name, value in vars(leaf).items():
                if _is_number(value):
                    yield value, functools.partial(_with, vars(leaf), name, (args, kwargs))


@contextlib.contextmanager
def _in_place_of(leaves: list[Any], index: int, spec: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    yield tree_unflatten([*leaves[:index], other, *leaves[index + 1 :]], spec)


@contextlib.contextmanager
def _with(attributes: dict[str, Any], name: str, given: tuple[Any, Any], other: Any) -> Iterator[tuple[Any, Any]]:
    before, attributes[name] = attributes[name], other
    try:
        yield given
    finally:
        attributes[name] = before


def is_of_user(leaf: Any) -> bool:
    """Whether the object's class is the user's, not an installed package's: a package's configuration is fixed with the model."""
    file = getattr(sys.modules.get(type(leaf).__module__), "__file__", None) or ""
    return (
        hasattr(leaf, "__dict__")
        and not isinstance(leaf, (torch.nn.Module, type))
        and is_users(file)
        and "-packages" + os.sep not in file
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
    """The operators of a call with the latest call's random numbers, whose findings are discarded; None if it raises."""
    draws.restore()
    kept, watch.found = watch.found, Findings()
    watch.begin_call()
    watch.step = watch.recording = True
    try:
        called(step, args, kwargs)
    except Exception:
        return None
    finally:
        watch.found, watch.step, watch.recording = kept, False, False
    return watch.trace
