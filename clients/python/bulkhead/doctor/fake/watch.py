"""Collects what one run of a callable shows; the two modes and the stand-ins report to it."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import threading
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Callable, Iterator

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook

from .. import findings, remedies
from ..findings import Findings
from ..source import Location, Use, here, is_users, one_line, statement_of, tested_later, use_of
from . import branches
from .cuda import LAUNCHED, OTHER_THREAD, SEED, STATE_READ, STREAM_NOT_FORKED, SYNCHRONIZE, Streams
from .origins import ARGUMENT, FOLLOWS, INTERNAL, LITERAL, SETUP, STEP, Origin

#: Functions that make a tensor which the user asked for.
_FACTORIES = frozenset(
    "tensor as_tensor from_numpy asarray arange zeros ones full empty rand randn randint randperm linspace logspace eye "
    "hann_window hamming_window "
    "blackman_window bartlett_window kaiser_window range scalar_tensor tril_indices triu_indices complex polar normal "
    "empty_strided vander "
    "frombuffer sparse_coo_tensor FloatTensor LongTensor __get__ aten::lift_fresh bernoulli multinomial cartesian_prod meshgrid "
    "new_tensor".split()
)
_CHOSEN = "; here "
#: What gives the value itself.
_READ = re.compile(r"\.(item|tolist|cpu|numpy)\(\)$|^(int|float|bool)\(")


NOT_JOINED, PINNED, DRAWN = "not_joined", "pinned", "drawn"
#: Code, reason and remedy of what a capture refuses.
_REFUSED = {
    SYNCHRONIZE: (findings.SYNC, "{name} makes the host wait for the GPU, which a capture refuses",
                  "do it before or after the step, outside the graph"),
    STREAM_NOT_FORKED: (findings.SYNC, "work goes to a stream that does not wait for the one that is captured",
                        "side.wait_stream(torch.cuda.current_stream()) before `with torch.cuda.stream(side)`"),
    OTHER_THREAD: (findings.SYNC, "another thread's work goes to that thread's own current stream, which is not the "
                   "one that is captured: the graph lacks it",
                   "do it in the thread of the step; or ask for torch.cuda.current_stream() before, and do the work "
                   "within `with torch.cuda.stream(it)`"),
    SEED: (findings.RNG, "{name} sets a seed within the step: a capture refuses it",
           "seed before the step; a replay advances the generator by itself"),
    STATE_READ: (findings.RNG, "{name} copies the generator's state within the step",
                 "save and restore the state outside the step"),
    NOT_JOINED: (findings.SYNC, "work goes to a stream that is not waited for (CUDA's error 904)",
                 "torch.cuda.current_stream().wait_stream(side) after the `with`"),
    PINNED: (findings.SYNC, "pinned host memory is allocated in the step, which a capture refuses",
             "allocate it once, before the step"),
    DRAWN: (findings.RNG, "{name} draws from a generator that is not registered with the graph",
            "graph.register_generator_state(generator) before the capture, or use the device's default generator"),
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One operator of a run, for the comparison of two runs."""

    name: str
    scalars: tuple[Any, ...]
    shapes: tuple[Any, ...]
    location: Location | None

    @property
    def where(self) -> tuple[str, str, int]:
        return self.name, self.location.file if self.location else "", self.location.line if self.location else 0


@dataclass(frozen=True)
class Concatenation:
    location: Location
    operands: tuple[int, ...]


class CustomOperator(BaseException):
    """An operator without a fake implementation: its result is not guessed. Not an ``Exception``,
    so that user code does not catch it."""


