"""Higgs Audio 2 by transformers' `higgs_audio_v2`, none of whose files is changed.

Upstream's processor makes the prompt and the samples; upstream's `generate` checks the parameters,
prepares the logits processors and prefills. What is replaced, and why:

- The loop `_sample`, by `_frames`, which `generate` calls as its `custom_generate`: upstream's
  returns only when all is generated, so that it can neither stream nor be cancelled. It draws the
  same random numbers in the same order.
- The forward call of one frame, by `_decode` through `context.graph`: upstream's builds the mask
  and the positions from numbers on the host, which cannot be captured. It calls upstream's
  `forward`.
- `min_p`, which upstream refuses though its own class works for each codebook alone, and
  `repetition_penalty`, whose class at upstream takes audio codes for text, are added to
  the processors.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor as Array

from ..engine import Boolean, Choice, Context, Integer, InvalidInput, Number, Parameter, Result, Tensor, Text, method
from .upstream import CACHE_LENGTHS, Caches, check_length, generation_config, load_files, load_weights, model_folder, position_of, seen_mask

MODEL = "bosonai/higgs-audio-v2-generation-3B-base"
PART_FRAMES = 25  #: a second of sound
#: Frames on each side that the codec's convolutions reach: with them, parts equal the whole.
AROUND = 12
NEVER = 1 << 30  #: repetitions; None would mean the model's own number
_VOICE: list[int | str] = ["1..2", "2400.."]

VOICES = [
    Tensor("reference", "float32", _VOICE, optional=True, description="the voice to speak in"),
    Tensor("second_reference", "float32", _VOICE, optional=True, description="the voice of SPEAKER1"),
]
TEXTS: list[Parameter] = [
    Text("text", multiline=True, description="with two speakers, [SPEAKER0] and [SPEAKER1] say who speaks"),
    Text("reference_text", "", multiline=True, description="what is said in the reference"),
    Text("second_reference_text", "", multiline=True),
    Integer("reference_rate", 24000, low=8000, high=192000, description="samples of the reference in a second"),
    Integer("second_reference_rate", 24000, low=8000, high=192000),
    Text("system_prompt", "Generate audio following instruction.", multiline=True),
    Text("scene", "Audio is recorded from a quiet room.", multiline=True),
]
SAMPLING: list[Parameter] = [
    Boolean("do_sample", True),
    Number("temperature", 1.0, low=0, high=2, step=0.05, description="0 is greedy"),
    Number("top_p", 0.95, low=0.05, high=1, step=0.01),
    Integer("top_k", 50, low=0, high=1026, description="0 is all"),
    Number("min_p", 0.0, low=0, high=1, step=0.01),
    Number("repetition_penalty", 1.0, low=1, high=2, step=0.01),
    Integer("ras_window", 7, low=0, high=1024, description="frames in which repetitions are counted; 0 counts none"),
    Integer("ras_repeats", 2, low=1, high=1024, description="repetitions at which a code is drawn once more"),
    Integer("max_new_tokens", 1024, low=16, high=8192, description="frames, 25 a second"),
    Integer("seed", 0, low=0),
]


def check_prompt(text: str, reference: Any, second_reference: Any, multi_speaker: str) -> None:
    """Errors: InvalidInput for an empty text, or a second reference without a first one or with
    `multi_speaker` off."""
    if not text.strip():
        raise InvalidInput("speaking an empty text", "give a text")
    if second_reference is not None and (reference is None or multi_speaker == "off"):
        raise InvalidInput("speaking with a second reference alone", "give a first one too, and a multi_speaker other than off")


class FramePenalty(transformers.LogitsProcessor):
    """Repetition penalty per codebook: scores [C, V] by the codes of the frames [1, n, C]
    generated so far."""

    def __init__(self, penalty: float, kept: set[int]) -> None:
        self.penalty, self.kept = penalty, sorted(kept)
        self.frames: Array | None = None

    def __call__(self, input_ids: Array, scores: Array) -> Array:
        if self.frames is None or scores.shape[0] != self.frames.shape[2]:
            return scores  # the second: of text
        codes = self.frames[0].T
        found = scores.gather(1, codes)
        penalised = scores.scatter(1, codes, torch.where(found < 0, found * self.penalty, found / self.penalty))
        penalised[:, self.kept] = scores[:, self.kept]
        return penalised


class HiggsAudio:
    """Higgs Audio 2: speech from text, in the voice of a reference or of two."""

    def load(self, context: Context) -> None:
        self.context = context
        folder = model_folder(context, MODEL)
        context.progress(0, 3, "processor and codec")
        given = {"local_files_only": True, "device_map": context.device}
        self.processor = load_files(folder, lambda: transformers.HiggsAudioV2Processor.from_pretrained(folder, **given))
        context.progress(1, 3, "weights")
        self.model = load_weights(transformers.HiggsAudioV2ForConditionalGeneration, folder, context)
        self.model._supported_logits_processor_types += (transformers.MinPLogitsWarper, FramePenalty)
        config = self.model.config
        self.codebooks, self.eos = config.num_codebooks, config.audio_stream_eos_id
        self.rate = self.processor.feature_extractor.sampling_rate
        context.progress(2, 3, "graphs")
        with torch.no_grad():
            self.caches = Caches(context, config, context.options.get("cache_lengths", CACHE_LENGTHS), self.model.dtype)
            frame = torch.full((self.codebooks,), config.audio_stream_bos_id, device=self.model.device)
            self.decode = self.caches.graphed(context, self._decode, frame=frame)

    @method(
        inputs=VOICES,
        parameters=[
            *TEXTS,
            Choice("multi_speaker", ["off", "conversation", "scene"], description="where the references stand: as turns before, or in the scene"),
            *SAMPLING,
        ],
        outputs=[Tensor("audio", "float32", ["channels=1", "samples=0.."])],
    )  # fmt: skip
    @torch.no_grad()
    def speak(self, *, repetition_penalty: float, ras_window: int, ras_repeats: int, max_new_tokens: int, seed: int, do_sample: bool,
              temperature: float, top_p: float, top_k: int, min_p: float, text: str, **prompt: Any) -> Generator[Result, None, Result]:  # fmt: skip
        """Speaks a text; streams the sound second by second."""
        started = time.monotonic()
        inputs = self._prompt(text=text, **prompt).to(self.model.device)
        penalty = FramePenalty(repetition_penalty, {self.model.config.audio_stream_bos_id, self.eos})
        config = generation_config(
            self.model, max_new_tokens=max_new_tokens, do_sample=do_sample, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
        )
        config.ras_win_len, config.ras_win_max_num_repeat = max(ras_window, 1), ras_repeats if ras_window else NEVER
        length = inputs["input_ids"].shape[1]
        check_length(self.model.config, length, max_new_tokens)
        cache = self.caches.fresh(length, length + max_new_tokens)
        torch.manual_seed(seed)
        frames: Iterator[Array] = self.model.generate(
            **inputs, generation_config=config, past_key_values=cache, custom_generate=self._frames, penalty=penalty,
            logits_processor=[penalty] if repetition_penalty != 1 else None,
        )  # fmt: skip
        made: list[Array] = []
        streamed = 0
        for frame in frames:
            made.append(frame)
            # Frames of sound; the first row is of bos.
            streamable = len(made) - self.codebooks - AROUND
            if streamable - streamed >= PART_FRAMES:
                yield Result(audio=self._between(made, streamed, streamable), values={"sample_rate": self.rate})
                streamed = streamable
            else:
                self.context.check()
        audio = self._whole(made)
        took = time.monotonic() - started
        values = {"sample_rate": self.rate, "text": text, "seconds": audio.shape[1] / self.rate, "tokens": len(made), "tokens_per_second": len(made) / took}
        yield Result(audio=audio[:, streamed * self.processor.audio_tokenizer.config.hop_length :], values={"sample_rate": self.rate})
        return Result(audio=audio, values=values)

    def _prompt(self, *, text: str, system_prompt: str, scene: str, multi_speaker: str, reference_text: str, second_reference_text: str,
                reference_rate: int, second_reference_rate: int, reference: Any = None, second_reference: Any = None) -> Any:  # fmt: skip
        check_prompt(text, reference, second_reference, multi_speaker)
        voices = [
            (said, self._heard(sound, rate))
            for said, sound, rate in ((reference_text, reference, reference_rate), (second_reference_text, second_reference, second_reference_rate))
            if sound is not None
        ]
        scenery: list[dict[str, Any]] = [_text(scene)] if scene.strip() else []
        turns: list[dict[str, Any]] = []
        for index, (said, sound) in enumerate(voices):
            if multi_speaker == "scene":
                scenery += [_text(f"SPEAKER{index}:"), {"type": "audio", "audio": sound}]
            else:
                tag = f"[SPEAKER{index}] " if multi_speaker == "conversation" else ""
                turns += [_turn("user", [_text(tag + said)]), _turn("assistant", [{"type": "audio", "audio": sound}])]
        conversation = [_turn("system", [_text(system_prompt)])]
        if scenery:
            conversation.append(_turn("scene", scenery))
        conversation += [*turns, _turn("user", [_text(text)])]
        return self.processor.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=True, processor_kwargs={"sampling_rate": self.rate, "return_tensors": "pt"}
        )

    def _heard(self, sound: Any, rate: int) -> Any:
        """Converts a voice for the processor: [channels, samples] to one channel at its rate."""
        import torchaudio

        return torchaudio.functional.resample(torch.tensor(sound).mean(dim=0), rate, self.rate).numpy()

    def _decode(self, *, frame: Array, cache: Any) -> Array:
        """Decodes one frame [C] to the logits of the next, [1, C * V]."""
        position = position_of(cache, frame.device)
        done = self.model(
            audio_input_ids=frame[None, None], attention_mask=seen_mask(cache, position), position_ids=position, past_key_values=cache, use_cache=True
        )
        logits: Array = done.logits[:, -1]
        return logits

    @torch.no_grad()
    def _frames(self, model: Any, input_ids: Array, logits_processor: Any, stopping_criteria: Any, generation_config: Any, *, penalty: FramePenalty,
                **prompt: Any) -> Generator[Array, None, None]:  # fmt: skip
        """Yields frames int64 [C] as they are generated; the same as upstream's
        `_sample` generates."""
        config = model.config
        # For repetitions upstream counts the prompt's frames too.
        heard = prompt.get("audio_input_ids")
        before = 0 if heard is None else heard.shape[1]
        logits = model._prefill(input_ids, generation_config, prompt).logits[:, -1]
        cache = prompt["past_key_values"]
        while True:
            logits = logits.to(torch.float32, copy=True)
            scores = logits_processor(input_ids, logits)
            drawn = scores.softmax(dim=-1).multinomial(1)[:, 0] if generation_config.do_sample else scores.argmax(dim=-1)
            if heard is not None:
                recent = heard[0, -generation_config.ras_win_len :]
                repeated = (recent == drawn) & (recent != config.audio_stream_bos_id) & (recent != config.audio_stream_eos_id)
                again = repeated.sum(dim=0) >= generation_config.ras_win_max_num_repeat
                drawn[again] = logits.view(self.codebooks, -1)[again].softmax(dim=-1).multinomial(1)[:, 0]
            heard = torch.cat([drawn[None, None]] if heard is None else [heard, drawn[None, None]], dim=1)
            penalty.frames = heard[:, before:]
            yield drawn
            ended = drawn == self.eos
            if bool(ended.all()):
                return
            delayed = bool(ended.any()) or int(input_ids[0, -1]) == config.audio_delay_token_id
            following = config.audio_delay_token_id if delayed else config.audio_token_id
            input_ids = torch.cat([input_ids, input_ids.new_full((1, 1), following)], dim=1)
            if bool(stopping_criteria(input_ids, None).all()):
                return
            cache = self.caches.with_room(cache, input_ids.shape[1])
            logits = self.decode(frame=drawn, cache=cache)

    def _between(self, made: list[Array], start: int, end: int) -> Array:
        """Samples [1, N] of the sound frames from start to end, decoded with the
        frames around them."""
        codec = self.processor.audio_tokenizer
        first = max(start - AROUND, 0)
        rows = torch.stack(made[1 + first : end + AROUND + self.codebooks])
        codes = self.processor.revert_delay_pattern(rows).clip(0, self.model.config.audio_stream_bos_id - 1)
        samples: Array = codec.decode(codes.T[None]).audio_values[0]
        hop = codec.config.hop_length
        return samples[:, (start - first) * hop : (end - first) * hop].float().cpu()

    def _whole(self, made: list[Array]) -> Array:
        """Samples [1, N] of all frames, as upstream's processor decodes them."""
        frames = torch.stack(made)
        spoken = len(made) - 1 - bool((frames[-1] == self.eos).all())
        if spoken < self.codebooks:
            return torch.zeros(1, 0)  # the model ended at once
        samples: Array = self.processor.decode(frames[None])
        return samples.float().reshape(1, -1)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _turn(role: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": role, "content": content}
