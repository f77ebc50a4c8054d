"""Compiles a package's functions, and lists the constants that they need."""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.codegen.cpp import CppScheduling
from torch.export import Dim, ExportedProgram

from . import absent_gpu, inductor, products, twins
from .families import Method, Numbers, PromptForm
from .lengths import any_length
from .rewriting import Rewriting
from .step import Decode, Prefill, Step


@dataclass(frozen=True)
class Sizes:
    """The sizes that the functions are compiled for."""

    length_max: int  #: positions of a key/value buffer
    slots_max: int
    chunk_max: int  #: prompt positions of one prefill call
    device: str
    kv_dtype: torch.dtype


def compile_decode(step: Step, numbers: Numbers, sizes: Sizes, file: Path, most: int) -> dict[str, Tensor]:
    """Compiles decode for one sequence (`most` 1: matrix-vector products, and only the length
    varies), or for 2 to `most`. Writes `file`. Returns the constants that it needs, by name."""
    count = min(3, most)
    n = Dim("n", min=2, max=most) if most > 2 else Dim.STATIC
    a, length = _lengths(sizes)
    arguments = [
        torch.zeros(count, numbers.codebooks, dtype=torch.int64),
        torch.arange(count),
        torch.arange(example_of(sizes).span),
        *([torch.zeros(count, dtype=torch.int64)] if step.rope_delta else []),
    ]
    rows = n if most <= 2 or numbers.rows == 1 else numbers.rows * n
    shapes: list[Any] = [{0: n}, {0: n}, {0: a}, *([{0: n}] if step.rope_delta else [])]
    return _compile(Decode(step), step, arguments, shapes, _buffers(numbers, sizes, count), {0: rows, 2: length}, sizes, file, "vectors")


def compile_prefill(step: Step, numbers: Numbers, form: PromptForm, sizes: Sizes, file: Path) -> dict[str, Tensor]:
    """Compiles prefill for 2 to `chunk_max` positions of one sequence. Writes `file`. Returns the
    constants that it needs, by name."""
    chunk = Dim("T", min=2, max=sizes.chunk_max)
    a, length = _lengths(sizes)
    example = example_of(sizes)
    count = example.chunk
    if form.input == "embeddings":
        assert form.width is not None
        prompt, prompt_shape = torch.zeros(numbers.rows, count, form.width, dtype=next(step.parameters()).dtype), {1: chunk}
    else:
        prompt, prompt_shape = torch.zeros(count, numbers.codebooks, dtype=torch.int64), {0: chunk}
    arguments = [prompt, torch.arange(count), torch.arange(example.span)]
    shapes: list[Any] = [prompt_shape, {0: chunk}, {0: a}]
    if step.rope_delta == "rope":
        arguments.append(torch.zeros(3, count, dtype=torch.int64))
        shapes.append({1: chunk})
    for extra in form.extras:
        arguments.append(torch.zeros([count if size == "T" else int(size) for size in extra.shape], dtype=getattr(torch, extra.dtype)))
        shapes.append({index: chunk for index, size in enumerate(extra.shape) if size == "T"})
    along = {extra.name: extra.shape.index("T") for extra in form.extras}
    module = Prefill(step, embeddings=form.input == "embeddings", logits=form.logits, extras=along)
    return _compile(module, step, arguments, shapes, _buffers(numbers, sizes, 1), {2: length}, sizes, file, "prompt")


def compile_method(method: Method, device: str, file: Path) -> dict[str, Tensor]:
    """Compiles a further function of the package. Writes `file`. Returns the constants that it
    needs, by name."""
    given = tuple(tensor.to(device) for tensor in method.arguments)
    with torch.no_grad(), Rewriting(device, "anything"):
        program = torch.export.export(method.module.eval(), given, dynamic_shapes=method.dynamic_shapes, strict=False)
    return compile_program(program, file, device, "anything")


KERNEL_ARGUMENTS = 24


@dataclass(frozen=True)
class Example:
    """Sizes for tracing a function: 1 < chunk < span < length, and none is a bound."""

    chunk: int
    span: int
    length: int


