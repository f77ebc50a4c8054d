"""How compiled functions compute matrix products, by the number of vectors.

With few vectors, reading the matrix dominates; with a prompt, arithmetic soon does. In float32 on a
CPU our own kernel computes both: it reads the matrix once and in order, and asks for what lies
ahead. Elsewhere few vectors meet plain sums, row by row, which read the matrix once and in order as
well, and which Inductor fuses with the code around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from .materialized import materialized
from .product_kernel import product

#: Rows that a GPU's sums are written for: both of a sequence with guidance, or of two. cuBLAS
# would pad them to a tile, and its output could not be fused.
FEW = 4

#: Few vectors, a prompt, or unknown.
Meets = Literal["vectors", "prompt", "anything"]

_library = torch.library.Library("bulkhead", "FRAGMENT")


def rewritten(device: str, meets: Meets) -> dict[Any, Callable[..., Any]]:
    """Decompositions for a function, by what its matrices are multiplied with."""
    linear, int8, int4 = torch.ops.aten.linear.default, torch.ops.bulkhead.linear_int8.default, torch.ops.bulkhead.linear_int4.default
    if meets == "vectors":
        if device == "cpu":
            return {linear: _of_vectors, int8: _int8_of_vectors, int4: _int4_of_vectors}
        return {linear: _as_sum_of_few, int8: _int8_as_sum, int4: _int4_as_sum}
    if device == "cpu" and meets == "prompt":
        return {linear: _of_prompt, int8: _int8_of_prompt, int4: _int4_of_prompt}
    return {int8: _int8_as_linear, int4: _int4_as_linear}


def _as_sum(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = materialized(x.reshape(-1, x.shape[-1]))
    products = (weight.unsqueeze(1) * rows.unsqueeze(0)).sum(-1).t()
    done = materialized(products).reshape(*x.shape[:-1], weight.shape[0])
    return done if bias is None else done + bias


def _as_sum_of_few(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """On a GPU: Inductor itself writes sums for one row; cuBLAS is faster for many, or for a
    varying number."""
    rows = x.numel() // x.shape[-1]
    return _as_sum(x, weight, bias) if isinstance(rows, int) and 1 < rows <= FEW else NotImplemented


_product = product("Float32", ("weight",), torch.nn.functional.linear)


def _of_vectors(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _computed(_product, x, weight, bias=bias) if x.dtype == torch.float32 else _as_sum(x, weight, bias)


def _of_prompt(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _of_vectors(x, weight, bias) if _as_vectors(x) else NotImplemented


def _as_vectors(x: Tensor) -> bool:
    """Whether a prompt meets the matrix as vectors do: in float32, or with one row, as for a head
    after the last position."""
    rows = x.numel() // x.shape[-1]
    return x.dtype == torch.float32 or (isinstance(rows, int) and rows == 1)


def _computed(kernel: Callable[..., Tensor], x: Tensor, *matrix: Tensor, bias: Tensor | None) -> Tensor:
    done = kernel(x.reshape(-1, x.shape[-1]), *matrix).reshape(*x.shape[:-1], matrix[0].shape[0])
    return done if bias is None else done + bias


# Weights of 8 bits: int8 [out, in], each row with a scale [out].
_library.define("linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")


def _int8_as_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight.to(x.dtype) * scale[:, None], bias)


def _int8_as_sum(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `_as_sum`: reads the bytes once and widens them in registers. In float32, because an
    unscaled sum exceeds float16's range."""
    rows = materialized(x.reshape(-1, x.shape[-1]))
    sums = (weight.to(x.dtype).unsqueeze(1) * rows.unsqueeze(0)).sum(-1, dtype=torch.float32) * scale[:, None]
    done = materialized(sums.to(x.dtype).t()).reshape(*x.shape[:-1], weight.shape[0])
    return done if bias is None else done + bias


_int8_product = product("Int8", ("weight", "scale"), _int8_as_linear)


def _int8_of_vectors(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return _computed(_int8_product, x, weight, scale, bias=bias) if x.dtype == torch.float32 else _int8_as_sum(x, weight, scale, bias)


def _int8_of_prompt(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return _int8_of_vectors(x, weight, scale, bias) if _as_vectors(x) else _int8_as_linear(x, weight, scale, bias)


_library.impl("linear_int8", _int8_as_linear, "CompositeExplicitAutograd")
_library.impl("linear_int8", lambda x, weight, scale, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0]), "Meta")

# Weights of 4 bits. A row is split into groups of GROUP elements, each with a scale and a least
# value. Byte h of a group's 16 has element h in its low half and element 16 + h in its high half,
# so vectors of bytes become vectors of elements without a shuffle.
GROUP = 32
_HALF = GROUP // 2

_library.define("linear_int4(Tensor x, Tensor weight, Tensor scale, Tensor least, Tensor? bias) -> Tensor")


def packed(levels: Tensor) -> Tensor:
    """Packs uint8 [out, groups, GROUP] of 0 to 15 into uint8 [out, in / 2]."""
    return (levels[..., :_HALF] | levels[..., _HALF:] << 4).flatten(1).contiguous()


def _halves(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The levels in the low and the high halves of bytes [out, in / 2]: int32 [out, groups, 16]."""
    wide = weight.unflatten(1, (-1, _HALF)).to(torch.int32)
    return wide & 15, wide >> 4


def _int4_as_linear(x: Tensor, weight: Tensor, scale: Tensor, least: Tensor, bias: Tensor | None = None) -> Tensor:
    levels = torch.cat(_halves(weight), 2).to(x.dtype)
    return torch.nn.functional.linear(x, (levels * scale.unsqueeze(-1) + least.unsqueeze(-1)).flatten(1), bias)


def _int4_as_sum(x: Tensor, weight: Tensor, scale: Tensor, least: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `_as_sum`: reads the bytes once and widens them in registers."""
    # [n, 2, groups, 16], in the bytes' order.
    parts = materialized(x.reshape(-1, scale.shape[1], 2, _HALF).transpose(1, 2))
    both = materialized(parts.sum(1))
    low, high = (half.to(x.dtype).unsqueeze(1) for half in _halves(weight))
    terms = (low * parts[:, 0] + high * parts[:, 1]) * scale[:, None, :, None] + both * least[:, None, :, None]
    done = materialized(terms.sum((-2, -1)).t()).reshape(*x.shape[:-1], weight.shape[0])
    return done if bias is None else done + bias


_int4_product = product("Int4", ("weight", "scale", "least"), _int4_as_linear)


def _int4_of_vectors(x: Tensor, weight: Tensor, scale: Tensor, least: Tensor, bias: Tensor | None = None) -> Tensor:
    return _computed(_int4_product, x, weight, scale, least, bias=bias) if x.dtype == torch.float32 else _int4_as_sum(x, weight, scale, least, bias)


def _int4_of_prompt(x: Tensor, weight: Tensor, scale: Tensor, least: Tensor, bias: Tensor | None = None) -> Tensor:
    return _int4_of_vectors(x, weight, scale, least, bias) if _as_vectors(x) else _int4_as_linear(x, weight, scale, least, bias)


_library.impl("linear_int4", _int4_as_linear, "CompositeExplicitAutograd")
_library.impl("linear_int4", lambda x, weight, scale, least, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0]), "Meta")
