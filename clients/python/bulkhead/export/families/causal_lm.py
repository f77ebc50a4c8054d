"""Language models like Llama: embedding, layers with rotary positions, head. Takes tokens, gives
one codebook."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ...errors import Error
from ..step import Step, given_attention
from . import Family, Numbers, Prompt


class CausalStep(Step):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model.model
        self.lm_head = model.lm_head

    def attention(self) -> AbstractContextManager[None]:
        return given_attention(self.model)

    def embed(self, tokens: Tensor, positions: Tensor, rope_delta: Tensor | None) -> Tensor:
        embedded: Tensor = self.model.embed_tokens(tokens[:, 0])
        return embedded

    def backbone(self, embeddings: Tensor, position_ids: Tensor, mask: Tensor, cache: Cache, extras: dict[str, Tensor]) -> Tensor:
        done = self.model(inputs_embeds=embeddings, position_ids=position_ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        hidden: Tensor = done.last_hidden_state
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits[:, None]


class CausalLm(Family):
    name = "causal_lm"

    def step(self) -> Step:
        return CausalStep(self.model)

    def numbers(self) -> Numbers:
        config = self.model.config
        check_attention(config)
        return Numbers(
            vocabulary=self.model.lm_head.out_features,
            layers=config.num_hidden_layers,
            heads=config.num_key_value_heads,
            dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            length_max=config.max_position_embeddings,
            stop=stop_tokens(self.model),
            bos=config.bos_token_id,
        )

    def prompts(self) -> list[Prompt]:
        if self.tokenizer is None:
            count = self.model.lm_head.out_features
            generator = torch.Generator().manual_seed(0)
            return [Prompt(tokens=torch.randint(0, count, (size, 1), generator=generator)) for size in (1, 3, 40)]
        return [Prompt(tokens=self.encoded(text)) for text in ("Name three planets.", "Why is the sky blue?", "Count from one to ten.")]

    def encoded(self, text: str) -> Tensor:
        """Encodes with the chat template if there is one: int64 [T, 1]."""
        if getattr(self.tokenizer, "chat_template", None):
            said = [{"role": "user", "content": text}]
            ids = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = self.tokenizer(text)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)[:, None]

    def reference(self, prompt: Prompt, count: int) -> list[list[int]]:
        assert prompt.tokens is not None
        ids = prompt.tokens.T.to(self.model.device)
        with torch.no_grad():
            whole = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, repetition_penalty=1.0,
                temperature=None, top_p=None, top_k=None, pad_token_id=0,
            )  # fmt: skip
        return [[token] for token in whole[0, ids.shape[1] :].tolist()]


FAMILY = CausalLm


def check_attention(config: Any) -> None:
    """Errors: input_invalid for layers that attend to less than all earlier positions."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"])
    if kinds != {"full_attention"}:
        raise Error("input_invalid", f"exporting a model with layers of {', '.join(sorted(kinds))}", "only full attention is supported")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise Error("input_invalid", f"exporting a model with rotary positions of type {rope}", "its angles change with the length so far; a step's must not")


def stop_tokens(model: Any) -> tuple[int, ...]:
    for config in (getattr(model, "generation_config", None), model.config):
        said = getattr(config, "eos_token_id", None)
        if said is not None:
            return tuple(said) if isinstance(said, list | tuple) else (said,)
    return ()
