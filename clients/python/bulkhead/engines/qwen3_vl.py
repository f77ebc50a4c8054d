"""Qwen3-VL by transformers' `qwen3_vl`, none of whose files is changed: pictures, a video and a
prompt to text.

Upstream's processor makes the prompt; upstream's `generate` checks the parameters, prepares the
logits processors and prefills. What is replaced, and why:

- The loop `_sample`, by `_tokens`, which `generate` calls as its `custom_generate`: upstream's
  streams only from a second thread, and cannot be cancelled. It draws the same random numbers in
  the same order.
- The forward call of one token, by `_decode` through `context.graph`: upstream's builds the mask
  and the positions from numbers on the host, which cannot be captured. It calls upstream's
  `forward`.

With `options.language_model`, only the vision encoder runs here. Its embeddings and the prompt go
to a worker with `runtime: generate`, with a package exported from the same folder. It samples by
the same rules, but with its own random numbers.

Options: `model`, `dtype`, `attention` (sdpa, flash_attention_2, eager), `quantization` (none, 8bit,
4bit), `cache_lengths`, `language_model`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
import transformers
from tokenizers.decoders import DecodeStream
from torch import Tensor as Array

from ..engine import Boolean, Context, Integer, InvalidInput, Number, Result, Tensor, Text, method
from ..errors import Error
from .language_model import LanguageModel
from .upstream import CACHE_LENGTHS, Caches, check_length, generation_config, load_files, load_weights, model_folder, position_of, seen_mask

MODEL = "Qwen/Qwen3-VL-4B-Instruct"
ATTENTIONS = ("sdpa", "flash_attention_2", "eager")
_PICTURES: list[int | str] = ["1..", "1..", "1..", 3]


class Qwen3VL:
    """Qwen3-VL: answers a prompt about pictures, a video, or text alone."""

    def load(self, context: Context) -> None:
        begun = time.monotonic()
        self.context = context
        folder = model_folder(context, MODEL)
        wanted, self.fallback = _attention(context)
        quantization = _quantization(context)
        self.language_model = LanguageModel(context) if "language_model" in context.options else None
        context.progress(0, 3, "processor")
        self.processor = load_files(folder, lambda: transformers.AutoProcessor.from_pretrained(folder, local_files_only=True))
        context.progress(1, 3, "weights")
        kind = transformers.Qwen3VLForConditionalGeneration
        placed = {} if self.language_model is None else {"device_map": "cpu"}
        self.model = load_weights(kind, folder, context, attn_implementation=wanted, quantization_config=quantization, **placed)
        self.attention = str(self.model.config.text_config._attn_implementation)
        self.bits = next((bits for bits in ("8bit", "4bit") if getattr(self.model, f"is_loaded_in_{bits}", False)), "none")
        if self.language_model is not None:
            del self.model.model.language_model, self.model.lm_head  # the package has them
            self.model.to(context.device)
            self.load_seconds = time.monotonic() - begun
            return
        context.progress(2, 3, "graphs")
        with torch.no_grad():
            # FlashAttention takes no mask, so it would read a static cache to its end.
            lengths = context.options.get("cache_lengths", CACHE_LENGTHS) if self.attention != "flash_attention_2" else ()
            self.caches = Caches(context, self.model.config, lengths, self.model.dtype)
            place = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
            self.decode = self.caches.graphed(context, self._decode, token=place, delta=place.clone())
        self.load_seconds = time.monotonic() - begun

    @method(
        inputs=[
            Tensor("images", "uint8", _PICTURES, optional=True, description="pictures of one size: count, height, width, RGB"),
            Tensor("video", "uint8", _PICTURES, optional=True, description="frames, height, width, RGB"),
        ],
        parameters=[
            Text("prompt", multiline=True),
            Text("system_prompt", "", multiline=True),
            Number("video_fps", 2.0, low=0.01, high=1000, description="frames of the video in a second"),
            Boolean("do_sample", True),
            Number("temperature", 0.7, low=0, high=2, step=0.05, description="0 is greedy"),
            Number("top_p", 0.9, low=0.05, high=1, step=0.01),
            Integer("top_k", 50, low=0, high=200, description="0 is all"),
            Number("min_p", 0.0, low=0, high=1, step=0.01),
            Number("repetition_penalty", 1.0, low=1, high=2, step=0.01),
            Integer("max_new_tokens", 512, low=1, high=32768),
            Integer("seed", 0, low=0),
        ],
    )
    @torch.no_grad()
    def answer(self, *, prompt: str, system_prompt: str, video_fps: float, repetition_penalty: float, max_new_tokens: int, seed: int,
               images: Any = None, video: Any = None, **sampling: Any) -> Generator[Result, None, Result]:  # fmt: skip
        """Answers a prompt; streams the text."""
        begun = time.monotonic()
        inputs = self._inputs(prompt, system_prompt, images, video, video_fps).to(self.model.device)
        length = inputs["input_ids"].shape[1]
        check_length(self.model.config.text_config, length, max_new_tokens)
        tokens: Iterator[int]
        if self.language_model is not None:
            tokens = self.language_model.tokens(
                self._seen(inputs), length=length, max_new_tokens=max_new_tokens, seed=seed, repetition_penalty=repetition_penalty, **_drawn(**sampling)
            )
        else:
            config = generation_config(self.model, max_new_tokens=max_new_tokens, **sampling)
            config.repetition_penalty = repetition_penalty
            torch.manual_seed(seed)
            tokens = self.model.generate(
                **inputs, generation_config=config, past_key_values=self.caches.fresh(length, length + max_new_tokens), custom_generate=self._tokens
            )
        made: list[int] = []
        streamed = ""
        pieces, tokenizer = DecodeStream(skip_special_tokens=True), self.processor.tokenizer
        first = 0.0
        for token in tokens:
            first = first or time.monotonic()
            made.append(token)
            if piece := pieces.step(tokenizer.backend_tokenizer, token):
                streamed += piece
                yield Result(values={"text": piece})
            else:
                self.context.check()
        took = time.monotonic() - first
        text = self.processor.post_process_image_text_to_text([made])[0]
        if text.startswith(streamed) and text != streamed:
            # Without an incomplete character at the end.
            yield Result(values={"text": text[len(streamed) :]})
        return Result(values={
            "text": text, "tokens": len(made), "prompt_tokens": length, "first_token_seconds": first - begun,
            "tokens_per_second": (len(made) - 1) / took if len(made) > 1 else 0.0, "load_seconds": self.load_seconds,
            "dtype": str(self.model.dtype).removeprefix("torch."), "quantization": self.bits,
            "attention": self.attention, "attention_fallback": self.fallback,
        })  # fmt: skip

    def _inputs(self, prompt: str, system_prompt: str, images: Any, video: Any, fps: float) -> Any:
        if not prompt.strip():
            raise InvalidInput("answering an empty prompt", "give a prompt")
        shown: list[dict[str, Any]] = [{"type": "image"} for _ in (() if images is None else images)]
        if video is not None:
            shown.append({"type": "video"})
        turns = [{"role": "system", "content": [{"type": "text", "text": system_prompt}]}] if system_prompt.strip() else []
        turns.append({"role": "user", "content": [*shown, {"type": "text", "text": prompt}]})
        seen: dict[str, Any] = {}
        if images is not None:
            seen["images"] = [torch.tensor(image).permute(2, 0, 1) for image in images]
        if video is not None:
            told = {"total_num_frames": len(video), "fps": fps, "frames_indices": list(range(len(video)))}
            seen |= {"videos": [torch.tensor(video).permute(0, 3, 1, 2)], "video_metadata": [told], "do_sample_frames": False}
        written = self.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        try:
            return self.processor(text=[written], return_tensors="pt", **seen)
        except ValueError as error:  # sides of very different lengths
            raise InvalidInput(f"reading the pictures: {error}", "give pictures of another shape") from error

    def _seen(self, inputs: Any) -> dict[str, Array]:
        """The prompt for the package's prefill: tokens [T]; with pictures also vision [T, E],
        deepstack [D, T, E] and rope [3, T]."""
        ids = inputs["input_ids"][0]
        config, model = self.model.config, self.model.model
        grids = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw") if name in inputs}
        if not grids:
            return {"tokens": ids}
        vision = torch.zeros(len(ids), config.text_config.hidden_size, dtype=self.model.dtype, device=ids.device)
        deepstack = vision.repeat(len(config.vision_config.deepstack_visual_indexes), 1, 1)
        kinds = (("pixel_values", "image_grid_thw", config.image_token_id), ("pixel_values_videos", "video_grid_thw", config.video_token_id))
        for pixels, grid, placeholder in kinds:
            if grid in grids:
                seen = model.get_image_features(inputs[pixels], grids[grid], return_dict=True)
                at = ids == placeholder
                vision[at], deepstack[:, at] = torch.cat(seen.pooler_output), torch.stack(seen.deepstack_features)
        rope, _ = model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], **grids)
        return {"tokens": ids, "vision": vision, "deepstack": deepstack, "rope": rope[:, 0]}

    def _decode(self, *, token: Array, delta: Array, cache: Any) -> Array:
        """Logits [1, V] after `token` [1, 1], whose rotary positions differ from its index by
        `delta` [1, 1]."""
        position = position_of(cache, token.device)
        mask = seen_mask(cache, position)
        if mask is not None and self.attention == "eager":  # eager adds the mask to the scores
            mask = torch.where(mask, 0.0, torch.finfo(self.model.dtype).min).to(self.model.dtype)
        places = torch.stack([position, *[position + delta] * 3])
        done = self.model(input_ids=token, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
        logits: Array = done.logits[:, -1]
        return logits

    @torch.no_grad()
    def _tokens(self, model: Any, input_ids: Array, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
                **prompt: Any) -> Generator[int, None, None]:  # fmt: skip
        """Yields tokens as they are generated; the same as upstream's `_sample` generates."""
        logits = model._prefill(input_ids, generation_config, prompt).logits[:, -1]
        cache = prompt["past_key_values"]
        while True:
            scores = logits_processor(input_ids, logits.to(torch.float32, copy=True))
            drawn = scores.softmax(dim=-1).multinomial(1) if generation_config.do_sample else scores.argmax(dim=-1, keepdim=True)
            input_ids = torch.cat([input_ids, drawn], dim=1)
            yield int(drawn)
            if bool(stopping_criteria(input_ids, None).all()):
                return
            cache = self.caches.with_room(cache, input_ids.shape[1])
            logits = self.decode(token=drawn, delta=model.model.rope_deltas, cache=cache)


