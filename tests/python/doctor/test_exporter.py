"""The functions that the exporter compiles, of every family: no finding, in
prefill or in decode."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "export"))
import tiny_models  # noqa: E402
import torch  # noqa: E402
from bulkhead.doctor import diagnose  # noqa: E402
from bulkhead.export.families import FAMILIES, Family, family_named  # noqa: E402
from bulkhead.export.step import Decode, Prefill  # noqa: E402

LENGTH, SPAN, COUNT, CHUNK = 64, 16, 2, 4


def call(module: Decode | Prefill, *arguments: torch.Tensor) -> torch.Tensor:
    with module.step.attention():
        return module(*arguments)


def buffers(family: Family, slots: int, device: str) -> list[torch.Tensor]:
    numbers = family.numbers()
    shape = (slots * numbers.rows, numbers.heads, LENGTH, numbers.dim)
    return [torch.zeros(shape, device=device) for _ in range(2 * numbers.layers)]


def decode(family: Family, device: str) -> tuple[Any, ...]:
    step, whole = family.step().eval().to(device), {"dtype": torch.int64, "device": device}
    deltas = [torch.zeros(COUNT, **whole)] if step.rope_delta else []
    tokens = torch.zeros(COUNT, family.numbers().codebooks, **whole)
    return Decode(step), tokens, torch.tensor([3, 5], **whole), torch.arange(SPAN, **whole), *deltas, *buffers(family, COUNT, device)


def prefill(family: Family, device: str) -> tuple[Any, ...]:
    step, numbers, form, whole = family.step().eval().to(device), family.numbers(), family.prompt_form(), {"dtype": torch.int64, "device": device}
    along = {one.name: one.shape.index("T") for one in form.extras}
    module = Prefill(step, embeddings=form.input == "embeddings", logits=form.logits, extras=along)
    prompt = torch.zeros(numbers.rows, CHUNK, form.width, device=device) if form.width else torch.zeros(CHUNK, numbers.codebooks, **whole)
    rope = [torch.zeros(3, CHUNK, **whole)] if step.rope_delta == "rope" else []
    extras = [torch.zeros([CHUNK if size == "T" else int(size) for size in one.shape], dtype=getattr(torch, one.dtype), device=device)
              for one in form.extras]  # fmt: skip
    return module, prompt, torch.arange(CHUNK, **whole), torch.arange(SPAN, **whole), *rope, *extras, *buffers(family, 1, device)


class Functions(unittest.TestCase):
    def clean(self, name: str, family: str, model: Any) -> None:
        for function in (decode, prefill):
            with self.subTest(name, function=function.__name__):
                report = diagnose(call, lambda device: function(family_named(family)(model()), device))
                self.assertEqual((report.error, report.skipped, report.calls), ("", [], 3))
                self.assertEqual([(one.file, one.line, one.code, one.reason) for one in report.findings], [])

    def test_of_transformers(self) -> None:
        for name in FAMILIES["causal_lm"]:
            layers = len(tiny_models.CAUSAL[name].get("no_rope_layers", [1]))  # unlike ones
            self.clean(name, "causal_lm", lambda: tiny_models.causal(name, num_hidden_layers=layers))
        for name in ("qwen3_vl", "higgs_audio_v2"):
            self.clean(name, name, getattr(tiny_models, name))

    def test_of_chatterbox(self) -> None:
        self.clean("chatterbox_t3", "chatterbox_t3", tiny_models.chatterbox_t3)


if __name__ == "__main__":
    unittest.main()
