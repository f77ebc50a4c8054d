"""Captures a CUDA graph, and cleans up what PyTorch leaves behind when a capture fails."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

_failed: list[Any] = []  #: graphs that PyTorch's allocator keeps querying for their stream


def record(fn: Callable[[], Any], cuda: Any, side: Any, pool: Any, device: str) -> tuple[Any, Any]:
    """Captures ``fn`` on the stream ``side``, with memory of ``pool``. Returns the graph and what
    ``fn`` returned.

    Raises what ``fn`` raised. The allocator stays in a failed capture, so do not use its ``pool``
    again. ``cuda`` is ``torch.cuda``; ``device`` is the device to capture on."""
    graph = cuda.CUDAGraph()
    try:
        with cuda.stream(side):
            # For this thread only: other threads of the process may use CUDA meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                made = fn()
            except BaseException:
                # The stream must leave the capture. Its own error only echoes the one being raised.
                with contextlib.suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
    except Exception:
        _failed.append(graph)
        _free_generator(cuda, side, device)
        raise
    return graph, made


def _free_generator(cuda: Any, side: Any, device: str) -> None:
    """Frees PyTorch's generator from a failed capture, in which it refuses random numbers to
    eager calls and to other graphs' replays. The next successful capture does that; here one of a
    single kernel."""
    import torch

    graph = cuda.CUDAGraph()
    _failed.append(graph)  # graphs are never freed
    # Where this fails, the context is lost; the next call reports it.
    with contextlib.suppress(Exception), cuda.stream(side):
        graph.capture_begin(pool=cuda.graph_pool_handle(), capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        graph.capture_end()
