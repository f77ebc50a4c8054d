"""Settings for compiling every Bulkhead package, and its metadata."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from ..errors import Error

if TYPE_CHECKING:  # slow to import, and not needed to check whether a package is current
    import torch

# A package is compiled with -march=native, but its own metadata only names its vector width. By
# these flags of /proc/cpuinfo the loader tells whether a CPU can run it: compilers emit their
# instructions unasked.
CPU_FLAGS = (
    "adx avx avx2 avx512_4fmaps avx512_4vnniw avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni "
    "avx512_vpopcntdq avx512bw avx512cd avx512dq avx512er avx512f avx512ifma avx512vbmi avx512vl avx_ifma "
    "avx_ne_convert avx_vnni avx_vnni_int8 bmi1 bmi2 f16c fma fma4 gfni movbe popcnt sse4_1 sse4_2 ssse3 tbm xop"
).split()


#: x86-64-v3, the minimum for another machine: its compiler name, and its flags among CPU_FLAGS.
BASELINE = "x86-64-v3"
BASELINE_FLAGS = "avx avx2 bmi1 bmi2 f16c fma movbe popcnt sse4_1 sse4_2 ssse3".split()
BASELINE_VECTOR = 256  #: bits

_for_another_machine = False


def for_another_machine() -> None:
    """Makes this process compile for any machine of the baseline."""
    from torch._inductor import cpp_builder

    global _for_another_machine
    _for_another_machine = True
    before = cpp_builder._get_optimization_cflags

    def of_the_baseline(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        compiler, linker = before(*args, **kwargs)
        return [f"march={BASELINE}" if flag == "march=native" else flag for flag in compiler], linker

    cpp_builder._get_optimization_cflags = of_the_baseline


def cpu_flags() -> list[str]:
    """The CPU_FLAGS that code compiled here needs: all that this CPU has, or the baseline's."""
    if _for_another_machine:
        return BASELINE_FLAGS
    with open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("flags"):
                present = set(line.split(":", 1)[1].split())
                return [flag for flag in CPU_FLAGS if flag in present]
    return []


@contextmanager
def scratch_beside(folder: Path) -> Iterator[None]:
    """Keeps temporary files of Inductor and gcc (4 times the package) in `folder`/.inductor instead
    of /tmp, and removes them. What another process can use, the compiled test of vectors and the
    headers, stays in Inductor's own folder."""
    pick_vectors()
    scratch = folder / ".inductor"
    (scratch / "tmp").mkdir(parents=True, exist_ok=True)
    wanted = {"TORCHINDUCTOR_CACHE_DIR": str(scratch), "TRITON_CACHE_DIR": str(scratch / "triton"), "TMPDIR": str(scratch / "tmp")}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    tempfile.tempdir = None  # makes it read TMPDIR again
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        shutil.rmtree(scratch, ignore_errors=True)


def use_toolkit() -> None:
    """Makes Inductor look for libcuda among the CUDA toolkit's stubs too, as it does if CUDA_HOME
    is set: the driver's own may lack the name that a linker looks for.

    Errors: input_invalid without the toolkit, which Inductor needs to compile for a GPU."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        raise Error("input_invalid", "exporting for a GPU without CUDA's toolkit", "install the one of PyTorch's version of CUDA, and set CUDA_HOME to its folder")
    os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME


def pick_vectors() -> None:
    """Makes Inductor test which vectors this CPU and compiler support, by compiling and loading a
    library for each kind. It caches the libraries, and in this process the answer. With
    link_libtorch=False its tests fail, and kernels would be scalar. One thread at a time."""
    from torch._inductor import cpu_vec_isa

    with libraries_loaded_here():
        cpu_vec_isa.pick_vec_isa()


@contextmanager
def libraries_loaded_here() -> Iterator[None]:
    """Has this process, which has imported PyTorch, run what Inductor starts an interpreter for, to
    import PyTorch and load a library that it compiled: up to ten times 2 to 3 s."""
    from torch._inductor import cpu_vec_isa

    def run_here(command: list[str], **_: Any) -> None:
        exec(command[-1], {})  # it follows the interpreter and `-c`

    with mock.patch.object(cpu_vec_isa, "subprocess", SimpleNamespace(**{**vars(subprocess), "check_call": run_here})):
        yield


def compile_package(program: torch.export.ExportedProgram, file: Path, options: dict[str, Any] | None = None) -> None:
    """Compiles `program` into the package `file`, with settings() and `options`. Records in its
    metadata which arguments it writes."""
    import torch

    with _writes_recorded():
        torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs={**settings(), **(options or {})})


def settings() -> dict[str, Any]:
    """`inductor_configs` for `aoti_compile_and_package`."""
    import torch

    pick_vectors()
    return {
        # Otherwise the package links LibTorch, with all CUDA libraries, into a CPU worker.
        "aot_inductor.link_libtorch": False,
        # Otherwise the kernels start as many threads as this machine has cores, whatever the fleet
        # declares.
        "cpp.dynamic_threads": True,
        # Accepts a dimension of 1: the loader has the package check its inputs' shapes, and it
        # would refuse sizes below 2, where tracing specialises.
        "aot_inductor.check_lowerbound": False,
        # Inductor runs `openssl` to check whether a precompiled header is current.
        "aot_inductor.precompile_headers": shutil.which("openssl") is not None,
        **({"cpp.simdlen": BASELINE_VECTOR} if _for_another_machine else {}),
        "aot_inductor.metadata": {
            "BULKHEAD_TORCH": torch.__version__,
            "BULKHEAD_CPU_FLAGS": " ".join(cpu_flags()),
        },
    }


@contextmanager
def _writes_recorded() -> Iterator[None]:
    """Adds the positions of the arguments that a package's code writes, as Inductor scheduled the
    writes, to its metadata. The program does not tell: its signature omits in-place operators, and
    operators that may return their input (`type_as`, `dropout`) do not say so in their schemas.

    Other models' tensors are lent read-only, and only to a model that writes none. The name is not
    BULKHEAD_WRITTEN_ARGUMENTS: packages with that say `none` whatever they write."""
    from torch._inductor import config
    from torch._inductor.codecache import AotCodeCompiler

    before = AotCodeCompiler.compile

    def compile_code(graph: Any, *args: Any, **kwargs: Any) -> Any:
        config.aot_inductor.metadata["BULKHEAD_MUTATED_ARGUMENTS"] = " ".join(map(str, sorted(graph.mutated_input_idxs))) or "none"
        return before(graph, *args, **kwargs)

    with mock.patch.object(AotCodeCompiler, "compile", compile_code):
        yield
