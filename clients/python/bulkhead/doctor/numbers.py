"""Python numbers that become part of a captured graph: found by comparing the operators of two calls."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

from torch.utils._pytree import tree_flatten, tree_unflatten

from . import findings
from .calls import called
from .findings import Findings
from .source import use_of
from .watch import Kernel, Watch

_NUMBERS_MAX = 8  #: that are varied, each by a call of its own
_NUDGE = 1.0625
_VALUE = "pass it as a tensor of the device: torch.full((), value, device=x.device) before the step, then value.fill_(new)"
_POSITION = "keep the position in a tensor of the device: x.index_copy_(dim, position, new), x.index_select(dim, position), position.add_(1)"
#: With integers these compare with a token's number or a vocabulary's size, which the model is made with.
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "clamp", "clamp_min", "clamp_max", "remainder", "where", "masked_fill", "masked_fill_", "full", "fill_")


def tell_differences(found: Findings, before: Sequence[Kernel], after: Sequence[Kernel], why: str) -> None:
    for one, other in zip(before, after):
        if one.where != other.where:
            return
        if one.shapes == other.shapes:
            _tell(found, one, other, why)


def _tell(found: Findings, one: Kernel, other: Kernel, why: str) -> None:
    number = next((a for a, b in zip(one.scalars, other.scalars) if a != b), None)
    if number is not None and one.place is not None:
        use = use_of(one.place)
        found.add(findings.BAKED_CONSTANT, findings.STALE, one.place,
                  f"`{use.text}` takes a number ({number!r}) that {why}: the graph keeps the one of its capture",
                  _POSITION if one.name in ("slice", "select") else _VALUE, use.kind)


def vary(found: Findings, watch: Watch, step: Any, args: Any, kwargs: Any, earlier: Sequence[Kernel], last: Sequence[Kernel]) -> None:
    """Calls once more for each number among the arguments, with that number changed. One that changes shapes, or how many operators
    run, only chooses among graphs. Shapes and numbers that differ between the two calls so far, as of a cache that grows, say nothing."""
    if [one.where for one in earlier] != [one.where for one in last]:
        earlier = last
    leaves, spec = tree_flatten((args, kwargs))
    varied = 0
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, bool) or not isinstance(leaf, (int, float)) or varied == _NUMBERS_MAX:
            continue
        varied += 1
        for other in _others(leaf):
            trace = _trace(watch, step, *tree_unflatten([*leaves[:index], other, *leaves[index + 1 :]], spec))
            if trace is None:
                continue
            runs = list(zip(earlier, last, trace))
            if len(trace) == len(last) and all(two.where == new.where and new.shapes == two.shapes for one, two, new in runs if one.shapes == two.shapes):
                for one, two, new in runs:
                    if one.scalars == two.scalars and not (isinstance(leaf, int) and two.name in _COMPARISONS):
                        _tell(found, two, new, "comes from an argument")
            break


def _others(number: int | float) -> Iterator[int | float]:
    if isinstance(number, float):
        yield number * _NUDGE if number else 0.0625
    else:
        yield number + 1
        yield number - 1


def _trace(watch: Watch, step: Any, args: Any, kwargs: Any) -> list[Kernel] | None:
    """The operators of a call whose findings do not count; None where it raises."""
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
