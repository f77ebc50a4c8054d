"""ChatterBox against upstream's own classes called directly, sample by sample: random models of the
true classes, with fewer layers."""

from __future__ import annotations

import contextlib
import io
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from bulkhead.engine import InvalidInput, LocalContext, MissingModel
from bulkhead.engines.chatterbox import TOKEN_SAMPLES, ChatterBox
from bulkhead.errors import Error
from comfyui import caches
from calls import SmallModelTest, StreamingCalls, answered, counted, loaded, started, steps_by_cache, waits_for_nothing

try:
    import small_chatterbox
except ImportError as error:
    raise unittest.SkipTest(f"{error}; scripts/install --tests brings what ChatterBox imports") from error
import perth
import soundfile
from chatterbox.vc import ChatterboxVC
from small_chatterbox import SmallChatterBox

TEXT = "Hello there, you."
VOICE = numpy.random.default_rng(1).normal(0, 0.1, (1, 16000)).astype(numpy.float32)
SAMPLING = {"seed": 3, "max_new_tokens": 18, "stream": False}


@contextlib.contextmanager
def without_vocoder() -> Iterator[None]:
    """A sound is its speech tokens, and a number for the voice, in a fraction of the time."""

    def spoken(_: Any, speech_tokens: torch.Tensor, ref_dict: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        return speech_tokens.reshape(1, -1).repeat_interleave(960, 1) / 6561 + ref_dict["embedding"].mean(), None

    unmarked = mock.patch.object(perth.PerthImplicitWatermarker, "apply_watermark", lambda _, sound, sample_rate: sound)
    with mock.patch.object(small_chatterbox.S3Gen, "inference", spoken), unmarked:
        yield


class ChatterBoxTest(StreamingCalls, SmallModelTest):
    make = staticmethod(small_chatterbox.chatterbox)
    method, usual = "speak", {"text": TEXT, **SAMPLING}
    # Whose voice upstream would keep.
    before = {"reference": VOICE, "reference_rate": 16000, "exaggeration": 1.0}
    cancelled = {"stream": True, "max_new_tokens": 100}
    bad = ({"text": ""}, {"text": "It goes on and on. " * 1500})  # half an hour

    @classmethod
    def setUpClass(cls) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            super().setUpClass()
            with small_chatterbox.small_sizes():
                cls.upstream = small_chatterbox.ChatterboxTTS.from_local(cls.folder, "cpu")
                cls.converter = ChatterboxVC(cls.upstream.s3gen, "cpu")
            with without_vocoder():
                cls.begin()
        cls.voice = str(cls.folder / "other.wav")
        soundfile.write(cls.voice, VOICE[0], 16000, subtype="FLOAT")

    @classmethod
    def fresh(cls, graphs: str = "preferred", context: type[LocalContext] = LocalContext, **options: Any) -> SmallChatterBox:
        with contextlib.redirect_stdout(io.StringIO()):
            engine: SmallChatterBox = loaded(SmallChatterBox, {"model": str(cls.folder), "cache_lengths": [256], **options}, graphs, context)
        return engine

    def theirs(self, seed: int = 3, **given: Any) -> torch.Tensor:
        """Upstream alone, stopped after as many tokens: its own number is 1,000."""
        inference = self.upstream.t3.inference
        self.upstream.conds = small_chatterbox.Conditionals.load(self.folder / "conds.pt")
        self.upstream.t3.inference = lambda **asked: inference(**{**asked, "max_new_tokens": SAMPLING["max_new_tokens"]})
        self.addCleanup(vars(self.upstream.t3).pop, "inference", None)
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            torch.manual_seed(seed)
            sound: torch.Tensor = self.upstream.generate(TEXT, **given)
        del self.upstream.t3.inference
        return sound

    def equals(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        self.assertGreater(ours.shape[1], 24000 // 4)
        self.assertTrue(torch.equal(ours, theirs), f"{ours.shape} and {theirs.shape}")

    def test_the_models_own_voice_sounds_as_upstreams(self) -> None:
        self.equals(self.said(), self.theirs())

    @without_vocoder()
    def test_requests_leave_nothing_for_the_next_also_without_graphs_and_their_static_caches(self) -> None:
        super().test_requests_leave_nothing_for_the_next_also_without_graphs_and_their_static_caches()

    @without_vocoder()
    def test_each_parameter_is_upstreams(self) -> None:
        for given in ({"exaggeration": 1.5}, {"cfg_weight": 0.9}, {"temperature": 0.5}, {"repetition_penalty": 2.0}, {"min_p": 0.5}, {"top_p": 0.5}, {"seed": 4}):
            with self.subTest(**given):
                ours = self.said(**given)
                self.assertTrue(torch.equal(ours, self.theirs(**given)))
                self.assertFalse(torch.equal(ours, self.first))

    def test_a_reference_is_heard_as_upstream_hears_it(self) -> None:
        self.equals(self.said(reference=VOICE, reference_rate=16000), self.theirs(audio_prompt_path=self.voice))

    @without_vocoder()
    def test_without_guidance_it_speaks_too(self) -> None:
        self.assertGreater(self.said(cfg_weight=0.0).shape[1], 0)

    @without_vocoder()
    def test_the_first_sound_comes_before_t3_ends(self) -> None:
        stream = started(self.engine, "speak", **{"text": TEXT, **SAMPLING, "stream": True, "max_new_tokens": 200})
        with counted(self.engine) as calls:
            first = next(stream)
        self.assertGreater(first.tensors["audio"].shape[1], 20 * TOKEN_SAMPLES)
        self.assertLess(calls["no_gpu"], 60)
        stream.close()

    def test_parts_are_as_long_as_the_whole_which_they_do_not_change(self) -> None:
        parts, whole = answered(self.engine, "speak", **{"text": TEXT, **SAMPLING, "stream": True, "max_new_tokens": 30})
        self.assertGreater(len(parts), 1)
        self.assertEqual(sum(part.tensors["audio"].shape[1] for part in parts), whole.tensors["audio"].shape[1])
        self.assertTrue(torch.equal(whole.tensors["audio"], self.said(max_new_tokens=30)))

    def test_a_part_is_25_tokens_made_with_the_50_before_them_and_fades_in_over_20_ms(self) -> None:
        """Each sound is its tokens, higher by one than the sound before, so that it shows what
        it was made of."""
        made: list[list[int]] = []

        def inference(_: Any, speech_tokens: torch.Tensor, ref_dict: Any) -> tuple[torch.Tensor, None]:
            made.append(speech_tokens.tolist())
            return len(made) + speech_tokens[None].repeat_interleave(960, 1) / 6561, None

        unmarked = mock.patch.object(ChatterBox, "_marked", lambda _, sound: sound[None])
        with mock.patch.object(small_chatterbox.S3Gen, "inference", inference), unmarked:
            parts, _ = answered(self.engine, "speak", **{"text": TEXT, **SAMPLING, "stream": True, "max_new_tokens": 110})
        spoken = made[-1]
        self.assertEqual((len(spoken), len(parts)), (110, 5))
        self.assertEqual(made[:-1], [spoken[:25], spoken[:50], spoken[:75], spoken[25:100], spoken[50:]])
        rising, end = torch.linspace(0, 1, 480), torch.zeros(0)
        for index, (window, part) in enumerate(zip(made, parts)):
            sound = index + 1 + torch.tensor(window).repeat_interleave(960) / 6561
            new = sound[-960 * min(25, 110 - 25 * index) :]
            faded = end * (1 - rising) + sound[-len(new) - 480 : -len(new)] * rising if index else end
            end = new[-480:]
            torch.testing.assert_close(part.tensors["audio"][0], torch.cat([faded, new if index == 4 else new[:-480]]))

    def test_a_voice_is_converted_as_upstream_converts(self) -> None:
        source = numpy.random.default_rng(2).normal(0, 0.1, (1, 12000)).astype(numpy.float32)
        soundfile.write(self.folder / "source.wav", source[0], 24000, subtype="FLOAT")
        for given, target in (({}, None), ({"reference": VOICE, "reference_rate": 16000}, self.voice), ({}, None)):
            self.converter.ref_dict = dict(small_chatterbox.Conditionals.load(self.folder / "conds.pt").gen)
            torch.manual_seed(5)
            theirs = self.converter.generate(str(self.folder / "source.wav"), target)
            ours = self.engine.convert(source=source, source_rate=24000, **{"reference_rate": 24000, "seed": 5, **given})
            self.equals(ours.tensors["audio"], theirs)

    @without_vocoder()
    def test_a_cache_that_is_full_goes_on_in_the_next_one(self) -> None:
        engine = self.fresh(cache_lengths=list(range(40, 264, 8)))
        with steps_by_cache(engine) as steps:
            self.equals(self.said(engine), self.first)
        used = [count for count in steps if count]
        self.assertEqual(sum(used), SAMPLING["max_new_tokens"])
        self.assertEqual(set(used[1:-1]), {8})

    def test_decoding_can_be_captured(self) -> None:
        place = torch.zeros(1, 1, dtype=torch.int64)
        waits_for_nothing(self.engine._decode, token=place, place=place, cache=self.engine.caches.static[0])

    def test_the_nodes_expect_the_caches_that_it_makes(self) -> None:
        held = sum(layer.keys.nbytes + layer.values.nbytes for cache in self.engine.caches.static for layer in cache.layers)
        self.assertEqual(caches.of_engine(self.folder, {}, [256]), held)

    @without_vocoder()
    def test_a_folder_without_a_voice_needs_a_reference(self) -> None:
        voice = Path(self.folder, "conds.pt").rename(self.folder / "kept.pt")
        try:
            engine = self.fresh()
        finally:
            voice.rename(self.folder / "conds.pt")
        for call in (lambda: self.said(engine), lambda: engine.convert(source=VOICE, source_rate=16000, reference_rate=1, seed=0)):
            with self.assertRaises(InvalidInput) as refused:
                call()
            self.assertIn("conds.pt", refused.exception.remedy)
        self.assertGreater(self.said(engine, reference=VOICE, reference_rate=16000).shape[1], 0)

    def test_other_variants_are_refused_by_name_and_by_their_files(self) -> None:
        for variant, file in (("multilingual", "t3_mtl23ls_v2.safetensors"), ("turbo", "t3_turbo_v1.safetensors")):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, file).touch()
                for options in ({"variant": variant}, {"model": folder}):
                    with self.subTest(**options), self.assertRaises(Error) as refused:
                        loaded(ChatterBox, options)
                    self.assertEqual(refused.exception.code, "config_invalid")
                    self.assertIn(variant, refused.exception.attempt)
                    self.assertIn("options.model has t3_cfg.safetensors", refused.exception.remedy)

    def test_a_missing_model_says_what_to_fetch(self) -> None:
        with self.assertRaises(MissingModel) as missing:
            loaded(ChatterBox, {})
        self.assertIn("hf download ResembleAI/chatterbox", missing.exception.remedy)


if __name__ == "__main__":
    unittest.main()
