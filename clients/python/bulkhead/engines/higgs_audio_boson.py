"""Higgs Audio 2 by its authors' own package, PyPI's `boson-multimodal`, none of whose files is
changed: text and sound from text.

The package needs transformers older than 4.47, so it needs its own interpreter; `higgs_audio_v2`
uses the newer transformers' classes. Upstream's `HiggsAudioServeEngine` makes the prompt, and
`HiggsAudioModel.generate` draws in a second thread, whose loop reports each step to a streamer.
Replaced parts:

- The graphs of one step, by `context.graph`: upstream captures at its own will, and counts nothing.
  They stand where upstream looks for its own, in `decode_graph_runners`. Steps in a cache that
  grows are counted by `_layers`.
- The constructor of `HiggsAudioServeEngine`, by `_prompts`: it makes caches where graphs are off.
- `repetition_penalty` is added to the processors: upstream's class takes audio codes for text.

Options: `model`, `codec`, `dtype`, `cache_lengths`.
"""

from __future__ import annotations

import base64
import copy
import os
import queue
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

# Upstream's codec would download its HuBERT; engines must not.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor as Array  # noqa: E402

from ..engine import Boolean, Choice, Context, MissingModel, Result, Tensor, Text, method  # noqa: E402
from .higgs_audio_v2 import AROUND, MODEL, PART_FRAMES, SAMPLING, TEXTS, VOICES, FramePenalty, check_prompt  # noqa: E402
from .upstream import CACHE_LENGTHS, check_length, dtype_of, load_files, model_folder, wave_file  # noqa: E402

CODEC = "bosonai/higgs-audio-v2-tokenizer"
WHISPER = "openai/whisper-large-v3-turbo"
STOPS = ["<|end_of_text|>", "<|eot_id|>"]
_STEP = ("hidden_states", "causal_mask", "position_ids", "audio_discrete_codes_mask", "cache_position", "audio_attention_mask",
         "fast_forward_attention_mask")  # fmt: skip


