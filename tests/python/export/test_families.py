"""Each family's step, uncompiled, generates what the upstream class itself generates: small random
models of the true classes, greedy tokens against upstream's own `generate` or `inference`, logits
against its own `forward`."""

from __future__ import annotations

import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tiny_models
import torch
import transformers
from bulkhead.errors import Error
from bulkhead.export import check, source
from bulkhead.export.families import FAMILIES, Family, Prompt, chatterbox_t3, family_named, higgs_audio_v2, qwen3_vl
from bulkhead.export.families.qwen3_vl_prompt import rope_positions
from bulkhead.export.step import Decode, Prefill
from transformers.models.higgs_audio_v2.generation_higgs_audio_v2 import HiggsAudioV2DelayPatternLogitsProcessor
from transformers.models.higgs_audio_v2.processing_higgs_audio_v2 import HiggsAudioV2Processor

COUNT = 24


class Uncompiled(check.Package):
    """The functions of a package as they are before they are compiled."""

    def __init__(self, family: Family, chunk: int = 512) -> None:
        numbers, form, step = family.numbers(), family.prompt_form(), family.step().eval()
        self.step, self.device = step, "cpu"
        self.manifest = {
            "rows": numbers.rows, "codebooks": numbers.codebooks, "length_max": numbers.length_max, "stop": list(numbers.stop),
            "kv": {"layers": numbers.layers, "heads": numbers.heads, "dim": numbers.dim}, "dtypes": {"kv": "float32"},
            "rope_delta": step.rope_delta or False, "first_token": numbers.first_token,
            "prefill": {"logits": form.logits, "chunk_max": chunk, "extras": [{"name": one.name, "shape": one.shape} for one in form.extras]},
        }  # fmt: skip
        along = {one.name: one.shape.index("T") for one in form.extras}
        self.prefill = Prefill(step, embeddings=form.input == "embeddings", logits=form.logits, extras=along)
        self.decode = [((1, 64), Decode(step))]

    def generate(self, family: Family, prompt: Prompt, count: int) -> tuple[list[list[int]], list[torch.Tensor]]:
        with torch.no_grad(), self.step.attention():
            return super().generate(family, prompt, count)


class Parity(unittest.TestCase):
    def generates_as_upstream(self, family: Family, chunk: int = 512) -> list[list[list[int]]]:
        """What each prompt is answered."""
        package = Uncompiled(family, chunk)
        seen: set[tuple[int, ...]] = set()
        answers = []
        for prompt in family.prompts():
            theirs = family.reference(prompt, COUNT)
            ours, _ = package.generate(family, prompt, COUNT)
            self.assertEqual(ours, theirs)
            answers.append(theirs)
            seen |= {tuple(frame) for frame in theirs}
        self.assertGreater(len(seen), 10, "models that repeat themselves prove little")
        return answers

    def alone_and_together_as_upstream(self, family: Family) -> None:
        """Together: sequences of unlike lengths side by side in one buffer, of which two are the
        same."""
        theirs = self.generates_as_upstream(family)
        prompts = [*family.prompts(), *family.prompts()[:1]]
        ours = side_by_side(Uncompiled(family), family, prompts, min(map(len, theirs)))
        for one, other in zip(ours, [*theirs, theirs[0]], strict=True):
            self.assertEqual(one, other[: len(one)])


def side_by_side(package: Uncompiled, family: Family, prompts: list[Prompt], count: int) -> list[list[list[int]]]:
    rows = package.manifest["rows"]
    sizes = [int(p.tokens.shape[0] if p.tokens is not None else p.embeddings.shape[1]) for p in prompts]  # type: ignore[union-attr]
    length = max(sizes) + count + 1
    buffers = package.buffers(len(prompts), length)
    for buffer in buffers:
        buffer.fill_(7.0)  # what an earlier sequence left must not matter
    deltas = torch.tensor([p.rope_delta for p in prompts]) if package.manifest["rope_delta"] else None
    chosen: list[list[list[int]]] = []
    with torch.no_grad(), package.step.attention():
        for slot, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
            own = [buffer.narrow(0, slot * rows, rows) for buffer in buffers]
            delta = None if deltas is None else deltas[slot : slot + 1]
            logits = package._prompt(prompt, size, own, delta)
            if logits is None:
                logits = package.run_decode(torch.tensor([package.manifest["first_token"]]), torch.tensor([size]), size + 1, own, delta)[0]
                sizes[slot] += 1
            chosen.append([family.next_tokens(logits, [])])
        for step in range(count - 1):
            tokens = torch.tensor([one[-1] for one in chosen])
            logits = package.run_decode(tokens, torch.tensor(sizes) + step, max(sizes) + step + 1, buffers, deltas)
            for own_logits, one in zip(logits, chosen, strict=True):
                one.append(family.next_tokens(own_logits, one))
    return chosen


