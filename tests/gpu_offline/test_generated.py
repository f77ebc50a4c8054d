"""What Inductor generates for a GPU: kernels that compute what the model computes, and nothing
between them that costs.

The kernels run under Triton's interpreter, on the CPU. What ptxas makes of them is not run, nor is
any GPU's arithmetic, whose order of sums and whose approximations are others.
"""

from __future__ import annotations

import collections
import math
import os
import sys
import unittest
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python" / "export"), str(Path(__file__).resolve().parents[2] / "clients" / "python")]

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
from bulkhead.export.step import Decode as UncompiledDecode  # noqa: E402

LENGTH = 48  # of a key/value buffer
#: Of each model but llama in float32, which shows that one layer reads what another gave: Inductor
#: takes its time by the layer.
LAYERS = 1
tiny_models.TEXT["num_hidden_layers"] = LAYERS


def of_several(layers: int = LAYERS) -> dict[str, int]:
    """Calls for sequences whose number changes: seven products for each layer, and the head's; and
    one for the rotary angles."""
    return {"extern_kernels.mm": 7 * layers + 1, "extern_kernels.bmm": 1}


#: How far numbers may lie from those of the step uncompiled; of logits in bfloat16 `FARTHEST` of
#: the greatest instead of `atol`. That step rounds to bfloat16 between any two operations, kernels
#: less often. Of a language model's logits between -28 and 28 the farthest was 0.39 away, and 0.23
#: from those in float32; of T3's between -183 and 140, 2.1 away and 1.7 from float32, from which
#: the step uncompiled lay 1.2.
WITHIN = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 0.02, "atol": 0.5}}
FARTHEST = 0.018


class Decode(unittest.TestCase):
    """A step behind 20 random positions, in float32 or, as on most GPUs, in bfloat16, against the
    same step uncompiled: logits, and keys and values in place. Each test names all calls of
    LibTorch in it; whatever else stands between kernels would be named among them."""

    def test_a_language_model(self) -> None:
        self.assertEqual(self.step_of(llama(layers=2)), {})

    def test_a_language_model_with_several_sequences(self) -> None:
        self.assertEqual(self.step_of(llama(layers=2), 3), of_several(layers=2))

    def test_speech_with_guidance(self) -> None:
        """Two rows meet each matrix: cuBLAS would be called for two."""
        family = family_named("chatterbox_t3")(tiny_models.chatterbox_t3().to(torch.bfloat16))
        self.assertEqual(self.step_of(family, dtype=torch.bfloat16), {})

    def test_codebooks(self) -> None:
        self.assertEqual(self.step_of(family_named("higgs_audio_v2")(tiny_models.higgs_audio_v2())), {})

    def test_pictures(self) -> None:
        self.assertEqual(self.step_of(family_named("qwen3_vl")(tiny_models.qwen3_vl())), {})

    def test_each_family_with_several_sequences(self) -> None:
        """The same calls as of a language model; with guidance, of as many rows again."""
        for name in ("chatterbox_t3", "higgs_audio_v2", "qwen3_vl"):
            with self.subTest(name):
                self.assertEqual(self.step_of(family_named(name)(getattr(tiny_models, name)()), 3), of_several())

    def test_bfloat16(self) -> None:
        self.assertEqual(self.step_of(llama(torch.bfloat16), dtype=torch.bfloat16), {})

    def test_8_bits(self) -> None:
        self.assertEqual(self.step_of(rounded("int8")), {})

    def test_8_bits_and_several_sequences(self) -> None:
        """A product by cuBLAS would have the matrix widened into a buffer first, at each step. The
        one left is for the rotary angles."""
        self.assertEqual(self.step_of(rounded("int8"), 3), {"extern_kernels.bmm": 1})

    def test_8_bits_with_guidance(self) -> None:
        family = family_named("chatterbox_t3")(tiny_models.chatterbox_t3().to(torch.bfloat16))
        self.assertEqual(self.step_of(rounded("int8", family), dtype=torch.bfloat16), {})

    def test_4_bits(self) -> None:
        self.assertEqual(self.step_of(rounded("int4", dtype=torch.bfloat16), dtype=torch.bfloat16), {})

    def test_4_bits_and_several_sequences(self) -> None:
        self.assertEqual(self.step_of(rounded("int4"), 3), {"extern_kernels.bmm": 1})

    def step_of(self, family: Family, sequences: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, int]:
        """How often it calls what, beside kernels. No buffer between them holds as many numbers as
        a matrix of 8 or 4 bits: a kernel too could widen one."""
        numbers, step = family.numbers(), family.step().eval()
        sizes = functions.Sizes(128, 1 if sequences == 1 else 4, 40, "cuda", dtype)
        with twins.placed(family.model, "cuda"):
            code, constants = interpreted.code_of(lambda: functions.compile_decode(step, numbers, sizes, Path("decode.pt2"), sizes.slots_max))
        generator = torch.Generator().manual_seed(1)
        span = 21
        tokens = torch.randint(0, numbers.vocabulary, (sequences, numbers.codebooks), generator=generator)
        positions = torch.full((sequences,), span - 1) - torch.arange(sequences)
        shape = (sequences * numbers.rows, numbers.heads, LENGTH, numbers.dim)
        before = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2 * numbers.layers)]
        rest = [] if not step.rope_delta else [torch.full((sequences,), -15 if step.rope_delta == "prompt" else 2)]
        arguments = [tokens, positions, torch.arange(span), *rest]
        wanted = [one.clone() for one in before]
        with torch.no_grad(), step.attention():
            logits = UncompiledDecode(step)(*arguments, *wanted)

        found = [one.clone() for one in before]
        run = interpreted.Interpreted(code, constants)
        (computed,) = run([*arguments, *found])

        self.assertGreater(len(run.launched), 5)
        matrices = [layer.in_features * layer.out_features for layer in family.model.modules() if isinstance(layer, (quantised.Int8Linear, quantised.Int4Linear))]
        self.assertLess(max(run.buffers), min(matrices, default=math.inf))
        far = {} if dtype is torch.float32 else {"atol": FARTHEST * float(logits.abs().max())}
        torch.testing.assert_close(computed, logits, **{**WITHIN[dtype], **far})
        for index, (one, other, old) in enumerate(zip(found, wanted, before, strict=True)):
            torch.testing.assert_close(one, other, **WITHIN[dtype], msg=lambda said, index=index: f"buffer {index}: {said}")
            self.assertEqual(int((one != old).any(-1).sum()), sequences * numbers.rows * numbers.heads, "one position of each row is written, in place")
        return dict(collections.Counter(interpreted.others(code)))


def llama(dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> Family:
    return family_named("causal_lm")(tiny_models.causal("llama", num_hidden_layers=layers).to(dtype))


def rounded(kind: str, family: Family | None = None, dtype: torch.dtype = torch.float32) -> Family:
    """By default a language model whose every matrix has as many inputs as 4 bits ask
    for, in `dtype`."""
    family = family or family_named("causal_lm")(tiny_models.causal("qwen3", hidden_size=64, intermediate_size=96).to(dtype))
    counts = quantised.quantise(family.model, family.step(), kind, family.numbers().vocabulary)
    assert counts[kind] >= 7 * LAYERS, counts
    return family


if __name__ == "__main__":
    unittest.main()
