"""``context.graph``: captures functions as CUDA graphs at load, replays them from static buffers,
and counts as the C++ worker does.

All graphs share one memory pool, so of several buckets only the largest costs memory. Nothing is
freed before the process ends. Used on the main thread; ``report`` on any.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any, Callable, Mapping, Sequence

from ..errors import Error
from ..recording import record

_WARM_UP_RUNS = 3

NO_GPU, GRAPHS_OFF, NO_BUCKET = "no_gpu", "graphs_off", "no_bucket"
CAPTURE_FAILED, PADDING_NOT_DECLARED = "capture_failed", "padding_not_declared"


class Bucket:
    """One set of shapes: its static inputs, and its graph once captured."""

    def __init__(self, arguments: Mapping[str, Any], device: str) -> None:
        import torch

        self.tensors = {name: value.detach().to(device, copy=True).contiguous() for name, value in arguments.items() if torch.is_tensor(value)}
        self.constants = {name: value for name, value in arguments.items() if name not in self.tensors}
        self.graph: Any = None
        self.outputs: Any = None
        self.failed = False
        self.hits = self.pads = 0
        self.capture_ms = 0.0

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def shapes(self) -> list[list[int]]:
        return [list(tensor.shape) for tensor in self.tensors.values()]

    def __str__(self) -> str:
        return " ".join(f"[{','.join(map(str, shape))}]" for shape in self.shapes)

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, **self.constants}

    def takes(self, tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments differs only in sizes."""
        if constants != self.constants or tensors.keys() != self.tensors.keys():
            return False
        return all(value.dtype == self.tensors[name].dtype and value.dim() == self.tensors[name].dim() for name, value in tensors.items())

    def padded_inputs(self, tensors: Mapping[str, Any]) -> list[str] | None:
        """The inputs that are smaller than the bucket's; None if one does not fit. An empty
        dimension is never padded."""
        smaller = []
        for name, value in tensors.items():
            room = self.tensors[name].shape
            if value.shape == room:
                continue
            if any(size != most and not 0 < size < most for size, most in zip(value.shape, room)):
                return None
            smaller.append(name)
        return smaller

    def fill(self, tensors: Mapping[str, Any], padding: Mapping[str, float]) -> None:
        for name, value in tensors.items():
            room = self.tensors[name]
            if value.shape != room.shape:
                room.fill_(padding[name])
                for axis, size in enumerate(value.shape):
                    room = room.narrow(axis, 0, size)
            if value.data_ptr() != room.data_ptr():
                room.copy_(value, non_blocking=True)


