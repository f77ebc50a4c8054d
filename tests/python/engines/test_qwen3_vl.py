"""Qwen3-VL against upstream's own classes called directly, token by token: small random models of
the true classes."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import PIL.Image
import small_models
import torch
import transformers
from bulkhead.engine import LocalContext, MissingModel, Result
from bulkhead.engines.qwen3_vl import Qwen3VL
from bulkhead.errors import Error
from calls import Capturing, SmallModelTest, StreamingCalls, answered, counted, loaded, steps_by_cache, waits_for_nothing
from safetensors.torch import load_file, save_file

PROMPT = "What is to be seen?"
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 30, "seed": 4}
RANDOM = numpy.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (2, 24, 32, 3), dtype=numpy.uint8)
VIDEO = RANDOM.integers(0, 256, (5, 16, 24, 3), dtype=numpy.uint8)


def upstream(model: Any, processor: Any, images: Any = None, video: Any = None, fps: float = 2.0, system: str = "", **sampling: Any) -> str:
    asked = {**SAMPLING, **sampling}
    torch.manual_seed(asked.pop("seed"))
    content: list[dict[str, Any]] = [{"type": "image", "image": PIL.Image.fromarray(image)} for image in (() if images is None else images)]
    told: dict[str, Any] = {}
    if video is not None:
        content.append({"type": "video", "video": video.transpose(0, 3, 1, 2)})
        told = {"do_sample_frames": False, "video_metadata": [{"total_num_frames": len(video), "fps": fps, "frames_indices": list(range(len(video)))}]}
    turns = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
    turns.append({"role": "user", "content": [*content, {"type": "text", "text": PROMPT}]})
    inputs = processor.apply_chat_template(
        turns, tokenize=True, add_generation_prompt=True, return_dict=True, processor_kwargs={"return_tensors": "pt", **told}
    )
    made = model.generate(**inputs, **asked)
    text: str = processor.post_process_image_text_to_text(made[:, inputs["input_ids"].shape[1] :])[0]
    return text


class Qwen3VLTest(StreamingCalls, SmallModelTest):
    make = staticmethod(small_models.qwen3_vl)
    method, usual = "answer", {"prompt": PROMPT, **SAMPLING}
    before, cancelled = {"video": VIDEO, "seed": 8}, {"prompt": "Something else?"}
    bad = ({"prompt": " "}, {"prompt": "It goes on and on. " * 1500}, {"images": numpy.zeros((1, 2, 900, 3), numpy.uint8)}, {"max_new_tokens": 5000})

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(cls.folder).eval()
        cls.processor = transformers.AutoProcessor.from_pretrained(cls.folder)
        cls.begin()

    @classmethod
    def fresh(cls, graphs: str = "preferred", context: type[LocalContext] = LocalContext, **options: Any) -> Qwen3VL:
        engine: Qwen3VL = loaded(Qwen3VL, {"model": str(cls.folder), "cache_lengths": [128, 256], **options}, graphs, context)
        return engine

    @staticmethod
    def taken(whole: Result) -> str:
        text: str = whole.values["text"]
        return text

    def upstream(self, **given: Any) -> str:
        return upstream(self.model, self.processor, **given)

    def equals(self, ours: str, theirs: str) -> None:
        self.assertGreater(len(set(theirs)), 5, "a model that repeats itself proves little")
        self.assertEqual(ours, theirs)

    def test_text_alone_is_answered_as_upstream_answers(self) -> None:
        self.equals(self.first, self.upstream())
        self.equals(self.said(system_prompt="Be short."), self.upstream(system="Be short."))

    def test_pictures_and_video_are_seen_as_upstream_sees_them(self) -> None:
        answers = set()
        for given in ({"images": IMAGES}, {"images": IMAGES[:1]}, {"video": VIDEO}, {"images": IMAGES, "video": VIDEO}, {"video": VIDEO, "video_fps": 0.5}):
            with self.subTest(given=sorted(given)):
                ours = self.said(**given)
                self.equals(ours, self.upstream(**{name.removeprefix("video_"): value for name, value in given.items()}))
                answers.add(ours)
        self.assertEqual(len(answers), 5)

    def test_each_parameter_of_sampling_is_upstreams(self) -> None:
        for given in ({"top_k": 0, "temperature": 1.5}, {"top_k": 2}, {"top_p": 0.4}, {"temperature": 2.0}, {"min_p": 0.2}, {"repetition_penalty": 1.4}, {"seed": 9}):
            with self.subTest(**given):
                ours = self.said(**given)
                self.equals(ours, self.upstream(**given))
                self.assertNotEqual(ours, self.first)
        greedy = self.upstream(do_sample=False, temperature=None, top_k=None, top_p=None)
        for given in ({"do_sample": False}, {"temperature": 0.0}):
            with self.subTest(**given):
                self.equals(self.said(**given), greedy)

    def test_what_is_streamed_is_the_whole(self) -> None:
        parts, whole = answered(self.engine, "answer", **{"prompt": PROMPT, **SAMPLING})
        self.assertGreater(len(parts), 5)
        self.assertEqual("".join(part.values["text"] for part in parts), whole.values["text"])

    def test_dtype_and_attention_are_those_of_the_options_and_are_told(self) -> None:
        """Eager attention reads the static cache as sdpa does, which can be captured too."""
        half = self.fresh(dtype="bfloat16")
        eager = self.fresh(context=Capturing, attention="eager")
        place = torch.zeros(1, 1, dtype=torch.int64)
        for engine, dtype, attention in ((self.engine, "float32", "sdpa"), (half, "bfloat16", "sdpa"), (eager, "float32", "eager")):
            with self.subTest(dtype=dtype, attention=attention):
                values = answered(engine, "answer", **{"prompt": PROMPT, **SAMPLING, "max_new_tokens": 3})[1].values
                told = [values[name] for name in ("dtype", "quantization", "attention", "attention_fallback")]
                self.assertEqual(told, [dtype, "none", attention, ""])
                self.assertGreater(values["tokens_per_second"], 0)
                self.assertGreater(values["load_seconds"], 0)
                waits_for_nothing(engine._decode, token=place, delta=place, cache=engine.caches.static[0])
        self.equals(self.said(eager, images=IMAGES), self.upstream(images=IMAGES))

    def test_attention_that_is_not_there_falls_back_by_name(self) -> None:
        engine = self.fresh(attention="flash_attention_2")
        values = answered(engine, "answer", **{"prompt": PROMPT, **SAMPLING, "max_new_tokens": 3})[1].values
        self.assertEqual(values["attention"], "sdpa")
        self.assertIn("flash-attn", values["attention_fallback"])
        with mock.patch("transformers.utils.is_flash_attn_2_available", return_value=True), self.assertRaises(Error) as refused:
            self.fresh("required", attention="flash_attention_2")
        self.assertEqual(refused.exception.code, "capture_failed")

    def test_static_caches_are_used_as_long_as_they_hold(self) -> None:
        for tokens, reason in ((SAMPLING["max_new_tokens"], "no_gpu"), (240, "no_bucket")):
            with counted(self.engine) as calls:
                long = self.said(max_new_tokens=tokens)
            self.assertEqual(set(calls), {reason})
        self.equals(long, self.upstream(max_new_tokens=240))

    def test_a_cache_that_is_full_goes_on_in_the_next_one(self) -> None:
        for given in ({}, {"images": IMAGES}):
            prompt = answered(self.engine, "answer", **{"prompt": PROMPT, **SAMPLING, **given})[1].values["prompt_tokens"]
            engine = self.fresh(cache_lengths=[prompt + 5, prompt + 12, 512])
            with steps_by_cache(engine) as steps:
                self.equals(self.said(engine, **given), self.upstream(**given))
            self.assertEqual(steps, [5, 7, 17])

    def test_one_pixel_is_a_picture_and_so_are_8k(self) -> None:
        for picture in (IMAGES[:1, :1, :1], numpy.full((1, 4320, 7680, 3), 90, numpy.uint8)):
            self.equals(self.said(images=picture), self.upstream(images=picture))

    def test_64_pictures_are_seen_at_once(self) -> None:
        many = RANDOM.integers(0, 256, (64, 16, 16, 3), dtype=numpy.uint8)
        self.equals(self.said(images=many), self.upstream(images=many))

    def test_options_that_cannot_be_are_refused(self) -> None:
        for options, told in (({"attention": "best"}, "sdpa"), ({"dtype": "float5"}, "bfloat16"), ({"quantization": "3bit"}, "4bit")):
            with self.subTest(**options), self.assertRaises(Error) as refused:
                self.fresh(**options)
            self.assertEqual(refused.exception.code, "config_invalid")
            self.assertIn(told, refused.exception.remedy)
        with mock.patch("importlib.util.find_spec", return_value=None), self.assertRaises(Error) as refused:
            self.fresh(quantization="8bit")
        self.assertIn("pip install bitsandbytes", refused.exception.remedy)

    def test_a_missing_model_says_what_to_fetch(self) -> None:
        with self.assertRaises(MissingModel) as missing:
            loaded(Qwen3VL, {})
        self.assertIn("Qwen/Qwen3-VL-4B-Instruct", missing.exception.attempt)
        self.assertIn("hf download Qwen/Qwen3-VL-4B-Instruct", missing.exception.remedy)

    def test_a_folder_without_some_weights_is_not_filled_with_random_ones(self) -> None:
        with tempfile.TemporaryDirectory() as kept:
            folder = shutil.copytree(self.folder, Path(kept, "partial"))
            weights = load_file(folder / "model.safetensors")
            del weights["lm_head.weight"]
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            with self.assertRaises(MissingModel) as missing:
                loaded(Qwen3VL, {"model": str(folder)})
        self.assertIn("lm_head.weight", missing.exception.attempt)


@unittest.skipUnless(importlib.util.find_spec("bitsandbytes"), "no bitsandbytes: scripts/install --tests brings it")
class Quantised(SmallModelTest):
    """A model wide enough for blocks of 64 weights, which is what bitsandbytes takes on a CPU."""

    @staticmethod
    def make(folder: Path) -> Path:
        wide = {"hidden_size": 64, "intermediate_size": 128}
        return small_models.qwen3_vl(folder, text=wide, vision={**wide, "out_hidden_size": 64})

    def test_8_and_4_bits_answer_as_upstream_does_with_them(self) -> None:
        processor = transformers.AutoProcessor.from_pretrained(self.folder)
        half = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        for bits, config, layer in (
            ("8bit", transformers.BitsAndBytesConfig(load_in_8bit=True), "Linear8bitLt"),
            ("4bit", transformers.BitsAndBytesConfig(load_in_4bit=True, **half), "Linear4bit"),
        ):
            with self.subTest(bits):
                model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(self.folder, quantization_config=config, device_map="cpu").eval()
                engine = loaded(Qwen3VL, {"model": str(self.folder), "cache_lengths": [128], "quantization": bits})
                self.assertIn(layer, {type(module).__name__ for module in engine.model.modules()})
                asked = {**SAMPLING, "max_new_tokens": 16}
                theirs = {of: upstream(model, processor, images, max_new_tokens=16) for of, images in (("text", None), ("a picture", IMAGES[:1]))}
                for of in ("text", "a picture", "text"):
                    values = answered(engine, "answer", prompt=PROMPT, images=None if of == "text" else IMAGES[:1], **asked)[1].values
                    self.assertGreater(len(set(values["text"])), 5)
                    self.assertEqual((values["text"], values["quantization"]), (theirs[of], bits))


if __name__ == "__main__":
    unittest.main()
