"""Engines by a real daemon, from folders of small random weights: what a client hears or reads is
what the engine says alone, also where its language model runs in a worker with `runtime: generate`.
The engines' own tests compare them with upstream."""

from __future__ import annotations

import os
import shutil
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import bulkhead
import numpy
import small_models
import family_packages  # from the folder that small_models adds
from bulkhead.engines.higgs_audio_v2 import HiggsAudio
from bulkhead.engines.qwen3_vl import Qwen3VL
from calls import SmallModelTest, answered, loaded
from daemon import BUILD, Daemon, row

SECONDS = 300  #: where other tests have the CPUs, a load takes one of them
VOICE = numpy.random.default_rng(1).normal(0, 0.1, (1, 9600)).astype(numpy.float32)
IMAGES = numpy.random.default_rng(2).integers(0, 256, (2, 16, 24, 3), dtype=numpy.uint8)
VIDEO = numpy.random.default_rng(3).integers(0, 256, (4, 16, 16, 3), dtype=numpy.uint8)
HIGGS = {"text": "Hello there.", "top_k": 6, "seed": 5, "max_new_tokens": 70}
ANSWER = {"prompt": "What?", "seed": 4, "max_new_tokens": 20}


class ServedTest(SmallModelTest):
    """`qwen`, alone; `seeing`, whose language model is `words`; and `higgs`, without graphs."""

    @staticmethod
    def make(folder: Path) -> Path:
        repository = folder / "home/hub/models--o--n"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text("x")
        for name, model in (("higgs", small_models.higgs_audio_v2), ("seeing", small_models.qwen3_vl_of_package),
                            ("home/hub/models--o--n/snapshots/x", small_models.qwen3_vl)):  # fmt: skip
            (folder / name).mkdir(parents=True)
            model(folder / name)
        return folder

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        package = family_packages.package("qwen3_vl", family_packages.family("qwen3_vl"), BUILD)
        folders = {"higgs": "higgs", "seeing": "seeing", "qwen": "home/hub/models--o--n/snapshots/x"}
        cls.options = {name: {"model": str(cls.folder / folder), "cache_lengths": [256]} for name, folder in folders.items()}
        engine = "bulkhead.engines.qwen3_vl:Qwen3VL"
        fleet = {
            "higgs": ("bulkhead.engines.higgs_audio_v2:HiggsAudio", cls.options["higgs"], "off"),
            "qwen": (engine, {**cls.options["qwen"], "model": "o/n"}, "preferred"),
            "seeing": (engine, {**cls.options["seeing"], "language_model": "words"}, "preferred"),
        }
        cls.daemon = Daemon(fleet_of(fleet, {"HF_HOME": str(cls.folder / "home")}) + f"  words: {{runtime: generate, package: {package}}}\n")
        cls.addClassCleanup(cls.daemon.stop)
        cls.client = bulkhead.connect(cls.daemon.socket)
        cls.addClassCleanup(cls.client.close)
        cls.alone = loaded(Qwen3VL, cls.options["seeing"])

    def asked(self, model: str, method: str, given: dict[str, Any], **inputs: Any) -> Any:
        return self.client.infer(model, inputs, method=method, parameters=given, deadline=SECONDS)

    def said(self, inputs: dict[str, Any] = {}, **given: Any) -> Any:
        return self.asked("seeing", "answer", {**ANSWER, **given}, **inputs).values_json

    def test_higgs_audio(self) -> None:
        """Its worker has no graphs, the engine here has."""
        theirs = answered(loaded(HiggsAudio, self.options["higgs"]), "speak", **HIGGS, reference=VOICE)[1].tensors["audio"].numpy()
        self.assertGreater(theirs.shape[1], 24000 // 2)
        parts = list(self.client.stream("higgs", {"reference": VOICE}, method="speak", parameters=HIGGS, deadline=SECONDS))
        self.assertTrue(numpy.array_equal(parts[-1]["audio"].numpy(), theirs))
        numpy.testing.assert_allclose(numpy.concatenate([part["audio"].numpy() for part in parts[:-1]], axis=1), theirs, atol=1e-6)
        left = self.client.stream("higgs", method="speak", parameters={**HIGGS, "max_new_tokens": 200}, deadline=SECONDS)
        next(left)
        left.close()
        self.assertTrue(numpy.array_equal(self.asked("higgs", "speak", HIGGS, reference=VOICE)["audio"].numpy(), theirs), "after a cancel")
        self.assertEqual(row(self.client, "higgs")["graphs"]["mode"], "off")
        for given, sound, code in (({}, VOICE.repeat(6, axis=0), "shape_mismatch"), ({"reference_rate": 4000}, VOICE, "input_invalid")):
            with self.assertRaises(bulkhead.Error) as refused:
                self.asked("higgs", "speak", {**HIGGS, **given}, reference=sound)
            self.assertEqual(refused.exception.code, code)

    def test_qwen3_vl_by_its_name_is_read_from_the_cache_of_the_hub(self) -> None:
        theirs = answered(loaded(Qwen3VL, self.options["qwen"]), "answer", **ANSWER, images=IMAGES)[1].values["text"]
        for model in ("qwen", "seeing"):
            *parts, whole = self.client.stream(model, {"images": IMAGES}, method="answer", parameters=ANSWER, deadline=SECONDS)
            self.assertGreater(len(parts), 4)
            self.assertEqual("".join(part.values_json["text"] for part in parts), whole.values_json["text"])
            self.assertEqual(whole.values_json["attention"], "sdpa")
            if model == "qwen":
                self.assertEqual(whole.values_json["text"], theirs)

    def test_pictures_of_8k_and_batches_of_64_pass(self) -> None:
        for images in (numpy.zeros((1, 4320, 7680, 3), numpy.uint8), numpy.zeros((64, 16, 16, 3), numpy.uint8)):
            self.assertTrue(self.asked("qwen", "answer", {**ANSWER, "max_new_tokens": 4}, images=images).values_json["text"])

    def test_greedy_answers_with_a_language_model_are_what_the_engine_says_alone(self) -> None:
        answers = []
        for inputs in ({}, {"images": IMAGES}, {"images": IMAGES[:1]}, {"video": VIDEO}, {"images": IMAGES[:1], "video": VIDEO}):
            for given in ({"do_sample": False}, {"do_sample": False, "repetition_penalty": 1.5}):
                with self.subTest(inputs=sorted(inputs), **given):
                    ours, theirs = self.said(inputs, **given), answered(self.alone, "answer", **ANSWER, **given, **inputs)[1].values
                    self.assertEqual((ours["text"], ours["tokens"], ours["prompt_tokens"]), (theirs["text"], theirs["tokens"], theirs["prompt_tokens"]))
                    answers.append(ours["text"])
        self.assertEqual(len(set(answers)), len(answers), "inputs or parameters that change nothing")

    def test_a_draw_from_the_likeliest_alone_is_greedy_and_a_seed_says_the_same_again(self) -> None:
        greedy = self.said(temperature=0.0)["text"]
        for given in ({"top_k": 1}, {"min_p": 1.0}):
            self.assertEqual(self.said(temperature=1.5, **given)["text"], greedy)
        drawn = self.said(temperature=2.0, top_k=0, top_p=1.0)["text"]
        self.assertEqual(self.said(temperature=2.0, top_k=0, top_p=1.0)["text"], drawn)
        self.assertNotEqual(self.said(temperature=2.0, top_k=0, top_p=1.0, seed=5)["text"], drawn)

    def test_the_engine_has_the_vision_encoder_alone(self) -> None:
        with mock.patch.dict(os.environ, BULKHEAD_SOCKET=self.daemon.socket):
            engine = loaded(Qwen3VL, {**self.options["seeing"], "language_model": "words"})
        self.assertEqual({name.split(".")[1] for name, _ in engine.model.named_parameters()}, {"visual"})

    def test_quantization_is_refused_where_the_package_has_the_weights(self) -> None:
        with mock.patch.dict(os.environ, BULKHEAD_SOCKET=self.daemon.socket), self.assertRaises(bulkhead.Error) as refused:
            loaded(Qwen3VL, {**self.options["seeing"], "language_model": "words", "quantization": "4bit"})
        self.assertEqual(refused.exception.code, "config_invalid")
        self.assertIn("--weights int8", refused.exception.remedy)


def fleet_of(models: dict[str, tuple[str, dict[str, Any], str]], environment: dict[str, str] = {}) -> str:
    text = f"version: 1\ndefaults: {{device: cpu, threads: 1, deadlines: {{load: {SECONDS}s, request: {SECONDS}s}}}}\nmodels:\n"
    for name, (engine, options, graphs) in models.items():
        text += f"  {name}: {{runtime: python, engine: '{engine}', interpreter: {sys.executable}, graphs: {graphs}, options: {options}, environment: {environment}}}\n"
    return text


if __name__ == "__main__":
    unittest.main()
