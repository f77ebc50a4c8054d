"""What exporting for a GPU needs, as far as a machine without one can show it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import family_packages
import tiny_models
import torch
from bulkhead.errors import Error
from bulkhead.export import functions, inductor, make, step
from bulkhead.export.families import Family, family_named
from torch._inductor import config, cpp_builder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import cpp_extension


class ForAGpu(unittest.TestCase):
    def test_compiled_functions_find_what_they_ask_of_a_gpu(self) -> None:
        """In a process of its own, where nobody else has let them."""
        if torch.version.cuda is None:
            self.skipTest("this PyTorch is for CPUs alone")
        names = ("aoti_torch_create_cuda_guard", "aoti_torch_get_current_cuda_stream", "aoti_torch_cuda_mm_out", "cudaMemcpyAsync")
        code = ("import ctypes, sys\nfrom bulkhead.export import functions\n"
                "found = lambda: [name for name in sys.argv[1:] if hasattr(ctypes.CDLL(None), name)]\n"
                "print(*found()); functions.share_libtorch(); print(*found())")  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        before, after = (line.split() for line in done.stdout.splitlines())
        self.assertNotIn(names[0], before, "so that this test could fail")
        self.assertEqual(after, list(names))

    def test_libcuda_is_looked_for_in_the_toolkits_stubs(self) -> None:
        with tempfile.TemporaryDirectory(prefix="bh-export-") as folder, mock.patch.dict(os.environ):
            os.environ.pop("CUDA_HOME", None)
            library = Path(folder, "lib64")
            (library / "stubs").mkdir(parents=True)
            (library / "libcudart_static.a").touch()
            with mock.patch.object(cpp_extension, "CUDA_HOME", folder), config.patch({"aot_inductor.link_libtorch": False}):
                inductor.use_toolkit()
                folders = cpp_builder.get_cpp_torch_device_options("cuda", aot_mode=True)[4]
            self.assertIn(str(library.resolve() / "stubs"), folders)

    def test_headers_are_precompiled_where_openssl_is(self) -> None:
        for found in (None, "/usr/bin/openssl"):
            with mock.patch.object(inductor.shutil, "which", return_value=found):
                self.assertEqual(inductor.settings()["aot_inductor.precompile_headers"], found is not None)

    def test_without_the_toolkit_it_is_refused(self) -> None:
        with mock.patch.object(cpp_extension, "CUDA_HOME", None), self.assertRaises(Error) as raised:
            inductor.use_toolkit()
        self.assertEqual(raised.exception.code, "input_invalid")

    def test_each_family_is_traced_with_16_bits_on_a_gpu(self) -> None:
        """Tensors that say they lie on a GPU: all that is made on the way must lie there too, and
        every size must stay free."""
        for name in ("causal_lm", *family_packages.NAMES):
            with self.subTest(name):
                self.traced(a_family(name), torch.bfloat16, torch.bfloat16)

    def test_keys_and_values_of_another_type_than_the_weights_are_traced_on_a_gpu(self) -> None:
        for weights, kv in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            with self.subTest(weights=weights, kv=kv):
                values = self.traced(a_family("causal_lm"), weights, kv)
                self.assertTrue({weights, kv} <= {value.dtype for value in values})

    def traced(self, family: Family, dtype: torch.dtype, kv_dtype: torch.dtype) -> list[torch.Tensor]:
        """What its functions compute with, each tensor of it."""
        family.model.to(dtype)
        programs: list[torch.export.ExportedProgram] = []

        def compiled(program: torch.export.ExportedProgram, *unused: Any, **also_unused: Any) -> dict[str, Any]:
            programs.append(program)
            return {}

        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode, mock.patch.object(functions, "compile_program", compiled):
            for module in family.model.modules():
                for held in (module._parameters, module._buffers):
                    for key, tensor in held.items():
                        held[key] = None if tensor is None else as_on_a_gpu(mode, tensor)
            form, numbers, cut = family.prompt_form(), family.numbers(), family.step().eval()
            sizes = functions.Sizes(128, 4, 40, "cuda", kv_dtype)
            for most in (1, 4):
                functions.compile_decode(cut, numbers, sizes, Path(), most)
            functions.compile_prefill(cut, numbers, form, sizes, Path())
            for method in family.methods():
                functions.compile_method(method, "cuda", Path())
            self.assertEqual(len(programs), 3 + len(family.methods()))
        values = [value for program in programs for node in program.graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)]
        self.assertEqual({value.device.type for value in values}, {"cuda"})
        return values

    def test_kernels_are_tuned_for_sizes_as_in_use(self) -> None:
        """Which are unequal and below every bound, however short the buffers are."""
        for length_max in (make.LENGTH_MIN, 120, 121, 122, 1000, 1001, 1002, 2000, 2048, 40960):
            for chunk_max in (make.CHUNK_MIN, 120, 121, 512):
                if chunk_max <= length_max:
                    example = functions.example_of(functions.Sizes(length_max, 4, chunk_max, "cuda", torch.bfloat16))
                    self.assertTrue(1 < example.chunk < example.span < example.length < length_max, f"{length_max}: {example}")
                    self.assertLess(example.chunk, chunk_max)
                    self.assertGreaterEqual(example.span, min(1000, length_max - 2))
                    self.assertGreaterEqual(example.chunk, min(120, chunk_max - 1, length_max - 3))

    def test_attention_written_as_products_is_attention(self) -> None:
        """Heads that share keys, rows of several sequences, and keys and values that are a
        part of a buffer."""
        generator = torch.Generator().manual_seed(1)
        for batch, heads, key_heads, count, start, span in ((1, 4, 2, 7, 0, 7), (2, 4, 4, 5, 6, 11), (1, 6, 1, 2, 20, 40)):
            query = torch.randn(batch, heads, count, 8, generator=generator)
            keys, values = (torch.randn(batch, key_heads, 50, 8, generator=generator)[:, :, :span] for _ in range(2))
            mask = (torch.arange(span)[None, :] <= torch.arange(start, start + count)[:, None])[None, None]
            ours = step.attended_by_products(query, keys, values, mask, 0.3)
            theirs = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.3, enable_gqa=True)
            torch.testing.assert_close(ours, theirs)


def a_family(name: str) -> Family:
    return family_named(name)(tiny_models.causal("llama")) if name == "causal_lm" else family_packages.family(name)


def as_on_a_gpu(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    there = mode.from_tensor(tensor.detach()).to("cuda")
    return torch.nn.Parameter(there, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else there


if __name__ == "__main__":
    unittest.main()
