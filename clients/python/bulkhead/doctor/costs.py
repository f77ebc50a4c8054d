"""On a GPU: what the lines with findings cost per call, in milliseconds.

Without a GPU the profiler shows no kernels.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from types import FrameType
from typing import Any, Callable, Collection, Iterator, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .coverage import traced
from .source import here

_TIMED_RUNS = 10
_MARK = "doctor:"
_READS = frozenset(
    "_local_scalar_dense equal allclose is_nonzero nonzero masked_select _unique2 unique_dim unique_consecutive bincount".split()
)

Line = tuple[str, int]  #: file and line number, counted from 1
Step = Callable[[], Any]
Span = tuple[float, float]  #: begin and end in microseconds


@dataclass
class Cost:
    """Costs of one line. ``held_ms``: the host's time in it. ``saved_ms``: the time that a call
    saves if the line's reads and copies return an earlier call's values; None if it has none to
    replace. ``idle_ms``: the GPU's wait for its next kernel after one that ended while the host was
    in the line."""

    held_ms: float = 0.0
    saved_ms: float | None = None
    idle_ms: float = 0.0


def timed(step: Step, cuda: Any) -> float:
    """Median time of a call in milliseconds. ``cuda`` is ``torch.cuda``."""
    times = []
    for _ in range(_TIMED_RUNS):
        cuda.synchronize()
        begun = time.perf_counter()
        step()
        cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times)


def measured(step: Step, lines: Collection[Line], cuda: Any) -> tuple[dict[Line, Cost], float]:
    """The cost of each executed line, and the GPU's idle time between the kernels of a call."""
    costs = {line: Cost(held_ms=ms) for line, ms in _held(step, lines, cuda).items()}
    kernels, _ = profiled(step, (), cuda)
    for line, ms in idle(*profiled(step, costs, cuda))[1].items():
        costs[line].idle_ms = ms
    with _Answers(("", 0)) as watching:
        with_all = timed(watching.calling(step), cuda)
    for line, cost in costs.items():
        cost.saved_ms = _saved(step, line, with_all, cuda)
    return costs, idle(kernels, ())[0]


def _held(step: Step, lines: Collection[Line], cuda: Any) -> dict[Line, float]:
    spent: dict[Line, float] = {}

    def begun(line: Line) -> Callable[[], None]:
        at = time.perf_counter()

        def ended() -> None:
            spent[line] = spent.get(line, 0.0) + (time.perf_counter() - at) * 1000

        return ended

    cuda.synchronize()
    with _traced(lines, begun):
        for _ in range(_TIMED_RUNS):
            step()
    cuda.synchronize()
    return {line: total / _TIMED_RUNS for line, total in spent.items()}


@contextlib.contextmanager
def _traced(lines: Collection[Line], begun: Callable[[Line], Callable[[], None]]) -> Iterator[None]:
    """Calls ``begun`` when a line begins, and the function that it returns when the line ends."""
    files = {file for file, _ in lines}

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        file = os.path.abspath(frame.f_code.co_filename)
        if file not in files:
            return None
        running: list[Callable[[], None]] = []

        def stepped(frame: FrameType, event: str, argument: Any) -> Any:
            while running:
                running.pop()()
            if event == "line" and (file, frame.f_lineno) in lines:
                running.append(begun((file, frame.f_lineno)))
            return stepped

        return stepped

    with traced(called):
        yield


def profiled(step: Step, lines: Collection[Line], cuda: Any) -> tuple[list[Span], list[tuple[Line, Span]]]:
    """The kernels and copies that the GPU ran in one call, and when the host was in ``lines``."""

    def begun(line: Line) -> Callable[[], None]:
        mark = record_function(f"{_MARK}{line[1]}:{line[0]}")
        mark.__enter__()
        return lambda: mark.__exit__(None, None, None)

    cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as taken:
        with _traced(lines, begun) if lines else contextlib.nullcontext():
            step()
        cuda.synchronize()
    kernels, marks = [], []
    for event in taken.events() or ():
        span = event.time_range.start, event.time_range.end
        if event.device_type == DeviceType.CUDA:
            if not getattr(event, "is_user_annotation", False) and not event.name.startswith(_MARK):
                kernels.append(span)
        elif event.name.startswith(_MARK):
            number, _, file = event.name.removeprefix(_MARK).partition(":")
            marks.append(((file, int(number)), span))
    return kernels, marks


def idle(kernels: Sequence[Span], marks: Sequence[tuple[Line, Span]]) -> tuple[float, dict[Line, float]]:
    """The idle milliseconds between kernels, in total and by the line that the host was in when the
    gap began: the innermost, if lines call one another."""
    total, by_line, end = 0.0, defaultdict[Line, float](float), None
    for begin, its_end in sorted(kernels):
        if end is not None and begin > end:
            gap = (begin - end) / 1000
            total += gap
            around = [(span[0], line) for line, span in marks if span[0] <= end <= span[1]]
            if around:
                by_line[max(around)[1]] += gap
        end = its_end if end is None else max(end, its_end)
    return total, dict(by_line)


def _saved(step: Step, line: Line, with_all: float, cuda: Any) -> float | None:
    with _Answers(line) as answers:
        answers.calling(step)()
        if not answers.kept:
            return None
        answers.answering = True
        try:
            return with_all - timed(answers.calling(step), cuda)
        except Exception:  # for example a cache has grown: the recorded answers no longer fit
            return None


class _Answers(TorchDispatchMode):  # type: ignore[misc]
    """Records one line's reads and copies between host and GPU. While ``answering``, returns the
    recorded values."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.answering = False
        self._line, self._count = line, 0

    def calling(self, step: Step) -> Step:
        def call() -> Any:
            self._count = 0
            return step()

        return call

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[1]
        location = here() if _crosses(name, args, kwargs) else None
        if location is None or (location.file, location.line) != self._line:
            return function(*args, **kwargs)
        number, self._count = self._count, self._count + 1
        if self.answering and number < len(self.kept):
            return args[0] if name == "copy_" else self.kept[number]
        result = function(*args, **kwargs)
        if not self.answering:
            self.kept.append(result)
        return result


def _crosses(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for a value or a count, or a tensor is copied between host and GPU."""
    if name in _READS:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "index":
        return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if name == "copy_":
        return bool(args[0].device.type != args[1].device.type)
    device = kwargs.get("device")
    return name == "_to_copy" and device is not None and torch.device(device).type != tree_leaves(args)[0].device.type
