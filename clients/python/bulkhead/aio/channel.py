"""A direct connection to one worker, on an event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING, Any, AsyncGenerator, Callable, Mapping, Sequence

from ..channel import GRACE_SECONDS, OPEN_SECONDS, PATIENCE_SECONDS, SLAB_SECONDS, receive, send
from ..errors import Error, checked_deadline
from ..placing import PlacingChannel, Steps, T
from ..protocol import ChannelCore, Reply, Request
from ..shared_tensors import Input
from .waiting import Turns, Waiters

if TYPE_CHECKING:
    from ..cuda import Events

_BURST = 32  # packets read before other handlers run


class Channel(PlacingChannel):
    """One channel on the running loop; many tasks may share it."""

    def __init__(self, sock: socket.socket, client: str, stateful: bool = True, events: Events | None = None) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._heard = Waiters()
        self._turns = Turns(0)
        self._writing = self._opened = False
        self.stateful = stateful
        self.core = ChannelCore(client, self._settle_soon, events)
        self._loop.add_reader(sock, self._read)
        self._flush()

    @classmethod
    async def open(cls, sock: socket.socket, *, client: str = "bulkhead-py", deadline: float = OPEN_SECONDS, stateful: bool = True,
                   events: Events | None = None) -> Channel:  # fmt: skip
        """Opens the channel on a socket from another source, and owns it."""
        patience = checked_deadline(deadline, OPEN_SECONDS)
        channel = cls(sock, client, stateful, events)
        try:
            await channel._until(lambda: channel.core.is_open, patience, "opening a channel: the worker has not said welcome in time")
        except BaseException:
            channel.close()
            raise
        return channel

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent: the worker has neither ended nor announced its end."""
        return self.core.accepts

    def close(self) -> None:
        """Ends the channel; the worker drops waiting requests. Outputs stay readable."""
        self.core.end(Error("cancelled", "the channel was closed by this client"))
        self._stop()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def allocate(self, shape: Sequence[int], dtype: Any = "float32", *, on_gpu: bool = False) -> Input:
        """As ``bulkhead.Channel.allocate``."""
        self._raise_if_ended()
        return await self._waited(self._allocated(shape, dtype, on_gpu))

    async def results_on_gpu(self, size_bytes: int) -> bool:
        """As ``bulkhead.Channel.results_on_gpu``."""
        return await self._waited(self._results_placed(size_bytes))

    async def _waited(self, steps: Steps[T]) -> T:
        try:
            while True:
                condition, attempt = next(steps)
                self._flush()
                await self._until(condition, SLAB_SECONDS, attempt)
                self._raise_if_ended()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def place(self, value: Any, dtype: str | None = None) -> Input:
        """As ``bulkhead.Channel.place``."""
        return (await self._waited(self._copied(value, dtype)))[0]

    async def infer(self, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward", parameters: Mapping[str, Any] | None = None,
                    deadline: float | None = None, retry_safe: bool = False, **named: Any) -> Reply:  # fmt: skip
        """As ``bulkhead.Channel.infer``. While the limit of requests in flight is reached, waits
        within the deadline. Cancelling the task cancels the request."""
        reply = None
        async for reply in self._stream(inputs, method, parameters, deadline, retry_safe, named):
            pass
        assert reply is not None
        return reply

    def stream(self, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward", parameters: Mapping[str, Any] | None = None,
               deadline: float | None = None, **named: Any) -> AsyncGenerator[Reply, None]:  # fmt: skip
        """Yields the parts of a streamed answer as they arrive, or the one answer of any other
        method. Sends the request when the first part is asked for. Leaving the loop, or cancelling
        the task, cancels the rest."""
        return self._stream(inputs, method, parameters, deadline, False, named)

    async def _stream(self, inputs: Mapping[str, Any] | None, method: str, parameters: Mapping[str, Any] | None, deadline: float | None,
                      retry_safe: bool, named: dict[str, Any],
                      sent: Callable[[Request], None] = lambda request: None) -> AsyncGenerator[Reply, None]:  # fmt: skip
        """Calls ``sent`` with the request once it is on its way."""
        until = self._loop.time() + checked_deadline(deadline, PATIENCE_SECONDS)
        changed = Waiters()
        await self._turns.take(until - self._loop.time(), f"waiting until one of the {self.core.in_flight_max} requests in flight is answered")
        try:
            declared = self.core.declared(method)
            tensors, more = declared.split({**(inputs or {}), **named})
            placed = [(name, await self._waited(self._placed(value, declared.dtypes.get(name)))) for name, value in tensors.items()]
            left = None if deadline is None else max(until - self._loop.time(), 0.001)
            request = self.core.submit(method, placed, {**more, **(parameters or {})}, left, retry_safe)
        except BaseException:
            self._turns.give()
            raise
        request.on_change = lambda: self._changed(request, changed)
        placed.clear()
        self._flush()
        sent(request)
        try:
            while True:
                while request.parts:
                    yield request.parts.popleft()
                if request.done:
                    break
                await changed.wait(until + GRACE_SECONDS - self._loop.time(),
                                   f"request {request.number} ({method}) of {self.core.model}: no answer in time")  # fmt: skip
        finally:
            if not request.done:
                self.core.abandon(request)
                self._flush()
        if request.error is not None:
            raise request.error.again()

    def _changed(self, request: Request, waiters: Waiters) -> None:
        waiters.wake()
        if request.done:
            self._turns.give()

    def _raise_if_ended(self) -> None:
        if self.core.ended is not None:
            raise self.core.ended.again()

    async def _until(self, condition: Callable[[], bool], seconds: float, attempt: str) -> None:
        end = self._loop.time() + seconds
        while not condition():
            self._raise_if_ended()
            await self._heard.wait(end - self._loop.time(), attempt)

    # --- the socket

    def _read(self) -> None:
        for _ in range(_BURST):
            if self.core.ended is not None:
                break
            try:
                receive(self._socket, self.core)
            except (BlockingIOError, InterruptedError):
                break
        if not self._opened and self.core.is_open:
            self._opened = True
            self._turns = Turns(self.core.in_flight_max)
        self._heard.wake()
        self._settle()
        if self.core.ended is not None:
            self._stop()

    def _settle_soon(self) -> None:
        """Any thread: called when a lent or withdrawn slab is no longer used."""
        try:
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._settle)
            else:
                self._loop.call_soon_threadsafe(self._settle)
        except RuntimeError:
            pass  # the loop is closed, and the channel with it

    def _settle(self) -> None:
        self.core.settle()
        self._flush()

    def _flush(self) -> None:
        outgoing = self.core.outgoing
        while outgoing and self.core.ended is None:
            try:
                send(self._socket, self.core)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                return  # the reader gets the earlier answers, then the end
        if bool(outgoing) != self._writing and self._socket.fileno() >= 0:
            self._writing = bool(outgoing)
            if self._writing:
                self._loop.add_writer(self._socket, self._flush)
            else:
                self._loop.remove_writer(self._socket)

    def _stop(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            if self._writing:
                self._loop.remove_writer(self._socket)
            self._socket.close()
        self._heard.wake()
        if self.core.ended is not None:
            self._turns.end(self.core.ended)
