"""Kernels that Inductor generates for a GPU compute what the model computes: by Triton's interpreter, on the CPU.

What ptxas makes of them is not run, nor is any GPU's arithmetic: order of sums and approximations of a GPU are others."""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python"), str(Path(__file__).resolve().parents[2] / "clients" / "python")]

import requirements  # noqa: E402

if reason := requirements.missing():
    print(f"Skipped\n{reason}")
    sys.exit(requirements.SKIPPED)

from bulkhead.export import absent_gpu  # noqa: E402

absent_gpu.install("sm_90")

import interpreted  # noqa: E402
import tiny_models  # noqa: E402
import torch  # noqa: E402
from bulkhead.export import functions, quantised, twins  # noqa: E402
from bulkhead.export.families import Family, family_named  # noqa: E402
from bulkhead.export.step import Decode  # noqa: E402

LENGTH = 48  # of a key/value buffer


class Numbers(unittest.TestCase):
    """One step behind 20 random positions, in float32, against the same step uncompiled: logits, and keys and values."""

    def test_a_language_model(self) -> None:
        self.steps(family_named("causal_lm")(tiny_models.causal("llama")))

    def test_speech_with_guidance(self) -> None:
        self.steps(family_named("chatterbox_t3")(tiny_models.chatterbox_t3()))

    def test_codebooks(self) -> None:
        self.steps(family_named("higgs_audio_v2")(tiny_models.higgs_audio_v2()))

    def test_pictures(self) -> None:
        self.steps(family_named("qwen3_vl")(tiny_models.qwen3_vl()))

    def test_8_bits_and_several_sequences(self) -> None:
        self.steps(rounded("int8"), 3)

    def test_4_bits(self) -> None:
        self.steps(rounded("int4"))

    def steps(self, family: Family, sequences: int = 1) -> None:
        numbers, step = family.numbers(), family.step().eval()
        sizes = functions.Sizes(128, 1 if sequences == 1 else 4, 40, "cuda", torch.float32)
        with twins.placed(family.model, "cuda"):
            code, constants = interpreted.code_of(lambda: functions.compile_decode(step, numbers, sizes, Path("decode.pt2"), sizes.slots_max))
        generator = torch.Generator().manual_seed(1)
        span = 21
        tokens = torch.randint(0, numbers.vocabulary, (sequences, numbers.codebooks), generator=generator)
        positions = torch.full((sequences,), span - 1) - torch.arange(sequences)
        shape = (sequences * numbers.rows, numbers.heads, LENGTH, numbers.dim)
        before = [torch.randn(shape, generator=generator) for _ in range(2 * numbers.layers)]
        rest = [] if not step.rope_delta else [torch.full((sequences,), -15 if step.rope_delta == "prompt" else 2)]
        arguments = [tokens, positions, torch.arange(span), *rest]
        wanted = [one.clone() for one in before]
        with torch.no_grad(), step.attention():
            logits = Decode(step)(*arguments, *wanted)

        found = [one.clone() for one in before]
        run = interpreted.Interpreted(code, constants)
        (computed,) = run([*arguments, *found])

        self.assertGreater(len(run.launched), 5)
        torch.testing.assert_close(computed, logits, rtol=1e-4, atol=1e-4)
        for index, (one, other, old) in enumerate(zip(found, wanted, before, strict=True)):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=lambda said, index=index: f"buffer {index}: {said}")
            self.assertEqual(int((one != old).any(-1).sum()), sequences * numbers.rows * numbers.heads, "one position of each row is written, in place")


def rounded(kind: str) -> Family:
    family = family_named("causal_lm")(tiny_models.causal("qwen3"))
    quantised.quantise(family.model, family.step(), kind, family.numbers().vocabulary)
    return family


if __name__ == "__main__":
    unittest.main()
