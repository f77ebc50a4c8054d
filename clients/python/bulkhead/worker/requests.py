"""Waiting requests and the running one: fair between channels, bounded, each with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Sequence

from ..engine import Method
from ..errors import Error
from .messages import Output, Tensor

if TYPE_CHECKING:
    from .session import ChannelSession

IDLE_SECONDS = 0.1  #: without a request in flight, until `idle` is sent
REMEMBERED = 1024  #: number of requests whose durations are reported
OVERRUN_GRACE_SECONDS = 0.5  #: beyond the model's request deadline


class Request:
    """One inference. The loop's thread owns it until it runs, then the main thread; both
    read ``answered``."""

    def __init__(self, number: int, session: ChannelSession, method: Method, tensors: Sequence[Tensor], arguments: dict[str, Any], deadline: float) -> None:
        self.number, self.session, self.method = number, session, method
        self.tensors, self.arguments = list(tensors), arguments
        self.received, self.deadline = time.monotonic(), deadline
        self.started = self.ended = 0.0
        self.streams = False
        self.answered = False  #: early: cancelled, past its deadline, or its channel has ended
        self.outputs: list[Output] = []  #: of the answer
        self.text = b""  #: the answer's values
        self.error: Error | None = None
        self.ran_out_of_memory = False

    def __str__(self) -> str:
        tensors = ", ".join(f"{tensor.name} {tensor.dtype}[{','.join(map(str, tensor.shape))}]" for tensor in self.tensors)
        return f"{self.method.name}({tensors})"


class Dispatcher:
    """Used on the loop's thread. ``run(request, done)`` starts a request on the main thread;
    ``done()`` runs here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, run: Callable[[Request, Callable[[], None]], None],
                 activity: Callable[[], None], settled: Callable[[], None], ran_out: Callable[[], None],
                 overrun: Callable[[str, float], None]) -> None:  # fmt: skip
        self._loop, self._run = loop, run
        self._activity, self._settled, self._ran_out, self._overrun = activity, settled, ran_out, overrun
        self._queues: dict[int, deque[Request]] = {}
        self._served_last = -1
        self._running: Request | None = None
        self._overrun_told = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self.bound = 0
        self.budget = 0.0  #: the model's request deadline
        self.busy = False
        self.requests = self.errors = self.out_of_memory = 0
        self._durations: deque[float] = deque(maxlen=REMEMBERED)  #: in ms

    @property
    def queued(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def in_flight(self) -> int:
        return self.queued + (self._running is not None)

    def durations(self) -> dict[str, float] | None:
        """From arrival to result, in ms, for the last ``REMEMBERED`` requests; None
        before the first."""
        ordered = sorted(self._durations)
        return {"last": self._durations[-1], "p50": ordered[(len(ordered) - 1) // 2],
                "p99": ordered[(len(ordered) - 1) * 99 // 100]} if ordered else None  # fmt: skip

    def submit(self, request: Request) -> None:
        """Raises ``queue_full``."""
        if self.in_flight >= self.bound:
            raise Error("queue_full", f"{self.in_flight} requests wait or run already, and `queue` is {self.bound}",
                        "send the request again later, or raise `queue` or `replicas` of the model")  # fmt: skip
        self._queues.setdefault(request.session.number, deque()).append(request)
        self.requests += 1
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if not self.busy:
            self.busy = True
            self._activity()
        self._start_next()
        self._arm()

    def count_refused(self) -> None:
        self.requests += 1
        self.errors += 1

    def cancel(self, channel: int, number: int) -> None:
        error = Error("cancelled", f"request {number} was cancelled by its client")
        for request in self._take(lambda one: one.session.number == channel and one.number == number):
            self._end_queued(request, error)
        running = self._running
        if running is not None and not running.answered and (running.session.number, running.number) == (channel, number):
            self._answer_early(running, error)
        self._settle()

    def end(self, request: Request, error: Error) -> None:
        """Ends the running request: its client does not read its stream."""
        if request is self._running and not request.answered:
            self._answer_early(request, error)

    def drop(self, channel: int) -> None:
        """The channel has ended: its requests get no answer."""
        if self._running is not None and self._running.session.number == channel:
            self._running.answered = True
        for request in self._take(lambda one: one.session.number == channel):
            request.session.let_go(request)
        self._settle()

    def fail_all(self, error: Error) -> None:
        for request in self._take(lambda _: True):
            self._end_queued(request, error)
        if self._running is not None and not self._running.answered:
            self._answer_early(self._running, error)

    def _take(self, matches: Callable[[Request], bool]) -> list[Request]:
        taken = [request for queue in self._queues.values() for request in queue if matches(request)]
        for request in taken:
            queue = self._queues[request.session.number]
            queue.remove(request)
            if not queue:
                del self._queues[request.session.number]
        return taken

    def _start_next(self) -> None:
        if self._running is not None or not self._queues:
            return
        later = [channel for channel in self._queues if channel > self._served_last]
        self._served_last = min(later) if later else min(self._queues)
        queue = self._queues[self._served_last]
        request = self._running = queue.popleft()
        if not queue:
            del self._queues[self._served_last]
        request.started = time.monotonic()
        self._overrun_told = False
        self._run(request, lambda: self._finished(request))

    def _finished(self, request: Request) -> None:
        self._running = None
        self._durations.append((request.ended - request.received) * 1000)
        self._start_next()  # before writing the answer, so that the engine keeps working
        if request.ran_out_of_memory:
            self._note_out_of_memory(request)
        if request.answered:
            request.session.take_back(request.outputs)
        else:
            if request.error is not None:
                self.errors += 1
            request.session.answer(request)
        request.session.let_go(request)
        self._settle()
        self._arm()

    def _note_out_of_memory(self, request: Request) -> None:
        """Before the answer: a client that sends it again at once finds the daemon informed."""
        assert request.error is not None
        code, attempt, remedy = request.error.args
        request.error = Error(code, attempt, f"send it again: on a device under `limits` the daemon makes more room for this model; if that fails, {remedy}")
        self.out_of_memory += 1
        self._ran_out()

    def _answer_early(self, request: Request, error: Error) -> None:
        self.errors += 1
        request.answered = True
        request.session.fail(request, error)

    def _end_queued(self, request: Request, error: Error) -> None:
        self._answer_early(request, error)
        request.session.let_go(request)

    def _settle(self) -> None:
        if self.in_flight:
            return
        if self.busy and self._idle_timer is None:
            self._idle_timer = self._loop.call_later(IDLE_SECONDS, self._idle)
        self._settled()

    def _idle(self) -> None:
        self._idle_timer = None
        if not self.in_flight and self.busy:
            self.busy = False
            self._activity()

    def _arm(self) -> None:
        dues = [request.deadline for queue in self._queues.values() for request in queue]
        if self._running is not None:
            dues += [] if self._running.answered else [self._running.deadline]
            dues += [] if self._overrun_told else [self._overrun_at]
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(dues), self._enforce) if dues else None

    @property
    def _overrun_at(self) -> float:
        assert self._running is not None
        return self._running.started + self.budget + OVERRUN_GRACE_SECONDS

    def _enforce(self) -> None:
        now = time.monotonic()
        for request in self._take(lambda one: one.deadline <= now):
            self._end_queued(request, _deadline_passed(request, False, now))
        running = self._running
        if running is not None and not running.answered and running.deadline <= now:
            self._answer_early(running, _deadline_passed(running, True, now))
        if running is not None and not self._overrun_told and self._overrun_at <= now:
            self._overrun_told = True
            self._overrun(running.method.name, now - running.started)
        self._settle()
        self._arm()


def _deadline_passed(request: Request, running: bool, now: float) -> Error:
    budget, spent = (round((until - request.received) * 1000) for until in (request.deadline, now))
    return Error("deadline_exceeded",
                 f"request {request.number} of method \"{request.method.name}\" is still {'running' if running else 'waiting'} after {spent} ms, "
                 f"its deadline is {budget} ms",
                 "give the request a longer deadline, or raise the model's request deadline" if running else
                 "give the request a longer deadline, or send fewer at once")  # fmt: skip
