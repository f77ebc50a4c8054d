"""Packages in 16 bits, or with keys and values of another type than the weights, compiled for a
CPU: as near to exact arithmetic as the upstream class itself is in those types.

Each is a package of its own, of one layer, and but two of them for single sequences, so that it is
soon compiled; that in bfloat16 is the one of make_test_models.py."""

from __future__ import annotations

import copy
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any

import served
import torch
import transformers
from bulkhead.export import check, make, quantised, source
from bulkhead.export.families import Prompt

BFLOAT16 = Path(os.environ["BULKHEAD_BUILD"]) / "models" / "test" / "tiny_bfloat16"
MAKER = Path(__file__).resolve().parents[3] / "scripts" / "models" / "make_test_models.py"
VOCABULARY, PROMPT, LENGTH = 512, 40, 120


class SixteenBits(unittest.TestCase):
    def test_packages_are_as_near_to_exact_arithmetic_as_upstream(self) -> None:
        for dtype, kv_dtype, weights, slots, made in (
            ("bfloat16", "bfloat16", None, 2, BFLOAT16),
            ("float16", "float16", None, 1, None),
            ("bfloat16", "bfloat16", "int4", 2, None),
            ("float32", "bfloat16", None, 1, None),
            ("bfloat16", "float32", None, 1, None),
        ):
            with self.subTest(dtype, kv_dtype=kv_dtype, weights=weights):
                self.packaged(dtype, kv_dtype, weights, slots, made)

    def packaged(self, dtype: str, kv_dtype: str, weights: str | None, slots: int, made: Path | None) -> None:
        family = source.load(f"{MAKER}:tiny_layer", getattr(torch, dtype)).family
        if weights is not None:
            quantised.quantise(family.model, family.step(), weights, VOCABULARY)
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            # Of the weights as they are, rounded.
            exact = copy.deepcopy(family.model).float()(ids[None]).logits[0]
            theirs = family.model(ids[None], past_key_values=Rounding(getattr(torch, kv_dtype)), use_cache=True).logits[0]
        with tempfile.TemporaryDirectory(prefix="bh-export-") as folder:
            out = made or Path(folder, "tiny")
            if made is None:
                make.make(source.Loaded(family, "tiny", {}), out, device="cpu", kv_dtype=kv_dtype, length=None, slots=1, slots_max=slots, buckets=None,
                          chunk=64, tell=lambda said: None)  # fmt: skip
            package = check.Package(out)
            self.assertEqual(package.manifest["dtypes"], {"weights": dtype, "kv": kv_dtype})
            for prompt in family.prompts():
                verdict = check.compare(package, family, prompt, 24)
                self.assertTrue(verdict.good(check.NEAR_TIE_16), f"{verdict}")
            for verdict in served.verdicts(out, family, 24):
                self.assertTrue(verdict.good(check.NEAR_TIE_16), f"by the worker: {verdict}")
            alone = along(package, ids)
            both = along(package, ids, beside=True) if slots > 1 else alone

        # Both round at each step of the same computation, though not in the same order: their
        # errors are of one size. An error that does not come of rounding (a sum kept in 16 bits, a
        # scale taken for another) is many times that.
        allowed = 2 * error(theirs[PROMPT:], exact[PROMPT:])
        self.assertGreater(allowed, 0, "nothing was rounded")
        self.assertLess(error(alone, exact[PROMPT:]), allowed)
        self.assertLess(error(both, exact[PROMPT:]), allowed)


class Rounding(transformers.DynamicCache):
    """Upstream's cache, of keys and values as this type keeps them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (states.to(self.dtype).to(states.dtype) for states in (key_states, value_states))
        return super().update(key, value, *rest, **named)


def along(package: check.Package, ids: torch.Tensor, beside: bool = False) -> torch.Tensor:
    """Logits [LENGTH - PROMPT, V] behind each token from PROMPT on, after a prefill of those
    before. `beside`: of the second of two sequences, whose first goes on as well."""
    buffers = package.buffers(1 + beside, LENGTH)
    package.run_prefill(Prompt(tokens=ids[:PROMPT, None]), 0, PROMPT, PROMPT, [one[beside:] for one in buffers])
    logits = []
    for position in range(PROMPT, LENGTH):
        tokens, at = ids[position].reshape(1, 1), torch.tensor([position])
        if beside:
            tokens, at = torch.cat([torch.full_like(tokens, 7), tokens]), torch.cat([at - PROMPT, at])
        logits.append(package.run_decode(tokens, at, position + 1, buffers)[-1, 0, 0])
    return torch.stack(logits)


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits.float() - exact).norm() / exact.norm())


if __name__ == "__main__":
    unittest.main()
