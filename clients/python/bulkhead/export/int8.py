"""Weights of 8 bits: each row of a matrix by its largest magnitude; computation stays in the model's own type."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """A linear layer whose matrix is int8 [out, in] times a scale [out]."""

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
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale[:, None], self.bias)


def quantise(model: nn.Module) -> int:
    """Replaces every linear layer, the head too; embeddings stay. Returns how many."""
    found = [(module, name, child) for module in model.modules() for name, child in module.named_children() if type(child) is nn.Linear]
    for module, name, child in found:
        setattr(module, name, Int8Linear(child))
    return len(found)
