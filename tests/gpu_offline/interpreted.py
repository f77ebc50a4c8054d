"""Generated code for a GPU, run on the CPU: the kernels by Triton's interpreter, what lies between
them by Python.

`code_of` has Inductor write a function for an absent GPU as Python, from the same lowering that a
package is made by; `Interpreted` runs that. Set TRITON_INTERPRET=1 before anything imports Triton,
and call `absent_gpu.install` first.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Callable
from unittest import mock

import numpy as np
import torch
import triton
from bulkhead.export import twins
from torch import Tensor
from torch._inductor.codegen import wrapper
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import TRITON_MAX_BLOCK
from triton.runtime import interpreter

#: Of CUDA's libdevice, in whose place the interpreter has nothing.
LIBDEVICE: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda x: 1 / np.sqrt(x), "exp": np.exp, "exp2": np.exp2, "log": np.log, "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "sqrt": np.sqrt,
    "floor": np.floor,
}  # fmt: skip

NUMBERS_MAX = 1 << 18  #: in an array of a program, where its rows are chosen here


class _Written(Exception):
    """Ends a compilation whose code is written."""


def code_of(compile_it: Callable[[], object]) -> tuple[str, dict[str, Tensor]]:
    """What Inductor writes while `compile_it` has it compile a package, but in Python; and the
    constants that it asks for."""

    def written(graph: GraphLowering) -> None:
        graph.cpp_wrapper = False
        code, _ = graph.codegen()
        raise _Written(code.value, {name: twins.original(value, name) for name, value in graph.constants.items()})

    with (
        mock.patch.object(GraphLowering, "codegen_with_cpp_wrapper", written),
        mock.patch.object(wrapper.PythonWrapperCodegen, "generate_and_run_autotune_block", lambda unused: None),
    ):
        try:
            compile_it()
        except Exception as wrong:
            cause = wrong if isinstance(wrong, _Written) else wrong.__cause__ or wrong.__context__
            if not isinstance(cause, _Written):
                raise
            code, constants = cause.args
            return code, constants
    raise AssertionError("nothing was compiled")


#: A buffer in another shape, of sizes that may be symbols.
SEEN = r"reinterpret_tensor\((?!.*\w\()[-\w\s,()*+/]*\)"

#: All that generated code may do between kernels at no cost to the device: make a buffer, see it in
#: another shape, let it go, compute a size.
PLAIN = [
    r"\w+(, \w+)* = args", r"args\.clear\(\)", r"arg\d+_1_size = arg\d+_1\.size\(\)", r"s\d+ = arg\d+_1_size\[\d\]", r"assert_size_stride\(arg.*\)",
    r"with torch\.cuda\._DeviceGuard\(0\):", r"torch\.cuda\.set_device\(0\)", r"stream0 = get_raw_stream\(0\)",
    r"buf\d+ = empty_strided_cuda\(.*\)", r"buf\d+ = buf\d+", rf"(buf\d+ = )?{SEEN}", r"del \w+",
    r"(?!.*\w\()\w+ = [-\w\s*+/()]+", r"triton_\w+\.run\(.*\)", rf"return \((buf\d+|{SEEN}), \)",
]  # fmt: skip


def others(code: str) -> list[str]:
    """What generated code does beside launching kernels and PLAIN statements, by name:
    calls of LibTorch, and anything that reads a tensor on the host, waits, or copies
    between host and device."""
    body = code[code.index("def call(args):") :].splitlines()[1:]
    end = next((index for index, line in enumerate(body) if line and not line.startswith(" ")), len(body))
    statements = [part.strip() for line in body[:end] if not line.strip().startswith("#") for part in line.split(";") if part.strip()]
    statements = [one.split("  # ")[0].rstrip() for one in statements]
    found = [one for one in statements if not any(re.fullmatch(plain, one) for plain in PLAIN)]
    return [one.split("(")[0] for one in found]


class Interpreted:
    """What generated code defines, to be called with tensors on the CPU."""

    def __init__(self, code: str, constants: dict[str, Tensor]) -> None:
        self.launched: list[str] = []
        self.buffers: list[int] = []  #: numbers in each that was made
        self.scope: dict[str, Any] = {"__name__": "interpreted"}
        # The guards of a device and the streams of an absent GPU; buffers lie on the CPU.
        with mock.patch.object(torch._inductor.async_compile.AsyncCompile, "triton", self._kernel):
            exec(code, self.scope)
        self.scope["empty_strided_cuda"] = self._filled
        self.scope.update({name: value.detach() for name, value in constants.items()})
        self.scope["get_raw_stream"] = lambda index: 0
        self.scope["assert_size_stride"] = lambda *unused: None
        self.scope["assert_alignment"] = lambda *unused: None

    def __call__(self, arguments: list[Any]) -> list[Tensor]:
        with (
            mock.patch.object(torch.cuda, "_DeviceGuard", _NoGuard),
            mock.patch.object(triton_helpers, "libdevice", _Libdevice()),
            mock.patch.object(interpreter, "_patch_lang_tensor", _with_index(interpreter._patch_lang_tensor)),
            mock.patch.object(interpreter.ReduceOps, "generic_reduce", _with_maximum(interpreter.ReduceOps.generic_reduce)),
            # Each sum computed a second time, to see it overflow: half of the interpreter's time.
            mock.patch.object(interpreter.interpreter_builder, "options", dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)),
        ):
            call = self.scope["call"]
            return list(call(list(arguments)))

    def _filled(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        """A new buffer, of values that show where one is read before it is written."""
        made = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype)
        self.buffers.append(made.numel())
        return made.fill_(float("nan")) if dtype.is_floating_point else made.fill_(-1)

    def _kernel(self, name: str, source: str, device: str = "cuda", **also_unused: object) -> Any:
        scope: dict[str, Any] = {"__name__": name, "__file__": name}
        exec(source, scope)
        scope["libdevice"] = _Libdevice()
        tuner = next(one for one in scope.values() if isinstance(one, triton_heuristics.CachingAutotuner))
        return _Launched(name, tuner, self.launched)


class _NoGuard:
    def __init__(self, index: int) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *unused: object) -> None: ...


class _Launched:
    """A kernel with the grid that its launcher computes. Of its configurations the one of the
    fewest programs, and of so many rows a program that two do all: the interpreter takes its time
    by the program, not by the number."""

    def __init__(self, name: str, tuner: Any, launched: list[str]) -> None:
        self.name, self.tuner, self.launched = name, tuner, launched
        self.config = max(tuner.configs, key=lambda config: config.kwargs.get("XBLOCK", 1) * config.kwargs.get("YBLOCK", 1))

    def run(self, *arguments: Any, stream: int, **also: Any) -> None:
        self.launched.append(self.name)
        fn, blocks = self.tuner.fn, self.config.kwargs
        named = dict(zip([one for one in fn.arg_names if one not in blocks], arguments, strict=False))
        if "XBLOCK" in blocks:
            blocks["XBLOCK"] = max(blocks["XBLOCK"], _rows(named, blocks))
        grid = triton_heuristics.GridExpr.from_meta(self.tuner.inductor_meta, self.config)
        scope = {**named, **blocks, **also}
        for line in grid.prefix:
            exec(line, scope)
        sizes = tuple(int(eval(str(one), scope)) for one in (grid.x_grid, grid.y_grid, grid.z_grid))
        constants = {name: value for name, value in self.tuner.triton_meta.get("constants", {}).items() if isinstance(name, str) and name not in named}
        fn[sizes](**named, **{**constants, **blocks})


def _rows(named: dict[str, Any], blocks: dict[str, int]) -> int:
    """Half of all rows, but no more than generated code allows for, and in arrays that
    stay in a cache."""
    beside = blocks.get("YBLOCK", 1) * (blocks.get("R0_BLOCK") or triton.next_power_of_2(named.get("r0_numel", 1)))
    half = triton.next_power_of_2((named["xnumel"] + 1) // 2)
    return min(half, TRITON_MAX_BLOCK["X"], NUMBERS_MAX // beside)


def _with_index(before: Any) -> Any:
    """Triton's own way from a tensor of one element to an index is one that numpy 2.4
    no longer goes."""

    def patched(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda one: int(one.handle.data.item()))

    return patched


def _with_maximum(before: Any) -> Any:
    """Of Inductor's maximum Triton knows only that it takes two numbers: it would be
    called for each."""

    def patched(reduce: Any, given: Any) -> Any:
        if reduce.combine_fn is triton_helpers.maximum:
            return [reduce.min_max(given, val_reduce_op=np.max)]  # which keeps a NaN, as that does
        return before(reduce, given)

    return patched


class _Libdevice:
    """Whose functions a GPU's compiler puts in; Triton's own module of them is hollow."""

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        if name not in LIBDEVICE:
            raise NotImplementedError(f"libdevice's {name}: give LIBDEVICE what numpy computes it by")

        def called(x: Any) -> Any:
            with np.errstate(all="ignore"):
                value = LIBDEVICE[name](x.handle.data).astype(x.handle.data.dtype)
            return triton.language.core.tensor(interpreter.TensorHandle(value, x.handle.dtype), x.type)

        return called


assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before Triton is imported"
