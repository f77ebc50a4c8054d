"""Lets PyTorch, Inductor and Triton compile for a GPU that this machine lacks, by describing its
kind to them.

Nothing runs on it and nothing is measured: of the kernel configurations to time, the first is used.
PyTorch remembers a GPU for good, so a process that calls `install` must end with its export.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor

from ..errors import Error
from . import inductor


@dataclass(frozen=True)
class Kind:
    """The device properties that Inductor and Triton read, by their names in torch.cuda."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    shared_memory_per_block_optin: int  #: bytes, as the next two
    shared_memory_per_multiprocessor: int
    L2_cache_size: int
    shared_memory_per_block: int = 48 << 10
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    gcnArchName: str = ""
    uuid: str = ""


#: Source: CUDA C++ Programming Guide, "Compute Capabilities"; multiprocessors, memory and cache are
#: those of an H200.
KINDS = {"sm_90": Kind("NVIDIA H200", 9, 0, 132, 141 << 30, 227 << 10, 228 << 10, 60 << 20)}

_installed: Kind | None = None


def installed() -> bool:
    """Whether this process compiles for an absent GPU."""
    return _installed is not None


def install(kind: str) -> None:
    """Takes effect until the process ends. Call it before anything asks PyTorch for its GPU. Code
    on the CPU beside the kernels is also compiled for another machine.

    Errors: input_invalid for an unknown kind, and without Triton, which compiles the kernels."""
    global _installed
    if kind not in KINDS:
        raise Error("input_invalid", f"compiling for a GPU of the kind {kind!r}", f"kinds are: {', '.join(KINDS)}")
    try:
        import triton  # noqa: F401
    except ImportError:
        raise Error("input_invalid", f"compiling for {kind} without Triton", "install the PyTorch for CUDA, which brings Triton along") from None
    inductor.for_another_machine()
    _installed = KINDS[kind]
    _tell_torch(_installed)
    _tell_triton(_installed)
    _tell_inductor()


def _tell_torch(kind: Kind) -> None:
    cuda = torch.cuda
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (kind.major, kind.minor),
        "get_device_properties": kind, "get_device_name": kind.name, "is_bf16_supported": True, "synchronize": None, "set_device": None,
        "_lazy_init": None, "_exchange_device": 0, "_maybe_exchange_device": 0, "set_rng_state": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, _always(answer))
    for name in ("get_rng_state", "set_rng_state"):
        setattr(cuda.random, name, getattr(cuda, name))
    # It may have been read before, and its result is cached.
    from torch._dynamo.device_interface import CudaInterface

    for name, answer in answers.items():
        if name.removeprefix("_") in vars(CudaInterface):
            setattr(CudaInterface, name.removeprefix("_"), staticmethod(_always(answer)))
    CudaInterface.get_raw_stream = staticmethod(_always(0))
    torch._C._cuda_getCurrentRawStream = _always(0)
    torch._C._ensureCUDADeviceGuardSet()
    fake_tensor.init_gpu_context = _always(None)  # would make a tensor there
    fake_tensor.FakeTensorMode.avoid_device_init = property(_always(True))


def _tell_triton(kind: Kind) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel

    class Driver:
        """The part of a driver that compiling kernels needs."""

        get_current_target = _always(GPUTarget("cuda", kind.major * 10 + kind.minor, kind.warp_size))
        get_current_device = _always(0)
        get_current_stream = _always(0)
        get_active_torch_device = _always(torch.device("cuda", 0))
        get_device_interface = _always(torch.cuda)
        set_current_device = _always(None)
        is_active = _always(True)

    def not_loaded(kernel: Any) -> None:
        kernel.module = kernel.function = kernel.n_spills = 0
        kernel.n_regs = 32  # so few that Inductor tries no other configuration
        kernel._run = _always(None)

    triton.runtime.driver.set_active(Driver())
    CompiledKernel._init_handles = not_loaded


def _tell_inductor() -> None:
    from torch._inductor import config, graph
    from torch._inductor.codegen import wrapper
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    config.compile_threads = 1  # more would start processes without these changes
    config.shape_padding = False  # it would measure
    triton_helpers.set_driver_to_gpu = _always(None)  # ours is set
    tuner = triton_heuristics.CachingAutotuner
    tuner._precompile_worker = _first_alone(tuner._precompile_worker)
    wrapper.PythonWrapperCodegen.generate_and_run_autotune_block = _compile_kernels
    # All tensors without bytes have address 0: equal sizes would make them the same one.
    graph.is_same_tensor = _one_storage
    # Their values would be written into the code.
    graph.GraphLowering.can_inline_constant = staticmethod(_always(False))
    folder = joint_graph.UniformValueConstantFolder
    folder._deduce_value = _on_cpu(folder._deduce_value)


def _always(answer: Any) -> Any:
    def given(*unused: object, **also_unused: object) -> Any:
        return answer

    return given


def _first_alone(before: Any) -> Any:
    """Compiles only one configuration of a kernel, because none is timed."""

    @functools.wraps(before)
    def precompile(tuner: Any) -> None:
        tuner.configs = tuner.configs and tuner.configs[:1]
        before(tuner)

    return precompile


def _compile_kernels(code: Any) -> None:
    """Replaces Inductor's tuning, which would run each kernel: compiles the kernels and keeps their
    launch parameters."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    code.kernel_autotune_defs.splice("\nasync_compile.wait(globals())\ndel async_compile\n")
    scope: dict[str, Any] = {}
    exec(code.kernel_autotune_defs.getvalue(), scope)
    for kernel in scope.values():
        if isinstance(kernel, CachingAutotuner):
            if not kernel.launchers:
                kernel.precompile()
            (launcher,) = kernel.launchers
            kernel.save_gpu_kernel(0, launcher)


def _one_storage(one: Tensor, other: Tensor) -> bool:
    return storage(one) == storage(other) and all(getattr(one, of)() == getattr(other, of)() for of in ("size", "stride", "storage_offset")) and one.dtype == other.dtype


def storage(tensor: Tensor) -> int:
    """Identifies a tensor's storage, even one without memory."""
    return int(tensor.untyped_storage()._cdata)


def _on_cpu(before: Any) -> Any:
    """Computes Inductor's constant-valued tensors on the CPU, where the values are the same."""

    def cpu(given: Any) -> Any:
        return torch.device("cpu") if isinstance(given, torch.device) and given.type == "cuda" else given

    def deduced(folder: Any, node: Any) -> Any:
        args, kwargs = node.args, node.kwargs
        try:
            node.args, node.kwargs = tuple(cpu(one) for one in args), {name: cpu(one) for name, one in kwargs.items()}
            return before(folder, node)
        finally:
            node.args, node.kwargs = args, kwargs

    return deduced
