"""What the exporter makes of a traced graph: the arguments that it writes, and how its
products are computed."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path

import torch
from bulkhead.export import functions, inductor, products, quantised
from bulkhead.export.rewriting import Rewriting
from torch import Tensor
from torch.nn import functional


Way = Callable[[Tensor, Tensor], Tensor]  #: of using x, a tensor [2, 2, 1] of 2, beside y, another


def without_gradients(x: Tensor, y: Tensor) -> Tensor:
    """A program has an operator that calls another graph, by which it is written."""
    with torch.no_grad():
        return x.add_(1) * y


def parts(x: Tensor, y: Tensor) -> Tensor:
    first, second = x.view(2, 2).unbind()
    torch._foreach_add_([first, second], 1)
    return x * y


def statistics(x: Tensor, y: Tensor) -> Tensor:
    mean, variance = x.flatten(), torch.ones(4)
    return functional.batch_norm(y.reshape(1, 4, 1).expand(1, 4, 3), mean, variance, training=True, momentum=1.0)


WRITE: dict[str, Way] = {
    "in place": lambda x, y: x.add_(1) * y,
    "out": lambda x, y: torch.add(y, 1, out=x) * 3,
    "a view": lambda x, y: x[0].mul_(3) + y[0],
    "through views": lambda x, y: x.view(4).reshape(2, 2).t()[0].zero_() + y.sum(),
    "parts": parts,
    "without gradients": without_gradients,
    "statistics": statistics,
    # PyTorch's operators that may return their input or a view of it, of which their
    # schemas say nothing.
    "_cast_Float": lambda x, y: torch._cast_Float(x).add_(1),
    "alpha_dropout": lambda x, y: functional.alpha_dropout(x).add_(1),
    "atleast_1d": lambda x, y: torch.atleast_1d(x).add_(1),
    "atleast_2d": lambda x, y: torch.atleast_2d(x).add_(1),
    "atleast_3d": lambda x, y: torch.atleast_3d(x).add_(1),
    "atleast_3d, several": lambda x, y: torch.atleast_3d(x, y)[0].add_(1),
    "broadcast_tensors": lambda x, y: torch.broadcast_tensors(x, y)[0].add_(1),
    "cartesian_prod": lambda x, y: torch.cartesian_prod(x.view(4)).add_(1),
    "conj_physical": lambda x, y: torch.conj_physical(x).add_(1),
    "einsum": lambda x, y: torch.einsum("ijk->jik", x).add_(1),
    "feature_alpha_dropout": lambda x, y: functional.feature_alpha_dropout(x).add_(1),
    "feature_dropout": lambda x, y: torch.feature_dropout(x, 0.5, False).add_(1),
    "flatten_dense_tensors": lambda x, y: torch.ops.aten.flatten_dense_tensors([x]).add_(1),
    "unflatten_dense_tensors": lambda x, y: torch.ops.aten.unflatten_dense_tensors(x.view(4), [y])[0].add_(1),
    "meshgrid": lambda x, y: torch.meshgrid(x.view(4), indexing="ij")[0].add_(1),
    "sum_to_size": lambda x, y: x.sum_to_size(2, 2, 1).add_(1),
    "to_dense": lambda x, y: x.to_dense().add_(1),
    "type_as": lambda x, y: x.type_as(y).add_(1),
}
READ: dict[str, Way] = {
    "a copy": lambda x, y: x.clone().add_(y),
    "another type": lambda x, y: x.type_as(y.to(torch.int64)).add_(1),
    "a result": lambda x, y: (x * y).relu_(),
    # Which return their input, but a copy where they are compiled.
    "dropout": lambda x, y: functional.dropout(x, training=False).add_(1),
    "unsafe_chunk": lambda x, y: x.unsafe_chunk(2)[0].add_(1) * y[0],
}


class Ways(torch.nn.Module):
    def forward(self, y: Tensor, *given: Tensor) -> list[Tensor]:
        return [way(x, y) for way, x in zip([*WRITE.values(), *READ.values()], given, strict=True)]


class Written(unittest.TestCase):
    """What a package says of the arguments that it writes is what it does."""

    def test_each_way_of_writing_is_seen_and_no_other(self) -> None:
        y, names = torch.full((2, 2, 1), 5.0), ["y", *WRITE, *READ]
        for strict in (True, False):
            with self.subTest(strict=strict), tempfile.TemporaryDirectory() as folder, inductor.scratch_beside(Path(folder)):
                program = torch.export.export(Ways(), (y, *(torch.full_like(y, 2) for _ in names[1:])), strict=strict)
                file = Path(folder) / "ways.pt2"
                inductor.compile_package(program, file)
                package = functions.load(file)
                given = [y.clone(), *(torch.full_like(y, 2) for _ in names[1:])]
                before = [one.clone() for one in given]
                package(*given)
                metadata = package.get_metadata()
                written = [name for name, one, old in zip(names, given, before, strict=True) if not torch.equal(one, old)]
                self.assertEqual(written, list(WRITE))
                self.assertEqual([names[int(position)] for position in metadata["BULKHEAD_MUTATED_ARGUMENTS"].split()], list(WRITE))
                self.assertNotIn("BULKHEAD_WRITTEN_ARGUMENTS", metadata, "what older packages say, and not truly")

    def test_a_package_that_writes_nothing_says_so(self) -> None:
        with tempfile.TemporaryDirectory() as folder, inductor.scratch_beside(Path(folder)):
            file = Path(folder) / "linear.pt2"
            inductor.compile_package(torch.export.export(torch.nn.Linear(4, 2), (torch.zeros(1, 4),)), file)
            self.assertEqual(functions.load(file).get_metadata()["BULKHEAD_MUTATED_ARGUMENTS"], "none")


class Products(unittest.TestCase):
    """By what a matrix meets, a linear layer is written one way or another, and is
    the same layer."""

    def operators(self, device: str, dtype: torch.dtype, meets: products.Meets, layer: torch.nn.Module | None = None) -> set[str]:
        layer, x = layer or torch.nn.Linear(32, 5).to(dtype), torch.randn(7, 32).to(dtype)
        rows = torch.export.Dim("rows", min=2, max=64)
        with Rewriting(device, meets):
            program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},), strict=False)
        rtol, atol = (1.3e-6, 1e-5) if dtype == torch.float32 else (0.01, 0.01)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=rtol, atol=atol)
        return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}

    def test_float32_on_a_cpu_meets_our_own_kernel_other_vectors_sums(self) -> None:
        product, linear = "bulkhead.product_float32.default", "aten.linear.default"
        self.assertIn(product, self.operators("cpu", torch.float32, "vectors"))
        self.assertIn(product, self.operators("cpu", torch.float32, "prompt"))
        self.assertFalse({product, linear} & self.operators("cpu", torch.bfloat16, "vectors"))
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
                self.assertEqual(f"bulkhead.product_{kind}.default" in seen, meets != "anything")

    def test_our_own_kernel_is_right_for_any_sizes(self) -> None:
        """Rows around its blocks, vectors and panels; depths and outs that fill no span, no tile
        and no thread's part of the copy."""
        sizes = ((160, 96), (37, 71), (96, 71), (64, 48), (544, 48))
        plain = [torch.nn.Linear(depth, outs) for depth, outs in sizes]
        kinds = (*plain, *map(quantised.Int8Linear, plain), *(quantised.Int4Linear(layer) for layer in plain if layer.in_features % 32 == 0))

        class Each(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = torch.nn.ModuleList(kinds)

            def forward(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
                return [layer(x) for layer, x in zip(self.layers, xs, strict=True)]

        def inputs(rows: int) -> list[torch.Tensor]:
            return [torch.randn(rows, layer.in_features) for layer in kinds]

        each = Each()
        some = {0: torch.export.Dim("rows", min=2, max=300)}
        for counts, shapes in (((1,), None), ((2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 24, 25, 32, 33, 47, 48, 49, 130), ([some] * len(kinds),))):
            with tempfile.TemporaryDirectory() as folder, inductor.scratch_beside(Path(folder)), torch.no_grad():
                with Rewriting("cpu", "prompt"):
                    program = torch.export.export(each, (inputs(counts[-1]),), dynamic_shapes=shapes, strict=False)
                file = Path(folder) / "products.pt2"
                constants = functions.compile_program(program, file, "cpu", "prompt")
                compiled = functions.load(file)
                compiled.load_constants(constants, check_full_update=True, user_managed=True)
                for count in counts:
                    xs = inputs(count)
                    for layer, found, wanted in zip(kinds, compiled(xs), each(xs), strict=True):
                        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda said: f"{count} rows, {layer}: {said}")  # noqa: B023

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
