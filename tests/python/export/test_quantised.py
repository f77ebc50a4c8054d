"""Weights of 8 and 4 bits: what rounding keeps and costs, and that packages of them are true to the
model so rounded."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Container
from pathlib import Path
from typing import Any

import family_packages
import served
import torch
from bulkhead.errors import Error
from bulkhead.export import check, make, products, quantised, source
from bulkhead.export.families import Family
from torch.utils._python_dispatch import TorchDispatchMode

MAKER = Path(__file__).resolve().parents[3] / "scripts" / "models" / "make_test_models.py"
VOCABULARY = 512  #: of tiny_layer


class _Called(TorchDispatchMode):
    """Lists the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(operator)
        return operator(*args, **(kwargs or {}))


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    return layer


class Rounding(unittest.TestCase):
    def test_a_byte_holds_elements_half_a_group_apart(self) -> None:
        levels = torch.stack([torch.arange(32) % 16, 15 - torch.arange(32) % 16]).to(torch.uint8)[None]
        levels[..., 16:] //= 2
        first, second = ([(h // 2) << 4 | h for h in range(16)], [((15 - h) // 2) << 4 | 15 - h for h in range(16)])
        self.assertEqual(products.packed(levels).tolist(), [first + second])

    def test_4_bits_that_were_4_bits_come_through(self) -> None:
        generator = torch.Generator().manual_seed(3)
        levels = torch.randint(0, 16, (5, 3, 32), generator=generator)
        levels[..., 4], levels[..., 29] = 0, 15  # each group has its least and its largest
        scale, least = torch.rand(5, 3, 1, generator=generator), torch.randn(5, 3, 1, generator=generator)
        layer, x = linear((levels * scale + least).flatten(1)), torch.randn(7, 96, generator=generator)
        torch.testing.assert_close(quantised.Int4Linear(layer)(x), layer(x), rtol=1e-5, atol=1e-5)

    def test_an_element_of_4_bits_is_off_by_half_a_level(self) -> None:
        for dtype, epsilon in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
            weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
            rounded = quantised.Int4Linear(linear(weight))(torch.eye(64, dtype=dtype)).T.float()
            groups = weight.float().unflatten(1, (-1, 32))
            level = ((groups.amax(-1) - groups.amin(-1)) / 15).repeat_interleave(32, 1)
            most = level * 0.5 + 4 * epsilon * groups.abs().amax(-1).repeat_interleave(32, 1)
            self.assertTrue(((rounded - weight.float()).abs() <= most).all(), dtype)

    def test_groups_without_a_spread(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for value in (0.0, 0.5, -3.0):
                layer = linear(torch.full((2, 32), value, dtype=dtype))
                self.assertTrue(torch.equal(quantised.Int4Linear(layer)(torch.eye(32, dtype=dtype)), layer(torch.eye(32, dtype=dtype))), (dtype, value))

    def test_vectors_meet_the_linear_layer(self) -> None:
        """The forms in which vectors meet the matrix, with a bias, against the one in which
        matrices do: our kernel in float32 on a CPU, Inductor's sums elsewhere."""
        layer = torch.nn.Linear(96, 40)
        int4, int8 = quantised.Int4Linear(layer), quantised.Int8Linear(layer)
        cases = (
            (int4, torch.ops.bulkhead.linear_int4.default, torch.ops.bulkhead.product_int4.default, (int4.weight, int4.scale, int4.least)),
            (int8, torch.ops.bulkhead.linear_int8.default, torch.ops.bulkhead.product_int8.default, (int8.weight, int8.scale)),
        )
        for device in ("cpu", "cuda"):
            for small, linear_of_bytes, kernel, members in cases:
                of_vectors = products.rewritten(device, "vectors")[linear_of_bytes]
                for x in (torch.randn(96), torch.randn(1, 96), torch.randn(3, 2, 96)):
                    with _Called() as called:
                        found = of_vectors(x, *members, small.bias)
                    torch.testing.assert_close(found, small(x), rtol=1e-4, atol=1e-5)
                    self.assertEqual(kernel in called.operators, device == "cpu", kernel)

    def test_sums_of_8_bits_before_they_are_scaled_fit_into_16(self) -> None:
        wide = quantised.Int8Linear(linear(torch.ones(2, 4096, dtype=torch.float16)))
        as_sum = products.rewritten("cuda", "vectors")[torch.ops.bulkhead.linear_int8.default]
        x = torch.ones(2, 4096, dtype=torch.float16)  # 127 * 4096 is beyond what float16 holds
        torch.testing.assert_close(as_sum(x, wide.weight, wide.scale, None), torch.full((2, 2), 4096.0, dtype=torch.float16), rtol=2e-3, atol=0)

    def test_which_layers_become_which(self) -> None:
        def model() -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 32), torch.nn.Linear(32, 7))

        whole = model()
        self.assertEqual(quantised.quantise(whole, whole, "int8", 7), {"int8": 3})
        mixed = model()
        self.assertEqual(quantised.quantise(mixed, mixed, "int4", 7), {"int8": 2, "int4": 1})
        kinds = [type(layer) for layer in mixed.children()]
        self.assertEqual(kinds, [quantised.Int4Linear, quantised.Int8Linear, quantised.Int8Linear], "48 is not a multiple, 7 are logits")
        with self.assertRaises(Error) as raised:
            quantised.quantise(model(), torch.nn.Embedding(4, 4), "int4", 4)
        self.assertEqual(raised.exception.code, "input_invalid")


class OfFamilies(unittest.TestCase):
    def test_what_methods_alone_run_stays(self) -> None:
        """A vision tower, an audio codec, the conditioning of a voice: no step reads them."""
        for name in family_packages.NAMES:
            family = family_packages.family(name)
            before = linear_layers(family, but=set(family.step().modules()))
            self.assertTrue(any(before), name)

            quantised.quantise(family.model, family.step(), "int4", family.numbers().vocabulary * family.numbers().codebooks)

            self.assertEqual(linear_layers(family), before, name)
            kinds = {type(module) for module in family.step().modules()}
            self.assertTrue(quantised.Int8Linear in kinds and torch.nn.Linear not in kinds, name)


def linear_layers(family: Family, but: Container[torch.nn.Module] = ()) -> list[list[torch.nn.Module]]:
    """Of each method."""
    return [[module for module in method.module.modules() if type(module) is torch.nn.Linear and module not in but] for method in family.methods()]


class Packages(unittest.TestCase):
    """Each a package of its own, of one layer, for one and exactly two sequences, so that it is
    soon compiled."""

    def test_packages_of_8_bits_and_of_4_with_the_head_in_8(self) -> None:
        for kind, counts, far in (("int8", {"int8": 7 + 1}, 0.05), ("int4", {"int8": 1, "int4": 7}, 0.4)):
            with self.subTest(kind):
                self.packaged(kind, counts, far)

    def packaged(self, kind: str, counts: dict[str, int], far: float) -> None:
        """`far`: the most that rounding may do to the logits, as a part of them."""
        family = source.load(f"{MAKER}:tiny_layer", torch.float32).family
        whole = sum(weight.nbytes for weight in family.model.parameters())
        ids = torch.arange(5, 45)[None]
        with torch.no_grad():
            exact = family.model(ids).logits
            self.assertEqual(quantised.quantise(family.model, family.step(), kind, VOCABULARY), counts)
            rounded = family.model(ids).logits
        self.assertLess(float((rounded - exact).norm() / exact.norm()), far)
        with tempfile.TemporaryDirectory(prefix="bh-export-") as folder:
            out = Path(folder, "tiny")
            make.make(source.Loaded(family, "tiny", {"weights": kind}), out, device="cpu", kv_dtype="float32", length=None, slots=1, slots_max=2,
                      buckets=None, chunk=64, tell=lambda said: None)  # fmt: skip
            package = check.Package(out)
            saved = whole - package.manifest["weights"]["bytes"]
            layers = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160
            rows = 64 * 2 + 32 * 2 + 160 * 2 + 64
            # The head shares its matrix with the embeddings where it is not rounded, and is stored
            # beside them where it is.
            wanted = {"int8": 3 * layers - 4 * rows, "int4": (4 - 6 / 8) * layers}[kind] - VOCABULARY * (64 + 4)
            self.assertLess(abs(saved - wanted), 4096, "names and offsets of the file aside")
            for prompt in family.prompts():
                verdict = check.compare(package, family, prompt, 24)
                self.assertTrue(verdict.good(check.NEAR_TIE), f"{verdict}")
            for verdict in served.verdicts(out, family, 24):
                self.assertTrue(verdict.good(check.NEAR_TIE), f"by the worker: {verdict}")
            both = package.run_decode(torch.tensor([[7], [7]]), torch.tensor([0, 0]), 1, package.buffers(2, 64))
            alone = package.run_decode(torch.tensor([[7]]), torch.tensor([0]), 1, package.buffers(1, 64))
            torch.testing.assert_close(both, alone.repeat(2, 1, 1, 1), rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    unittest.main()
