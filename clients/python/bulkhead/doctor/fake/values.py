"""Keeps values of small tensors on the CPU beside their fake tensors, so that branches, lengths and
counts that follow from known inputs are real. An unknown whole number is assumed to be one, so that
values computed from it agree."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

ELEMENTS_MAX = 4096  #: largest tensor whose value is kept
_NAME, _ASSUMED = "_doctor_value", "_doctor_assumed"
_lost: set[int] = set()  #: storages whose contents are no longer known
_kept: list[Any] = []  #: those storages, so that their numbers are not reused


def known(tensor: Any) -> Any:
    """The value as a real tensor on the CPU, or None."""
    value = getattr(tensor, _NAME, None)
    if value is None or value.untyped_storage()._cdata in _lost or tuple(value.shape) != tuple(tensor.shape):
        return None
    return value


def keep(tensor: Any, value: Any) -> None:
    if value.layout == torch.strided and value.numel() <= ELEMENTS_MAX:
        setattr(tensor, _NAME, value)


def is_assumed(tensor: Any) -> bool:
    return hasattr(tensor, _ASSUMED)


def follow(function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
    """Computes the result's value if all arguments have theirs. In-place operators change the
    kept values too."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    changed = changed_arguments(function, args, kwargs)
    if all(known(tensor) is not None for tensor in tensors) and all(fake.numel() <= ELEMENTS_MAX for fake in results):
        try:
            made = compute(function, args, kwargs)
        except Exception:  # for example a dtype that the CPU lacks
            made = None
        if made is not None:
            assumed = any(is_assumed(tensor) for tensor in tensors)
            for fake, value in zip(tree_leaves(result), tree_leaves(made)):
                if isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor) and not any(fake is one for one in changed):
                    _keep_of(fake, value, assumed)
            return
    for tensor in changed:
        forget(tensor)
    for fake in results:
        if fake.dim() == 0 and not fake.is_floating_point() and not any(fake is one for one in changed):
            with no_dispatch():
                one = torch.ones((), dtype=fake.dtype)
            _keep_of(fake, one, True)


def _keep_of(fake: Any, value: Any, assumed: bool) -> None:
    """Keeps no boolean that follows from an assumption: `branches.py` decides it."""
    if not (assumed and value.dtype == torch.bool):
        keep(fake, value)
        if assumed:
            setattr(fake, _ASSUMED, True)


def compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs the operator on the CPU. Every tensor argument must be known."""
    args, kwargs = tree_map(_real, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("generator", None)
    kwargs.pop("pin_memory", None)
    with no_dispatch():
        return function(*args, **kwargs)


def asked(tensor: Any, question: Any, otherwise: Any = None) -> Any:
    """What a function says of the tensor's value, outside all modes; ``otherwise`` if that is
    unknown."""
    value = known(tensor)
    if value is None:
        return otherwise
    with no_dispatch():
        return question(value)


def array(tensor: Any) -> Any:
    """The value as numpy's array. An unknown one takes the memory of one element,
    if it is large."""
    import numpy

    dtype = str(tensor.dtype).split(".")[1].replace("bfloat16", "float32")
    if known(tensor) is not None:
        return asked(tensor, lambda one: one.detach().to(getattr(torch, dtype)).numpy().copy())
    made = numpy.broadcast_to(numpy.full((), numpy.issubdtype(dtype, numpy.integer), dtype), tuple(tensor.shape))
    if tensor.numel() <= ELEMENTS_MAX:
        made = made.copy()
        if made.ndim and made.dtype != bool:
            made[..., 1:2] = 1  # so that the greatest has number 1, as an unknown whole number is 1
    return made


def forget(tensor: Any) -> None:
    value = getattr(tensor, _NAME, None)
    if value is not None:
        _kept.append(value.untyped_storage())
        _lost.add(value.untyped_storage()._cdata)


def changed_arguments(function: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that the operator writes."""
    changed: list[Any] = []
    for index, (name, is_written) in enumerate(arguments(function)):
        if is_written:
            given = kwargs.get(name, args[index] if index < len(args) else None)
            changed += [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    return changed


@functools.lru_cache(maxsize=None)
def arguments(function: Any) -> tuple[tuple[str, bool], ...]:
    """An operator's arguments: the name of each, and whether it is written."""
    of_schema = function._schema.arguments  # which makes objects of all
    return tuple((one.name, one.alias_info is not None and one.alias_info.is_write) for one in of_schema)


def _real(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return known(leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