class CausalLm(Parity):
    def family(self, model_type: str) -> Family:
        return family_named("causal_lm")(tiny_models.causal(model_type))

    def test_every_type_that_is_named_generates_as_upstream(self) -> None:
        for model_type in FAMILIES["causal_lm"]:
            with self.subTest(model_type):
                self.alone_and_together_as_upstream(self.family(model_type))

    def test_a_prompt_in_chunks_is_the_same_prompt(self) -> None:
        self.generates_as_upstream(self.family("llama"), chunk=7)

    def test_windows_and_angles_that_change_with_the_length_are_refused(self) -> None:
        dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
        for model_type, options in (("mistral", {"sliding_window": 32}), ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
                                    ("llama", dynamic)):  # fmt: skip
            config = transformers.AutoConfig.for_model(model_type, **{**tiny_models.TEXT, **options})
            family = family_named("causal_lm")(transformers.AutoModelForCausalLM.from_config(config))
            with self.subTest(model_type), self.assertRaises(Error) as refused:
                family.numbers()
            self.assertEqual(refused.exception.code, "input_invalid")


class Qwen3Vl(Parity):
    @classmethod
    def setUpClass(cls) -> None:
        cls.family = qwen3_vl.Qwen3Vl(tiny_models.qwen3_vl())

    def test_generates_as_upstream_with_and_without_a_picture(self) -> None:
        self.alone_and_together_as_upstream(self.family)

    def test_a_picture_across_chunks_is_the_same_picture(self) -> None:
        self.generates_as_upstream(self.family, chunk=5)

    def test_pictures_change_what_is_said(self) -> None:
        words = self.family._words(6)
        one, other = (self.family.reference(self.family.seen(words, self.family._picture(*size)), COUNT) for size in ((2, 3), (3, 2)))
        self.assertNotEqual(one, other)

    def test_what_stands_beside_a_picture_in_its_rows_is_not_read(self) -> None:
        prompt = self.family.prompts()[1]
        beside = prompt.tokens[:, 0] != self.family.model.config.image_token_id
        dirty = {name: extra.clone() for name, extra in prompt.extras.items()}
        dirty["vision"][beside], dirty["deepstack"][:, beside] = 1e3, 1e3

        ours, _ = Uncompiled(self.family).generate(self.family, replace(prompt, extras=dirty), COUNT)

        self.assertEqual(ours, self.family.reference(prompt, COUNT))

    def test_the_vision_encoder_gives_what_upstreams_gives(self) -> None:
        visual = self.family.model.model.visual
        for high, wide in ((2, 3), (3, 2), (1, 5), (4, 4), (1, 1)):
            with self.subTest(grid=(high, wide)), torch.no_grad():
                picture = self.family._picture(high, wide)
                theirs = visual(picture.reshape(high * wide * 4, -1), grid_thw=torch.tensor([[1, 2 * high, 2 * wide]]), return_dict=True)
                embeddings, deepstack = qwen3_vl.Vision(visual)(picture)
                torch.testing.assert_close(embeddings, theirs.pooler_output, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(deepstack, torch.stack(theirs.deepstack_features), atol=1e-4, rtol=1e-4)

    def test_rotary_positions_are_upstreams(self) -> None:
        config = self.family.model.config
        image, video, start, end = config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id
        # Words, a picture of 2 x 3, words, a video of two moments of 3 x 2 with a timestamp
        # between them, a word.
        tokens = [5, 6, start, *[image] * 6, end, 7, 8, start, *[video] * 6, end, 9, start, *[video] * 6, end, 10]
        kinds = [1 if token == image else 2 if token == video else 0 for token in tokens]
        theirs, delta = self.family.model.model.get_rope_index(
            torch.tensor([tokens]), torch.tensor([kinds]), image_grid_thw=torch.tensor([[1, 4, 6]]), video_grid_thw=torch.tensor([[2, 6, 4]])
        )

        ours, our_delta = rope_positions(tokens, [(1, 2, 3), (1, 3, 2), (1, 3, 2)], image, video)

        self.assertEqual(ours, theirs[:, 0].tolist())
        self.assertEqual(our_delta, int(delta))

    def test_pictures_and_placeholders_that_do_not_agree_are_refused(self) -> None:
        for tokens, grids in (([5, 99], []), ([5, 99, 99], [(1, 1, 3)]), ([5], [(1, 1, 1)])):
            with self.subTest(tokens=tokens), self.assertRaises(ValueError):
                rope_positions(tokens, grids, 99, 98)


class HiggsAudioV2(Parity):
    @classmethod
    def setUpClass(cls) -> None:
        cls.family = higgs_audio_v2.HiggsAudioV2(tiny_models.higgs_audio_v2(codec=True))
        cls.config = cls.family.model.config

    def test_generates_as_upstream_from_text_and_from_a_voice(self) -> None:
        self.alone_and_together_as_upstream(self.family)

    def test_a_voice_across_chunks_is_the_same_voice(self) -> None:
        self.generates_as_upstream(self.family, chunk=6)

    def test_some_prompt_ends_by_the_delay_pattern(self) -> None:
        ends = [self.family.reference(prompt, COUNT)[-1] for prompt in self.family.prompts()]
        self.assertTrue(any(self.family.stops(frame) for frame in ends), "the tests above would not see how a sequence ends")

    def test_forced_codes_are_those_of_upstreams_logits_processor(self) -> None:
        """Random frames, of which some end: upstream masks all but one code where ours
        forces that one."""
        config, codebooks, size = self.config, self.config.num_codebooks, self.config.codebook_size
        generator = torch.Generator().manual_seed(5)
        for trial in range(50):
            theirs = HiggsAudioV2DelayPatternLogitsProcessor(
                [c + 1 for c in range(codebooks)], config.audio_bos_token_id, config.audio_delay_token_id, config.audio_stream_bos_id,
                config.audio_stream_eos_id, codebooks, size,
            )  # fmt: skip
            ids = torch.tensor([[*range(3, 10), config.audio_bos_token_id]])
            frames: list[list[int]] = []
            for _ in range(3 * codebooks + 4):
                masked = theirs(ids, torch.zeros(1, codebooks * size))
                must = [int(row.argmax()) if int(row.isfinite().sum()) == 1 else None for row in masked]
                self.assertEqual(higgs_audio_v2.forced_by_delay(frames, codebooks, config.audio_stream_bos_id, config.audio_stream_eos_id), must)
                high = size if trial % 2 else size - 1  # without eos in every other trial
                drawn = torch.randint(0, high, (codebooks,), generator=generator).tolist()
                frames.append([free if one is None else one for free, one in zip(drawn, must, strict=True)])
                if self.family.stops(frames[-1]):
                    break
                # As upstream's _sample.
                ended = config.audio_stream_eos_id in frames[-1] or int(ids[0, -1]) == config.audio_delay_token_id
                ids = torch.cat([ids, torch.tensor([[config.audio_delay_token_id if ended else config.audio_token_id]])], dim=1)

    def test_rows_of_a_voice_are_those_of_upstreams_processor(self) -> None:
        config = self.config
        codes = torch.randint(0, config.audio_stream_bos_id, (7, config.num_codebooks), generator=torch.Generator().manual_seed(1))
        around = torch.nn.functional.pad(codes.T[None], (1, 0), value=config.audio_stream_bos_id)
        around = torch.nn.functional.pad(around, (0, 1), value=config.audio_stream_eos_id)

        theirs = HiggsAudioV2Processor.build_delay_pattern(self.processor(), around)[0].T

        self.assertTrue(torch.equal(higgs_audio_v2.delayed(codes, config), theirs))

    def test_decoded_audio_is_upstreams(self) -> None:
        frames = torch.tensor(self.family.reference(self.family.prompts()[0], COUNT))
        processor = self.processor()
        (theirs,) = HiggsAudioV2Processor.batch_decode(processor, frames[None])
        (end,) = [index for index, frame in enumerate(frames.tolist()) if self.family.stops(frame)][:1] or [len(frames)]

        with torch.no_grad():
            ours = self.family.methods()[0].module(frames[1:end])

        torch.testing.assert_close(ours, theirs)

    def test_repetition_aware_sampling_is_what_the_generation_config_says(self) -> None:
        self.assertIsNone(self.ras(None, None))
        self.assertIsNone(self.ras(7, None))
        self.assertEqual(self.ras(16, 16), {"window": 16, "repeats": 16})
        self.assertIsNone(self.ras(7, 8), "so many can never be")
        self.assertEqual(self.ras(7, 2), {"window": 7, "repeats": 2})
        self.generates_as_upstream(self.family)  # both without

    def test_repetition_aware_sampling_beyond_what_a_worker_remembers_is_refused(self) -> None:
        for window, repeats in ((17, 2), (0, 2), (7, 0)):
            with self.subTest(window=window, repeats=repeats), self.assertRaises(Error) as refused:
                self.ras(window, repeats)
            self.assertEqual(refused.exception.code, "input_invalid")

    def ras(self, window: int | None, repeats: int | None) -> Any:
        """What the manifest says of a model whose generation_config says this; it says so until
        the test ends."""
        said = self.family.model.generation_config
        patched = mock.patch.multiple(said, create=True, ras_win_len=window, ras_win_max_num_repeat=repeats)
        patched.start()
        self.addCleanup(patched.stop)
        return self.family.numbers().delay_pattern["ras"]

    def test_codebooks_without_room_for_bos_and_eos_are_refused(self) -> None:
        with mock.patch.object(self.config, "codebook_size", 25), self.assertRaises(Error) as refused:
            self.family.numbers()
        self.assertEqual(refused.exception.code, "input_invalid")

    def processor(self) -> Any:
        """What the methods of upstream's processor read; the class itself wants a
        tokenizer's files."""
        config = self.config
        fake = SimpleNamespace(audio_stream_bos_id=config.audio_stream_bos_id, audio_stream_eos_id=config.audio_stream_eos_id,
                               audio_tokenizer=self.family.model.codec)  # fmt: skip
        fake.revert_delay_pattern = lambda ids: HiggsAudioV2Processor.revert_delay_pattern(fake, ids)
        return fake


class ChatterboxT3(Parity):
    @classmethod
    def setUpClass(cls) -> None:
        cls.family = chatterbox_t3.ChatterboxT3(tiny_models.chatterbox_t3())

    def test_generates_as_upstream_with_guidance_and_penalty(self) -> None:
        self.alone_and_together_as_upstream(self.family)

    def test_guidance_and_penalty_change_what_is_said(self) -> None:
        """Else the test above would not see them."""
        prompt = self.family.prompts()[0]
        said = self.family.reference(prompt, COUNT)
        for name, off in (("GUIDANCE", 0.0), ("PENALTY", 1.0)):
            with self.subTest(name), mock.patch.object(chatterbox_t3, name, off):
                self.assertNotEqual(self.family.reference(prompt, COUNT), said)

    def test_the_folder_of_a_chatterbox_checkpoint_is_known(self) -> None:
        from safetensors.torch import save_file

        configs = chatterbox_t3._modules("t3.llama_configs").LLAMA_CONFIGS
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(configs, Llama_520M=configs["tiny"]):
            state = self.family.model.state_dict()
            # What inference() leaves behind.
            once = {name: tensor for name, tensor in state.items() if not name.startswith("patched_model.")}
            save_file(once, Path(folder) / "t3_cfg.safetensors")
            loaded = source.load(folder, torch.float32)
        self.assertEqual(loaded.family.name, "chatterbox_t3")
        prompt = self.family.prompts()[0]
        self.assertEqual(loaded.family.reference(prompt, 5), self.family.reference(prompt, 5))

    def test_other_kinds_of_t3_are_refused(self) -> None:
        with mock.patch.object(self.family.model.hp, "text_tokens_dict_size", 2454), self.assertRaises(Error) as refused:
            chatterbox_t3.ChatterboxT3(self.family.model)
        self.assertEqual(refused.exception.code, "input_invalid")

    def test_the_rest_of_chatterbox_is_left_alone(self) -> None:
        self.assertNotIn("chatterbox", sys.modules)


if __name__ == "__main__":
    unittest.main()