class HiggsAudio:
    """Higgs Audio 2 by boson-multimodal: speech from text, in the voice of a reference or of
    two; and text."""

    def load(self, context: Context) -> None:
        self.context = context
        try:
            from boson_multimodal.audio_processing.higgs_audio_tokenizer import load_higgs_audio_tokenizer
            from boson_multimodal.model.higgs_audio import HiggsAudioModel
        except ImportError as error:
            raise MissingModel(f"importing boson-multimodal: {error}",
                               "pip install boson-multimodal into the environment of the model's interpreter") from error  # fmt: skip
        folder = model_folder(context, MODEL)
        codec = model_folder(context, CODEC, option="codec")
        context.progress(0, 3, "codec")
        self.codec = load_files(codec, lambda: load_higgs_audio_tokenizer(codec, device=context.device))
        tokenizer = load_files(folder, lambda: transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True))
        context.progress(1, 3, "weights")
        given = {"torch_dtype": dtype_of(context), "device_map": {"": context.device}, "local_files_only": True}
        self.model = load_files(folder, lambda: HiggsAudioModel.from_pretrained(folder, **given)).eval()
        self.model.set_audio_special_tokens(tokenizer)
        self.prompts = _prompts(self.model, tokenizer, self.codec)
        self.codebooks = self.model.config.audio_num_codebooks
        self.rate, self.hop = self.codec.sampling_rate, self.codec.sampling_rate // self.codec.tps
        context.progress(2, 3, "graphs")
        self.caches: dict[int, Any] = {}
        self.layers = self.model._forward_core
        self.grown = context.graph(self.layers, [])
        self.model._forward_core = self._layers
        if context.graphs != "off":
            self._capture(context, context.options.get("cache_lengths", CACHE_LENGTHS))
        # One for all requests: OpenMP keeps threads for each computing thread.
        self.thread = ThreadPoolExecutor(1)

    @torch.no_grad()
    def _capture(self, context: Context, lengths: Any) -> None:
        config, device, dtype = self.model.config, self.model.device, self.model.dtype
        layers = copy.deepcopy(config.text_config)
        # As many as upstream copies.
        layers.num_hidden_layers += len(config.audio_dual_ffn_layers or ())
        buckets = []
        for length in sorted(lengths):
            cache = transformers.StaticCache(config=layers, batch_size=1, max_cache_len=length, device=device, dtype=dtype)
            self.caches[length] = cache
            mask = torch.zeros(1, 1, 1, length, dtype=dtype, device=device)
            place = torch.zeros(1, 1, dtype=torch.int64, device=device)
            example = (torch.zeros(1, 1, config.text_config.hidden_size, dtype=dtype, device=device), mask, place, place > 0, place[0], mask, mask)
            buckets += [{**dict(zip(_STEP, example)), "cache": cache, "of_sound": of_sound} for of_sound in (True, False)]
        step = context.graph(self._step, buckets)
        for length, cache in self.caches.items():
            cache.reset()  # capturing wrote into it
            for of_sound in (True, False):
                self.model.decode_graph_runners[length][of_sound] = _Runner(step, cache, of_sound)

    def _step(self, *, cache: Any, of_sound: bool, **tensors: Array) -> Array:
        """The layers, for one position [1, 1, E]."""
        done: Array = self.layers(
            **tensors, past_key_values=cache, use_cache=True, output_attentions=False, output_hidden_states=False,
            is_decoding_audio_token=of_sound, is_using_cuda_graph=True,
        )[0]  # fmt: skip
        return done

    def _layers(self, *, hidden_states: Array, **given: Any) -> Any:
        """Replaces upstream's call of its layers outside the graphs: of a prompt, or of one
        position, which is counted."""
        return (self.layers if hidden_states.shape[1] > 1 else self.grown)(hidden_states=hidden_states, **given)

    @method(
        inputs=VOICES,
        parameters=[
            *TEXTS,
            Choice("multi_speaker", ["off", "conversation"], description="conversation: the references are turns of SPEAKER0 and SPEAKER1"),
            Boolean("speech_only", True, description="false: the model may write before and after it speaks"),
            Text("stop_strings", "\n".join(STOPS), multiline=True, description="what it writes where it is to end, one a line"),
            *SAMPLING,
        ],
        outputs=[Tensor("audio", "float32", ["channels=1", "samples=0.."])],
    )  # fmt: skip
    def speak(self, *, do_sample: bool, temperature: float, top_p: float, top_k: int, min_p: float, repetition_penalty: float,
              ras_window: int, ras_repeats: int, max_new_tokens: int, seed: int, stop_strings: str,
              **prompt: Any) -> Generator[Result, None, Result]:  # fmt: skip
        """Speaks a text; streams the sound second by second."""
        started = time.monotonic()
        with torch.inference_mode():
            inputs = self._prompt(**prompt)
        prompted = inputs["input_ids"].shape[1]
        length = prompted + (0 if inputs["audio_out_ids"] is None else inputs["audio_out_ids"].shape[1])
        check_length(self.model.config.text_config, length, max_new_tokens)
        # Upstream's loop fails when they are full.
        caches = self.caches if length + max_new_tokens <= max(self.caches, default=0) else None
        for cache in self.caches.values():
            cache.reset()
        config = self.model.config
        penalty = FramePenalty(repetition_penalty, {config.audio_stream_bos_id, config.audio_stream_eos_id})
        drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k or None, "min_p": min_p or None}
        sampled = do_sample and temperature > 0
        steps = Steps(self.codebooks, config.audio_stream_bos_id, penalty)
        made: Future[Any] = self.thread.submit(
            self.model.generate, **inputs, max_new_tokens=max_new_tokens, use_cache=True, tokenizer=self.prompts.tokenizer,
            stop_strings=stop_strings.splitlines() or None,
            do_sample=sampled, **(drawn if sampled else {}), past_key_values_buckets=caches, ras_win_len=ras_window or None,
            ras_win_max_num_repeat=ras_repeats, seed=seed, streamer=steps, logits_processor=[penalty] if repetition_penalty != 1 else [],
        )  # fmt: skip
        made.add_done_callback(lambda _: steps.close())
        sounds: list[Array] = []
        streamed = 0
        try:
            for ended in steps:
                while len(sounds) < ended:
                    sounds.append(self._whole(steps.sequences[len(sounds)]))
                    yield Result(audio=sounds[-1][:, streamed * self.hop :], values={"sample_rate": self.rate})
                    streamed = 0
                frames = steps.sequences[ended] if ended < len(steps.sequences) else []
                # Frames of sound; the first row is of bos.
                streamable = len(frames) - self.codebooks - AROUND
                if streamable - streamed >= PART_FRAMES:
                    yield Result(audio=self._between(frames, streamed, streamable), values={"sample_rate": self.rate})
                    streamed = streamable
                else:
                    self.context.check()
        finally:
            steps.left.set()
            wait([made])
        written = made.result()[0][0, prompted:]
        took, count = time.monotonic() - started, sum(map(len, steps.sequences))
        audio = torch.cat([torch.zeros(1, 0), *sounds], dim=1)
        return Result(audio=audio, values={
            "sample_rate": self.rate, "text": self.prompts.tokenizer.decode(written), "seconds": audio.shape[1] / self.rate, "tokens": count,
            "tokens_per_second": count / took,
        })  # fmt: skip

    def _prompt(self, *, text: str, system_prompt: str, scene: str, multi_speaker: str, speech_only: bool, reference_text: str,
                second_reference_text: str, reference_rate: int, second_reference_rate: int, reference: Any = None,
                second_reference: Any = None) -> dict[str, Any]:  # fmt: skip
        from boson_multimodal.data_types import AudioContent, ChatMLSample, Message

        check_prompt(text, reference, second_reference, multi_speaker)
        system = f"{system_prompt}\n\n<|scene_desc_start|>\n{scene.strip()}\n<|scene_desc_end|>" if scene.strip() else system_prompt
        turns = [Message("system", system)]
        voices = ((reference_text, reference, reference_rate), (second_reference_text, second_reference, second_reference_rate))
        for index, (said, sound, rate) in enumerate(voices):
            if sound is not None:
                tag = f"[SPEAKER{index}] " if multi_speaker == "conversation" else ""
                turns += [Message("user", tag + said), Message("assistant", AudioContent("placeholder", raw_audio=_encoded(sound, rate)))]
        turns.append(Message("user", text))
        inputs: dict[str, Any] = self.prompts._prepare_inputs(ChatMLSample(turns), force_audio_gen=speech_only)
        return inputs

    def _between(self, frames: list[Array], start: int, end: int) -> Array:
        """Samples [1, N] of the sound frames from start to end, decoded with the
        frames around them."""
        first = max(start - AROUND, 0)
        heard = self._sound(torch.stack(frames[1 + first : end + AROUND + self.codebooks], dim=1))
        return heard[:, (start - first) * self.hop : (end - first) * self.hop]

    def _whole(self, frames: list[Array]) -> Array:
        """Samples [1, N] of one sequence, decoded as in `HiggsAudioServeEngine.generate`: without
        its first and last frame."""
        if len(frames) < self.codebooks + 2:
            return torch.zeros(1, 0)  # the model ended at once
        return self._sound(torch.stack(frames, dim=1), slice(1, -1))

    def _sound(self, frames: Array, kept: slice = slice(None)) -> Array:
        """Samples [1, N] of frames [C, n], each codebook delayed by one more."""
        from boson_multimodal.model.higgs_audio.utils import revert_delay_pattern

        codes = revert_delay_pattern(frames).clip(0, self.model.config.audio_codebook_size - 1)[:, kept]
        return torch.from_numpy(self.codec.decode(codes[None])[0])


