"""On a GPU: makes a real capture, and maps CUDA's errors to a line and a cause."""

from __future__ import annotations

import ast
import gc
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Iterable

from ..recording import record
from . import costs, findings
from .findings import Finding
from .source import Location, one_line, location_of, statement_at

_WARM_UP_RUNS = 3


def _numbered(number: int) -> str:
    """Matches the number of an error, and no other number of a message."""
    return rf"(?:error|code)[ :=]*{number}\b"


_OUT_OF_MEMORY = r"out of memory"
#: Errors of CUDA and PyTorch in a failed capture, and their meanings.
ERRORS = (
    (_OUT_OF_MEMORY, "the graphs' memory pool has no room"),
    (r"cudaErrorStreamCaptureUnsupported|operation not permitted when stream is capturing|" + _numbered(900),
     "the line does what a capture refuses (CUDA's error 900)"),
    (r"cudaErrorStreamCaptureInvalidated|previous error during capture|" + _numbered(901),
     "an earlier line has invalidated the capture (901)"),
    (r"cudaErrorStreamCaptureUnjoined|unjoined work|" + _numbered(904), "work on another stream is not joined (904)"),
    (r"cudaErrorStreamCaptureImplicit|legacy stream|" + _numbered(906),
     "the line uses the default stream, which waits for all others (906)"),
    (r"cudaErrorStreamCaptureWrongThread|" + _numbered(908), "another thread ends or uses the capture (908)"),
    (r"Cannot copy between CPU and CUDA tensors during CUDA graph capture",
     "the line copies between pageable host memory and the GPU"),
    (r"Offset increment outside graph capture|generator.*(captur|regist)",
     "random numbers come from a generator that is not registered with the graph"),
    (r"Expected all tensors to be on the same device", "a tensor of the CPU meets tensors of the GPU"),
)  # fmt: skip
#: What is called in a failing line: code and remedy.
_CAUSES = (
    (r"\.item\(\)|\.tolist\(\)|\.cpu\(|\.numpy\(|\bprint\(|\bbool\(|\bint\(|\bfloat\(", findings.HOST_READ,
     "keep the value a tensor on the device, torch.where(condition, a, b) for a branch"),
    (r"synchronize\(|elapsed_time\(|\.query\(|empty_cache\(", findings.SYNC, "do it before or after the step"),
    (r"manual_seed\(|generator", findings.RNG,
     "graph.register_generator_state(generator) before the capture, and seed outside the step"),
    (r"nonzero|masked_select|unique\(|argwhere|repeat_interleave", findings.DYNAMIC_SHAPE,
     "keep the full shape and a mask: torch.where(mask, x, 0)"),
    (r"torch\.(tensor|as_tensor|from_numpy)\(|\.new_tensor\(|\.to\(|\.cuda\(|\.copy_\(", findings.HOST_COPY,
     "copy before the step into a static tensor of the device"),
    (r"torch\.(arange|zeros|ones|full|empty|rand|randn|linspace|eye|hann_window)\((?!.*device)", findings.CPU_TENSOR,
     "give it the device: device=x.device"),
)  # fmt: skip


#: The cause of a capture that fails whatever its lines do; no finding.
OUT_OF_MEMORY = "out_of_memory"


def explain(error: BaseException, target: Location | None = None) -> Finding | None:
    """The cause of a failed capture, at the innermost user line, else at ``target``; None if
    there is neither."""
    location = location_of(error) or target
    if location is None:
        return None
    text = one_line(f"{type(error).__name__}: {error}", 300)
    meaning = next((meant for pattern, meant in ERRORS if re.search(pattern, text)), text)
    code, remedy = _cause(location, text)
    if re.search(_OUT_OF_MEMORY, text):
        code, remedy = OUT_OF_MEMORY, "declare fewer or smaller buckets, or choose a GPU with more free memory"
    reason = f"`{location.text.strip()}`: {meaning}"
    return Finding(code, findings.PREVENTS_CAPTURE, location.file, location.line, location.columns[0], location.function,
                   reason, remedy, location.path)  # fmt: skip


def _cause(location: Location, text: str) -> tuple[str, str]:
    statement = statement_at(location.file, location.line)
    line = location.text
    # Of the target: the error came through no line.
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        line = ""
    elif isinstance(statement, (ast.If, ast.While)):  # not their bodies
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
    if not line and "unjoined" in text.lower():
        return findings.SYNC, "torch.cuda.current_stream().wait_stream(side) after the work on the other stream"
    return findings.SYNC, "run `bulkhead doctor` on the function: it names each place and its remedy"


@dataclass
class Captured:
    """``eager_ms`` and ``replay_ms`` are medians; ``replay_ms`` is 0 if the capture failed.
    ``idle_ms``: the GPU's idle time between kernels in an eager call. ``costs`` are per line
    with a finding."""

    failure: Finding | None = None
    error: str = ""
    eager_ms: float = 0.0
    replay_ms: float = 0.0
    idle_ms: float = 0.0
    costs: dict[costs.Line, costs.Cost] = field(default_factory=dict)

    def document(self, found: Iterable[Finding]) -> dict[str, Any]:
        document: dict[str, Any] = {"captured": not self.error, "error": self.error}
        if (failed := self.failure) is not None:
            has_finding = any((one.file, one.line) == (failed.file, failed.line) for one in found)
            document |= {"cause": failed.code, "reason": failed.reason, "remedy": failed.remedy}
            document["failed_at"] = {"file": failed.file, "line": failed.line, "has_finding": has_finding}
        document |= {name: round(getattr(self, name), 4) for name in ("eager_ms", "replay_ms", "idle_ms")}
        document["costs"] = [{"file": file, "line": line, **asdict(cost)} for (file, line), cost in sorted(self.costs.items())]
        return document


def capture(step: Callable[[], Any], found: Iterable[Finding], cuda: Any, device: str = "cuda",
            target: Location | None = None) -> Captured:  # fmt: skip
    """Warms up, measures, and captures ``step`` on a side stream; ``cuda`` is ``torch.cuda``.
    Keeps the graph until the process ends. ``target``: where a failure is told that came
    through no user line."""
    result = Captured()
    main, side = cuda.current_stream(), cuda.Stream()
    side.wait_stream(main)
    with cuda.stream(side):
        for _ in range(_WARM_UP_RUNS):
            step()
    main.wait_stream(side)
    cuda.synchronize()
    result.eager_ms = costs.timed(step, cuda)
    result.costs, result.idle_ms = costs.measured(step, {(one.file, one.line) for one in found}, cuda)
    cuda.synchronize()
    gc.collect()  # freeing a tensor during a capture would break it
    try:
        graph, _ = record(step, cuda, side, cuda.graph_pool_handle(), device)
    except Exception as error:
        result.failure, result.error = explain(error, target), one_line(f"{type(error).__name__}: {error}", 300)
        return result
    cuda.synchronize()
    result.replay_ms = costs.timed(graph.replay, cuda)
    return result