def example_of(sizes: Sizes) -> Example:
    """For a GPU as long as in use: Inductor derives the split of sums from them, and measures
    kernels with them."""
    chunk, span, length = (120, 1000, 1999) if sizes.device == "cuda" else (7, 24, 40)
    length = min(length, sizes.length_max - 1)
    span = min(span, length - 1)
    return Example(min(chunk, sizes.chunk_max - 1, span - 1), span, length)


def _lengths(sizes: Sizes) -> tuple[Any, Any]:
    """The attention length, and the buffers' length. If a narrowed buffer is converted (16-bit
    dtypes), tracing assumes that a rest remains, so the second range must exceed the first; a
    compiled function does not depend on it."""
    return Dim("a", min=2, max=sizes.length_max), Dim("length", min=3, max=sizes.length_max + 1)


def _buffers(numbers: Numbers, sizes: Sizes, count: int) -> list[Tensor]:
    shape = (count * numbers.rows, numbers.heads, example_of(sizes).length, numbers.dim)
    return [torch.zeros(shape, dtype=sizes.kv_dtype) for _ in range(2 * numbers.layers)]


def _compile(module: torch.nn.Module, step: Step, arguments: list[Tensor], shapes: list[Any], buffers: list[Tensor],
             buffer_shape: dict[int, Any], sizes: Sizes, file: Path, meets: products.Meets) -> dict[str, Tensor]:  # fmt: skip
    heads = [tensor.to(sizes.device) for tensor in arguments]
    given = (*heads, *(buffer.to(sizes.device) for buffer in buffers))
    dynamic = (*shapes[:3], (*shapes[3:], *([buffer_shape] * len(buffers))))
    with torch.no_grad(), step.attention(), Rewriting(sizes.device, meets):
        program = torch.export.export(module.eval(), given, dynamic_shapes=dynamic, strict=False)
    return compile_program(program, file, sizes.device, meets, single=meets == "vectors" and len(arguments[0]) == 1)


def compile_program(program: ExportedProgram, file: Path, device: str, meets: products.Meets, *, single: bool = False) -> dict[str, Tensor]:
    """Compiles without the constants. Writes `file` completely or not at all. Returns the constants
    that it needs, by name.

    single: for one sequence, the most frequent step of a graph."""
    # The products of product_kernel.h, on a CPU, take in no epilogue.
    options: dict[str, Any] = {"aot_inductor.package_constants_in_so": False, "epilogue_fusion": device != "cpu"}
    if meets == "vectors" and device == "cpu":
        options["realize_reads_threshold"] = 1  # stores sums that the next layers add to
    if device == "cuda":
        # With it, Inductor also writes products with a vector as sums.
        options["coordinate_descent_tuning"] = single
    partial = file.with_suffix(".partial.pt2")
    known = {**program.state_dict, **program.constants}
    with _short_kernels(), any_length(), twins.compiling(program):
        inductor.compile_package(program, partial, options)
    wanted = twins.constants_of(partial) if absent_gpu.installed() else load(partial).get_constant_fqns()
    os.replace(partial, file)
    return {name: twins.original(known[name], name) for name in wanted}


def _short_kernels() -> AbstractContextManager[Any]:
    """Keeps kernels short. Otherwise Inductor writes all layers of a CPU function as one kernel of
    some ten thousand lines, which gcc compiles for minutes; short ones are shared by the layers."""
    return mock.patch.object(CppScheduling, "MAX_FUSED_KERNEL_ARGS_NUM", KERNEL_ARGUMENTS)


def load(file: Path) -> Any:
    """Loads a compiled function, without its constants."""
    share_libtorch()
    inductor.pick_vectors()  # the loader compares them with the package's
    return torch._inductor.aoti_load_package(str(file), run_single_threaded=True)


def share_libtorch() -> None:
    """Lets compiled functions, which are not linked to LibTorch, find its symbols: Python loads it
    privately. A GPU function also needs a library that a CPU-only PyTorch lacks."""
    for name in ("libtorch_cpu.so", "libtorch_cuda.so"):
        library = Path(torch.__file__).parent / "lib" / name
        if library.is_file():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
