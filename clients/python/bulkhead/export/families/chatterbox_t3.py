"""ChatterBox T3: text to speech tokens. Llama's layers with T3's own embedding and head, learned
positions beside the rotary ones, and classifier-free guidance as a second row.

The package's method `condition` makes a prompt of embeddings [2, T, E]; generation starts from the
start-of-speech token at learned position 0.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
import types
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ...errors import Error
from ..source import CHATTERBOX, in_dtype
from ..step import Step, given_attention
from . import Family, Method, Numbers, Prompt, PromptForm

GUIDANCE, PENALTY = 0.5, 1.2  #: ChatterboxTTS.generate's own defaults


class T3Step(Step):
    rows = 2
    rope_delta = "prompt"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tfmr = model.tfmr
        self.speech_emb = model.speech_emb
        self.speech_pos_emb = model.speech_pos_emb
        self.speech_head = model.speech_head

    def attention(self) -> AbstractContextManager[None]:
        return given_attention(self.tfmr)

    def embed(self, tokens: Tensor, positions: Tensor, rope_delta: Tensor | None) -> Tensor:
        assert rope_delta is not None
        table = self.speech_pos_emb.emb
        # Clamped for unused rows, which are computed too: their position is arbitrary.
        learned = table((positions + rope_delta).clamp(0, table.num_embeddings - 1))
        embedded: Tensor = self.speech_emb(tokens[:, 0]) + learned
        return embedded

    def backbone(self, embeddings: Tensor, position_ids: Tensor, mask: Tensor, cache: Cache, extras: dict[str, Tensor]) -> Tensor:
        done = self.tfmr(inputs_embeds=embeddings, position_ids=position_ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        hidden: Tensor = done.last_hidden_state
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.speech_head(hidden)
        return logits[:, None]


class Condition(nn.Module):
    """Makes a prompt of voice and text: speaker [1, 256], the voice's speech tokens int64 [P],
    emotion [1], text tokens int64 [T] with start and stop; embeddings [2, L, E], whose row 1 has no
    text."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, speaker: Tensor, voice: Tensor, emotion: Tensor, text: Tensor) -> Tensor:
        start = torch.full((2, 1), self.model.hp.start_speech_token, dtype=torch.int64, device=text.device)
        embeddings: Tensor = self.model.prepare_input_embeds(
            t3_cond=_condition(speaker, voice, emotion), text_tokens=text.repeat(2, 1), speech_tokens=start, cfg_weight=1.0
        )[0]
        return embeddings


@dataclass(frozen=True)
class SpokenPrompt(Prompt):
    """Also holds what upstream makes the embeddings from."""

    condition: tuple[Tensor, Tensor, Tensor] | None = None  #: speaker, voice, emotion
    text: Tensor | None = None


