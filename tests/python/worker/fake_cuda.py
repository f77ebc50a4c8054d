"""A stand-in for ``torch.cuda`` that records the order of calls, and replays what was
captured, on the CPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Recorder(TorchDispatchMode):
    """Notes each operation and its arguments, so that it can be done again in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.operations.append(lambda: self._again(made, func, args, kwargs or {}))
        return made

    @staticmethod
    def _again(made: torch.Tensor, func: Any, args: Any, kwargs: Any) -> None:
        made.copy_(func(*args, **kwargs))


class FakeCuda:
    """What ``bulkhead.worker.graphs`` uses of the module. ``calls`` are in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream_now = "main"
        self.capturing: FakeGraph | None = None
        self.pools = 0
        self.reserved = 0
        cuda = self

        class CUDAGraph(FakeGraph):
            def __init__(self) -> None:
                super().__init__(cuda)

        self.CUDAGraph = CUDAGraph

    def graph_pool_handle(self) -> tuple[int, int]:
        self.pools += 1
        return (self.pools, 0)

    def Stream(self) -> FakeStream:
        return FakeStream(self, "side")

    def current_stream(self) -> FakeStream:
        return FakeStream(self, self.stream_now)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream.name
        try:
            yield
        finally:
            self.stream_now = before

    def synchronize(self) -> None:
        if self.capturing is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def memory_allocated(self) -> int:
        return self.reserved // 2

    def memory_reserved(self) -> int:
        return self.reserved

    def max_memory_reserved(self) -> int:
        return 2 * self.reserved

    def ran(self) -> None:
        """A function of the test: one more run of ``fn``."""
        self.calls.append(f"fn on {self.stream_now}{' captured' if self.capturing else ''}")
        self.reserved += 1024 if self.capturing else 0


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.calls.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    """As torch's: begun once, ended once, replayed after that."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.state = cuda, "new"
        self.recorder = _Recorder()

    def capture_begin(self, *, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert self.state == "new" and self.cuda.capturing is None, self.state
        assert self.cuda.stream_now == "side", "the main stream cannot be captured"
        assert capture_error_mode == "thread_local"
        self.state, self.cuda.capturing = "begun", self
        self.cuda.calls.append(f"begin in pool {pool[0]}")
        self.recorder.__enter__()

    def capture_end(self) -> None:
        assert self.state == "begun", self.state
        self.recorder.__exit__(None, None, None)
        self.state, self.cuda.capturing = "ended", None
        self.cuda.calls.append("end")

    def replay(self) -> None:
        assert self.state == "ended", self.state
        self.cuda.calls.append("replay")
        for operation in self.recorder.operations:
            operation()
