"""Higgs Audio v2: text to frames of audio codes in a delay pattern: codebook c runs c frames behind
the first.

Each layer has two feed-forward networks. Generated tokens are all audio and pass only the second; a
prompt passes both, row by row. In a prompt's tokens [T, C] a text row is its id followed by -1s, an
audio row its C codes.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ...errors import Error
from ..step import Step, given_attention
from . import Family, Method, Numbers, Prompt, PromptForm

#: Folder of the codec (higgs_audio_v2_tokenizer) beside the model's files, if there is one.
CODEC = "audio_tokenizer"
FRAMES_MAX = 2048
RAS_WINDOW_MAX = 16  #: frames that a worker keeps per sequence


class HiggsStep(Step):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.model
        self.audio_lm_head = model.audio_lm_head
        self.codebooks = model.config.num_codebooks
        self.codebook_size = model.config.codebook_size

    def attention(self) -> AbstractContextManager[None]:
        return given_attention(self.model)

    def embed(self, tokens: Tensor, positions: Tensor, rope_delta: Tensor | None) -> Tensor:
        embedded: Tensor = self.model.embed_audio_tokens(tokens)
        return embedded

    def embed_prompt(self, tokens: Tensor, positions: Tensor, extras: dict[str, Tensor]) -> Tensor:
        audio = tokens[:, 1] >= 0
        extras["audio"] = audio
        spoken = self.model.embed_audio_tokens(tokens.clamp(0, self.codebook_size - 1))
        return torch.where(audio[:, None], spoken, self.model.embed_tokens(tokens[:, 0].clamp(min=0)))

    def backbone(self, embeddings: Tensor, position_ids: Tensor, mask: Tensor, cache: Cache, extras: dict[str, Tensor]) -> Tensor:
        model = self.model
        given = {
            "attention_mask": mask, "position_ids": position_ids, "past_key_values": cache, "use_cache": True,
            "position_embeddings": model.rotary_emb(embeddings, position_ids),
        }  # fmt: skip
        hidden = embeddings
        for layer in model.layers:
            hidden = _both(layer, hidden, extras["audio"], given) if "audio" in extras else layer(hidden, audio_token_mask=None, **given)
        normed: Tensor = model.norm(hidden)
        return normed

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.audio_lm_head(hidden)
        return logits.view(-1, self.codebooks, self.codebook_size)


def _both(layer: Any, hidden: Tensor, audio: Tensor, given: dict[str, Any]) -> Tensor:
    """HiggsAudioV2DecoderLayer for rows [1, T, E] of text and audio. Upstream separates them by
    indexing with a mask, which has unknown sizes; here both networks run and one result is
    selected."""
    where = audio[None, :, None]
    normed = torch.where(where, layer.audio_input_layernorm(hidden), layer.input_layernorm(hidden))
    hidden = hidden + layer.self_attn(hidden_states=normed, **given)[0]
    spoken = layer.audio_mlp(layer.audio_post_attention_layernorm(hidden))
    written = layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden + torch.where(where, spoken, written)


class DecodeAudio(nn.Module):
    """Converts frames int64 [N, C], between the frame of all bos and the frame of all eos, to
    samples."""

    codec: Any

    def __init__(self, codec: Any, bos: int) -> None:
        super().__init__()
        self.codec = codec
        self.bos = bos

    def forward(self, frames: Tensor) -> Tensor:
        count, codebooks = frames.shape
        aligned = torch.stack([frames[c : count - codebooks + 1 + c, c] for c in range(codebooks)])
        samples: Tensor = self.codec.decode(aligned.clamp(0, self.bos - 1)[None]).audio_values
        return samples.reshape(-1)


class HiggsAudioV2(Family):
    """`model` has the codec as its member `codec`, if there is one."""

    name = "higgs_audio_v2"

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, gguf: str | None = None) -> Any:
        import transformers

        model = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(folder, dtype=dtype, local_files_only=True)
        if (folder / CODEC / "config.json").is_file():
            codec: Any = transformers.HiggsAudioV2TokenizerModel.from_pretrained(folder / CODEC, local_files_only=True)
            model.codec = codec.eval()
        return model

    def step(self) -> Step:
        return HiggsStep(self.model)

    def numbers(self) -> Numbers:
        config = self.model.config
        if max(config.audio_stream_bos_id, config.audio_stream_eos_id) >= config.codebook_size:
            raise Error("input_invalid", f"exporting a model with codebooks of {config.codebook_size}, whose audio begins with {config.audio_stream_bos_id} "
                        f"and ends with {config.audio_stream_eos_id}", "codebook_size counts these two as well")  # fmt: skip
        return Numbers(
            vocabulary=config.codebook_size,
            layers=config.num_hidden_layers,
            heads=config.num_key_value_heads,
            dim=config.head_dim,
            length_max=config.max_position_embeddings,
            codebooks=config.num_codebooks,
            delay_pattern={"bos": config.audio_stream_bos_id, "eos": config.audio_stream_eos_id, "ras": self._ras()},
        )

    def _ras(self) -> dict[str, int] | None:
        """Repetition-aware sampling, if the model's generation_config asks for it. Upstream draws
        even in greedy generation if it finds repetitions; a worker does not."""
        said = self.model.generation_config
        window, repeats = getattr(said, "ras_win_len", None), getattr(said, "ras_win_max_num_repeat", None)
        if window is None or repeats is None:
            return None
        if not 1 <= window <= RAS_WINDOW_MAX or repeats < 1:
            raise Error("input_invalid", f"exporting a model with ras_win_len {window} and ras_win_max_num_repeat {repeats}",
                        f"give its generation_config a window of 1 to {RAS_WINDOW_MAX} frames and 1 repetition or more, or neither")  # fmt: skip
        return None if repeats > window else {"window": window, "repeats": repeats}

    def prompt_form(self) -> PromptForm:
        return PromptForm(logits=True, ids=(-1, self.model.config.vocab_size))

    def methods(self) -> list[Method]:
        codec = getattr(self.model, "codec", None)
        if codec is None:
            return []
        config, hop = self.model.config, codec.config.hop_length
        c = config.num_codebooks
        frames = torch.export.Dim("n", min=c + 1, max=FRAMES_MAX)
        example = torch.randint(0, config.audio_stream_bos_id, (c + 20, c), generator=torch.Generator().manual_seed(0))
        return [Method(
            "decode_audio", DecodeAudio(codec, config.audio_stream_bos_id), (example,), ({0: frames},),
            {"frames": {"dtype": "int64", "shape": [f"n={c + 1}..{FRAMES_MAX}", c]}},
            {"samples": {"dtype": "float32", "shape": [f"s={2 * hop}..{(FRAMES_MAX - c + 1) * hop}"]}},
        )]  # fmt: skip

    def prompts(self) -> list[Prompt]:
        config = self.model.config
        generator = torch.Generator().manual_seed(0)
        start = torch.tensor([config.audio_bos_token_id])

        def words(size: int) -> Tensor:
            return torch.randint(0, min(config.vocab_size, config.audio_bos_token_id), (size,), generator=generator)

        voice = delayed(torch.randint(0, config.audio_stream_bos_id, (9, config.num_codebooks), generator=generator), config)
        alone = torch.cat([words(30), start])
        return [
            Prompt(tokens=text_rows(alone, config.num_codebooks)),
            Prompt(tokens=torch.cat([text_rows(torch.cat([words(5), start]), config.num_codebooks), voice,
                                     text_rows(torch.cat([words(20), start]), config.num_codebooks)])),
        ]  # fmt: skip

    def next_tokens(self, logits: Tensor, generated: list[list[int]]) -> list[int]:
        config = self.model.config
        chosen: list[int] = logits[0].argmax(-1).tolist()
        forced = forced_by_delay(generated, config.num_codebooks, config.audio_stream_bos_id, config.audio_stream_eos_id)
        return [free if must is None else must for free, must in zip(chosen, forced, strict=True)]

    def stops(self, tokens: list[int]) -> bool:
        return all(token == self.model.config.audio_stream_eos_id for token in tokens)

    def reference(self, prompt: Prompt, count: int) -> list[list[int]]:
        assert prompt.tokens is not None
        config = self.model.config
        tokens = prompt.tokens.to(self.model.device)
        audio = tokens[:, 1] >= 0
        ids = torch.where(audio, config.audio_token_id, tokens[:, 0])[None]
        heard = {"audio_input_ids": tokens[audio][None], "audio_input_ids_mask": torch.ones_like(tokens[audio][None, :, 0], dtype=torch.bool)}
        greedy = copy.deepcopy(self.model.generation_config)
        # Otherwise it draws, though all else is greedy; None would mean the model's own.
        greedy.ras_win_max_num_repeat = 1 << 30
        greedy.max_new_tokens, greedy.do_sample = count, False
        greedy.temperature = greedy.top_p = greedy.top_k = None
        with torch.no_grad():
            frames = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=greedy, **(heard if audio.any() else {})
            )
        new: list[list[int]] = frames[0, int(audio.sum()) :].tolist()
        return new


FAMILY = HiggsAudioV2


def forced_by_delay(generated: list[list[int]], codebooks: int, bos: int, eos: int) -> list[int | None]:
    """What the delay pattern forces in each codebook of the next frame, after frames `generated`
    since a prompt that ended in audio_bos.

    Frame k begins with bos in codebooks k and above. Once a frame has eos in any codebook, each
    further frame has it in one more codebook, starting with the first."""
    step = len(generated)
    first_end = next((index for index, frame in enumerate(generated) if eos in frame), step)
    return [bos if c >= step else eos if c < step - first_end else None for c in range(codebooks)]


def text_rows(ids: Tensor, codebooks: int) -> Tensor:
    """Text ids [T] as rows of a prompt, [T, C]."""
    return torch.cat([ids[:, None], torch.full((ids.shape[0], codebooks - 1), -1)], dim=1)


def delayed(codes: Tensor, config: Any) -> Tensor:
    """Codes [N, C] of a voice as prompt rows: bos before, eos after, codebook c delayed by c
    rows."""
    count, codebooks = codes.shape
    rows = torch.full((count + 1 + codebooks, codebooks), config.audio_stream_bos_id)
    for c in range(codebooks):
        rows[c + 1 : c + 1 + count, c] = codes[:, c]
        rows[c + 1 + count :, c] = config.audio_stream_eos_id
    return rows
