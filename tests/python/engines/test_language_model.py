"""ChatterBox by a real daemon, where T3 runs in a worker with `runtime: generate`: a client hears
what the engine says alone."""

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
import small_models  # noqa: F401
import family_packages  # from the folder that small_models adds
from bulkhead.engine import LocalContext
from calls import SmallModelTest, answered, loaded
from daemon import BUILD, Daemon, row, until
from safetensors.torch import save_file
from test_served import SECONDS, VOICE, fleet_of

CHATTERBOX = Path(__file__).parents[3] / "build" / "chatterbox"
SPEAK = {"text": "Hello.", "seed": 3, "max_new_tokens": 60}
#: Only the likeliest token passes the filter.
GREEDY = {"min_p": 1.0}


class SpeechTest(SmallModelTest):
    """`tokens`, whose T3 is `t3`."""

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
        python = {"tokens": (f"{file}:SpokenTokens", {**options, "language_model": "t3"}, "preferred")}
        cls.daemon = Daemon(fleet_of(python, {"PYTHONPATH": str(CHATTERBOX)}) + f"  t3: {{runtime: generate, package: {package}}}\n")
        cls.addClassCleanup(cls.daemon.stop)
        cls.client = bulkhead.connect(cls.daemon.socket)
        cls.addClassCleanup(cls.client.close)
        with contextlib.redirect_stdout(io.StringIO()):
            cls.alone = loaded(cls.kind, options)

    def said(self, inputs: dict[str, Any] | None = None, **given: Any) -> numpy.ndarray:
        answer = self.client.infer("tokens", inputs, method="speak", parameters={**SPEAK, **given}, deadline=SECONDS)
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

    def test_it_speaks_in_parts_and_converts_as_the_engine_alone(self) -> None:
        *parts, whole = (part["audio"].numpy().copy() for part in self.client.stream("tokens", method="speak", parameters=SPEAK, deadline=SECONDS))
        self.assertGreater(len(parts), 1)
        self.assertEqual(sum(part.shape[1] for part in parts), whole.shape[1])
        theirs = self.alone.convert(source=VOICE, source_rate=24000, reference_rate=24000, seed=5).tensors["audio"].numpy()
        ours = self.client.infer("tokens", {"source": VOICE}, method="convert", parameters={"seed": 5}, deadline=SECONDS)
        self.assertTrue(numpy.array_equal(ours["audio"].numpy(), theirs))

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


if __name__ == "__main__":
    unittest.main()
