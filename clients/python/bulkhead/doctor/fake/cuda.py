"""Stand-ins for what `torch.cuda` cannot do without a GPU, and for calls that must be
observed with one.

Without them user code takes its CPU branch, or raises. They answer like one idle GPU, and report
calls that matter to a capture to `observe`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Callable
from unittest import mock

import torch
from torch._subclasses import fake_tensor

from ..source import Location, here
from . import values

Observe = Callable[..., None]  #: (what happened, the call's name, its location if not here)

SYNCHRONIZE, SEED, STREAM_NOT_FORKED, STATE_READ, LAUNCHED = "synchronize", "seed", "stream_not_forked", "rng_state", "launched"
OTHER_THREAD = "other_thread"

_PROPERTIES = SimpleNamespace(
    name="a GPU that is not there", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, is_integrated=False,
    warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10, L2_cache_size=50 << 20, gcnArchName="",
    uuid="",
)  # fmt: skip
_RealGenerator = torch.Generator


class CudaGenerator(_RealGenerator):  # type: ignore[misc, valid-type]
    """`torch.Generator("cuda")`: a CPU generator that reports a CUDA device."""

    observe: Observe = staticmethod(lambda what, name: None)
    is_registered = False  #: with a graph, which then advances it

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
    """A stream, also usable as `with stream:`."""

    observe: Observe = staticmethod(lambda what, name: None)
    streams: Streams

    def __init__(self, device: Any = None, priority: int = 0, **unused: Any) -> None:
        self.device, self.priority, self.cuda_stream, self.stream_id = torch.device("cuda", 0), priority, id(self), id(self)
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(self.streams.current)
        self.streams.go_to(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        self.streams.current = self._before.pop()

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.streams.wait(self, event)

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
        self.recorded: _Recorded | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = Stream.streams.recorded(stream or Stream.streams.current)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.streams.current).wait_event(self)

    def synchronize(self) -> None:
        type(self).observe(SYNCHRONIZE, "Event.synchronize")

    def query(self) -> bool:
        type(self).observe(SYNCHRONIZE, "Event.query")
        return True

    def elapsed_time(self, end: Event) -> float:
        type(self).observe(SYNCHRONIZE, "Event.elapsed_time")
        return 1.0


class Graph:
    """The user's own capture: the code in it runs like the rest of the step."""

    def __init__(self, *unused: Any, **also_unused: Any) -> None:
        pass

    def replay(self) -> None:
        pass

    capture_begin = capture_end = reset = lambda self, *unused, **also_unused: None

    def register_generator_state(self, generator: Any) -> None:
        generator.is_registered = True

    def pool(self) -> tuple[int, int]:
        return 0, 1


@dataclass
class _Work:
    """One stream's work in one call: whether the capture reaches it, how many operators ran on it,
    and how many of each other stream it has waited for."""

    is_captured: bool = False
    count: int = 0
    awaited: dict[int, int] = field(default_factory=dict)
    entered: Location | None = None


@dataclass(frozen=True)
class _Recorded:
    call: int
    is_captured: bool
    awaited: dict[int, int]


