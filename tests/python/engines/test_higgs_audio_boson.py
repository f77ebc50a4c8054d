"""Higgs Audio 2 by boson-multimodal against that package's own `HiggsAudioServeEngine`, sample
by sample: a small random model of the true classes. Run where transformers is as old as the
package wants it."""

from __future__ import annotations

import base64
import json
import os
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import bulkhead
import numpy
import torch
from bulkhead.engine import LocalContext, MissingModel, Result

try:
    import small_boson
except ImportError as error:
    raise unittest.SkipTest(f"{error}; scripts/install --tests brings what boson-multimodal imports") from error
from boson_multimodal.data_types import AudioContent, ChatMLSample, Message
from boson_multimodal.serve.serve_engine import HiggsAudioServeEngine
from bulkhead.engines.higgs_audio_boson import HiggsAudio
from bulkhead.engines.upstream import wave_file
from comfyui import caches
from calls import SmallModelTest, StreamingCalls, answered, counted, loaded, started, waits_for_nothing
from daemon import Daemon
from loguru import logger

TEXT = "[SPEAKER0] Hello there. [SPEAKER1] You again?"
PROMPT, SCENE = "Generate audio following instruction.", "\n\n<|scene_desc_start|>\nAudio is recorded from a quiet room.\n<|scene_desc_end|>"
VOICE, OTHER = (numpy.random.default_rng(seed).normal(0, 0.1, (1, 9600)).astype(numpy.float32) for seed in (1, 2))
HALF_AN_HOUR = "It goes on and on. " * 1500
SAMPLING = {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "seed": 3, "max_new_tokens": 70}


class Stopped(Exception):
    pass


