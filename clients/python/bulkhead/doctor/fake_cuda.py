"""Stand-ins for what `torch.cuda` cannot do on a machine without a GPU, and for what must be seen where there is one.

Without them user code takes the branch for the CPU, or raises. They answer as one idle GPU would; `observe` is told of calls that
matter to a capture.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, Callable, Iterator

import torch
from torch._subclasses import fake_tensor

from . import values
from .source import Place, here

Observe = Callable[[str, str], None]  #: (what happened, the call by name)

SYNCHRONIZE, SEED, STREAM_NOT_FORKED, STATE_READ, LAUNCHED = "synchronize", "seed", "stream_not_forked", "rng_state", "launched"

_PROPERTIES = SimpleNamespace(
    name="a GPU that is not there", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, is_integrated=False, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10, L2_cache_size=50 << 20, gcnArchName="", uuid="",
)  # fmt: skip
_RealGenerator = torch.Generator


class CudaGenerator(_RealGenerator):  # type: ignore[misc, valid-type]
    """`torch.Generator("cuda")`: a generator of the CPU that says otherwise."""

    observe: Observe = staticmethod(lambda what, name: None)

    def __new__(cls, device: Any = "cpu") -> Any:
        kind = torch.device(device).type
        return super().__new__(cls if kind == "cuda" else _RealGenerator, "cpu")

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def manual_seed(self, seed: int) -> Any:
        type(self).observe(SEED, "Generator.manual_seed")
        super().manual_seed(seed)
        return self

    def seed(self) -> int:
        type(self).observe(SEED, "Generator.seed")
        return int(super().seed())

    def get_state(self) -> Any:
        type(self).observe(STATE_READ, "Generator.get_state")
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, state: Any) -> Any:
        type(self).observe(STATE_READ, "Generator.set_state")
        return self


class Stream:
    """Knows for which streams it waits, by which capture decides what belongs to it."""

    observe: Observe = staticmethod(lambda what, name: None)

    def __init__(self, device: Any = None, priority: int = 0, **unused: Any) -> None:
        self.device, self.priority, self.cuda_stream, self.stream_id = torch.device("cuda", 0), priority, id(self), id(self)
        self.waits_for: set[int] = set()

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.add(id(other))

    def wait_event(self, event: Event) -> None:
        self.waits_for.add(event.stream)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        type(self).observe(SYNCHRONIZE, "Stream.synchronize")

    def query(self) -> bool:
        type(self).observe(SYNCHRONIZE, "Stream.query")
        return True


class Event:
    observe: Observe = staticmethod(lambda what, name: None)

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **unused: Any) -> None:
        self.stream = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = id(stream or torch.cuda.current_stream())

    def wait(self, stream: Stream | None = None) -> None:
        (stream or torch.cuda.current_stream()).waits_for.add(self.stream)

    def synchronize(self) -> None:
        type(self).observe(SYNCHRONIZE, "Event.synchronize")

    def query(self) -> bool:
        type(self).observe(SYNCHRONIZE, "Event.query")
        return True

    def elapsed_time(self, end: Event) -> float:
        type(self).observe(SYNCHRONIZE, "Event.elapsed_time")
        return 1.0


class Graph:
    """A capture of the user's own: what is within it runs as the rest of the step does."""

    def __init__(self, *unused: Any, **also_unused: Any) -> None:
        pass

    def replay(self) -> None:
        pass

    capture_begin = capture_end = reset = register_generator_state = lambda self, *unused, **also_unused: None

    def pool(self) -> tuple[int, int]:
        return 0, 1


class _Streams:
    """Which stream is current."""

    def __init__(self, observe: Observe) -> None:
        self.main = Stream()
        self.current = self.main
        self.used: list[tuple[Stream, Place | None]] = []
        self._observe = observe

    @contextlib.contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before, self.current = self.current, stream
        if stream is not before:
            self.used.append((stream, here()))
            if id(before) not in stream.waits_for:
                self._observe(STREAM_NOT_FORKED, "torch.cuda.stream")
        try:
            yield
        finally:
            self.current = before

    def end_call(self) -> list[Place]:
        """Where streams were used that nothing waits for; the next call begins without a trace of them."""
        left = [place for stream, place in self.used if place is not None and id(stream) not in self.main.waits_for]
        for stream in (self.main, *(stream for stream, _ in self.used)):
            stream.waits_for.clear()
        self.used.clear()
        return left


