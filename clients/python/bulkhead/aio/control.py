"""The control socket on an event loop."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from typing import Any, AsyncIterator

from ..control.lines import (
    ABSENCE_SECONDS, FDS_MAX, RECONNECT_PAUSE_MAX_SECONDS, RECONNECT_PAUSE_SECONDS, Call, ControlLines, Gone, Lost, NotSent,
    connecting_failed, new_lines, nobody_answers, resumed,
)  # fmt: skip
from ..descriptors import receive
from ..errors import Error

Answer = tuple[Any, list[int]]


async def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    until = time.monotonic() + ABSENCE_SECONDS
    try:
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:  # the daemon's backlog is full
                if time.monotonic() >= until:
                    raise Error("deadline_exceeded", f"connecting to {path}: too many wait to be served") from None
                await asyncio.sleep(RECONNECT_PAUSE_SECONDS)
            except OSError as error:
                raise connecting_failed(path, error) from None
    except BaseException:
        sock.close()
        raise


class _Connection:
    """Any number of calls, identified by their ids, and notifications. Reads no notification before
    a consumer takes it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._lines = ControlLines()
        self._asked: dict[int, tuple[str, asyncio.Future[Answer]]] = {}
        self._outgoing = bytearray()
        self.notified: deque[dict[str, Any]] = deque()
        self._waits: asyncio.Future[None] | None = None
        self.ended = False
        self._why: BaseException = Lost()
        self._loop.add_reader(sock, self._read)

    def close(self, why: BaseException | None = None) -> None:
        if self.ended:
            return
        self.ended = True
        self._why = why or self._why
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._lines.close()
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(self._why)
        self._asked.clear()
        self._wake()

    async def ask(self, method: str, params: dict[str, Any]) -> Answer:
        if self.ended:
            raise NotSent
        number, line = self._lines.request(method, params)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._asked[number] = method, answer
        self._loop.add_reader(self._socket, self._read)
        self._outgoing += line
        self._write()
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                for fd in answer.result()[1]:  # it arrived just before
                    os.close(fd)
            raise

    async def notification(self) -> dict[str, Any]:
        while not self.notified:
            if self.ended:
                raise self._why
            self._loop.add_reader(self._socket, self._read)
            self._waits = self._loop.create_future()
            await self._waits
        return self.notified.popleft()

    def _wake(self) -> None:
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)

    def _write(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing, socket.MSG_NOSIGNAL)]
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            return self.close()
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data, fds, _ = receive(self._socket, 65536, FDS_MAX)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            return self.close()
        self._lines.feed(data, fds)
        if not data:
            return self.close()
        try:
            while not self.ended and (message := self._lines.next()) is not None:
                self._take(message)
        except Error as error:
            return self.close(error)
        if self.notified:
            self._wake()
            if not self._asked and not self.ended:
                self._loop.remove_reader(self._socket)

    def _take(self, message: dict[str, Any]) -> None:
        if "method" in message:
            self.notified.append(message.get("params", {}))
            return
        asked = self._asked.pop(message.get("id") or 0, None)
        if asked is None:
            # About the connection as a whole.
            if message.get("id", 0) is None and "error" in message:
                self._lines.answer("a request", message)
            return
        method, answer = asked
        try:
            result = self._lines.answer(method, message)
        except Error as error:
            if not answer.done():
                answer.set_exception(error)
            return
        if answer.done():  # its caller no longer waits
            for fd in result[1]:
                os.close(fd)
        else:
            answer.set_result(result)


class Control:
    """As ``bulkhead.control.Control``, with one connection for all calls."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def open(self) -> None:
        self._connection = _Connection(await _connect(self.path))

    def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.close(Error("cancelled", "the client was closed"))

    async def call(self, method: str, params: dict[str, Any] | None = None) -> Answer:
        """Returns the result, and the descriptors that came with it, which the caller owns."""
        asked = Call(method, params)
        while True:
            try:
                connection = await self._connected()
                return await connection.ask(method, asked.params())
            except Lost as lost:
                if not isinstance(lost, NotSent):
                    asked.lost()
            except Gone as gone:
                return asked.without_daemon(gone), []

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._closed:
                raise Error("not_running", "using a client after it was closed", "connect again")
            if self._connection is None or self._connection.ended:
                self._connection = await reconnect(self.path)
            return self._connection


async def reconnect(path: str) -> _Connection:
    """Connects until a supervisor answers. A keeper alone accepts connections too: they wait
    in its backlog."""
    start = time.monotonic()
    pause = RECONNECT_PAUSE_SECONDS
    while time.monotonic() < start + ABSENCE_SECONDS:
        connection = _Connection(await _connect(path))
        try:
            await asyncio.wait_for(connection.ask("daemon.ping", {}), start + ABSENCE_SECONDS - time.monotonic())
            return connection
        except Lost:
            connection.close()
        except asyncio.TimeoutError:
            connection.close()
            break
        except BaseException:
            connection.close()
            raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, RECONNECT_PAUSE_MAX_SECONDS)
    raise nobody_answers(start)


class Notifications(AsyncIterator[dict[str, Any]]):
    """As ``bulkhead.Notifications``: a subscription's messages, without end. Reads no message
    before the iterator asks for it."""

    def __init__(self, path: str, method: str, params: dict[str, Any]) -> None:
        self._path, self._method, self._params = path, method, params
        self._last: dict[str, Any] | None = None
        self._connection: _Connection | None = None

    @classmethod
    async def open(cls, path: str, method: str, params: dict[str, Any]) -> Notifications:
        """Subscribes before it returns."""
        self = cls(path, method, params)
        try:
            self._connection = await self._subscribe(_Connection(await _connect(path)), params)
        except Lost:
            await self._resume()
        return self

    async def aclose(self) -> None:
        """Ends the subscription."""
        if self._connection is not None:
            self._connection.close(StopAsyncIteration())
            self._connection = None

    async def __aenter__(self) -> Notifications:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __anext__(self) -> dict[str, Any]:
        while self._connection is not None:
            try:
                self._last = await self._connection.notification()
                return self._last
            except Lost:
                await self._resume()
        raise StopAsyncIteration

    async def _resume(self) -> None:
        await self.aclose()
        while self._connection is None:
            try:
                self._connection = await self._subscribe(await reconnect(self._path), resumed(self._params))
            except Lost:
                continue
            if self._method == "events.subscribe":
                self._connection.notified.appendleft({"event": "resubscribed"})

    async def _subscribe(self, connection: _Connection, params: dict[str, Any]) -> _Connection:
        try:
            result, _ = await asyncio.wait_for(connection.ask(self._method, params), ABSENCE_SECONDS)
        except BaseException:
            connection.close()
            raise
        connection.notified.extendleft(reversed(new_lines(result.get("lines", ()), self._last)))
        return connection
