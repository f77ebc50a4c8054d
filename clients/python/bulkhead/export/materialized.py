"""A hint to Inductor: compute this once and keep it.

Inductor inlines an elementwise chain into each loop that reads it; in a matrix-vector product that
recomputes it for each row: a rotary angle's cosine, or SiLU's exponential, some hundred times.
`materialized(x)` is x; its only effect on the compiled function is that x has a buffer with a
contiguous last dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._inductor import ir, lowering

_library = torch.library.Library("bulkhead", "DEF")
_library.define("materialized(Tensor x) -> Tensor")
_library.impl("materialized", lambda x: x.clone(memory_format=torch.contiguous_format), "CompositeExplicitAutograd")
_library.impl("materialized", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format), "Meta")


@lowering.register_lowering(torch.ops.bulkhead.materialized.default, type_promotion_kind=None)
def _lower(x: lowering.TensorBox) -> lowering.TensorBox:
    return ir.ExternKernel.require_contiguous(x)


def materialized(x: Tensor) -> Tensor:
    """x, in a buffer of its own, contiguous."""
    kept: Tensor = torch.ops.bulkhead.materialized(x)
    return kept