class _Use(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    """`with torch.cuda.stream(s)`. A class, so that the user's frame calls `__enter__` itself."""

    streams: _Streams

    def __init__(self, stream: Stream | None) -> None:
        self._using = self.streams.use(stream)

    def __enter__(self) -> None:
        self._using.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._using.__exit__(None, None, None)


class _Nothing(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    """`torch.cuda.device(0)` and the like."""

    def __init__(self, *unused: Any, **also_unused: Any) -> None:
        pass

    def __exit__(self, *raised: Any) -> None:
        return None


def _always(answer: Any) -> Any:
    return lambda *unused, **also_unused: answer


def _apply(module: Any, function: Any, recurse: bool = True) -> Any:
    """In the place of `Module._apply`, which cannot swap fake parameters for those of another device. Tied ones stay tied."""
    made: dict[int, Any] = {}

    def moved(tensor: Any) -> Any:
        if id(tensor) not in made:
            with torch.no_grad():
                result = function(tensor)
            if isinstance(tensor, torch.nn.Parameter) and result is not tensor:
                result = torch.nn.Parameter(result, tensor.requires_grad)
            made[id(tensor)] = result
        return made[id(tensor)]

    for one in module.modules() if recurse else [module]:
        for tensors in (one._parameters, one._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = moved(tensor)
    return module


def answers(observe: Observe, streams: _Streams) -> dict[str, Any]:
    """What `torch.cuda` answers, by name."""

    def observed(what: str, name: str, answer: Any = None) -> Any:
        def call(*unused: Any, **also_unused: Any) -> Any:
            observe(what, f"torch.cuda.{name}")
            return answer

        return call

    use = type("stream", (_Use,), {"streams": streams})
    quiet = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_properties": _PROPERTIES, "get_device_name": _PROPERTIES.name, "is_bf16_supported": True, "set_device": None,
        "init": None, "_lazy_init": None, "_exchange_device": 0, "_maybe_exchange_device": 0, "mem_get_info": (70 << 30, 80 << 30),
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "max_memory_reserved": 0, "reset_peak_memory_stats": None,
        "memory_stats": defaultdict(int), "memory_summary": "", "memory_snapshot": [], "utilization": 0, "ipc_collect": None, "is_current_stream_capturing": False, "can_device_access_peer": False,
        "_get_device_index": 0, "_get_device_properties": _PROPERTIES, "get_arch_list": ["sm_90"], "_is_compiled": True, "graph_pool_handle": (0, 1),
    }  # fmt: skip
    answered: dict[str, Any] = {name: _always(answer) for name, answer in quiet.items()}
    for name in ("synchronize", "empty_cache"):
        answered[name] = observed(SYNCHRONIZE, name)
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
        answered[name] = observed(SEED, name)
    state = torch.zeros(16, dtype=torch.uint8)
    for name in ("get_rng_state", "set_rng_state"):
        answered[name] = observed(STATE_READ, name, state if name.startswith("get") else None)
    for name in ("get_rng_state_all", "set_rng_state_all"):
        answered[name] = observed(STATE_READ, name, [state] if name.startswith("get") else None)
    answered |= {"Stream": Stream, "ExternalStream": Stream, "Event": Event, "stream": use, "StreamContext": use, "device": _Nothing,
                 "device_of": _Nothing, "CUDAGraph": Graph, "graph": _Nothing, "make_graphed_callables": lambda steps, *unused, **also_unused: steps,
                 "current_stream": lambda *unused: streams.current, "default_stream": lambda *unused: streams.main,
                 "set_stream": lambda stream: setattr(streams, "current", stream)}  # fmt: skip
    return answered


class StandIns(contextlib.ExitStack):
    """All stand-ins, from entering to leaving."""

    def __init__(self, observe: Observe) -> None:
        super().__init__()
        self._observe = observe
        self.streams = _Streams(observe)

    def __enter__(self) -> StandIns:
        super().__enter__()
        observe = self._observe
        for kind in (CudaGenerator, Stream, Event):
            self._set(kind, "observe", staticmethod(observe))
        answered = answers(observe, self.streams)
        for name, answer in answered.items():
            self._set(torch.cuda, name, answer)
        for module, names in ((torch.cuda.random, ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all")),
                              (torch.cuda.memory, ("empty_cache", "memory_allocated", "memory_reserved", "memory_stats")),
                              (torch.cuda.graphs, ("CUDAGraph", "graph", "make_graphed_callables")),
                              (torch.cuda.streams, ("Stream", "Event"))):  # fmt: skip
            for name in names:
                self._set(module, name, answered[name])
        if (accelerator := getattr(torch, "accelerator", None)) is not None:
            self._set(accelerator, "is_available", _always(True))
            self._set(accelerator, "current_accelerator", _always(torch.device("cuda")))
            self._set(accelerator, "synchronize", answered["synchronize"])
        self._set(torch, "Generator", CudaGenerator)
        self._set(torch, "Stream", Stream)
        self._set(torch, "Event", Event)
        seed = torch.manual_seed
        self._set(torch, "manual_seed", _seeding(observe, seed))
        self._set(torch.nn.Module, "_apply", _apply)
        if hasattr(fake_tensor, "init_gpu_context"):
            self._set(fake_tensor, "init_gpu_context", _always(None))  # would make a tensor there
        if hasattr(fake_tensor.FakeTensorMode, "avoid_device_init"):
            self._set(fake_tensor.FakeTensorMode, "avoid_device_init", property(_always(True), _always(None)))
        for module_name, launcher in (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")):
            if (kernels := sys.modules.get(module_name)) is not None:
                self._set(getattr(kernels, launcher), "run", _launching(observe))
        guard = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
        if guard is not None:
            guard()
        return self

    def _set(self, owner: Any, name: str, value: Any) -> None:
        missing = name not in vars(owner)
        before = vars(owner).get(name)
        setattr(owner, name, value)
        self.callback(delattr, owner, name) if missing else self.callback(setattr, owner, name, before)


def _launching(observe: Observe) -> Any:
    """In the place of a launch of a Triton kernel: what it writes is not known afterwards."""

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        for argument in (*args, *kwargs.values()):
            values.forget(argument)
        observe(LAUNCHED, getattr(getattr(kernel, "fn", kernel), "__name__", type(kernel).__name__))

    return run


def _seeding(observe: Observe, seed: Any) -> Any:
    def manual_seed(value: int) -> Any:
        observe(SEED, "torch.manual_seed")
        return seed(value)

    return manual_seed
