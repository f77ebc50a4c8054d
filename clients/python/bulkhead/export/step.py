"""Cuts a model the same way for every family: one step of generation as plain functions of tensors.

A family defines how tokens become embeddings, how embeddings pass the layers, and how hidden states
become logits (`Step`). `Decode` and `Prefill` are the two functions of a package; positions and the
key/value buffers are arguments, and they write into the buffers in place. Nothing here keeps state.

Sizes: n sequences, R rows each (2 with classifier-free guidance), C codebooks, T prompt positions,
V vocabulary, E embedding width; a buffer is [slots * R, heads, length, dim].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache

from .materialized import materialized

ATTENTION = "bulkhead"  #: the name under which transformers knows `attend`


class Step(nn.Module):
    """A family's part. Submodules keep the upstream classes; their parameters' names become the
    weights' names."""

    codebooks: int = 1
    rows: int = 1
    #: "rope": decode takes `rope_delta` [n], prefill `rope` [3, T]. "prompt": only decode takes
    # it, as minus the prompt's length.
    rope_delta: str | None = None

    def attention(self) -> AbstractContextManager[None]:
        """Active while the step is traced: `given_attention` of its transformers model."""
        raise NotImplementedError

    def embed(self, tokens: Tensor, positions: Tensor, rope_delta: Tensor | None) -> Tensor:
        """Tokens [n, C] at positions [n] to embeddings [n, E], or [n * R, E] where a sequence's
        rows differ."""
        raise NotImplementedError

    def embed_prompt(self, tokens: Tensor, positions: Tensor, extras: dict[str, Tensor]) -> Tensor:
        """Tokens [T, C] at positions [T] to [T, E]; only if prompts are tokens. Stores what
        `backbone` needs of the tokens in `extras`."""
        return self.embed(tokens, positions, None)

    def decode_positions(self, positions: Tensor, rope_delta: Tensor | None) -> Tensor:
        """`position_ids` of the backbone, from positions [n * R]: [n * R, 1] unless the family
        rotates otherwise."""
        return positions[:, None]

    def prefill_positions(self, positions: Tensor, rope: Tensor | None) -> Tensor:
        """`position_ids` of the backbone, from positions [T] and rope [3, T]: [1, T] unless the
        family rotates otherwise."""
        return positions[None, :]

    def backbone(self, embeddings: Tensor, position_ids: Tensor, mask: Tensor, cache: Cache, extras: dict[str, Tensor]) -> Tensor:
        """Embeddings [B, T, E] to hidden states [B, T, E], after the last norm.

        `mask` [B, 1, T, a] is True where a query may attend; transformers gets it as the 4-D
        `attention_mask`."""
        raise NotImplementedError

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, E] to logits [B, C, V]."""
        raise NotImplementedError


class GivenCache(Cache):
    """A cache with transformers' interface over given buffers: new keys and values go to
    `positions`, and the first `length` positions are visible."""

    def __init__(self, buffers: tuple[Tensor, ...], positions: Tensor, length: int) -> None:
        super().__init__(layers=[])
        self.keys, self.values = buffers[0::2], buffers[1::2]
        self.positions = positions
        self.length = length

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *unused: object, **also_unused: object) -> tuple[Tensor, Tensor]:
        """Shapes [B, heads, T, dim]. T = 1 is decode, with `positions` [B]; else prefill, with
        `positions` [T]."""
        return self._put(self.keys[layer_idx], key_states), self._put(self.values[layer_idx], value_states)

    def _put(self, buffer: Tensor, states: Tensor) -> Tensor:
        new = states.to(buffer.dtype)
        if states.shape[2] == 1 and states.shape[0] != 1:
            rows = torch.arange(states.shape[0], device=buffer.device)[:, None]
            heads = torch.arange(states.shape[1], device=buffer.device)[None, :]
            buffer.index_put_((rows, heads, self.positions[:, None]), new[:, :, 0])
        else:
            buffer.index_copy_(2, self.positions, new)
        return buffer[:, :, : self.length].to(states.dtype)


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None,
           dropout: float = 0.0, **unused: object) -> tuple[Tensor, None]:  # fmt: skip
    """Attention in transformers' interface: query [B, heads, T, dim], key and value [B, key heads,
    a, dim], mask [B or 1, 1, T, a] of bool; returns [B, T, heads, dim].

    One query is written as sums, because it has no matrix product: Inductor makes a few loops over
    the visible cache, without copies of keys for heads that share them. Several queries on a GPU
    are written as products."""
    batch, heads, queries, dim = query.shape
    key_heads = key.shape[1]
    scale = scaling if scaling is not None else dim**-0.5
    if queries != 1 and query.device.type == "cuda":
        return attended_by_products(query, key, value, attention_mask, scale).transpose(1, 2), None
    if queries != 1:
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=key_heads != heads
        )
        return mixed.transpose(1, 2), None
    grouped = materialized(query.reshape(batch, key_heads, heads // key_heads, 1, dim))
    # [B, key heads, group, a]
    scores = (grouped * key.unsqueeze(2)).sum(-1, dtype=torch.float32) * scale
    weights = torch.where(attention_mask, scores, float("-inf")).softmax(-1)
    mixed = (weights.to(value.dtype).unsqueeze(-1) * value.unsqueeze(2)).sum(-2)
    return mixed.reshape(batch, 1, heads, dim), None


def attended_by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`attend` of several queries: [B, heads, T, dim].

    scaled_dot_product_attention selects a GPU kernel while it is traced, by the example's sizes. Of
    the kernels with a mask, one needs rows at multiples of 8 elements, so other lengths would fail;
    another plans again for each length."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        # Picked one by one: a copy of whole dimensions would be merged with them, for which sizes
        # must be known.
        shared = torch.arange(query.shape[1], device=query.device) // group
        key, value = key.index_select(1, shared), value.index_select(1, shared)
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scale
    weights = torch.where(mask, scores, float("-inf")).softmax(-1)
    return torch.matmul(weights.to(value.dtype), value)


AttentionInterface.register(ATTENTION, attend)


@contextmanager
def given_attention(model: Any) -> Iterator[None]:
    """While active, this transformers model uses `attend`; afterwards its previous attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class Decode(nn.Module):
    """(tokens int64 [n, C], positions int64 [n], span int64 [a], [rope_delta int64 [n]], k0, v0,
    k1, v1, …) to logits float32 [n * R, C, V]. span is arange(a): only its length is read, the
    attention length."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, tokens: Tensor, positions: Tensor, span: Tensor, *rest: Tensor) -> Tensor:
        step = self.step
        rope_delta, buffers = (rest[0], rest[1:]) if step.rope_delta else (None, rest)
        embeddings = step.embed(tokens, positions, rope_delta)
        if step.rows > 1:
            if embeddings.shape[0] == tokens.shape[0]:
                embeddings = embeddings.repeat_interleave(step.rows, 0)
            positions = positions.repeat_interleave(step.rows, 0)
            rope_delta = None if rope_delta is None else rope_delta.repeat_interleave(step.rows, 0)
        mask = (span[None, :] <= positions[:, None])[:, None, None, :]
        cache = GivenCache(buffers, positions, span.shape[0])
        hidden = step.backbone(embeddings[:, None], step.decode_positions(positions, rope_delta), mask, cache, {})
        return step.head(hidden[:, 0]).float()


class Prefill(nn.Module):
    """(tokens int64 [T, C] or embeddings [R, T, E], positions int64 [T], span int64 [a], [rope
    int64 [3, T]], extras…, k0, v0, …) of one slot: logits float32 [R, C, V] of the last position,
    or the position after it, int64 [1].

    `extras` gives the dimension of each along which the prompt runs."""

    def __init__(self, step: Step, *, embeddings: bool, logits: bool, extras: dict[str, int]) -> None:
        super().__init__()
        self.step = step
        self.embeddings, self.logits, self.extras = embeddings, logits, extras

    def forward(self, prompt: Tensor, positions: Tensor, span: Tensor, *rest: Tensor) -> Tensor:
        step = self.step
        rope, rest = (rest[0], rest[1:]) if step.rope_delta == "rope" else (None, rest)
        extras, buffers = dict(zip(self.extras, rest, strict=False)), rest[len(self.extras) :]
        cache = GivenCache(buffers, positions, span.shape[0])
        if self.embeddings:
            embeddings = prompt
        else:
            embeddings = step.embed_prompt(prompt, positions, extras)[None]
            embeddings = embeddings.expand(step.rows, -1, -1) if step.rows > 1 else embeddings
        mask = (span[None, :] <= positions[:, None])[None, None]
        hidden = step.backbone(embeddings, step.prefill_positions(positions, rope), mask, cache, extras)
        return step.head(hidden[:, -1]).float() if self.logits else positions[-1:] + 1
