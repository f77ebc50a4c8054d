"""On a GPU: a real capture, CUDA's errors in terms of the line and the cause, and what the findings cost.

Never run on a GPU so far: tested with a stand-in for `torch.cuda`, which proves the order of calls and the words.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Callable, Iterable

from . import findings
from .findings import Finding
from .source import Place, one_line, place_of, statement_at

_WARM_UP_RUNS = 3
_TIMED_RUNS = 10

#: What CUDA and PyTorch say when a capture fails, and what it means.
ERRORS = (
    (r"cudaErrorStreamCaptureUnsupported|operation not permitted when stream is capturing|\b900\b", "the line does what a capture refuses (CUDA's error 900)"),
    (r"cudaErrorStreamCaptureInvalidated|previous error during capture|\b901\b", "an earlier line has invalidated the capture (901)"),
    (r"cudaErrorStreamCaptureUnjoined|unjoined work|\b904\b", "work on another stream is not joined (904)"),
    (r"cudaErrorStreamCaptureImplicit|legacy stream|\b906\b", "the line uses the default stream, which waits for all others (906)"),
    (r"cudaErrorStreamCaptureWrongThread|\b908\b", "another thread ends or uses the capture (908)"),
    (r"out of memory", "the graphs' memory pool has no room"),
    (r"Cannot copy between CPU and CUDA tensors during CUDA graph capture", "the line copies between pageable host memory and the GPU"),
    (r"Offset increment outside graph capture|generator.*(captur|regist)", "random numbers come from a generator that is not registered with the graph"),
    (r"Expected all tensors to be on the same device", "a tensor of the CPU meets tensors of the GPU"),
)
#: What a line that fails does, by what is called in it: code, and the remedy.
_CAUSES = (
    (r"\.item\(\)|\.tolist\(\)|\.cpu\(|\.numpy\(|\bprint\(|\bbool\(|\bint\(|\bfloat\(", findings.HOST_READ, "keep the value a tensor on the device, torch.where(condition, a, b) for a branch"),
    (r"synchronize\(|elapsed_time\(|\.query\(|empty_cache\(", findings.SYNC, "do it before or after the step"),
    (r"manual_seed\(|generator", findings.RNG, "graph.register_generator_state(generator) before the capture, and seed outside the step"),
    (r"nonzero|masked_select|unique\(|argwhere|repeat_interleave", findings.DYNAMIC_SHAPE, "keep the full shape and a mask: torch.where(mask, x, 0)"),
    (r"torch\.(tensor|as_tensor|from_numpy)\(|\.new_tensor\(|\.to\(|\.cuda\(|\.copy_\(", findings.HOST_COPY, "copy before the step into a static tensor of the device"),
    (r"torch\.(arange|zeros|ones|full|empty|rand|randn|linspace|eye|hann_window)\((?!.*device)", findings.CPU_TENSOR, "give it the device: device=x.device"),
)


def explain(error: BaseException) -> Finding | None:
    """What made a capture fail, by the innermost line of the user's; None where the error came through none."""
    place = place_of(error)
    if place is None:
        return None
    text = one_line(f"{type(error).__name__}: {error}", 300)
    meaning = next((meant for pattern, meant in ERRORS if re.search(pattern, text)), text)
    code, remedy = _cause(place, text)
    return Finding(code, findings.PREVENTS_CAPTURE, place.file, place.line, place.column, place.function, f"`{place.text.strip()}`: {meaning}", remedy, place.path)


def _cause(place: Place, text: str) -> tuple[str, str]:
    statement = statement_at(place.file, place.line)
    line = place.text
    if isinstance(statement, (ast.If, ast.While)):  # not their bodies
        line = ast.unparse(statement.test)
    elif statement is not None and (statement.end_lineno or 0) - statement.lineno < 20:
        line = ast.unparse(statement)
    for pattern, code, remedy in _CAUSES:
        if re.search(pattern, line):
            return code, remedy
    if isinstance(statement, (ast.If, ast.While, ast.Assert)):
        return findings.HOST_READ, "compute both branches and choose on the device: torch.where(condition, a, b)"
    if "same device" in text or "CPU" in text:
        return findings.CPU_TENSOR, "make all tensors of the step on the device"
    return findings.SYNC, "run `bulkhead doctor` on the function: it names each place and its remedy"


@dataclass
class Captured:
    """``eager_ms`` and ``replay_ms`` are medians; ``replay_ms`` is 0 where the capture failed. ``cost_ms`` is by line: how long the
    host is held there in a call, of which a replay has nothing."""

    failure: Finding | None = None
    error: str = ""
    eager_ms: float = 0.0
    replay_ms: float = 0.0
    cost_ms: dict[tuple[str, int], float] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        costs = [{"file": file, "line": line, "ms": round(ms, 4)} for (file, line), ms in sorted(self.cost_ms.items())]
        return {"captured": not self.error, "error": self.error, "eager_ms": round(self.eager_ms, 4), "replay_ms": round(self.replay_ms, 4), "costs": costs}


def capture(step: Callable[[], Any], found: Iterable[Finding], cuda: Any) -> Captured:
    """Warms up, times, and captures ``step`` on a side stream; ``cuda`` is ``torch.cuda``. The graph is kept until the process ends."""
    result = Captured()
    main, side = cuda.current_stream(), cuda.Stream()
    side.wait_stream(main)
    with cuda.stream(side):
        for _ in range(_WARM_UP_RUNS):
            step()
    main.wait_stream(side)
    cuda.synchronize()
    result.eager_ms = _timed(step, cuda)
    result.cost_ms = _costs(step, {(one.file, one.line) for one in found}, cuda)
    graph = cuda.CUDAGraph()
    try:
        with cuda.graph(graph, stream=side):
            step()
    except Exception as error:
        result.failure, result.error = explain(error), one_line(f"{type(error).__name__}: {error}", 300)
        return result
    cuda.synchronize()
    result.replay_ms = _timed(graph.replay, cuda)
    return result


def _timed(step: Callable[[], Any], cuda: Any) -> float:
    times = []
    for _ in range(_TIMED_RUNS):
        cuda.synchronize()
        begun = time.perf_counter()
        step()
        cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times)


def _costs(step: Callable[[], Any], lines: set[tuple[str, int]], cuda: Any) -> dict[tuple[str, int], float]:
    """Milliseconds a call that the host spends in each line: where a line waits for the GPU, that is the wait."""
    spent: dict[tuple[str, int], float] = {}
    files = {file for file, _ in lines}

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in files:
            return None
        at: list[Any] = [frame.f_lineno, time.perf_counter()]

        def stepped(frame: FrameType, event: str, argument: Any) -> Any:
            now = time.perf_counter()
            key = file, at[0]
            if key in lines:
                spent[key] = spent.get(key, 0.0) + (now - at[1]) * 1000
            at[:] = [frame.f_lineno, now]
            return stepped

        return stepped

    before = sys.gettrace()
    cuda.synchronize()
    sys.settrace(called)
    try:
        for _ in range(_TIMED_RUNS):
            step()
    finally:
        sys.settrace(before)
    cuda.synchronize()
    return {key: total / _TIMED_RUNS for key, total in spent.items()}
