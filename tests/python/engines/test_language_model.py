"""Engines whose language model runs in a worker with `runtime: generate`, by a real daemon: they
say what they say alone."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import bulkhead
import numpy
import small_models
import family_packages  # from the folder that small_models adds
from bulkhead.engine import LocalContext
from bulkhead.engines.qwen3_vl import Qwen3VL
from calls import SmallModelTest, answered, loaded
from daemon import Daemon, row, until
from safetensors.torch import save_file
from test_served import CHATTERBOX, SECONDS, VOICE, fleet_of

BUILD = Path(os.environ["BULKHEAD_BUILD"])
IMAGES = numpy.random.default_rng(2).integers(0, 256, (2, 16, 24, 3), dtype=numpy.uint8)
VIDEO = numpy.random.default_rng(3).integers(0, 256, (4, 16, 16, 3), dtype=numpy.uint8)
ANSWER = {"prompt": "What?", "seed": 4, "max_new_tokens": 20}
SPEAK = {"text": "Hello.", "seed": 3, "max_new_tokens": 60}
#: Only the likeliest token passes the filter.
GREEDY = {"min_p": 1.0}


class SpeechTest(SmallModelTest):
    """ChatterBox, and its T3."""

    @staticmethod
    def make(folder: Path) -> Path:
        import small_chatterbox

        return small_chatterbox.chatterbox(folder)

    @classmethod
    def setUpClass(cls) -> None:
        if not CHATTERBOX.is_dir():
            raise unittest.SkipTest(f"no {CHATTERBOX}: scripts/install --tests brings what ChatterBox imports")
        sys.path.append(str(CHATTERBOX))
        import small_chatterbox

        super().setUpClass()
        family = family_packages.family("chatterbox_t3")
        package = family_packages.package("chatterbox_t3", family, BUILD)
        save_file(family.model.state_dict(), cls.folder / "t3_cfg.safetensors")
        cls.kind = small_chatterbox.SpokenTokens
        file = Path(small_chatterbox.__file__).resolve()
        cls.options = options = {"model": str(cls.folder), "cache_lengths": [256]}
        python = {name: (f"{file}:{kind}", {**options, "language_model": "t3"}, "preferred")
                  for name, kind in (("tokens", "SpokenTokens"), ("speech", "WithPackage"))}  # fmt: skip
        cls.daemon = Daemon(fleet_of(python, {"PYTHONPATH": str(CHATTERBOX)}) + f"  t3: {{runtime: generate, package: {package}}}\n")
        cls.addClassCleanup(cls.daemon.stop)
        cls.client = bulkhead.connect(cls.daemon.socket)
        cls.addClassCleanup(cls.client.close)
        with contextlib.redirect_stdout(io.StringIO()):
            cls.alone = loaded(cls.kind, options)

    def said(self, model: str = "tokens", inputs: dict[str, Any] | None = None, **given: Any) -> numpy.ndarray:
        answer = self.client.infer(model, inputs, method="speak", parameters={**SPEAK, **given}, deadline=SECONDS)
        return answer["audio"].numpy().copy()

    def test_greedy_speech_is_what_the_engine_says_alone(self) -> None:
        heard = []
        for given in ({}, {"cfg_weight": 0.0}, {"cfg_weight": 1.0, "exaggeration": 1.5}, {"repetition_penalty": 1.0, "temperature": 0.5}, {"reference": VOICE}):
            asked = {**GREEDY, **given}
            inputs = {"reference": asked.pop("reference")} if "reference" in asked else {}
            with self.subTest(**asked, inputs=list(inputs)):
                ours = self.said(inputs=inputs, **asked)
                self.assertGreater(ours.shape[1], 0)
                self.assertTrue(numpy.array_equal(ours, answered(self.alone, "speak", **SPEAK, **asked, **inputs)[1].tensors["audio"].numpy()))
                heard.append(ours.tobytes())
        self.assertEqual(len(set(heard)), len(heard), "parameters that change nothing")

    def test_a_seed_says_the_same_again_and_another_something_else(self) -> None:
        first = self.said()
        self.assertTrue(numpy.array_equal(self.said(), first))
        self.assertFalse(numpy.array_equal(self.said(seed=4), first))

    def test_the_engine_has_no_layers_of_its_own(self) -> None:
        from chatterbox.tts import ChatterboxTTS

        with mock.patch.dict(os.environ, BULKHEAD_SOCKET=self.daemon.socket), contextlib.redirect_stdout(io.StringIO()):
            engine = self.kind()
            with mock.patch.object(ChatterboxTTS, "from_local", wraps=ChatterboxTTS.from_local) as read:
                # Which holds no weights.
                engine.load(LocalContext({"model": str(self.folder), "language_model": "t3"}, device="meta"))
        self.assertFalse(any(name.startswith("tfmr.") for name, _ in engine.tts.t3.named_parameters()))
        self.assertEqual(read.call_args.args[1], "cpu", "they go through the host alone")
        kept = [*engine.tts.t3.parameters(), *engine.tts.s3gen.parameters(), *engine.tts.ve.parameters(), engine.own_voice.t3.speaker_emb]
        self.assertEqual(({one.device.type for one in kept}, engine.tts.device), ({"meta"}, "meta"))

    def test_speech_comes_in_parts_with_a_voice(self) -> None:
        parts = [part["audio"].numpy().copy() for part in self.client.stream("speech", method="speak", parameters=SPEAK | {"max_new_tokens": 80}, deadline=SECONDS)]
        self.assertGreater(len(parts), 3)
        self.assertEqual(sum(part.shape[1] for part in parts[:-1]), parts[-1].shape[1])

    def test_a_cancel_ends_the_language_models_request_too(self) -> None:
        first = self.said(**GREEDY)
        stream = self.client.stream("tokens", method="speak", parameters=SPEAK | {"max_new_tokens": 80}, deadline=SECONDS)
        next(stream)
        stream.close()
        until(self.client, "t3", lambda now: now["state"] == "ready", SECONDS)
        self.assertTrue(numpy.array_equal(self.said(**GREEDY), first))

    def test_a_language_model_that_dies_ends_the_request_and_not_the_engine(self) -> None:
        first = self.said(**GREEDY)
        engine, drawn_by = (row(self.client, model)["pid"] for model in ("tokens", "t3"))
        os.kill(drawn_by, signal.SIGSTOP)
        stream = self.client.stream("tokens", method="speak", parameters=SPEAK, deadline=SECONDS)
        given_up = time.monotonic() + SECONDS
        while row(self.client, "t3")["channels"] == 0:
            self.assertLess(time.monotonic(), given_up)
        os.kill(drawn_by, signal.SIGKILL)
        with self.assertRaises(bulkhead.Error) as died:
            list(stream)
        self.assertEqual(died.exception.code, "worker_lost")
        self.assertIn("t3", died.exception.attempt)
        self.assertTrue(numpy.array_equal(self.said(**GREEDY), first))
        self.assertEqual(row(self.client, "tokens")["pid"], engine)

    def test_it_is_unloaded_between_two_requests_and_held_by_nobody(self) -> None:
        first = self.said(**GREEDY)
        (receipt,) = self.client.unload("t3")
        self.assertEqual((receipt["verified"], receipt["held_by"]), (True, []))
        self.assertTrue(numpy.array_equal(self.said(**GREEDY), first))

    def test_what_is_no_language_model_is_refused_by_name(self) -> None:
        with mock.patch.dict(os.environ, BULKHEAD_SOCKET=self.daemon.socket), contextlib.redirect_stdout(io.StringIO()):
            with self.assertRaises(bulkhead.Error) as unknown:
                loaded(self.kind, {**self.options, "language_model": "t4"})
            engine = loaded(self.kind, {**self.options, "language_model": "tokens"})
            with self.assertRaises(bulkhead.Error) as wrong:
                answered(engine, "speak", **SPEAK)
        self.assertEqual(unknown.exception.code, "config_invalid")
        self.assertIn("'t4'", str(unknown.exception))
        self.assertEqual(wrong.exception.code, "config_invalid")
        self.assertIn("runtime: generate", wrong.exception.remedy)

    def test_more_than_a_sequence_holds_is_refused_with_the_remedy(self) -> None:
        with self.assertRaises(bulkhead.Error) as long:
            self.said(max_new_tokens=1000)
        self.assertEqual(long.exception.code, "input_invalid")
        self.assertIn("generate.length", long.exception.remedy)


class AnswerTest(SmallModelTest):
    """Qwen3-VL, of which the vision encoder alone is the engine's."""

    make = staticmethod(small_models.qwen3_vl_of_package)

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        package = family_packages.package("qwen3_vl", family_packages.family("qwen3_vl"), BUILD)
        cls.options = {"model": str(cls.folder), "cache_lengths": [256]}
        python = {"qwen": ("bulkhead.engines.qwen3_vl:Qwen3VL", {**cls.options, "language_model": "words"}, "preferred")}
        cls.daemon = Daemon(fleet_of(python) + f"  words: {{runtime: generate, package: {package}}}\n")
        cls.addClassCleanup(cls.daemon.stop)
        cls.client = bulkhead.connect(cls.daemon.socket)
        cls.addClassCleanup(cls.client.close)
        cls.alone = loaded(Qwen3VL, cls.options)

    def said(self, inputs: dict[str, Any] | None = None, **given: Any) -> Any:
        return self.client.infer("qwen", inputs, method="answer", parameters={**ANSWER, **given}, deadline=SECONDS).values_json

    def test_greedy_answers_are_what_the_engine_says_alone(self) -> None:
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

    def test_the_text_is_streamed(self) -> None:
        parts = [part.values_json["text"] for part in self.client.stream("qwen", {"images": IMAGES}, method="answer", parameters=ANSWER, deadline=SECONDS)]
        self.assertGreater(len(parts), 5)
        self.assertEqual("".join(parts[:-1]), parts[-1])

    def test_the_engine_has_the_vision_encoder_alone(self) -> None:
        with mock.patch.dict(os.environ, BULKHEAD_SOCKET=self.daemon.socket):
            engine = loaded(Qwen3VL, {**self.options, "language_model": "words"})
        self.assertEqual({name.split(".")[1] for name, _ in engine.model.named_parameters()}, {"visual"})

    def test_quantization_is_refused_where_the_package_has_the_weights(self) -> None:
        with mock.patch.dict(os.environ, BULKHEAD_SOCKET=self.daemon.socket), self.assertRaises(bulkhead.Error) as refused:
            loaded(Qwen3VL, {**self.options, "language_model": "words", "quantization": "4bit"})
        self.assertEqual(refused.exception.code, "config_invalid")
        self.assertIn("--weights int8", refused.exception.remedy)


if __name__ == "__main__":
    unittest.main()
