"""Weights of 8 and of 4 bits in linear layers; computation stays in the model's own type.

8 bits: each row of a matrix has a scale. 4 bits: each 32 elements of a row have a scale and a least
value, as in GGUF's kind Q4_1, whose matrices are therefore preserved almost exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import Error
from . import products

KINDS = ("int8", "int4")


class Int8Linear(nn.Module):
    """A linear layer whose matrix is int8 [out, in] times a scale [out], by the row's largest
    magnitude."""

    weight: Tensor
    scale: Tensor

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        exact = original.weight.detach().float()
        scale = exact.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("weight", (exact / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(original.weight.dtype))
        self.bias = original.bias

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = torch.ops.bulkhead.linear_int8(x, self.weight, self.scale, self.bias)
        return done


class Int4Linear(nn.Module):
    """A linear layer whose matrix is `products.packed` uint8 [out, in / 2] times a scale
    [out, in / 32] plus a least value [out, in / 32], by the smallest and the largest of each
    group."""

    weight: Tensor
    scale: Tensor
    least: Tensor

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        dtype = original.weight.dtype
        groups = original.weight.detach().float().unflatten(1, (-1, products.GROUP))
        least = groups.amin(-1).to(dtype)
        scale = ((groups.amax(-1) - least).clamp(min=torch.finfo(torch.float32).tiny) / 15).to(dtype)
        levels = ((groups - least.unsqueeze(-1)) / scale.unsqueeze(-1)).nan_to_num(0).round().clamp(0, 15)
        self.register_buffer("weight", products.packed(levels.to(torch.uint8)))
        self.register_buffer("scale", scale)
        self.register_buffer("least", least)
        self.bias = original.bias

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = torch.ops.bulkhead.linear_int4(x, self.weight, self.scale, self.least, self.bias)
        return done


def quantise(model: nn.Module, step: nn.Module, kind: str, logits: int) -> dict[str, int]:
    """Replaces every linear layer of `model` that `step` has too. Embeddings stay, and so do layers
    that only the package's methods run (a vision tower, an audio codec): they add no cost per step.
    Returns how many layers are of which kind.

    Exceptions from int4: a layer with `logits` outputs, a head, is int8, because its errors affect
    the choice of a token; so is one whose inputs are not a multiple of a group. `step` may keep an
    old layer: cut the model again.

    Errors: input_invalid for a step without a linear layer."""
    stepped = set(step.modules())
    found = [(module, name, child) for module in model.modules() for name, child in module.named_children() if type(child) is nn.Linear and child in stepped]
    counts = dict.fromkeys(KINDS, 0)
    for module, name, child in found:
        small = kind == "int4" and child.out_features != logits and child.in_features % products.GROUP == 0
        setattr(module, name, Int4Linear(child) if small else Int8Linear(child))
        counts["int4" if small else "int8"] += 1
    if not found:
        raise Error("input_invalid", f"exporting with --weights {kind} a model without linear layers", "leave --weights out")
    return {kind: count for kind, count in counts.items() if count}