class ChatterboxT3(Family):
    name = "chatterbox_t3"

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        super().__init__(model, tokenizer)
        if model.is_gpt or model.hp.is_multilingual or model.hp.input_pos_emb != "learned":
            raise Error("input_invalid", "exporting a T3 of the multilingual or the turbo kind", "the English T3 is supported; the others sample by other rules")

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, gguf: str | None = None) -> Any:
        from safetensors.torch import load_file

        model = t3_class()()
        model.load_state_dict(load_file(folder / CHATTERBOX))
        return in_dtype(model, dtype)

    def step(self) -> Step:
        return T3Step(self.model)

    def numbers(self) -> Numbers:
        model, config = self.model, self.model.cfg
        return Numbers(
            vocabulary=model.speech_head.out_features,
            layers=config.num_hidden_layers,
            heads=config.num_key_value_heads,
            dim=config.head_dim,
            length_max=model.speech_pos_emb.emb.num_embeddings,
            rows=2,
            stop=(model.hp.stop_speech_token,),
            first_token=(model.hp.start_speech_token,),
            sampling_order="t3",
        )

    def prompt_form(self) -> PromptForm:
        return PromptForm(input="embeddings", width=self.model.dim)

    def methods(self) -> list[Method]:
        hp, dim = self.model.hp, self.model.dim
        dtype = str(self.model.speech_emb.weight.dtype).removeprefix("torch.")
        text_max = self.model.text_pos_emb.emb.num_embeddings
        example = self._spoken(0, 5)
        assert example.condition is not None and example.text is not None
        fixed = example.embeddings.shape[1] - example.text.shape[0]  # type: ignore[union-attr]
        voice = torch.export.Dim("p", min=2, max=hp.speech_cond_prompt_len)
        text = torch.export.Dim("t", min=2, max=text_max)
        return [Method(
            "condition", Condition(self.model), (*example.condition, example.text), ({}, {0: voice}, {}, {0: text}),
            {"speaker": {"dtype": dtype, "shape": [1, hp.speaker_embed_size]},
             "voice": {"dtype": "int64", "shape": [f"p=2..{hp.speech_cond_prompt_len}"]},
             "emotion": {"dtype": dtype, "shape": [1]},
             "text": {"dtype": "int64", "shape": [f"t=2..{text_max}"]}},
            {"embeddings": {"dtype": dtype, "shape": [2, f"l={fixed + 2}..{fixed + text_max}", dim]}},
        )]  # fmt: skip

    def sampling(self) -> dict[str, Any]:
        return {"do_sample": True, "temperature": 0.8, "top_p": 1.0, "min_p": 0.05, "repetition_penalty": PENALTY,
                "guidance": GUIDANCE, "max_new_tokens": 1000}  # fmt: skip

    def prompts(self) -> list[Prompt]:
        return [self._spoken(seed, size) for seed, size in ((1, 3), (2, 30))]

    def _spoken(self, seed: int, size: int) -> SpokenPrompt:
        """`size` random letters in a random voice."""
        model, hp = self.model, self.model.hp
        weight = model.speech_emb.weight
        generator = torch.Generator().manual_seed(seed)
        speaker = torch.randn(1, hp.speaker_embed_size, generator=generator).to(weight)
        voice = torch.randint(0, hp.start_speech_token, (hp.speech_cond_prompt_len,), generator=generator).to(weight.device)
        emotion = torch.full((1,), 0.5).to(weight)
        letters = torch.randint(1, hp.start_text_token, (size,), generator=generator)
        text = torch.cat([torch.tensor([hp.start_text_token]), letters, torch.tensor([hp.stop_text_token])]).to(weight.device)
        with torch.no_grad():
            embeddings = Condition(model)(speaker, voice, emotion, text)
        return SpokenPrompt(embeddings=embeddings, rope_delta=-embeddings.shape[1], condition=(speaker, voice, emotion), text=text)

    def next_tokens(self, logits: Tensor, generated: list[list[int]]) -> list[int]:
        cond, uncond = logits[0, 0], logits[1, 0]
        guided = cond + GUIDANCE * (cond - uncond)
        seen = torch.tensor([self.model.hp.start_speech_token, *(token for (token,) in generated)], device=guided.device)
        guided[seen] = torch.where(guided[seen] < 0, guided[seen] * PENALTY, guided[seen] / PENALTY)
        return [int(guided.argmax())]

    def reference(self, prompt: Prompt, count: int) -> list[list[int]]:
        assert isinstance(prompt, SpokenPrompt) and prompt.condition is not None and prompt.text is not None
        # It can only sample; min-p 1 leaves only the likeliest token.
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            tokens = self.model.inference(
                t3_cond=_condition(*prompt.condition), text_tokens=prompt.text.repeat(2, 1), max_new_tokens=count, temperature=1.0,
                top_p=1.0, min_p=1.0, repetition_penalty=PENALTY, cfg_weight=GUIDANCE,
            )  # fmt: skip
        return [[token] for token in tokens[0].tolist()]


FAMILY = ChatterboxT3


def t3_class() -> Any:
    """`T3` of the package chatterbox-tts.

    Imports it without the package's own __init__, which needs the vocoder, the watermark and more.
    Errors: input_invalid if the package is not installed."""
    return _modules("t3.t3").T3


def _condition(speaker: Tensor, voice: Tensor, emotion: Tensor) -> Any:
    kind = _modules("t3.modules.cond_enc").T3Cond
    return kind(speaker_emb=speaker, cond_prompt_speech_tokens=voice[None], emotion_adv=emotion.view(1, 1, 1))


def _modules(name: str) -> Any:
    if "chatterbox" in sys.modules:
        return importlib.import_module(f"chatterbox.models.{name}")
    spec = importlib.util.find_spec("chatterbox")
    if spec is None or spec.submodule_search_locations is None:
        raise Error("input_invalid", "exporting ChatterBox T3 without chatterbox-tts", "pip install --no-deps chatterbox-tts einops")
    hollow = types.ModuleType("chatterbox")
    hollow.__path__ = list(spec.submodule_search_locations)
    sys.modules["chatterbox"] = hollow
    try:
        return importlib.import_module(f"chatterbox.models.{name}")
    finally:
        del sys.modules["chatterbox"]  # later imports must get the whole package
