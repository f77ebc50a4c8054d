"""Engines in Python on a GPU, by a real daemon, with small models of the true classes: captured, as
upstream speaks on the same GPU, the same again for a second request, and gone from the GPU after an
unload. In float64, so that no kernel's rounding decides between two codes.

On a machine without a GPU the same runs on the CPU, where nothing is captured: `no_gpu`
counts each step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / folder) for folder in ("clients/python", "tests/python", "tests/python/engines")]
# Of transformers too, which reads it when it is imported.
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import bulkhead  # noqa: E402
import numpy  # noqa: E402
import small_models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from daemon import Daemon, row  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if GPU else "cpu"
SECONDS = 120
FRAMES = TOKENS = 100
CACHES = [128, 512]  #: a request begins in the first and crosses into the second
HIGGS = {"text": "Hello there.", "temperature": 0.9, "top_k": 6, "top_p": 0.9, "seed": 5, "max_new_tokens": FRAMES}
QWEN = {"prompt": "What is to be seen?", "temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 4, "max_new_tokens": TOKENS}
IMAGES = numpy.random.default_rng(2).integers(0, 256, (1, 24, 32, 3), dtype=numpy.uint8)
CLASSES = {"higgs": "higgs_audio_v2:HiggsAudio", "qwen": "qwen3_vl:Qwen3VL", "voice": "small_voice:SmallVoice"}


class EnginesOnAGpu(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        transformers.logging.set_verbosity_error()
        kept = tempfile.TemporaryDirectory(prefix="bh-engines-")
        cls.addClassCleanup(kept.cleanup)
        cls.folder = Path(kept.name)
        small_models.higgs_audio_v2(cls.folder / "higgs")
        small_models.qwen3_vl(cls.folder / "qwen")
        models = {}
        for name, engine in CLASSES.items():
            options = {} if name == "voice" else {"model": str(cls.folder / name), "cache_lengths": CACHES, "dtype": "float64"}
            common = {"runtime": "python", "interpreter": sys.executable, "engine": f"bulkhead.engines.{engine}", "options": options, "device": DEVICE}
            models[name] = {**common, "graphs": "required" if GPU else "preferred"}
            models[f"{name}-eager"] = {**common, "graphs": "off"}
        cls.daemon = Daemon(json.dumps({"version": 1, "models": models}))
        cls.addClassCleanup(cls.daemon.stop)
        cls.client = bulkhead.connect(cls.daemon.socket)
        cls.addClassCleanup(cls.client.close)

    def asked(self, model: str, method: str, given: dict[str, Any], **inputs: Any) -> Any:
        return self.client.infer(model, inputs, method=method, parameters=given, deadline=SECONDS)

    def sound(self, model: str, **given: Any) -> numpy.ndarray:
        # A view would hold its slab.
        made: numpy.ndarray = self.asked(model, "speak", {**HIGGS, **given})["audio"].numpy().copy()
        return made

    def answer(self, model: str, **given: Any) -> str:
        text: str = self.asked(model, "answer", {**QWEN, **given}, images=IMAGES).values_json["text"]
        return text

    def replays_all(self, model: str) -> None:
        graphs = row(self.client, model)["graphs"]
        hits = [bucket["hits"] for bucket in graphs["buckets"]]
        if GPU:
            self.assertEqual(graphs["eager"], {}, "no step ran without its graph")
            self.assertEqual(len(hits), len(CACHES))
            self.assertTrue(all(hits), f"each cache was used: {hits}")
        else:
            self.assertEqual(set(graphs["eager"]), {"no_gpu"})

    def test_higgs_audio_speaks_as_upstream_on_this_device(self) -> None:
        model = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(self.folder / "higgs", device_map=DEVICE, dtype=torch.float64).eval()
        processor = transformers.AutoProcessor.from_pretrained(self.folder / "higgs", device_map=DEVICE)
        turns = [("system", "Generate audio following instruction."), ("scene", "Audio is recorded from a quiet room."), ("user", HIGGS["text"])]
        inputs = processor.apply_chat_template(
            [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns],
            add_generation_prompt=True, tokenize=True, return_dict=True, processor_kwargs={"sampling_rate": 24000, "return_tensors": "pt"},
        ).to(model.device)  # fmt: skip
        asked: dict[str, Any]
        for asked in ({"do_sample": False, "temperature": None, "top_k": None, "top_p": None}, {"do_sample": True, **HIGGS}):
            config = model.generation_config
            config.max_new_tokens, config.ras_win_len, config.ras_win_max_num_repeat = FRAMES, 7, 2
            for name in ("do_sample", "temperature", "top_k", "top_p"):
                setattr(config, name, asked[name])
            torch.manual_seed(HIGGS["seed"])
            with torch.no_grad():
                theirs = processor.decode(model.generate(**inputs, generation_config=config)).cpu().numpy().reshape(1, -1)
            for name in ("higgs", "higgs-eager"):
                with self.subTest(name, do_sample=asked["do_sample"]):
                    ours = self.sound(name, do_sample=asked["do_sample"])
                    self.assertEqual(ours.shape, theirs.shape)
                    numpy.testing.assert_allclose(ours, theirs, atol=1e-4)
        self.replays_all("higgs")

    def test_qwen3_vl_answers_as_its_eager_self_does(self) -> None:
        self.assertEqual(self.answer("qwen", do_sample=False), self.answer("qwen-eager", do_sample=False))
        self.assertEqual(self.answer("qwen"), self.answer("qwen-eager"))
        self.replays_all("qwen")

    def test_the_small_voice_babbles_as_its_eager_self_does(self) -> None:
        ours, eager = (self.asked(name, "speak", {"text": "One, two."})["audio"].numpy() for name in ("voice", "voice-eager"))
        numpy.testing.assert_allclose(ours, eager, atol=1e-4)

    def test_a_second_request_equals_the_first_also_after_a_cancel(self) -> None:
        for model in ("higgs", "higgs-eager"):
            with self.subTest(model):
                self.client.unload(model)
                first = self.sound(model)
                self.sound(model, text="Something else, and longer than that.", seed=8)
                self.assertTrue(numpy.array_equal(self.sound(model), first))
                left = self.client.stream(model, method="speak", parameters={**HIGGS, "max_new_tokens": 400}, deadline=SECONDS)
                next(left)
                left.close()
                self.assertTrue(numpy.array_equal(self.sound(model), first), "after a cancel")

    def test_an_unload_gives_the_gpus_memory_back_and_says_so(self) -> None:
        before = self.sound("higgs")
        receipt = self.client.unload("higgs")[0]
        self.assertTrue(receipt["verified"], receipt)
        if GPU:
            self.assertGreater(receipt["gpu_bytes"], 200 << 20, "a CUDA context alone has more")
        self.assertTrue(numpy.array_equal(self.sound("higgs"), before), "the next process says the same")


if __name__ == "__main__":
    unittest.main()