class Graphed:
    """The result of ``context.graph``: ``fn`` through its graphs, if there is one for the
    call's shapes."""

    def __init__(self, graphs: Graphs, fn: Callable[..., Any], name: str, buckets: list[Bucket], padding: Mapping[str, float]) -> None:
        self.name, self.fn = name, fn
        self._graphs, self._buckets, self._padding = graphs, buckets, dict(padding)

    def __call__(self, **arguments: Any) -> Any:
        import torch

        tensors = {name: value for name, value in arguments.items() if torch.is_tensor(value)}
        constants = {name: value for name, value in arguments.items() if name not in tensors}
        bucket, padded, reason = self._choose(tensors, constants)
        if bucket is None or bucket.failed:
            self._graphs.count_eager(reason if bucket is None else CAPTURE_FAILED)
            return self.fn(**arguments)
        bucket.fill(tensors, self._padding)
        if bucket.graph is None:
            self._graphs.count_eager(NO_GPU)
            return self._run_static(bucket)
        bucket.graph.replay()
        bucket.hits += 1
        bucket.pads += padded
        return bucket.outputs

    def _choose(self, tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> tuple[Bucket | None, bool, str]:
        """Returns the bucket of exactly these shapes, else the smallest that padding allows;
        whether to pad; and, without one, the reason."""
        if self._graphs.mode == "off":
            return None, False, GRAPHS_OFF
        smallest: Bucket | None = None
        reason = NO_BUCKET
        for bucket in self._buckets:
            smaller = bucket.padded_inputs(tensors) if bucket.takes(tensors, constants) else None
            if smaller is None:
                continue
            if not smaller:
                return bucket, False, ""
            if not self._padding.keys() >= set(smaller):
                reason = PADDING_NOT_DECLARED
            elif smallest is None or bucket.elements < smallest.elements:
                smallest = bucket
        return smallest, smallest is not None, reason

    def _run_static(self, bucket: Bucket) -> Any:
        """Runs like a replay: from the static inputs into the static outputs."""
        made = self.fn(**bucket.arguments)
        if bucket.outputs is None:
            bucket.outputs = made
        else:
            _copy_into(bucket.outputs, made)
        return bucket.outputs


class Graphs:
    """All graphs of one process.

    ``device`` holds the static buffers. ``mode`` is ``off``, ``preferred`` or ``required``.
    ``cuda`` is the module that has ``CUDAGraph``, ``Stream`` etc.: ``torch.cuda`` unless the
    device is a CPU.
    """

    def __init__(self, device: str, mode: str, *, progress: Callable[[int, int, str], None] = lambda done, total, detail: None, cuda: Any = None) -> None:
        self.mode = mode
        self._device, self._cuda, self._progress = device, cuda, progress
        self._pool: Any = None
        self._side: Any = None
        self._pool_bytes = 0
        self._buckets: list[tuple[str, Bucket]] = []
        self._eager: dict[str, int] = {}
        self._failures: list[dict[str, Any]] = []

    def add(self, fn: Callable[..., Any], buckets: Sequence[Mapping[str, Any]], *, padding: Mapping[str, float], name: str) -> Graphed:
        """Captures the largest bucket first, so that the others reuse its memory in the pool.
        Raises ``capture_failed`` if graphs are required and one cannot be captured."""
        name = name or getattr(fn, "__qualname__", type(fn).__name__)
        if self.mode == "off":
            return Graphed(self, fn, name, [], padding)
        # Not earlier: an engine on a GPU may work without torch.
        if self._cuda is None and self._device != "cpu":
            import torch

            self._cuda = torch.cuda
        made = sorted((Bucket(one, self._device) for one in buckets), key=lambda bucket: -bucket.elements)
        if self._cuda is not None:
            for done, bucket in enumerate(made):
                self._progress(done, len(made), f"{name} {bucket}")
                self._capture_counted(fn, name, bucket)
            self._progress(len(made), len(made), "")
        return Graphed(self, fn, name, made, padding)

    def count_eager(self, reason: str) -> None:
        self._eager[reason] = self._eager.get(reason, 0) + 1

    def report(self) -> dict[str, Any]:
        """``graphs`` of ``ready`` and ``statistics``."""
        captured = [(name, bucket) for name, bucket in list(self._buckets) if bucket.graph is not None]
        report: dict[str, Any] = {
            "mode": "off" if self.mode == "off" else "captured" if captured else "eager",
            "pool_bytes": self._pool_bytes,
            "buckets": [
                {"method": name, "shapes": bucket.shapes, "hits": bucket.hits, "pads": bucket.pads, "capture_ms": round(bucket.capture_ms, 3)}
                for name, bucket in captured
            ],
            "eager": dict(self._eager),
        }
        if self._failures:
            report["failures"] = list(self._failures)
        cuda = self._cuda
        if cuda is None and self._device != "cpu":
            # None until the engine has imported it.
            cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if hasattr(cuda, "max_memory_reserved"):  # false while torch is still being imported
            report |= {"allocated_bytes": cuda.memory_allocated(), "reserved_bytes": cuda.memory_reserved(), "peak_bytes": cuda.max_memory_reserved()}
        return report

    def _capture_counted(self, fn: Callable[..., Any], name: str, bucket: Bucket) -> None:
        begun = time.monotonic()
        try:
            self._capture(fn, bucket)
        except Exception as error:
            cause, reason, remedy = _explained(error)
            if self.mode == "required":
                raise Error("capture_failed", f"capturing {name} {bucket}: {reason}", f"{remedy}; or set graphs: preferred") from error
            bucket.failed = True
            self._failures.append({"method": name, "shapes": bucket.shapes, "cause": cause, "reason": reason, "remedy": remedy})
        else:
            bucket.capture_ms = (time.monotonic() - begun) * 1000
            self._buckets.append((name, bucket))

    def _capture(self, fn: Callable[..., Any], bucket: Bucket) -> None:
        cuda = self._cuda
        if self._pool is None:
            self._pool, self._side = cuda.graph_pool_handle(), cuda.Stream()
        main, side = cuda.current_stream(), self._side
        side.wait_stream(main)
        with cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                fn(**bucket.arguments)
        main.wait_stream(side)
        cuda.synchronize()
        gc.collect()  # freeing a tensor during a capture would break it
        cuda.empty_cache()  # frees what the warm-up used for the pool
        before = cuda.memory_reserved()
        try:
            bucket.graph, bucket.outputs = record(lambda: fn(**bucket.arguments), cuda, side, self._pool, self._device)
        except Exception:
            self._pool = cuda.graph_pool_handle()
            raise
        cuda.synchronize()
        self._pool_bytes += max(cuda.memory_reserved() - before, 0)


def _explained(error: Exception) -> tuple[str, str, str]:
    """Cause, reason and remedy; from the graph doctor if the error came through a line
    of the engine."""
    from ..doctor.capture import explain
    from ..doctor.source import short

    if (finding := explain(error)) is not None:
        return finding.code, f"{short(finding.file)}:{finding.line} in {finding.function}: {finding.reason}", finding.remedy
    remedy = "capture no host access, no synchronization and no shape that depends on data"
    return "exception", f"{type(error).__name__}: {error}".splitlines()[0], remedy


def _copy_into(kept: Any, made: Any) -> None:
    if isinstance(kept, dict):
        for name, tensor in kept.items():
            tensor.copy_(made[name])
    elif isinstance(kept, (tuple, list)):
        for tensor, value in zip(kept, made):
            tensor.copy_(value)
    else:
        kept.copy_(made)