class Watch:
    """What one run of a callable shows. ``step`` is false while the callable and its
    arguments are made."""

    def __init__(self, found: Findings, target: Location) -> None:
        self.found = found
        self.target = target
        self.streams: Streams  #: of the stand-ins
        #: Functions that ask whether their stream is captured.
        self.asks_capture: set[tuple[str, str]] = set()
        self._call = 0
        self.step = False
        self.recording = False
        self.skipped: list[str] = []
        self.unwatched: set[str] = set()  #: threads that used a fake tensor without the modes
        self.end_call: Callable[[], None] = lambda: None  #: waits for the threads of a call
        #: The operators of the step, then those of each thread that it has started.
        self._lanes: list[list[Kernel]] = [[]]
        self._own = threading.local()  #: of each thread: .functions that it is in, and its .lane
        self.devices: set[str] = set()  #: of the tensors of all calls, and of their arguments
        self.used: set[int] = set()  #: ids of the tensors that operators of this call took
        self._reads: dict[tuple[str, int, int], Any] = {}  #: what the n-th read at a line gave
        self._counts: dict[tuple[str, int], int] = {}

    @property
    def _functions(self) -> list[tuple[str, Any]]:
        if not hasattr(self._own, "functions"):
            self._own.functions = []
        return self._own.functions  # type: ignore[no-any-return]

    @property
    def _function(self) -> str:
        """The name of the innermost function of PyTorch's that this thread is in."""
        return self._functions[-1][0] if self._functions else ""

    @property
    def trace(self) -> list[Kernel]:
        """The operators of the call, those of each thread together, so that the order does not
        depend on when a thread runs."""
        return [kernel for lane in self._lanes for kernel in lane]

    def ran(self, kernel: Kernel) -> None:
        lane = getattr(self._own, "lane", None)
        (self._lanes[0] if lane is None else lane).append(kernel)

    def new_lane(self) -> list[Kernel]:
        self._lanes.append([])
        return self._lanes[-1]

    @contextlib.contextmanager
    def in_lane(self, lane: list[Kernel]) -> Iterator[None]:
        before, self._own.lane = getattr(self._own, "lane", None), lane
        try:
            yield
        finally:
            self._own.lane = before

    def skip(self, told: str) -> None:
        self.skipped += [] if told in self.skipped else [told]

    def _here(self) -> Location | None:
        """None outside the step. An event without a user line belongs to the target."""
        return (here() or self.target) if self.step else None

    def begin_call(self) -> None:
        self._lanes = [[]]
        self.used = set()
        self._counts = {}
        self._call += 1
        self.streams.begin_call()

    def is_capturing(self) -> bool:
        """False in the first call, which warms up as a user's does."""
        if self.step:
            location = here() or self.target
            self.asks_capture.add((location.file, location.function))
        return self.step and self._call > 1

    def answer(self, value: Any, dtype: Any, otherwise: bool, is_assumed: bool = False) -> Any:
        """Returns what an earlier call read there, so that two calls differ only through Python.
        ``value`` is None if unknown; ``otherwise`` is then the answer if no branch asks. An assumed
        value cannot keep a loop running for ever."""
        location = self._here()
        if location is None:
            return stand_in(dtype) if value is None else value
        count = self._counts[location.file, location.line] = self._counts.get((location.file, location.line), -1) + 1
        if value is None:
            is_truth = dtype == torch.bool
            value = branches.truth(location, count, otherwise) if is_truth else type(stand_in(dtype))(branches.number(location, count))
        elif is_assumed and branches.is_long(count) and (ending := branches.ending(count)) is not None:
            value = type(stand_in(dtype))(ending)
        return self._reads.setdefault((location.file, location.line, count), value)

    def refuse(self, what: str, name: str = "", location: Location | None = None) -> None:
        """Reports what a capture refuses; the stand-ins of torch.cuda call it."""
        location = (location or self._here()) if self.step else None
        if location is not None and what == LAUNCHED:
            self.skip(f"Triton kernel {name} at {location}: it is not launched, and what it writes is not known")
        elif location is not None:
            self.add_refused(what, name, location)

    def add_refused(self, what: str, name: str, location: Location) -> None:
        code, reason, remedy = _REFUSED[what]
        self.found.add(code, findings.PREVENTS_CAPTURE, location, reason.format(name=name), remedy)

    # --- origins of CPU tensors

    def born(self, tensor: Any, location: Location | None, kind: str = "") -> None:
        function, device = self._functions[-1] if self._functions else ("", None)
        if not kind:
            kind = (STEP if self.step else SETUP) if location is not None else INTERNAL
            if function and function not in _FACTORIES:
                kind = INTERNAL
            elif isinstance(device, int) or str(device).split(":")[0] == "cuda":
                kind = LITERAL
            elif device is not None:
                kind = FOLLOWS
        in_module = any(is_users(frame.f_code.co_filename) for frame in _constructors(sys._getframe(1)))
        tensor._doctor_origin = Origin(kind, location, function, in_module)

    @contextlib.contextmanager
    def registrations(self) -> Iterator[None]:
        """Follows the parameters and buffers that modules make of tensors of the CPU: these
        move with them."""

        def registered(module: Any, name: str, tensor: Any) -> None:
            origin = getattr(tensor, "_doctor_origin", None)
            if origin is not None and origin.kind == SETUP and tensor.device.type == "cpu":
                tensor._doctor_origin = replace(origin, makers=_makers(module))

        # Each is removed at the end.
        with register_module_parameter_registration_hook(registered), register_module_buffer_registration_hook(registered):
            yield

    @contextlib.contextmanager
    def function(self, name: str, device: Any) -> Iterator[None]:
        self._functions.append((name, device))
        try:
            yield
        finally:
            self._functions.pop()

    def _is_own(self, origin: Origin, tensor: Any) -> bool:
        """Whether PyTorch made it for itself, and not from a list used as an index."""
        return origin.kind == INTERNAL and (tensor.dim() == 0 or self._function not in ("__getitem__", "__setitem__"))

    # --- findings

    def read(self, is_copy: bool = False) -> None:
        location = self._here()
        if location is None:
            return
        use = use_of(location, not is_copy and self._function in ("__getitem__", "__setitem__"))
        reason = f"`{use.text}` reads a value that the GPU computes; the host waits for it{remedies.purpose(use)}"
        remedy = remedies.host_read(use, self._function)
        self.found.add(findings.HOST_READ, findings.PREVENTS_CAPTURE, location, reason, remedy, use.kind)

    def not_taken(self, value: Any, is_known: bool, location: Location | None = None) -> None:
        """Reports a branch chosen by a value that was read, once per line. ``location``: where it
        was read, if not here."""
        location = (location or self._here()) if self.step else None
        found = self.found.at(findings.HOST_READ, location) if location is not None else None
        if location is None or found is None or _CHOSEN in found.reason:
            return
        use = use_of(location)
        read = f"{value:.4g}" if isinstance(value, float) else one_line(str(value), 40)
        told = f"{read} with these inputs" if is_known else f"taken as {read}, as its value is not known"
        if use.kind in ("if", "while", "assert", "match"):
            after = {"if": "; the other branch was not run", "while": " at first", "match": "; the other cases were not run"}
            chosen = f"`{use.text.removeprefix('not ')}` is {told}{after.get(use.kind, '')}"
        elif use.kind in ("value", "argument", "loop") and (later := tested_later(location)) is not None:
            name, test, line = later
            statement = statement_of(location)
            is_all = isinstance(statement, ast.Assign) and one_line(ast.unparse(statement.value)) == use.text
            itself = is_all and _READ.search(use.text)
            decides = f"`{name}` is {told}; it decides" if itself else f"it is {told}; `{name}` follows from it, and decides"
            chosen = f"{decides} `{test}` in line {line}, of which one way was run"
        else:
            return
        self.found.change(found, reason=f"{found.reason}{_CHOSEN}{chosen}")

    def copied(self, tensor: Any, pinned: bool, waits: bool) -> None:
        """Reports a copy of a CPU tensor to the GPU. The host waits for it unless it is
        ``non_blocking``."""
        location = self._here()
        origin = getattr(tensor, "_doctor_origin", None) or Origin(ARGUMENT)
        if origin.kind == INTERNAL and tensor.dim() == 0 and self._function == "__setitem__":
            self.written("to one element", "x[i : i + 1] = value fills a slice with the number as it is")
            return
        if location is None or self._is_own(origin, tensor) or (origin.kind == LITERAL and tensor.numel() == 0):
            return
        use = use_of(location)
        made = [one.location for one in (origin, *origin.beside) if one.is_made and one.location is not None]
        same = [(one.file, one.line) == (location.file, location.line) for one in made]
        self._born_on_cpu(
            origin, lambda one: f"and is copied to the GPU {'there' if one == str(location) else f'in {location}'}", location
        )
        if origin.is_made:
            lazy = _lazily_moved(use, location) if origin.kind == SETUP else ""
            if lazy:
                self.found.add(findings.CPU_TENSOR, findings.SLOW, location,
                               f"`{use.text}` moves the tensor made in {origin.location} at the first call: a "
                               "capture without a call before it fails, and the address changes",
                               f"in __init__, {remedies.buffer(lazy, 'value')}")  # fmt: skip
                return
            if all(same):
                return
        what = {LITERAL: "a literal", INTERNAL: "a list that is an index"}.get(origin.kind, "a tensor in host memory")
        kind, severity = "pageable memory", findings.PREVENTS_CAPTURE
        remedy = "copy before the step into a static tensor of the device: static.copy_(value)"
        if pinned and waits:
            kind = "pinned memory, and the host waits"
            remedy += "; or non_blocking=True, from pinned memory that stays"
        elif pinned:
            kind, severity = "pinned memory: a replay copies from the same address", findings.STALE
        reason = f"`{use.text}` copies {what} to the GPU in the step ({kind})"
        if origin.is_made:
            lines = list(dict.fromkeys(map(str, made)))
            remedy = f"not needed once {' and '.join(lines)} {'is' if len(lines) == 1 else 'are'} mended"
        elif origin.kind == LITERAL:
            remedy = "make it once, outside the step; or fill a static tensor: torch.full((), value, device=x.device)"
        elif origin.kind == INTERNAL:
            remedy = ("make the index once, before the step, on the device: torch.tensor([0, 2], device=x.device); neighbours "
                      "are a slice, which copies nothing")  # fmt: skip
        self.found.add(findings.HOST_COPY, severity, location, reason, remedy, use.kind)

    def written(self, where: str, remedy: str) -> None:
        """Reports a number that is written through a tensor of indices, or to one element."""
        location = self._here()
        if location is not None:
            use = use_of(location)
            self.found.add(findings.HOST_COPY, findings.PREVENTS_CAPTURE, location,
                           f"`{use.text}` writes a number {where}: the number "
                           "becomes a tensor in host memory, which is copied to the GPU in the step (pageable memory)",
                           f"{remedy}; or write a tensor of the device: torch.full((), value, device=x.device)",
                           use.kind)  # fmt: skip

    def met(self, tensor: Any, function: str, is_number: bool) -> None:
        """Reports a CPU tensor among GPU tensors as arguments. ``is_number``: a kernel takes its
        value, or values, as it is."""
        location = self._here()
        origin = getattr(tensor, "_doctor_origin", None) or Origin(ARGUMENT)
        if location is None or self._is_own(origin, tensor):
            return
        kept, severity = "", findings.PREVENTS_CAPTURE
        if is_number:
            kept = ": torch.compile then makes no CUDA Graph, and one that is captured by hand keeps "
            kept += "this value" if tensor.dim() == 0 else "these values"
            severity = findings.STALE
        self._born_on_cpu(
            origin, lambda _: f"and meets a tensor of the GPU in {location} ({function}){kept}", location, severity
        )
        if not origin.is_made:
            what = "an argument" if origin.kind == ARGUMENT else "a tensor"
            self.found.add(findings.HOST_COPY, severity, location,
                           f"`{use_of(location).text}` ({function}) takes {what} in host memory "
                           f"beside tensors of the GPU{kept}",
                           "move it to the device before the step; --inputs is given the device")  # fmt: skip

    def _born_on_cpu(self, origin: Origin, then: Callable[[str], str], location: Location,
                     severity: str = findings.PREVENTS_CAPTURE) -> None:  # fmt: skip
        """``then`` is given the location of each."""
        for other in origin.beside:
            self._born_on_cpu(other, then, location, severity)
        if not origin.is_made or origin.location is None:
            return
        made, use = origin.location, use_of(origin.location)
        moved_by = use_of(location).text if location.function == made.function else ""
        remedy = remedies.cpu_tensor(use, origin.made_by, origin.kind == SETUP, origin.is_module, moved_by)
        # The greatest module that it moves with.
        for around, (module, where) in enumerate(reversed(origin.makers)):
            if where is not None and any(one is origin.makers[0][0] for one in module.modules()):
                made, use = where, use_of(where)
                remedy = remedies.module(use, is_kept=around > 0)
                break
        when = "is made on the CPU, before the step," if origin.kind == SETUP else "is made on the CPU"
        reason = f"`{use.text}` {when} {then(str(origin.location))}"
        self.found.add(findings.CPU_TENSOR, severity, made, reason, remedy, use.kind)

    def dynamic(self, name: str, *tensors: Any) -> None:
        """Reports a shape that depends on values of these, if they lie on the GPU."""
        location = self._here()
        if location is not None and any(tensor.device.type == "cuda" for tensor in tensors):
            use = use_of(location)
            self.found.add(findings.DYNAMIC_SHAPE, findings.PREVENTS_CAPTURE, location,
                           f"`{use.text}` ({name}) has a shape that depends on values of the GPU: the host waits for the count",
                           remedies.dynamic(name), use.kind)  # fmt: skip


def _constructors(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames that run a module's `__init__`, innermost first."""
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            yield frame
        frame = frame.f_back


def _makers(module: Any) -> tuple[tuple[Any, Location | None], ...]:
    """The modules whose `__init__` runs, and where each is made, if the innermost is ``module``."""
    outermost = {id(frame.f_locals["self"]): frame for frame in _constructors(sys._getframe(2))}
    if next(iter(outermost), None) != id(module):
        return ()
    return tuple((frame.f_locals["self"], here(frame.f_back)) for frame in outermost.values())


def _lazily_moved(use: Use, location: Location) -> str:
    """The attribute that an assignment such as `self.x = self.x.to(device)` moves;
    empty for others."""
    statement = statement_of(location)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return next((target.attr for target in targets if isinstance(target, ast.Attribute) and ast.unparse(target) in use.text), "")


def stand_in(dtype: Any) -> Any:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
