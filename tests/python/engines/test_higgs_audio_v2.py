"""Higgs Audio 2 against upstream's own classes called directly, sample by sample: small random
models of the true classes."""

from __future__ import annotations

import copy
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import small_models
import torch
import transformers
from bulkhead.engine import LocalContext, MissingModel
from bulkhead.engines.higgs_audio_v2 import NEVER, FramePenalty, HiggsAudio
from calls import SmallModelTest, StreamingCalls, answered, counted, loaded, steps_by_cache, waits_for_nothing

TEXT = "[SPEAKER0] Hello there. [SPEAKER1] You again?"
SYSTEM, SCENE = "Generate audio following instruction.", "Audio is recorded from a quiet room."
VOICE, OTHER = (numpy.random.default_rng(seed).normal(0, 0.1, (1, 9600)).astype(numpy.float32) for seed in (1, 2))
HALF_AN_HOUR = "It goes on and on. " * 1500
SAMPLING = {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "seed": 5, "max_new_tokens": 40}


class Stopped(Exception):
    pass


class HiggsAudioTest(StreamingCalls, SmallModelTest):
    make = staticmethod(small_models.higgs_audio_v2)
    method, usual = "speak", {"text": TEXT, **SAMPLING}
    before, cancelled = {"text": "Something else, and longer than that.", "seed": 8}, {"max_new_tokens": 200}
    bad = ({"text": " "}, {"text": HALF_AN_HOUR}, {"second_reference": OTHER, "multi_speaker": "scene"}, {"reference": VOICE, "second_reference": OTHER})

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.model = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(cls.folder).eval()
        cls.processor = transformers.AutoProcessor.from_pretrained(cls.folder)
        cls.begin()

    @classmethod
    def fresh(cls, **context: Any) -> HiggsAudio:
        engine: HiggsAudio = loaded(HiggsAudio, {"model": str(cls.folder), "cache_lengths": [256, 320]}, **context)
        return engine

    def upstream(self, turns: list[Any], scene: list[Any] | None = None, ras: tuple[int, int] = (7, 2), system: str = SYSTEM,
                 **sampling: Any) -> torch.Tensor:  # fmt: skip
        """Speaks TEXT after these turns; upstream alone. An empty list leaves the scene out; None
        is the default scene."""
        scenery = [text(SCENE)] if scene is None else scene
        said = [("system", [text(system)]), *([("scene", scenery)] if scenery else []), *turns, ("user", [text(TEXT)])]
        inputs = self.processor.apply_chat_template(
            [{"role": role, "content": content} for role, content in said],
            add_generation_prompt=True, tokenize=True, return_dict=True, processor_kwargs={"sampling_rate": 24000, "return_tensors": "pt"},
        )  # fmt: skip
        asked = {**SAMPLING, **sampling}
        torch.manual_seed(asked.pop("seed"))
        config = copy.deepcopy(self.model.generation_config)
        config.ras_win_len, config.ras_win_max_num_repeat = ras
        for name, value in {"do_sample": True, **asked}.items():
            setattr(config, name, value)
        sound: torch.Tensor = self.processor.decode(self.model.generate(**inputs, generation_config=config))
        return sound[None]

    def equals(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        self.assertGreater(ours.shape[1], 24000 // 2)
        self.assertTrue(torch.equal(ours, theirs), f"{ours.shape} and {theirs.shape}")

    def test_a_text_alone_sounds_as_upstreams(self) -> None:
        self.equals(self.first, self.upstream([]))

    def test_each_parameter_is_upstreams(self) -> None:
        without_scene = self.upstream([], [])
        for given, theirs in (
            ({"top_k": 3}, {"top_k": 3}), ({"top_p": 0.5}, {"top_p": 0.5}), ({"temperature": 0.6}, {"temperature": 0.6}), ({"seed": 6}, {"seed": 6}),
            ({"system_prompt": "Whisper it."}, {"system": "Whisper it."}), ({"scene": "A busy street."}, {"scene": [text("A busy street.")]}),
            ({"scene": ""}, without_scene), ({"scene": " \n"}, without_scene),
            ({"ras_window": 12, "ras_repeats": 1}, {"ras": (12, 1)}), ({"ras_window": 3, "ras_repeats": 3}, {"ras": (3, 3)}),
            ({"ras_window": 0}, {"ras": (7, NEVER)}),
        ):  # fmt: skip
            with self.subTest(**given):
                ours = self.said(**given)
                self.equals(ours, self.upstream([], **theirs) if isinstance(theirs, dict) else theirs)
                self.assertFalse(torch.equal(ours, self.first))

    def test_a_model_that_ends_by_itself_ends_as_upstreams(self) -> None:
        given = {"top_k": 0, "temperature": 2.0, "max_new_tokens": 200}
        whole = answered(self.engine, "speak", **{"text": TEXT, **SAMPLING, **given})[1]
        self.assertLess(whole.values["tokens"], 200)
        self.assertTrue(torch.equal(whole.tensors["audio"], self.upstream([], **given)))

    def test_greedy_is_upstreams(self) -> None:
        """Also where only the likeliest is left."""
        off = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        for ras, *asked in (((7, 2), {"temperature": 0.0}, {"do_sample": False}), ((7, NEVER), {"ras_window": 0, "min_p": 1.0})):
            theirs = self.upstream([], ras=ras, **off)
            for given in asked:
                with self.subTest(**given):
                    self.equals(self.said(**given), theirs)

    def test_a_reference_and_its_text_are_a_turn_before(self) -> None:
        theirs = self.upstream([("user", [text("Who is it?")]), ("assistant", [sound(VOICE)])])
        self.equals(self.said(reference=VOICE, reference_text="Who is it?"), theirs)

    def test_two_speakers_are_turns_or_stand_in_the_scene(self) -> None:
        voices = {"reference": VOICE, "second_reference": OTHER, "reference_text": "One.", "second_reference_text": "Two."}
        turns = [("user", [text("[SPEAKER0] One.")]), ("assistant", [sound(VOICE)]), ("user", [text("[SPEAKER1] Two.")]), ("assistant", [sound(OTHER)])]
        self.equals(self.said(multi_speaker="conversation", **voices), self.upstream(turns))
        scene = [text(SCENE), text("SPEAKER0:"), sound(VOICE), text("SPEAKER1:"), sound(OTHER)]
        self.equals(self.said(multi_speaker="scene", **voices), self.upstream([], scene))

    def test_a_voice_of_two_channels_and_another_rate_is_resampled(self) -> None:
        import torchaudio

        stereo = numpy.concatenate([VOICE, OTHER])
        mono = torchaudio.functional.resample(torch.tensor(stereo).mean(0), 16000, 24000).numpy()[None]
        theirs = self.upstream([("user", [text("")]), ("assistant", [sound(mono)])])
        self.equals(self.said(reference=stereo, reference_rate=16000), theirs)

    def test_what_is_streamed_is_the_whole(self) -> None:
        parts, whole = answered(self.engine, "speak", **{"text": TEXT, **SAMPLING, "max_new_tokens": 140})
        self.assertGreater(len(parts), 3)
        torch.testing.assert_close(torch.cat([part.tensors["audio"] for part in parts], dim=1), whole.tensors["audio"], atol=1e-6, rtol=1e-4)
        self.assertEqual(whole.values["text"], TEXT)
        self.assertEqual(whole.values["sample_rate"], 24000)

    def test_static_caches_are_used_as_long_as_they_hold(self) -> None:
        self.assertEqual([cache.layers[0].max_cache_len for cache in self.engine.caches.static], [256, 320])
        # The latter beside the prompt is too long for the cache of 320.
        for tokens, reason in ((SAMPLING["max_new_tokens"], "no_gpu"), (200, "no_bucket")):
            with counted(self.engine) as calls:
                long = self.said(max_new_tokens=tokens)
            self.assertEqual(set(calls), {reason})
        self.equals(long, self.upstream([], max_new_tokens=200))

    def test_a_cache_that_is_full_goes_on_in_the_next_one(self) -> None:
        """However many tokens a request allows, it begins in the smallest that holds its prompt."""
        prompt = self.engine._prompt(text=TEXT, system_prompt=SYSTEM, scene=SCENE, multi_speaker="off", reference_text="", second_reference_text="",
                                     reference_rate=24000, second_reference_rate=24000)["input_ids"].shape[1]  # fmt: skip
        for lengths, used in (
            ([prompt + 1, prompt + 20, prompt + 21, 512], [1, 19, 1, 18]),
            ([prompt + 40, 512], [39, 0]),  # the frame that is drawn last is never decoded
            ([prompt, 512], [0, 39]),
        ):
            engine: HiggsAudio = loaded(HiggsAudio, {"model": str(self.folder), "cache_lengths": lengths})
            for _ in range(2):
                with steps_by_cache(engine) as steps:
                    self.equals(self.said(engine), self.first)
                self.assertEqual(steps, used)

    def test_weights_are_read_straight_onto_the_device(self) -> None:
        with mock.patch.object(transformers.HiggsAudioV2Processor, "from_pretrained") as codec, \
             mock.patch.object(transformers.HiggsAudioV2ForConditionalGeneration, "from_pretrained", side_effect=Stopped) as weights, \
             self.assertRaises(Stopped):  # fmt: skip
            HiggsAudio().load(LocalContext({"model": str(self.folder)}, device="cuda"))
        self.assertEqual([made.call_args.kwargs["device_map"] for made in (codec, weights)], ["cuda", "cuda"])

    def test_decoding_can_be_captured(self) -> None:
        waits_for_nothing(self.engine._decode, frame=torch.zeros(4, dtype=torch.int64), cache=self.engine.caches.static[0])

    def test_the_penalty_is_upstreams_for_each_codebook(self) -> None:
        generator = torch.Generator().manual_seed(0)
        scores, frames = torch.randn(4, 26, generator=generator), torch.randint(0, 24, (1, 9, 4), generator=generator)
        penalty = FramePenalty(1.3, {24, 25})
        self.assertTrue(torch.equal(penalty(frames, scores), scores), "nothing was generated")
        penalty.frames = frames
        theirs = transformers.RepetitionPenaltyLogitsProcessor(1.3)(frames[0].T, scores)
        self.assertTrue(torch.equal(penalty(frames, scores), theirs))
        penalty.frames = torch.full_like(frames, 25)
        self.assertTrue(torch.equal(penalty(frames, scores), scores), "the end is never penalised")

    def test_the_penalty_changes_what_is_drawn(self) -> None:
        self.assertFalse(torch.equal(self.said(ras_window=0, repetition_penalty=1.5), self.said(ras_window=0)))

    def test_a_missing_model_says_what_to_fetch(self) -> None:
        for name, told in (("bosonai/higgs-audio-v2-generation-3B-base", "hf download"), ("./nowhere", "options.model")):
            with self.subTest(name), self.assertRaises(MissingModel) as missing:
                loaded(HiggsAudio, {"model": name})
            self.assertIn(name, missing.exception.attempt)
            self.assertIn(told, missing.exception.remedy)

    def test_a_folder_without_its_codec_says_so(self) -> None:
        weights = Path(self.folder, "codec", "model.safetensors").rename(self.folder / "kept")
        try:
            with self.assertRaises(MissingModel) as missing:
                self.fresh()
        finally:
            weights.rename(self.folder / "codec" / "model.safetensors")
        self.assertIn("codec", missing.exception.attempt)


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def sound(voice: Any) -> dict[str, Any]:
    return {"type": "audio", "audio": voice[0]}


if __name__ == "__main__":
    unittest.main()
