"""Exports a module as an AOTInductor package that bulkhead-worker can load."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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


def cpu_flags() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("flags"):
                present = set(line.split(":", 1)[1].split())
                return " ".join(flag for flag in CPU_FLAGS if flag in present)
    return ""


@contextmanager
def scratch_beside(models: Path) -> Iterator[None]:
    """Keeps what Inductor and gcc write (4 times the package) beside the models, out of /tmp, while it is needed."""
    scratch = models / ".inductor"
    (scratch / "tmp").mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch)
    os.environ["TMPDIR"] = str(scratch / "tmp")
    tempfile.tempdir = None  # reads TMPDIR again
    try:
        yield
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def export_package(module: torch.nn.Module, arguments: tuple, file: Path, dynamic_shapes=None) -> None:
    """Writes `file` whole or not at all."""
    import torch
    import torch._inductor.cpu_vec_isa

    # Asked now, because Inductor remembers the answer: under link_libtorch=False its own trial compilation
    # fails, and the kernels would come out scalar.
    torch._inductor.cpu_vec_isa.pick_vec_isa()
    partial = file.with_suffix(".partial.pt2")
    with torch.no_grad():
        program = torch.export.export(module.eval(), arguments, dynamic_shapes=dynamic_shapes)
        written = set(program.graph_signature.user_inputs_to_mutate.values())
        positions = [str(i) for i, name in enumerate(program.graph_signature.user_inputs) if name in written]
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(partial),
            inductor_configs={
                # Else the package itself links LibTorch, all CUDA libraries included, into a CPU worker.
                "aot_inductor.link_libtorch": False,
                # Else the kernels start as many threads as this machine has cores, whatever the fleet declares.
                "cpp.dynamic_threads": True,
                # A dimension of 1 is as good as any: the loader has the package check its inputs' shapes, and it
                # would refuse those below 2, where tracing had to draw a line.
                "aot_inductor.check_lowerbound": False,
                "aot_inductor.metadata": {
                    "BULKHEAD_TORCH": torch.__version__,
                    "BULKHEAD_CPU_FLAGS": cpu_flags(),
                    # Tensors of another model are lent read-only, and only to who writes into none of them.
                    "BULKHEAD_WRITTEN_ARGUMENTS": " ".join(positions) or "none",
                },
            },
        )
    os.replace(partial, file)