class Streams:
    """Each thread's current stream, and what each stream waits for. A capture reaches a stream
    through an event of a stream it has already reached; the main stream must wait for that stream's
    last operator."""

    def __init__(self, observe: Observe) -> None:
        self.main, self.default = Stream(), Stream()  #: a capture runs on its own stream
        self._observe, self._call = observe, 0
        self._own = threading.local()  #: .stream
        self.begin_call()

    @property
    def current(self) -> Stream:
        return getattr(self._own, "stream", self.default)  # a thread begins with the default stream

    @current.setter
    def current(self, stream: Stream) -> None:
        self._own.stream = stream

    def begin_call(self) -> None:
        self.current = self.main
        self._call += 1
        self._work: dict[int, tuple[Stream, _Work]] = {id(self.main): (self.main, _Work(is_captured=True))}

    def _of(self, stream: Stream) -> _Work:
        return self._work.setdefault(id(stream), (stream, _Work()))[1]

    def go_to(self, stream: Stream) -> None:
        self.current = stream
        self._of(stream).entered = here()

    def work(self, is_read: bool) -> None:
        """Counts an operator of the step on the current stream. What another thread reads is a
        finding by itself."""
        work = self._of(self.current)
        if is_read and self._is_threads_own(self.current, work):
            return
        work.count += 1
        if not work.is_captured and work.count == 1:
            self._observe(OTHER_THREAD if self._is_threads_own(self.current, work) else STREAM_NOT_FORKED, "torch.cuda.stream",
                          work.entered)  # fmt: skip

    def recorded(self, stream: Stream) -> _Recorded:
        work = self._of(stream)
        return _Recorded(self._call, work.is_captured, work.awaited | {id(stream): work.count})

    def wait(self, stream: Stream, event: Event) -> None:
        recorded = event.recorded
        if recorded is None or recorded.call != self._call:  # not recorded in this call
            return
        work = self._of(stream)
        work.is_captured |= recorded.is_captured
        for one, count in recorded.awaited.items():
            work.awaited[one] = max(count, work.awaited.get(one, 0))

    def not_joined(self) -> list[Location | None]:
        """Where streams were used that the main stream has not waited for at the end."""
        awaited = self._of(self.main).awaited
        return [
            work.entered
            for stream, work in self._work.values()
            if stream is not self.main
            and not self._is_threads_own(stream, work)
            and work.count > awaited.get(id(stream), 0)
        ]

    def _is_threads_own(self, stream: Stream, work: _Work) -> bool:
        """Whether another thread has worked there because it has entered no stream."""
        return stream is self.default and work.entered is None