def _drawn(*, do_sample: bool, temperature: float, **filters: Any) -> dict[str, Any]:
    """Parameters for `runtime: generate`, which refuses a temperature without sampling."""
    return {"do_sample": True, "temperature": temperature, **filters} if do_sample and temperature > 0 else {"do_sample": False}


def _attention(context: Context) -> tuple[str, str]:
    """The attention to load, and why it is not the requested one; empty if it is."""
    wanted = str(context.options.get("attention", "sdpa"))
    if wanted not in ATTENTIONS:
        raise Error("config_invalid", f"loading with attention {wanted!r}", f"options.attention is one of {', '.join(ATTENTIONS)}")
    if wanted == "flash_attention_2" and not transformers.utils.is_flash_attn_2_available():
        return "sdpa", "flash_attention_2 needs a GPU and the package flash-attn; sdpa was loaded"
    if wanted == "flash_attention_2" and context.graphs == "required":
        raise Error("capture_failed", "capturing with flash_attention_2, which takes no static cache", "set options.attention to sdpa, or graphs to preferred")
    return wanted, ""


def _quantization(context: Context) -> Any:
    wanted = str(context.options.get("quantization", "none"))
    if wanted == "none":
        return None
    if "language_model" in context.options:
        raise Error("config_invalid", f"loading with quantization {wanted} and a language_model, whose package has its own weights",
                    "set options.quantization to none; `python -m bulkhead.export --weights int8` or int4 makes such a package")  # fmt: skip
    if wanted not in ("8bit", "4bit"):
        raise Error("config_invalid", f"loading with quantization {wanted!r}", "options.quantization is none, 8bit or 4bit")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Error("config_invalid", f"loading with quantization {wanted} without the package bitsandbytes",
                    "pip install bitsandbytes, or set options.quantization to none")  # fmt: skip
    if wanted == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
