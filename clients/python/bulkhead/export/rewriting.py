"""Replaces linear layers by those of `products` while a function is traced.

`ExportedProgram.run_decompositions` could do it afterwards, but would trace the whole function
again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import products


class Rewriting(TorchFunctionMode):
    """While active, replaces linear layers called on this thread by those of
    `products.rewritten`."""

    def __init__(self, device: str, meets: products.Meets) -> None:
        super().__init__()
        self.found = {_called_as(operator): instead for operator, instead in products.rewritten(device, meets).items()}

    def __torch_function__(self, function: Callable[..., Any], types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        if (instead := self.found.get(function)) is not None:
            with self:  # a replacement may contain others
                done = instead(*arguments, **named)
            if done is not NotImplemented:
                return done
        return function(*arguments, **named)


def _called_as(operator: Any) -> Callable[..., Any]:
    """The function that a mode sees when a module calls `operator`."""
    called: Callable[..., Any] = torch.nn.functional.linear if operator is torch.ops.aten.linear.default else operator.overloadpacket
    return called
