"""What the exporter makes of a traced graph: the arguments that it writes, and how its products are computed."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
from bulkhead.export import functions, inductor, products, quantised
from bulkhead.export.rewriting import Rewriting


class Written(unittest.TestCase):
    """What a package says of the arguments that it writes."""

    def test_each_way_of_writing_is_seen(self) -> None:
        class Writes(torch.nn.Module):
            def __init__(self, method: Any) -> None:
                super().__init__()
                self.method = method

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return self.method(x, y)

        def said_of(method: Any, **options: bool) -> str:
            program = torch.export.export(Writes(method), (torch.zeros(4), torch.zeros(4)), **options)
            if method is views:  # as where layers were written another way before
                program = program.run_decompositions({})
            metadata = inductor.settings(program)["aot_inductor.metadata"]
            self.assertNotIn("BULKHEAD_WRITTEN_ARGUMENTS", metadata, "what older packages say, and not truly")
            return str(metadata["BULKHEAD_MUTATED_ARGUMENTS"])

        def parts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            first, second = y.view(2, 2).unbind()
            torch._foreach_add_([first, second], 1)
            return x.reshape(2, 2) * second

        def views(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x[0].mul_(2) + y.zero_()

        self.assertEqual(said_of(lambda x, y: x.clone().add_(y)), "none")
        self.assertEqual(said_of(lambda x, y: x.add_(1) * 2 + y, strict=True), "0")
        self.assertEqual(said_of(lambda x, y: torch.add(x, 1, out=y) * 2, strict=False), "1")
        self.assertEqual(said_of(views), "0 1")
        self.assertEqual(said_of(parts), "1")


class Products(unittest.TestCase):
    """By what a matrix meets, a linear layer is written one way or another, and is the same layer."""

    def operators(self, device: str, dtype: torch.dtype, meets: products.Meets, layer: torch.nn.Module | None = None) -> set[str]:
        layer, x = layer or torch.nn.Linear(32, 5).to(dtype), torch.randn(7, 32).to(dtype)
        rows = torch.export.Dim("rows", min=2, max=64)
        with Rewriting(device, meets):
            program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},), strict=False)
        torch.testing.assert_close(program.module()(x), layer(x))
        return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}

    def test_vectors_meet_sums_and_a_prompt_our_own_kernel(self) -> None:
        product, linear = "bulkhead.product_float32.default", "aten.linear.default"
        self.assertFalse({product, linear} & self.operators("cpu", torch.float32, "vectors"))
        self.assertIn(product, self.operators("cpu", torch.float32, "prompt"))
        for device, dtype, meets in (("cpu", torch.bfloat16, "prompt"), ("cpu", torch.float32, "anything"), ("cuda", torch.float32, "vectors")):
            seen = self.operators(device, dtype, meets)  # type: ignore[arg-type]
            self.assertTrue(linear in seen and product not in seen, (device, dtype, meets))

    def test_8_and_4_bits_are_written_out(self) -> None:
        """No worker knows the operators themselves."""
        for kind, layer in (("int8", quantised.Int8Linear(torch.nn.Linear(32, 5))), ("int4", quantised.Int4Linear(torch.nn.Linear(32, 5)))):
            for meets in ("vectors", "prompt", "anything"):
                seen = self.operators("cpu", torch.float32, meets, layer)  # type: ignore[arg-type]
                self.assertNotIn(f"bulkhead.linear_{kind}.default", seen)
                self.assertEqual("aten.linear.default" in seen, meets == "anything")
                self.assertEqual(f"bulkhead.product_{kind}.default" in seen, meets == "prompt")

    def test_our_own_kernel_is_right_for_any_sizes(self) -> None:
        """Rows around its blocks, vectors and panels; depths and outs that fill no span, no tile and no thread's part of the copy."""
        rows = torch.export.Dim("rows", min=2, max=300)
        plain = [torch.nn.Linear(depth, outs) for depth, outs in ((160, 96), (37, 71), (37, 71), (96, 71), (96, 71))]
        for layer in (*plain[:2], *map(quantised.Int8Linear, plain[2:4]), quantised.Int4Linear(plain[4])):
            with tempfile.TemporaryDirectory() as folder, inductor.scratch_beside(Path(folder)), torch.no_grad():
                with Rewriting("cpu", "prompt"):
                    program = torch.export.export(layer, (torch.randn(7, layer.in_features),), dynamic_shapes=({0: rows},), strict=False)
                file = Path(folder) / "product.pt2"
                constants = functions.compile_program(program, file, "cpu", "prompt")
                compiled = functions.load(file)
                compiled.load_constants(constants, check_full_update=True, user_managed=True)
                for count in (2, 3, 7, 8, 9, 15, 16, 17, 24, 25, 32, 33, 47, 48, 49, 130):
                    x = torch.randn(count, layer.in_features)
                    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5, msg=lambda said: f"{count} rows, {layer}: {said}")

    def test_our_own_kernel_reads_parts_of_tensors(self) -> None:
        class Parts(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(24, 16))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                linear = torch.nn.functional.linear
                return linear(x[3:], self.weight[8:24]) + linear(x[3:], self.weight[:16]) + linear(self.weight, self.weight).sum()

        parts, x = Parts(), torch.randn(9, 16)
        with tempfile.TemporaryDirectory() as folder, inductor.scratch_beside(Path(folder)), torch.no_grad():
            with Rewriting("cpu", "prompt"):
                program = torch.export.export(parts, (x,), strict=False)
            file = Path(folder) / "parts.pt2"
            constants = functions.compile_program(program, file, "cpu", "prompt")
            compiled = functions.load(file)
            compiled.load_constants(constants, check_full_update=True, user_managed=True)
            torch.testing.assert_close(compiled(x), parts(x))


if __name__ == "__main__":
    unittest.main()
