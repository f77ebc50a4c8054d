"""ChatterBox by PyPI's `chatterbox-tts`, none of whose files is changed: English speech, and
voice conversion.

Upstream's `ChatterboxTTS` loads, encodes the reference, tokenizes the text and makes the whole
sound; `ChatterboxVC` converts. Replaced parts:

- `ChatterboxTTS.generate`, by `_read`, `_whole` and `_marked`: upstream's has one answer,
  the whole sound, and its watermark fails with sounds that are shorter than its window,
  which are padded here.
- The loop of `T3.inference`, by `_speech`: upstream's returns only when all tokens are generated,
  so it can neither stream nor be cancelled. It draws the same random numbers in the same order. It
  also works with cfg_weight 0, where upstream's fails.
- The forward call of one speech token, by `_decode` through `context.graph`: upstream asks for the
  weights of attention, which only its multilingual model reads, and its cache grows. It calls
  upstream's modules.

With `options.language_model`, T3's layers run in a worker with `runtime: generate`, from a package
exported from the same folder. It samples by the same rules, but with its own random numbers.

A streamed part is 25 speech tokens, made with the 50 before them and cross-faded with the part
before. The final whole is upstream's own, made from all tokens at once. Each part has
upstream's watermark.

The multilingual and the turbo model are refused: their T3 samples by other rules.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator
from typing import Any

import torch
import transformers
from torch import Tensor as Array

from ..engine import Boolean, Context, Integer, InvalidInput, MissingModel, Number, Result, Tensor, Text, method
from ..errors import Error
from .language_model import LanguageModel
from .upstream import Caches, load_files, model_folder, position_of, seen_mask, wave_file

MODEL = "ResembleAI/chatterbox"
T3 = "t3_cfg.safetensors"
OTHER_T3 = {"t3_mtl23ls_v2.safetensors": "multilingual", "t3_turbo_v1.safetensors": "turbo"}
CACHE_LENGTHS = (512, 1280)
PART, AROUND = 25, 50  #: speech tokens, 25 a second
TOKEN_SAMPLES = 960
FADE = 480
MARKED_MIN = 2048
_VOICE: list[int | str] = ["1..2", "2400.."]
_RATE: dict[str, Any] = {"low": 8000, "high": 192000}


class ChatterBox:
    """ChatterBox: English speech from text, in the voice of a reference; and voice conversion."""

    def load(self, context: Context) -> None:
        self.context = context
        folder = _folder(context)
        try:
            from chatterbox.tts import ChatterboxTTS
            from chatterbox.vc import ChatterboxVC
        except ImportError as error:
            raise MissingModel(f"importing chatterbox-tts: {error}", "pip install chatterbox-tts into the environment of the model's interpreter") from error
        self.language_model = LanguageModel(context) if "language_model" in context.options else None
        context.progress(0, 2, "weights")
        first = context.device if self.language_model is None else "cpu"
        self.tts = load_files(folder, lambda: ChatterboxTTS.from_local(folder, first))
        t3 = self.tts.t3
        if self.language_model is not None:
            del t3.tfmr  # the package has these layers; do not load them onto the device
            for part in (t3, self.tts.s3gen, self.tts.ve, *([self.tts.conds] if self.tts.conds is not None else [])):
                part.to(context.device)
            self.tts.device = context.device
        self.vc = ChatterboxVC(self.tts.s3gen, context.device)
        self.own_voice = self.tts.conds
        if self.language_model is not None:
            return
        context.progress(1, 2, "graphs")
        with torch.no_grad():
            self.caches = Caches(context, t3.cfg, context.options.get("cache_lengths", CACHE_LENGTHS), t3.speech_head.weight.dtype, rows=2)
            place = torch.zeros(1, 1, dtype=torch.int64, device=t3.device)
            self.decode = self.caches.graphed(context, self._decode, token=place, place=place.clone())

    @method(
        inputs=[Tensor("reference", "float32", _VOICE, optional=True, description="the voice to speak in; ten seconds are enough")],
        parameters=[
            Text("text", multiline=True),
            Integer("reference_rate", 24000, description="samples of the reference in a second", **_RATE),
            Number("exaggeration", 0.5, low=0, high=2, step=0.05),
            Number("cfg_weight", 0.5, low=0, high=1, step=0.05),
            Number("temperature", 0.8, low=0.05, high=5, step=0.05),
            Number("repetition_penalty", 1.2, low=1, high=2, step=0.05),
            Number("min_p", 0.05, low=0, high=1, step=0.01),
            Number("top_p", 1.0, low=0.01, high=1, step=0.01),
            Integer("max_new_tokens", 1000, low=1, high=4000, description="speech tokens, 25 a second"),
            Integer("seed", 0, low=0),
            Boolean("stream", True, description="makes the sound in parts too, which costs time and is useless to a client that takes no parts"),
        ],
        outputs=[Tensor("audio", "float32", ["channels=1", "samples=0.."])],
    )
    @torch.inference_mode()
    def speak(self, *, text: str, reference_rate: int, exaggeration: float, seed: int, stream: bool, reference: Any = None,
              **sampling: Any) -> Generator[Result, None, Result]:  # fmt: skip
        """Speaks a text; streams the sound second by second, from the first speech tokens on."""
        begun = time.monotonic()
        torch.manual_seed(seed)
        self._hear(reference, reference_rate, exaggeration)
        tokens: list[int] = []
        spoken: list[int] = []  # without start and stop tokens
        done, faded = 0, None
        for token in self._speech(self._read(text), seed, **sampling):
            tokens.append(token)
            if token < self.tts.t3.hp.start_speech_token:
                spoken.append(token)
            self.context.check()
            if stream and len(spoken) - done >= PART:
                sound, faded = self._part(spoken, done, faded)
                done = len(spoken)
                yield Result(audio=sound, values={"sample_rate": self.tts.sr})
        took = time.monotonic() - begun
        if stream and faded is not None:
            yield Result(audio=self._part(spoken, done, faded, last=True)[0], values={"sample_rate": self.tts.sr})
        audio = self._whole(tokens)
        if stream and faded is None:
            yield Result(audio=audio, values={"sample_rate": self.tts.sr})
        values = {"sample_rate": self.tts.sr, "text": text, "seconds": audio.shape[1] / self.tts.sr, "tokens": len(tokens), "tokens_per_second": len(tokens) / took}
        return Result(audio=audio, values=values)

    @method(
        inputs=[Tensor("source", "float32", _VOICE), Tensor("reference", "float32", _VOICE, optional=True, description="the voice to be heard")],
        parameters=[Integer("source_rate", 24000, **_RATE), Integer("reference_rate", 24000, **_RATE), Integer("seed", 0, low=0)],
        outputs=[Tensor("audio", "float32", ["channels=1", "samples=0.."])],
    )
    def convert(self, *, source: Any, source_rate: int, reference_rate: int, seed: int, reference: Any = None) -> Result:
        """Says what is said in `source`, in the voice of the reference."""
        if reference is None and self.own_voice is None:
            raise InvalidInput("converting without a reference", "give a reference: the model's folder has no conds.pt, which is its own voice")
        torch.manual_seed(seed)
        self.vc.ref_dict = None if self.own_voice is None else dict(self.own_voice.gen)
        audio = self.vc.generate(wave_file(source, source_rate), None if reference is None else wave_file(reference, reference_rate))
        return Result(audio=audio, values={"sample_rate": self.vc.sr, "seconds": audio.shape[1] / self.vc.sr})

    def _hear(self, reference: Any, rate: int, exaggeration: float) -> None:
        """Sets the voice. Without a reference, upstream keeps the last one."""
        if reference is not None:
            self.tts.prepare_conditionals(wave_file(reference, rate), exaggeration=exaggeration)
            return
        if self.own_voice is None:
            raise InvalidInput("speaking without a reference", "give a reference: the model's folder has no conds.pt, which is its own voice")
        emotion = exaggeration * torch.ones(1, 1, 1, device=self.tts.t3.device)
        voice = dataclasses.replace(self.own_voice.t3, emotion_adv=emotion, cond_prompt_speech_emb=None)
        self.tts.conds = dataclasses.replace(self.own_voice, t3=voice, gen=dict(self.own_voice.gen))

    def _read(self, text: str) -> Array:
        """Text tokens int64 [2, T], with start and stop; the second row is the one
        without a text."""
        from chatterbox.tts import punc_norm

        if not text.strip():
            raise InvalidInput("speaking an empty text", "give a text")
        hp = self.tts.t3.hp
        letters = self.tts.tokenizer.text_to_tokens(punc_norm(text))
        if letters.shape[1] > hp.max_text_tokens:
            raise InvalidInput(f"speaking a text of {letters.shape[1]} tokens", f"the model reads {hp.max_text_tokens}: give its sentences one by one")
        around = torch.nn.functional.pad(torch.nn.functional.pad(letters, (1, 0), value=hp.start_text_token), (0, 1), value=hp.stop_text_token)
        return around.to(self.tts.t3.device, torch.int64).repeat(2, 1)

    def _decode(self, *, token: Array, place: Array, cache: Any) -> Array:
        """Logits [2, V] after the speech token [1, 1] at `place` [1, 1] among the speech."""
        t3 = self.tts.t3
        position = position_of(cache, token.device)
        embedded = (t3.speech_emb(token) + t3.speech_pos_emb.get_fixed_embedding(place)).repeat(2, 1, 1)
        done = t3.tfmr(
            inputs_embeds=embedded, attention_mask=seen_mask(cache, position), position_ids=position, past_key_values=cache, use_cache=True
        )
        logits: Array = t3.speech_head(done.last_hidden_state)[:, -1]
        return logits

    @torch.inference_mode()
    def _speech(self, text: Array, seed: int, *, max_new_tokens: int, cfg_weight: float, temperature: float, repetition_penalty: float,
                min_p: float, top_p: float) -> Generator[int, None, None]:  # fmt: skip
        """Yields speech tokens as they are generated; the same as upstream's
        `T3.inference` generates."""
        t3 = self.tts.t3
        start = torch.full((1, 1), t3.hp.start_speech_token, device=t3.device)
        embedded, _ = t3.prepare_input_embeds(t3_cond=self.tts.conds.t3, text_tokens=text, speech_tokens=start.repeat(2, 1), cfg_weight=cfg_weight)
        if self.language_model is not None:
            yield from self.language_model.tokens(
                {"embeddings": embedded}, length=embedded.shape[1], max_new_tokens=max_new_tokens, do_sample=True, seed=seed,
                guidance=cfg_weight, temperature=temperature, repetition_penalty=repetition_penalty, min_p=min_p, top_p=top_p,
            )  # fmt: skip
            return
        first = (t3.speech_emb(start) + t3.speech_pos_emb.get_fixed_embedding(0)).repeat(2, 1, 1)
        prompt = torch.cat([embedded, first], dim=1)
        cache = self.caches.fresh(prompt.shape[1], prompt.shape[1] + max_new_tokens)
        logits = t3.speech_head(t3.tfmr(inputs_embeds=prompt, past_key_values=cache, use_cache=True).last_hidden_state[:, -1])
        penalty = transformers.RepetitionPenaltyLogitsProcessor(penalty=float(repetition_penalty))
        warpers = [transformers.MinPLogitsWarper(min_p=min_p), transformers.TopPLogitsWarper(top_p=top_p)]
        made = start
        for index in range(max_new_tokens):
            with_text, without = logits[0:1], logits[1:2]
            scores = penalty(made, with_text + cfg_weight * (with_text - without))
            if temperature != 1.0:
                scores = scores / temperature
            for warper in warpers:
                scores = warper(made, scores)
            drawn = torch.multinomial(scores.softmax(dim=-1), num_samples=1)
            made = torch.cat([made, drawn], dim=1)
            token = int(drawn)
            yield token
            if token == t3.hp.stop_speech_token:
                return
            cache = self.caches.with_room(cache, prompt.shape[1] + index + 1)
            logits = self.decode(token=drawn, place=torch.full_like(start, index + 1), cache=cache)

    def _part(self, spoken: list[int], done: int, faded: Array | None, last: bool = False) -> tuple[Array, Array]:
        """Returns the sound [1, N] of the tokens since `done`, and its end, which is cross-faded
        with the next part; the last part includes its end."""
        first = max(done - AROUND, 0)
        # T3 draws on.
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if self.tts.t3.device.type == "cuda" else []):
            window = torch.tensor(spoken[first:], device=self.tts.t3.device)
            sound = self.tts.s3gen.inference(speech_tokens=window, ref_dict=dict(self.tts.conds.gen))[0][0]
        begin = (done - first) * TOKEN_SAMPLES
        if faded is not None:
            rising = torch.linspace(0, 1, FADE, device=sound.device)
            sound[begin - FADE : begin].lerp_(faded, 1 - rising)
            begin -= FADE
        return self._marked(sound[begin:] if last else sound[begin:-FADE]), sound[-FADE:]

    def _whole(self, tokens: list[int]) -> Array:
        """The sound [1, N] of all tokens, made as ChatterboxTTS.generate makes it."""
        from chatterbox.models.s3tokenizer import SPEECH_VOCAB_SIZE, drop_invalid_tokens

        speech = drop_invalid_tokens(torch.tensor(tokens, device=self.tts.t3.device))
        speech = speech[speech < SPEECH_VOCAB_SIZE]
        if speech.shape[0] == 0:
            return torch.zeros(1, 0)  # the model ended at once
        return self._marked(self.tts.s3gen.inference(speech_tokens=speech, ref_dict=dict(self.tts.conds.gen))[0][0])

    def _marked(self, sound: Array) -> Array:
        """Adds upstream's watermark, [1, N]; pads sounds shorter than its window, with which
        upstream's fails."""
        missing = max(MARKED_MIN - sound.shape[0], 0)
        marked = self.tts.watermarker.apply_watermark(torch.nn.functional.pad(sound, (0, missing)).cpu().numpy(), sample_rate=self.tts.sr)
        return torch.from_numpy(marked)[None, : sound.shape[0]]


def _folder(context: Context) -> str:
    """Errors: config_invalid for another variant, by name or by files; MissingModel."""
    variant = str(context.options.get("variant", "english"))
    if variant == "english":
        try:
            return model_folder(context, MODEL, T3)
        except MissingModel:
            found = [name for file, name in OTHER_T3.items() if _has(context, file)]
            if not found:
                raise
            variant = found[0]
    raise Error("config_invalid", f"loading ChatterBox {variant}",
                f"options.variant is english, and options.model has {T3}, as {MODEL} has: the multilingual and the turbo model sample by other rules; "
                "an engine of your own can run upstream's classes of them (docs/python-engines.md)")  # fmt: skip


def _has(context: Context, file: str) -> bool:
    try:
        return bool(model_folder(context, MODEL, file))
    except MissingModel:
        return False
