"""Qwen3-VL: the language model, which takes encoded pictures at prefill, and the vision encoder as
the method `vision`.

A prompt is tokens with placeholders for pictures, and for them `vision` (replaces their
embeddings),
`deepstack` (added after the first layers) and `rope`; `qwen3_vl_prompt` arranges these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ..step import Step, given_attention
from . import Extra, Family, Method, Numbers, Prompt, PromptForm
from .causal_lm import stop_tokens
from .qwen3_vl_prompt import rope_positions

SIDE_MAX = 128  #: of a picture, in units of merged patches


class Qwen3VlStep(Step):
    rope_delta = "rope"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.model.language_model
        self.lm_head = model.lm_head
        self.placeholders = (model.config.image_token_id, model.config.video_token_id)

    @contextmanager
    def _traced(self) -> Iterator[None]:
        # Upstream selects the rows of pictures by a mask, which has unknown sizes. Ours has all
        # rows; a row without a picture is zero.
        self.model._deepstack_process = lambda hidden, unused, seen: hidden + seen
        try:
            with given_attention(self.model):
                yield
        finally:
            del self.model._deepstack_process

    def attention(self) -> AbstractContextManager[None]:
        return self._traced()

    def embed(self, tokens: Tensor, positions: Tensor, rope_delta: Tensor | None) -> Tensor:
        embedded: Tensor = self.model.embed_tokens(tokens[:, 0])
        return embedded

    def embed_prompt(self, tokens: Tensor, positions: Tensor, extras: dict[str, Tensor]) -> Tensor:
        image, video = self.placeholders
        seen = ((tokens == image) | (tokens == video))[:, :1]
        extras["deepstack"] = torch.where(seen, extras["deepstack"], 0)
        return torch.where(seen, extras["vision"], self.embed(tokens, positions, None))

    def decode_positions(self, positions: Tensor, rope_delta: Tensor | None) -> Tensor:
        assert rope_delta is not None
        return (positions + rope_delta)[None, :, None].expand(3, -1, -1)

    def prefill_positions(self, positions: Tensor, rope: Tensor | None) -> Tensor:
        assert rope is not None
        return rope[:, None, :]

    def backbone(self, embeddings: Tensor, position_ids: Tensor, mask: Tensor, cache: Cache, extras: dict[str, Tensor]) -> Tensor:
        deepstack = list(extras["deepstack"][:, None]) if extras else None
        done = self.model(
            inputs_embeds=embeddings, position_ids=position_ids, attention_mask=mask, past_key_values=cache, use_cache=True,
            visual_pos_masks=None, deepstack_visual_embeds=deepstack,
        )  # fmt: skip
        hidden: Tensor = done.last_hidden_state
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits[:, None]


class Vision(nn.Module):
    """Encodes one picture, or one moment of a video: pixels [H, W, P] in merged patches, a view of
    the processor's `pixel_values`; embeddings [H * W, E] and deepstack [D, H * W, E].

    Positions follow from H and W in the shape; upstream reads them from a tensor."""

    model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.merge: int = model.spatial_merge_size

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model
        rows, columns = self._grid(pixels)
        hidden = model.patch_embed(pixels.reshape(rows.shape[0], -1))
        hidden = hidden + self._learned_positions(rows, columns, pixels.shape[0], pixels.shape[1]).to(hidden.dtype)
        cos, sin = model.rotary_pos_emb(hidden, torch.stack([rows, columns], dim=-1))
        deepstack = []
        for index, block in enumerate(model.blocks):
            hidden = hidden + _attended(block.attn, block.norm1(hidden), cos, sin)
            hidden = hidden + block.mlp(block.norm2(hidden))
            if index in model.deepstack_visual_indexes:
                merger = model.deepstack_merger_list[list(model.deepstack_visual_indexes).index(index)]
                deepstack.append(merger(hidden))
        return model.merger(hidden), torch.stack(deepstack)

    def _grid(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column [N] of each patch in patch order: by merged patch, then within it."""
        merge = self.merge
        row = torch.arange(pixels.shape[0], device=pixels.device)[:, None, None, None] * merge
        column = torch.arange(pixels.shape[1], device=pixels.device)[None, :, None, None] * merge
        inside = torch.arange(merge, device=pixels.device)
        shape = (pixels.shape[0], pixels.shape[1], merge, merge)
        return ((row + inside[:, None]).expand(shape).reshape(-1), (column + inside).expand(shape).reshape(-1))

    def _learned_positions(self, rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:
        """Learned positions, bilinearly interpolated from their square table: [N, width of the
        encoder]."""
        side = self.model.num_grid_per_side
        low_row, high_row, down = _between(rows, height * self.merge, side)
        low_column, high_column, right = _between(columns, width * self.merge, side)
        total: Any = 0
        for row, share in ((low_row, 1 - down), (high_row, down)):
            for column, other in ((low_column, 1 - right), (high_column, right)):
                total = total + self.model.pos_embed(row * side + column) * (share * other)[:, None]
        return total


def _between(index: Tensor, size: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maps 0 … size - 1 to 0 … side - 1: the entries below and above, and the weight of the upper
    one."""
    at = index.to(torch.float32) * (side - 1) / max(size - 1, 1)
    low = at.floor()
    first = low.long().clamp(0, side - 1)
    return first, (low.long() + 1).clamp(0, side - 1), at - low


def _attended(module: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Qwen3VLVisionAttention for one picture. Upstream first splits its input into pictures, by
    numbers in a tensor."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

    count = hidden.shape[0]
    query, key, value = module.qkv(hidden).reshape(count, 3, module.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
    query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
    query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, scale=module.scaling)
    done: Tensor = module.proj(mixed[0].transpose(0, 1).reshape(count, -1))
    return done


@dataclass(frozen=True)
class SeenPrompt(Prompt):
    """Also holds the picture for upstream."""

    pixels: Tensor | None = None  #: [H, W, P]


class Qwen3Vl(Family):
    name = "qwen3_vl"

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, gguf: str | None = None) -> Any:
        import transformers

        return transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype, local_files_only=True)

    def step(self) -> Step:
        return Qwen3VlStep(self.model)

    def numbers(self) -> Numbers:
        text = self.model.config.text_config
        return Numbers(
            vocabulary=self.model.lm_head.out_features,
            layers=text.num_hidden_layers,
            heads=text.num_key_value_heads,
            dim=text.head_dim,
            length_max=text.max_position_embeddings,
            stop=stop_tokens(self.model) or _said(text.eos_token_id),
            bos=text.bos_token_id,
        )

    def prompt_form(self) -> PromptForm:
        width, dtype = self.model.config.text_config.hidden_size, self._dtype()
        depth = len(self.model.config.vision_config.deepstack_visual_indexes)
        return PromptForm(extras=(Extra("vision", dtype, ("T", width)), Extra("deepstack", dtype, (depth, "T", width))))

    def methods(self) -> list[Method]:
        config, dtype = self.model.config, self._dtype()
        width, depth = config.text_config.hidden_size, len(config.vision_config.deepstack_visual_indexes)
        example = self._picture(2, 3)
        high = torch.export.Dim("h", min=2, max=SIDE_MAX)
        wide = torch.export.Dim("w", min=2, max=SIDE_MAX)
        return [Method(
            "vision", Vision(self.model.model.visual), (example,), ({0: high, 1: wide},),
            {"pixels": {"dtype": dtype, "shape": [f"h=1..{SIDE_MAX}", f"w=1..{SIDE_MAX}", example.shape[2]]}},
            {"embeddings": {"dtype": dtype, "shape": [f"t=1..{SIDE_MAX**2}", width]},
             "deepstack": {"dtype": dtype, "shape": [depth, f"t=1..{SIDE_MAX**2}", width]}},
        )]  # fmt: skip

    def prompts(self) -> list[Prompt]:
        return [self.seen(self._words(9)), self.seen(self._words(6), self._picture(2, 3))]

    def seen(self, words: Tensor, picture: Tensor | None = None) -> SeenPrompt:
        """Words [T], with a picture [H, W, P] after the third of them."""
        config = self.model.config
        grids = []
        if picture is not None:
            high, wide = picture.shape[:2]
            grids = [(1, high, wide)]
            shown = torch.full((high * wide,), config.image_token_id)
            words = torch.cat([words[:3], torch.tensor([config.vision_start_token_id]), shown, torch.tensor([config.vision_end_token_id]), words[3:]])
        rope, delta = rope_positions(words.tolist(), grids, config.image_token_id, config.video_token_id)
        form = self.prompt_form()
        extras = {
            one.name: torch.zeros([words.shape[0] if size == "T" else int(size) for size in one.shape], dtype=getattr(torch, one.dtype))
            for one in form.extras
        }
        if picture is not None:
            with torch.no_grad():
                embeddings, deepstack = Vision(self.model.model.visual)(picture)
            at = words == config.image_token_id
            extras["vision"][at], extras["deepstack"][:, at] = embeddings.cpu(), deepstack.cpu()
        return SeenPrompt(tokens=words[:, None], extras=extras, rope=torch.tensor(rope), rope_delta=delta, pixels=picture)

    def reference(self, prompt: Prompt, count: int) -> list[list[int]]:
        assert prompt.tokens is not None
        config, device = self.model.config, self.model.device
        ids = prompt.tokens.T.to(device)
        given: dict[str, Tensor] = {}
        if isinstance(prompt, SeenPrompt) and prompt.pixels is not None:
            high, wide = (size * config.vision_config.spatial_merge_size for size in prompt.pixels.shape[:2])
            patches = prompt.pixels.reshape(high * wide, -1)
            given = {"pixel_values": patches.to(device), "image_grid_thw": torch.tensor([[1, high, wide]], device=device),
                     "mm_token_type_ids": (ids == config.image_token_id).int()}  # fmt: skip
        with torch.no_grad():
            whole = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, repetition_penalty=1.0,
                temperature=None, top_p=None, top_k=None, pad_token_id=0, **given,
            )  # fmt: skip
        return [[token] for token in whole[0, ids.shape[1] :].tolist()]

    def _dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def _words(self, count: int) -> Tensor:
        """Random text tokens."""
        config = self.model.config
        special = {config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id}
        plain = torch.tensor([one for one in range(min(config.text_config.vocab_size, 10_000)) if one not in special])
        return plain[torch.randint(0, plain.shape[0], (count,), generator=torch.Generator().manual_seed(count))]

    def _picture(self, high: int, wide: int) -> Tensor:
        """A random picture of this many merged patches."""
        vision = self.model.config.vision_config
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * vision.spatial_merge_size**2
        return torch.randn(high, wide, values, generator=torch.Generator().manual_seed(high)).to(self.model.device, self.model.dtype)


FAMILY = Qwen3Vl


def _said(token: Any) -> tuple[int, ...]:
    return () if token is None else tuple(token) if isinstance(token, list | tuple) else (token,)
