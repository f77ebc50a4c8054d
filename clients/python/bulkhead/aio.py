"""The same for asyncio: ``async with bulkhead.aio.connect() as b: out = await b.infer("minilm", input_ids=x)``."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, AsyncIterator, Mapping, Sequence

from .channel import GRACE_SECONDS, OPEN_SECONDS, PATIENCE_SECONDS, SLAB_SECONDS, declared_dtype, receive, split_arguments
from .control import Control, find_socket
from .errors import Error
from .protocol import ChannelCore, Input, Reply, Request
from .tensors import Source, dtype_name


class Channel:
    """One channel on the running loop; many tasks may share it."""

    def __init__(self, sock: socket.socket, client: str) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._writing = False
        self.core = ChannelCore(client)
        self._loop.add_reader(sock, self._read)
        self._flush()

    @classmethod
    async def open(cls, sock: socket.socket, *, client: str = "bulkhead-py", deadline: float = OPEN_SECONDS) -> Channel:
        channel = cls(sock, client)
        try:
            await channel._until(lambda: channel.core.is_open, deadline, "opening a channel: the worker has not said welcome in time")
        except BaseException:
            channel.close()
            raise
        return channel

    def close(self) -> None:
        self.core.end(Error("cancelled", "the channel was closed by this client"))
        self._stop()

    async def allocate(self, shape: Sequence[int], dtype: Any = "float32") -> Input:
        name = dtype_name(dtype)
        while (found := self.core.try_allocate(shape, name)) is None:
            self._flush()
            await self._until(lambda: not self.core.growing, SLAB_SECONDS, "waiting for one more input slab")
        return found

    async def place(self, value: Any, dtype: str | None = None) -> Input:
        if isinstance(value, Input) and self.core.owns(value):
            return value
        source = Source.of(value, dtype)
        room = await self.allocate(source.shape, source.dtype)
        if source.data.nbytes:
            room.data[:] = source.data
        return room

    async def infer(self, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward",
                    parameters: Mapping[str, Any] | None = None, deadline: float | None = None, **named: Any) -> Reply:  # fmt: skip
        """Cancelling the task cancels the request."""
        reply = None
        async for reply in self.stream(inputs, method=method, parameters=parameters, deadline=deadline, **named):
            pass
        assert reply is not None
        return reply

    async def stream(self, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward",
                     parameters: Mapping[str, Any] | None = None, deadline: float | None = None, **named: Any) -> AsyncIterator[Reply]:  # fmt: skip
        """The parts of a streamed answer as they come; the one answer of any other."""
        tensors, more = split_arguments(self.core, method, {**(inputs or {}), **named})
        placed = [(name, await self.place(value, declared_dtype(self.core, method, name))) for name, value in tensors.items()]
        ms = 0 if deadline is None else max(1, int(deadline * 1000))
        request = self.core.submit(method, placed, {**more, **(parameters or {})}, ms, False)
        placed.clear()
        self._flush()
        until = self._loop.time() + (PATIENCE_SECONDS if deadline is None else deadline) + GRACE_SECONDS
        try:
            while True:
                while request.parts:
                    yield request.parts.popleft()
                if request.done:
                    break
                await self._until(lambda: request.done or bool(request.parts), until - self._loop.time(),
                                  f"request {request.number} ({method}) of {self.core.model}: no answer in time")  # fmt: skip
        finally:
            if not request.done:
                self._abandon(request)
        if request.error is not None:
            raise request.error

    def _abandon(self, request: Request) -> None:
        self.core.abandon(request)
        self._flush()

    async def _until(self, condition: Any, seconds: float, attempt: str) -> None:
        end = self._loop.time() + seconds
        while not condition():
            if self.core.ended is not None:
                raise self.core.ended
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(end - self._loop.time(), 0))
            except asyncio.TimeoutError:
                raise Error("deadline_exceeded", attempt, "allow more time") from None

    def _read(self) -> None:
        for _ in range(32):  # then the others have their turn
            if self.core.ended is not None:
                break
            try:
                receive(self._socket, self.core)
            except (BlockingIOError, InterruptedError):
                break
        self._changed.set()
        self._flush()
        if self.core.ended is not None:
            self._stop()

    def _flush(self) -> None:
        outgoing = self.core.outgoing
        while outgoing and self.core.ended is None:
            try:
                self._socket.send(outgoing[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                outgoing.popleft()
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                return  # the reader sees the end, and the answers before it
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
        self._changed.set()


class Client:
    """Inference on the loop; control calls, which are rare, on a thread."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, name: str = "bulkhead-py") -> None:
        self.name = name
        self._path = find_socket(path)
        self._control: Control | None = None
        self._channels: dict[str, asyncio.Task[Channel]] = {}

    async def __aenter__(self) -> Client:
        self._control = await asyncio.to_thread(Control, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._channels.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()
            else:
                task.cancel()
        if self._control is not None:
            self._control.close()

    async def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """Any method of the control socket (docs/control.md)."""
        assert self._control is not None, "use `async with`"
        again = method in ("model.load", "model.unload")
        result, fds = await asyncio.to_thread(self._control.call, method, params, again=again)
        for fd in fds:
            os.close(fd)
        return result

    async def open(self, model: str) -> Channel:
        assert self._control is not None, "use `async with`"
        _, fds = await asyncio.to_thread(self._control.call, "channel.open", {"model": model, "client": self.name})
        return await Channel.open(socket.socket(fileno=fds[0]), client=self.name)

    async def infer(self, model: str, inputs: Mapping[str, Any] | None = None, /, *, retry_safe: bool = False, **arguments: Any) -> Reply:
        """As ``bulkhead.Client.infer``; concurrent calls for one model share its channel."""
        channel = await self._channel(model)
        try:
            return await channel.infer(inputs, **arguments)
        except Error as error:
            if error.code != "worker_lost" or not retry_safe:
                raise
        return await (await self._channel(model)).infer(inputs, **arguments)

    async def _channel(self, model: str) -> Channel:
        task = self._channels.get(model)
        if task is not None and task.done() and (task.cancelled() or task.exception() is not None or task.result().core.ended is not None):
            task = None
        if task is None:
            task = self._channels[model] = asyncio.ensure_future(self.open(model))
        return await asyncio.shield(task)


def connect(path: str | os.PathLike[str] | None = None, *, name: str = "bulkhead-py") -> Client:
    return Client(path, name=name)
