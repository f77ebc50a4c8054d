"""Where a tensor of the CPU comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Sequence

import torch

from ..source import Location

ARGUMENT, SETUP, STEP, LITERAL, INTERNAL, READ, FOLLOWS = "argument", "setup", "step", "literal", "internal", "read", "follows"


@dataclass(frozen=True)
class Origin:
    """The origin of a CPU tensor. ``kind``: an argument, made before or in the step, from a literal
    for the device, made within PyTorch, read from the GPU, or made for another tensor's device."""

    kind: str
    location: Location | None = None
    made_by: str = ""
    is_module: bool = False
    #: of a parameter or a buffer: the modules around it, and where each is made
    makers: tuple[tuple[Any, Location | None], ...] = ()
    #: Of the other tensors that the user made on the CPU, and that it was computed from.
    beside: tuple[Origin, ...] = ()

    @property
    def is_made(self) -> bool:
        return self.location is not None and self.kind in (STEP, SETUP, FOLLOWS)


def joined(origins: Sequence[Origin]) -> Origin | None:
    """The origin of what is computed on the CPU from tensors with these: one that the user made, or
    gave, before others."""
    if len(set(origins)) < 2:
        return next(iter(origins), None)
    alone = dict.fromkeys(replace(part, beside=()) for one in origins for part in (one, *one.beside))
    first = min(alone, key=lambda one: one.kind in (FOLLOWS, INTERNAL))
    return replace(first, beside=tuple(one for one in alone if one.kind in (STEP, SETUP) and one != first))


def read_before(tensor: Any) -> Location | None:
    """Where a tensor of the CPU was copied from the GPU."""
    origin: Origin | None = getattr(tensor, "_doctor_origin", None)
    return origin.location if origin is not None and origin.kind == READ else None


def is_of_gpu(leaf: Any) -> bool:
    """Whether it lies on the GPU, or was copied from there."""
    return isinstance(leaf, torch.Tensor) and (leaf.device.type == "cuda" or read_before(leaf) is not None)


def is_pinned(tensor: Any) -> bool:
    return bool(getattr(tensor, "_doctor_pinned", False))
