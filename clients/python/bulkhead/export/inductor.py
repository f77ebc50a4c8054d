"""Settings under which every package of Bulkhead is compiled, and what a package says of itself."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Error

if TYPE_CHECKING:  # slow to import, and not needed to see that a package is current
    import torch

# A package is compiled with -march=native, and its own metadata names only the vector width it was generated
# for. These are the flags of /proc/cpuinfo by which the loader tells whether this CPU can run it: those for which
# a compiler writes instructions unasked.
CPU_FLAGS = (
    "adx avx avx2 avx512_4fmaps avx512_4vnniw avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni "
    "avx512_vpopcntdq avx512bw avx512cd avx512dq avx512er avx512f avx512ifma avx512vbmi avx512vl avx_ifma "
    "avx_ne_convert avx_vnni avx_vnni_int8 bmi1 bmi2 f16c fma fma4 gfni movbe popcnt sse4_1 sse4_2 ssse3 tbm xop"
).split()


#: x86-64-v3, what is taken for granted of another machine, as a compiler names it and by those of CPU_FLAGS in it.
BASELINE = "x86-64-v3"
BASELINE_FLAGS = "avx avx2 bmi1 bmi2 f16c fma movbe popcnt sse4_1 sse4_2 ssse3".split()
BASELINE_VECTOR = 256  #: bits

_for_another_machine = False


def for_another_machine() -> None:
    """From now on this process compiles what any machine of the baseline can run."""
    from torch._inductor import cpp_builder

    global _for_another_machine
    _for_another_machine = True
    before = cpp_builder._get_optimization_cflags

    def of_the_baseline(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        compiler, linker = before(*args, **kwargs)
        return [f"march={BASELINE}" if flag == "march=native" else flag for flag in compiler], linker

    cpp_builder._get_optimization_cflags = of_the_baseline


def cpu_flags() -> list[str]:
    """Those of CPU_FLAGS that what is compiled here asks for: all that this CPU has, or the baseline's."""
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
    """Keeps what Inductor and gcc write (4 times the package) in `folder`/.inductor, out of /tmp, while it is needed."""
    scratch = folder / ".inductor"
    (scratch / "tmp").mkdir(parents=True, exist_ok=True)
    wanted = {"TORCHINDUCTOR_CACHE_DIR": str(scratch), "TRITON_CACHE_DIR": str(scratch / "triton"), "TMPDIR": str(scratch / "tmp")}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    tempfile.tempdir = None  # reads TMPDIR again
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
    """Has Inductor look for libcuda among the stubs of CUDA's toolkit too, as it does where CUDA_HOME is set: the driver's own
    may have no name that a linker goes by.

    Errors: input_invalid, without the toolkit, against which Inductor compiles what is to run on a GPU."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        raise Error("input_invalid", "exporting for a GPU without CUDA's toolkit", "install the one of PyTorch's version of CUDA, and set CUDA_HOME to its folder")
    os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME


def pick_vectors() -> None:
    """Has Inductor try which vectors this CPU and compiler can do, by compiling and loading for each kind: seconds, mostly of other
    processes. It remembers the answer; under link_libtorch=False its trials fail, and kernels would come out scalar."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.pick_vec_isa()


def compile_package(program: torch.export.ExportedProgram, file: Path, options: dict[str, Any] | None = None) -> None:
    """Compiles `program` into the package `file`, under settings() and `options`. The package's metadata says which of its
    arguments it writes."""
    import torch

    with _writes_recorded():
        torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs={**settings(), **(options or {})})


def settings() -> dict[str, Any]:
    """`inductor_configs` for `aoti_compile_and_package`."""
    import torch

    pick_vectors()
    return {
        # Else the package itself links LibTorch, all CUDA libraries included, into a CPU worker.
        "aot_inductor.link_libtorch": False,
        # Else the kernels start as many threads as this machine has cores, whatever the fleet declares.
        "cpp.dynamic_threads": True,
        # A dimension of 1 is as good as any: the loader has the package check its inputs' shapes, and it
        # would refuse those below 2, where tracing had to draw a line.
        "aot_inductor.check_lowerbound": False,
        # Inductor has the program `openssl` tell whether a precompiled header is current.
        "aot_inductor.precompile_headers": shutil.which("openssl") is not None,
        **({"cpp.simdlen": BASELINE_VECTOR} if _for_another_machine else {}),
        "aot_inductor.metadata": {
            "BULKHEAD_TORCH": torch.__version__,
            "BULKHEAD_CPU_FLAGS": " ".join(cpu_flags()),
        },
    }


@contextmanager
def _writes_recorded() -> Iterator[None]:
    """Adds to a package's metadata the positions of the arguments that its code writes, as Inductor scheduled the writes. The
    program itself does not tell: its signature names no operator that works in place, and operators that may return their own
    input (`type_as`, `dropout`) do not say so in their schemas.

    Tensors of another model are lent read-only, and only to a model that writes none of them. The name is not
    BULKHEAD_WRITTEN_ARGUMENTS: packages that have that say `none` whatever they write."""
    from torch._inductor import config
    from torch._inductor.codecache import AotCodeCompiler

    before = AotCodeCompiler.compile

    def compile_code(graph: Any, *args: Any, **kwargs: Any) -> Any:
        config.aot_inductor.metadata["BULKHEAD_MUTATED_ARGUMENTS"] = " ".join(map(str, sorted(graph.mutated_input_idxs))) or "none"
        return before(graph, *args, **kwargs)

    AotCodeCompiler.compile = compile_code
    try:
        yield
    finally:
        AotCodeCompiler.compile = before