class _Use(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    """`with torch.cuda.stream(s)`. A class, so that the user's frame calls `__enter__` itself."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._stream is not None:
            self._stream.__exit__()


class _Nothing(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    """Stands in for `torch.cuda.device(0)` and similar calls."""

    def __init__(self, *unused: Any, **also_unused: Any) -> None:
        pass

    def __exit__(self, *raised: Any) -> None:
        return None


def _always(answer: Any) -> Any:
    return lambda *unused, **also_unused: answer


class _Moved:
    """What `Module._apply` calls for each tensor. Tied tensors stay tied across all
    modules of one call."""

    def __init__(self, function: Any) -> None:
        self._function = function
        #: By id; holds the tensor, so that its id is not reused.
        self._made: dict[int, tuple[Any, Any]] = {}

    def __call__(self, tensor: Any) -> Any:
        if id(tensor) not in self._made:
            with torch.no_grad():
                result = self._function(tensor)
            if isinstance(tensor, torch.nn.Parameter) and result is not tensor:
                result = torch.nn.Parameter(result, tensor.requires_grad)
            self._made[id(tensor)] = tensor, result
        return self._made[id(tensor)][1]


def _apply(module: Any, function: Any, recurse: bool = True) -> Any:
    """Replaces `Module._apply`, which cannot swap fake parameters for those of another device."""
    moved = function if isinstance(function, _Moved) else _Moved(function)
    for child in module.children() if recurse else ():
        child._apply(moved)  # the child's own `_apply`, if it has one
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                tensors[name] = moved(tensor)
    return module


def answers(observe: Observe, streams: Streams, is_capturing: Callable[[], bool]) -> dict[str, Any]:
    """The answers of `torch.cuda`, by name."""

    def observed(what: str, name: str, answer: Any = None) -> Any:
        def call(*unused: Any, **also_unused: Any) -> Any:
            observe(what, f"torch.cuda.{name}")
            return answer

        return call

    quiet = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_properties": _PROPERTIES, "get_device_name": _PROPERTIES.name, "is_bf16_supported": True, "set_device": None,
        "init": None, "_lazy_init": None, "_exchange_device": 0, "_maybe_exchange_device": 0,
        "mem_get_info": (70 << 30, 80 << 30),
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "memory_stats": defaultdict(int), "memory_summary": "", "memory_snapshot": [], "utilization": 0, "ipc_collect": None,
        "can_device_access_peer": False,
        "_get_device_index": 0, "_get_device_properties": _PROPERTIES, "get_arch_list": ["sm_90"], "_is_compiled": True,
        "graph_pool_handle": (0, 1),
    }  # fmt: skip
    answered: dict[str, Any] = {name: _always(answer) for name, answer in quiet.items()}
    for name in ("synchronize", "empty_cache"):
        answered[name] = observed(SYNCHRONIZE, name)
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
        answered[name] = observed(SEED, name)
    state = torch.zeros(16, dtype=torch.uint8)
    for suffix, answer in (("", state), ("_all", [state])):
        answered[f"get_rng_state{suffix}"] = observed(STATE_READ, f"get_rng_state{suffix}", answer)
        answered[f"set_rng_state{suffix}"] = observed(STATE_READ, f"set_rng_state{suffix}")
    answered |= {"Stream": Stream, "ExternalStream": Stream, "Event": Event, "stream": _Use, "StreamContext": _Use,
                 "is_current_stream_capturing": is_capturing, "device": _Nothing,
                 "device_of": _Nothing, "CUDAGraph": Graph, "graph": _Nothing,
                 "make_graphed_callables": lambda steps, *unused, **also_unused: steps,
                 "current_stream": lambda *unused: streams.current, "default_stream": lambda *unused: streams.default,
                 "set_stream": streams.go_to}  # fmt: skip
    return answered


class StandIns(contextlib.ExitStack):
    """All stand-ins, installed while entered."""

    def __init__(self, observe: Observe, is_capturing: Callable[[], bool]) -> None:
        super().__init__()
        self._observe, self._is_capturing = observe, is_capturing
        self.streams = Streams(observe)

    def __enter__(self) -> StandIns:
        super().__enter__()
        observe = self._observe
        for kind in (CudaGenerator, Stream, Event):
            self._set(kind, "observe", staticmethod(observe))
        self._set(Stream, "streams", self.streams)
        answered = answers(observe, self.streams, self._is_capturing)
        for name, answer in answered.items():
            self._set(torch.cuda, name, answer)
        for module, names in ((torch.cuda.random, ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all")),
                              (torch.cuda.memory, ("empty_cache", "memory_allocated", "memory_reserved", "memory_stats")),
                              (torch.cuda.graphs,
                               ("CUDAGraph", "graph", "make_graphed_callables", "is_current_stream_capturing")),
                              (torch.cuda.streams, ("Stream", "Event"))):  # fmt: skip
            for name in names:
                self._set(module, name, answered[name])
        if (accelerator := getattr(torch, "accelerator", None)) is not None:
            self._set(accelerator, "is_available", _always(True))
            self._set(accelerator, "current_accelerator", _always(torch.device("cuda")))
            for name in ("synchronize", "current_stream", "set_stream"):
                # Dynamo's table wants a function once.
                self._set(accelerator, name, functools.partial(answered[name]))
        self._set(torch, "Generator", CudaGenerator)
        self._set(torch, "Stream", Stream)
        self._set(torch, "Event", Event)
        self._set(torch, "cond", _conditional(torch.cond))
        self._set(torch, "manual_seed", _seeding(observe, torch.manual_seed))
        self._set(torch.nn.Module, "_apply", _apply)
        # Its own takes no stand-in.
        self._set(torch.Tensor, "record_stream", lambda tensor, stream: None)
        if hasattr(fake_tensor, "init_gpu_context"):
            self._set(fake_tensor, "init_gpu_context", _always(None))  # would make a tensor there
        if hasattr(fake_tensor.FakeTensorMode, "avoid_device_init"):
            self._set(fake_tensor.FakeTensorMode, "avoid_device_init", property(_always(True), _always(None)))
        for module_name, launcher in (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")):
            if (kernels := sys.modules.get(module_name)) is not None:
                self._set(getattr(kernels, launcher), "run", _launching(observe))
        getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)()
        return self

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self.enter_context(mock.patch.object(owner, name, value, create=True))


def _conditional(cond: Any) -> Any:
    """`torch.cond` outside a compiler: reads its predicate and runs one of its functions."""

    def call(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return cond(pred, true_fn, false_fn, operands)
        return (true_fn if pred else false_fn)(*operands)

    return call


def _launching(observe: Observe) -> Any:
    """Replaces a Triton kernel launch: what it writes is unknown afterwards."""

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