class HiggsAudioTest(StreamingCalls, SmallModelTest):
    make = staticmethod(small_boson.boson)
    method, usual = "speak", {"text": TEXT, **SAMPLING}
    before, cancelled = {"text": "Something else, and longer than that.", "seed": 8}, {"max_new_tokens": 200}
    bad = ({"text": " "}, {"text": HALF_AN_HOUR}, {"second_reference": OTHER, "multi_speaker": "conversation"}, {"reference": VOICE, "second_reference": OTHER})

    @classmethod
    def setUpClass(cls) -> None:
        logger.remove()
        super().setUpClass()
        cls.enterClassContext(small_boson.hub(cls.folder / "hub"))
        with small_boson.small_sizes():
            cls.model = HiggsAudioServeEngine(str(cls.folder), str(cls.folder / "codec"), device="cpu", kv_cache_lengths=[256, 512])
        cls.begin()

    @classmethod
    def fresh(cls, graphs: str = "preferred", context: type[LocalContext] = LocalContext) -> HiggsAudio:
        engine: HiggsAudio = loaded(small_boson.SmallHiggsAudio, cls.options(), graphs, context)
        return engine

    @classmethod
    def options(cls) -> dict[str, Any]:
        return {"model": str(cls.folder), "codec": str(cls.folder / "codec"), "cache_lengths": [256, 512]}

    @staticmethod
    def taken(whole: Result) -> tuple[torch.Tensor, str]:
        return whole.tensors["audio"], whole.values["text"]

    def upstream(self, *turns: Any, forced: bool = True, system: str = PROMPT + SCENE, **sampling: Any) -> tuple[torch.Tensor, str]:
        """Speaks TEXT after these turns; upstream alone."""
        sample = ChatMLSample([Message("system", system), *turns, Message("user", TEXT)])
        done = self.model.generate(sample, force_audio_gen=forced, **{**SAMPLING, **sampling})
        return torch.from_numpy(done.audio)[None], done.generated_text

    def equals(self, ours: tuple[torch.Tensor, str], theirs: tuple[torch.Tensor, str]) -> None:
        self.assertGreater(ours[0].shape[1], 1000)
        self.assertTrue(torch.equal(ours[0], theirs[0]), f"{ours[0].shape} and {theirs[0].shape}")
        self.assertEqual(ours[1], theirs[1])

    def test_sound_and_text_are_upstreams(self) -> None:
        self.equals(self.first, self.upstream())
        self.equals(self.said(speech_only=False), self.upstream(forced=False))

    def test_each_parameter_is_upstreams(self) -> None:
        without_scene = self.upstream(system=PROMPT)
        for given, theirs in (
            ({"top_k": 3}, {"top_k": 3}), ({"top_k": 0}, {"top_k": None}), ({"top_p": 0.5}, {"top_p": 0.5}), ({"temperature": 0.6}, {"temperature": 0.6}),
            ({"seed": 6}, {"seed": 6}), ({"ras_window": 12, "ras_repeats": 1}, {"ras_win_len": 12, "ras_win_max_num_repeat": 1}),
            ({"ras_window": 0}, {"ras_win_len": None}), ({"system_prompt": "Whisper it."}, {"system": "Whisper it." + SCENE}),
            ({"scene": "A church."}, {"system": PROMPT + SCENE.replace("Audio is recorded from a quiet room.", "A church.")}),
            ({"scene": ""}, without_scene), ({"scene": " \n"}, without_scene),
        ):  # fmt: skip
            with self.subTest(**given):
                ours = self.said(**given)
                self.equals(ours, self.upstream(**theirs) if isinstance(theirs, dict) else theirs)
                self.assertFalse(torch.equal(ours[0], self.first[0]))

    def test_it_ends_at_the_stop_strings_where_upstream_does(self) -> None:
        whole = self.said(speech_only=False)[1]
        # The letter that comes last, after sound: upstream's engine fails where there is none.
        stop = max(whole, key=whole.index)
        ours = self.said(speech_only=False, stop_strings=f"never written\n{stop}")
        theirs = self.upstream(forced=False, stop_strings=["never written", stop])
        self.assertTrue(torch.equal(ours[0], theirs[0]))
        self.assertEqual(ours[1], theirs[1])
        self.assertLess(len(ours[1]), len(whole))

    def test_weights_are_read_straight_onto_the_device(self) -> None:
        from boson_multimodal.model.higgs_audio import HiggsAudioModel

        with mock.patch("boson_multimodal.audio_processing.higgs_audio_tokenizer.load_higgs_audio_tokenizer") as codec, \
             mock.patch.object(HiggsAudioModel, "from_pretrained", side_effect=Stopped) as weights, self.assertRaises(Stopped):  # fmt: skip
            HiggsAudio().load(LocalContext(self.options(), device="cuda"))
        self.assertEqual((codec.call_args.kwargs["device"], weights.call_args.kwargs["device_map"]), ("cuda", {"": "cuda"}))

    def test_greedy_is_upstreams(self) -> None:
        greedy = self.upstream(temperature=0.0, top_k=None, ras_win_len=None)
        # Of which the last leaves only the likeliest.
        for given in ({"temperature": 0.0}, {"do_sample": False}, {"min_p": 1.0}):
            with self.subTest(**given):
                self.equals(self.said(ras_window=0, **given), greedy)

    def test_references_are_turns_before(self) -> None:
        voices = {"reference": VOICE, "second_reference": OTHER, "reference_text": "One.", "second_reference_text": "Two."}
        seed = {"seed": 5}  # with others upstream's engine fails: the sound is too short
        self.equals(self.said(reference=VOICE, reference_text="Who is it?", **seed), self.upstream(*turn("Who is it?", VOICE), **seed))
        theirs = self.upstream(*turn("[SPEAKER0] One.", VOICE), *turn("[SPEAKER1] Two.", OTHER), **seed)
        self.equals(self.said(multi_speaker="conversation", **voices, **seed), theirs)

    def test_what_is_streamed_is_the_whole(self) -> None:
        parts, whole = answered(self.engine, "speak", **{"text": TEXT, **SAMPLING, "seed": 10, "max_new_tokens": 160})
        self.assertGreater(len(parts), 2)
        torch.testing.assert_close(torch.cat([part.tensors["audio"] for part in parts], dim=1), whole.tensors["audio"], atol=1e-6, rtol=1e-4)

    def test_a_part_sounds_as_its_frames_do_in_the_whole(self) -> None:
        """Also one with frames before it, for which what the small model says is too short."""
        frames = list(torch.randint(0, 24, (100, 4), generator=torch.Generator().manual_seed(1)))
        whole, hop = self.engine._sound(torch.stack(frames[1:], dim=1)), self.engine.hop
        for start, end in ((0, 25), (25, 50), (40, 70)):
            part = self.engine._between(frames, start, end)
            torch.testing.assert_close(part, whole[:, start * hop : end * hop], atol=1e-5, rtol=1e-4)

    def test_static_caches_are_used_as_long_as_they_hold(self) -> None:
        with counted(self.engine) as calls:
            self.said()
        self.assertEqual(set(calls), {"no_gpu"})
        self.assertGreater(calls["no_gpu"], 30)
        # Beside the prompt that is too long for the cache of 512.
        long = started(self.engine, "speak", **{"text": TEXT, **SAMPLING, "max_new_tokens": 500})
        with counted(self.engine) as calls:
            next(long)
            long.close()
        self.assertEqual(set(calls), {"no_bucket"})
        self.assertGreater(calls["no_bucket"], 20)

    def test_the_nodes_expect_the_caches_that_it_makes(self) -> None:
        held = sum(one.nbytes for cache in self.engine.caches.values() for one in (*cache.key_cache, *cache.value_cache))
        self.assertEqual(caches.of_engine(self.folder, {}, [256, 512]), held)

    def test_a_step_can_be_captured(self) -> None:
        cache, place = self.engine.caches[256], torch.zeros(1, 1, dtype=torch.int64)
        hidden, mask = torch.zeros(1, 1, self.engine.model.config.text_config.hidden_size), torch.zeros(1, 1, 1, 256)
        for of_sound in (True, False):
            waits_for_nothing(self.engine._step, cache=cache, of_sound=of_sound, hidden_states=hidden, causal_mask=mask, position_ids=place,
                              audio_discrete_codes_mask=place > 0, cache_position=place[0], audio_attention_mask=mask,
                              fast_forward_attention_mask=mask)  # fmt: skip

    def test_the_penalty_changes_what_is_drawn(self) -> None:
        self.assertNotEqual(self.said(ras_window=0, repetition_penalty=1.5)[1], self.said(ras_window=0)[1])

    def test_what_is_missing_is_said(self) -> None:
        for changed, told in (({"model": "./nowhere"}, "options.model"), ({"codec": "./nowhere"}, "options.codec")):
            with self.subTest(told), self.assertRaises(MissingModel) as missing:
                loaded(HiggsAudio, {**self.options(), **changed})
            self.assertIn(told, missing.exception.remedy)
        with small_boson.hub(Path("/nowhere")), self.assertRaises(MissingModel) as missing:
            self.fresh()
        self.assertIn("codec", missing.exception.attempt)

    def test_a_failure_of_upstreams_loop_is_the_requests(self) -> None:
        with mock.patch.object(self.engine.model, "_sample_audio_tokens", side_effect=RuntimeError("a broken loop")), self.assertRaisesRegex(RuntimeError, "broken"):
            self.said()
        self.equals(self.said(), self.first)

    def test_a_daemon_gives_the_same(self) -> None:
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_CACHE": str(self.folder / "hub")}
        model = {"runtime": "python", "engine": f"{small_boson.__file__}:SmallHiggsAudio", "interpreter": sys.executable, "device": "cpu",
                 "threads": 1, "options": self.options(), "environment": environment, "deadlines": {"load": "300s", "request": "300s"}}  # fmt: skip
        daemon = Daemon(json.dumps({"version": 1, "models": {"higgs": model}}))
        self.addCleanup(daemon.stop)
        with bulkhead.connect(daemon.socket) as client:
            parts = list(client.stream("higgs", method="speak", parameters={"text": TEXT, **SAMPLING}, deadline=300))
        self.assertGreater(len(parts), 2)
        self.equals((torch.tensor(parts[-1]["audio"].numpy()), parts[-1].values_json["text"]), self.first)


def turn(said: str, voice: Any) -> list[Message]:
    sound = base64.b64encode(wave_file(voice, 24000).getvalue()).decode()
    return [Message("user", said), Message("assistant", AudioContent("placeholder", raw_audio=sound))]


if __name__ == "__main__":
    unittest.main()