class Steps(transformers.generation.streamers.BaseStreamer):
    """Receives each step of upstream's loop in its thread. Iterating on another thread yields how
    many sequences have ended. `sequences` are their frames [C] so far; one begins with a frame of
    `bos` after a text token."""

    def __init__(self, codebooks: int, bos: int, penalty: FramePenalty) -> None:
        self.sequences: list[list[Array]] = []
        self.left = threading.Event()  #: its consumer has left
        self._codebooks, self._bos, self._penalty = codebooks, bos, penalty
        self._told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._prompted = self._wrote = False

    def put(self, value: Array) -> None:
        if self.left.is_set():
            raise InterruptedError("the request has ended")
        if not self._prompted:
            self._prompted = True  # with the prompt
            return
        if value.numel() == self._codebooks:
            if self._wrote and bool((value == self._bos).all()):
                self.sequences.append([])
            self.sequences[-1].append(value)
            self._penalty.frames = torch.stack(self.sequences[-1])[None]
        self._wrote = value.numel() != self._codebooks
        self._told.put(max(len(self.sequences) - 1, 0))

    def end(self) -> None:
        pass

    def close(self) -> None:
        """Nothing more arrives: the loop has ended, or failed."""
        self._told.put(None)

    def __iter__(self) -> Iterator[int]:
        while (told := self._told.get()) is not None:
            yield told
        yield len(self.sequences)


class _Runner:
    """Replaces upstream's own graph of one step."""

    def __init__(self, step: Any, cache: Any, of_sound: bool) -> None:
        self.step, self.cache, self.of_sound = step, cache, of_sound

    def __call__(self, **given: Any) -> tuple[Array, None, None]:
        return self.step(**{name: given[name] for name in _STEP}, cache=self.cache, of_sound=self.of_sound), None, None


def _encoded(sound: Any, rate: int) -> str:
    return base64.b64encode(wave_file(sound, rate).getvalue()).decode()


def _prompts(model: Any, tokenizer: Any, codec: Any) -> Any:
    """Makes upstream's engine as far as prompts need it."""
    from boson_multimodal.data_collator.higgs_audio_collator import HiggsAudioSampleCollator
    from boson_multimodal.serve.serve_engine import HiggsAudioServeEngine

    config = model.config
    whisper = transformers.AutoProcessor.from_pretrained(WHISPER, local_files_only=True) if config.encode_whisper_embed else None
    made = HiggsAudioServeEngine.__new__(HiggsAudioServeEngine)
    made.model, made.tokenizer, made.audio_tokenizer, made.device = model, tokenizer, codec, model.device
    made.collator = HiggsAudioSampleCollator(
        whisper_processor=whisper, encode_whisper_embed=config.encode_whisper_embed, audio_in_token_id=config.audio_in_token_idx,
        audio_out_token_id=config.audio_out_token_idx, audio_stream_bos_id=config.audio_stream_bos_id, round_to=1,
        audio_stream_eos_id=config.audio_stream_eos_id, pad_token_id=config.pad_token_id, return_audio_in_tokens=False,
        use_delay_pattern=config.use_delay_pattern, audio_num_codebooks=config.audio_num_codebooks,
    )  # fmt: skip
    return made
