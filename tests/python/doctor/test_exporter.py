"""The steps that the exporter compiles, of every family: no finding."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from typing import Any, Callable

sys.path.append(str(Path(__file__).parent.parent / "export"))
import tiny_models  # noqa: E402
import torch  # noqa: E402
from bulkhead.doctor import diagnose  # noqa: E402
from bulkhead.export.families import FAMILIES, family_named  # noqa: E402
from bulkhead.export.step import Decode  # noqa: E402

LENGTH, SPAN, COUNT = 64, 16, 2


def decode(module: Decode, *arguments: torch.Tensor) -> torch.Tensor:
    with module.step.attention():
        return module(*arguments)


def inputs(family: str, model: Callable[[], Any]) -> Callable[[str], tuple[Any, ...]]:
    def made(device: str) -> tuple[Any, ...]:
        of = family_named(family)(model())
        step, numbers = of.step().eval().to(device), of.numbers()
        buffers = [torch.zeros(COUNT * numbers.rows, numbers.heads, LENGTH, numbers.dim, device=device) for _ in range(2 * numbers.layers)]
        deltas = [torch.zeros(COUNT, dtype=torch.int64, device=device)] if step.rope_delta else []
        whole = {"dtype": torch.int64, "device": device}
        return Decode(step), torch.zeros(COUNT, numbers.codebooks, **whole), torch.tensor([3, 5], **whole), torch.arange(SPAN, **whole), *deltas, *buffers

    return made


class DecodeSteps(unittest.TestCase):
    def test_no_finding_in_a_step_of_any_family(self) -> None:
        models = {name: ("causal_lm", lambda name=name: tiny_models.causal(name)) for name in FAMILIES["causal_lm"]}
        models |= {"qwen3_vl": ("qwen3_vl", tiny_models.qwen3_vl), "higgs_audio_v2": ("higgs_audio_v2", tiny_models.higgs_audio_v2)}
        for name, (family, model) in models.items():
            with self.subTest(name):
                report = diagnose(decode, inputs(family, model))
                self.assertEqual((report.error, report.skipped, report.calls), ("", [], 3))
                self.assertEqual([(one.file, one.line, one.code, one.reason) for one in report.findings], [])


if __name__ == "__main__":
    unittest.main()
