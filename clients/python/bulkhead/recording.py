"""One capture on a GPU, and what PyTorch leaves undone when it fails."""

from __future__ import annotations

from typing import Any, Callable

_failed: list[Any] = []  #: graphs that PyTorch's allocator goes on asking which stream they capture


def record(fn: Callable[[], Any], cuda: Any, side: Any, pool: Any, device: str) -> tuple[Any, Any]:
    """Captures ``fn`` on the stream ``side``, with memory of ``pool``. Returns the graph and what ``fn`` returned.

    What ``fn`` raised ends the capture and is raised here. The allocator stays in a capture that failed, so ``pool`` takes no other.
    ``cuda`` is ``torch.cuda``, ``device`` the one that it captures on."""
    graph = cuda.CUDAGraph()
    try:
        with cuda.stream(side):
            # Of this thread alone: the others of the process may use CUDA meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                made = fn()
            except BaseException:
                _end(graph)
                raise
            graph.capture_end()
    except Exception:
        _failed.append(graph)
        _free_generator(cuda, side, device)
        raise
    return graph, made


def _end(graph: Any) -> None:
    """The stream must leave the capture; its own error is an echo of the one that is being raised."""
    try:
        graph.capture_end()
    except Exception:
        pass


def _free_generator(cuda: Any, side: Any, device: str) -> None:
    """PyTorch's generator stays in a capture that failed: it refuses random numbers in eager calls and in replays of other graphs. The
    next capture that succeeds frees it, here one of a single kernel."""
    import torch

    graph = cuda.CUDAGraph()
    _failed.append(graph)  # no graph is ever freed
    try:
        with cuda.stream(side):
            graph.capture_begin(pool=cuda.graph_pool_handle(), capture_error_mode="thread_local")
            torch.zeros(1, device=device)
            graph.capture_end()
    except Exception:  # the context is lost: what comes next says so
        pass
