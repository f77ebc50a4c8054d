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


def _written(program: torch.export.ExportedProgram) -> list[str]:
    """Positions of the arguments that `program` writes into. As exported, a program still holds operators that work in place, and
    its signature names none of what they write: so each is followed through views to where its memory came from."""
    import operator

    import torch

    written: set[torch.fx.Node] = set()
    sources: dict[torch.fx.Node, list[torch.fx.Node]] = {}  # whose memory a node's result may be
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):  # what it calls may write: exact, but traced once more
            signature = program.run_decompositions({}).graph_signature
            mutated = set(signature.user_inputs_to_mutate.values())
            return [str(i) for i, name in enumerate(signature.user_inputs) if name in mutated]
        if node.target is operator.getitem:
            sources[node] = [node.args[0]]
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema = node.target._schema
        named = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
        aliased = [(argument.alias_info.is_write, one) for argument in schema.arguments if argument.alias_info and argument.name in named
                   for one in (named[argument.name] if isinstance(named[argument.name], (list, tuple)) else [named[argument.name]])]  # fmt: skip
        written.update(one for is_write, one in aliased if is_write)
        if any(result.alias_info for result in schema.returns):
            sources[node] = [one for _, one in aliased]
    pending = list(written)
    while pending:
        found = [one for one in sources.get(pending.pop(), []) if one not in written]
        written.update(found)
        pending.extend(found)
    names = {node.name for node in written if isinstance(node, torch.fx.Node)}
    names |= set(program.graph_signature.user_inputs_to_mutate.values())
    return [str(i) for i, name in enumerate(program.graph_signature.user_inputs) if name in names]


def pick_vectors() -> None:
    """Has Inductor try which vectors this CPU and compiler can do, by compiling and loading for each kind: seconds, mostly of other
    processes. It remembers the answer; under link_libtorch=False its trials fail, and kernels would come out scalar."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.pick_vec_isa()


def settings(program: torch.export.ExportedProgram) -> dict[str, Any]:
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
            # Tensors of another model are lent read-only, and only to who writes into none of them. Not under the name
            # BULKHEAD_WRITTEN_ARGUMENTS: packages that have that say `none` whatever they write.
            "BULKHEAD_MUTATED_ARGUMENTS": " ".join(_written(program)) or "none",
        },
    }
