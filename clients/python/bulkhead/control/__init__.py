"""The control socket, blocking."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from typing import Any, Iterator

from ..descriptors import receive
from ..errors import Error, checked_deadline
from .lines import (
    ABSENCE_SECONDS, FDS_MAX, RECONNECT_PAUSE_MAX_SECONDS, RECONNECT_PAUSE_SECONDS, Call, ControlLines, Gone, Lost, NotSent,
    connecting_failed, find_socket, new_lines, nobody_answers, resumed,
)  # fmt: skip

__all__ = ["Control", "Notifications", "find_socket"]

_IDLE_MAX = 4  #: connections kept for later calls
CONNECT_SECONDS = 5  #: while the daemon's backlog is full


class _Connection:
    """Used by one thread at a time."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", CONNECT_SECONDS, 0))
        try:
            self._socket.connect(path)
        except BlockingIOError:
            self._socket.close()
            raise Error("deadline_exceeded", f"connecting to {path}: too many wait to be served", "look at `bulkhead info`") from None
        except OSError as error:
            self._socket.close()
            raise connecting_failed(path, error) from None
        self.lines = ControlLines()
        self.process = os.getpid()
        self.close = weakref.finalize(self, _close, self._socket, self.lines)

    def stop(self) -> None:
        """Called on another thread: the reader gets an end of file."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def send(self, line: bytes) -> None:
        try:
            self._socket.sendall(line)
        except OSError:
            raise NotSent from None

    def receive(self, until: float | None) -> dict[str, Any]:
        while (message := self.lines.next()) is None:
            if until is not None:
                left = until - time.monotonic()
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                if left <= 0 or not poll.poll(left * 1000 + 1):
                    raise Error("deadline_exceeded", "waiting for the daemon's answer", "allow more time")
            try:
                data, fds, _ = receive(self._socket, 65536, FDS_MAX)
            except OSError:
                raise Lost from None
            self.lines.feed(data, fds)
            if not data:
                raise Lost
        return message


def _close(sock: socket.socket, lines: ControlLines) -> None:
    lines.close()
    sock.close()


class Control:
    """Calls to the daemon, from any thread. Each call in flight has its own connection, so a load
    that takes minutes delays no other call. A connection ends with its supervisor; the call is then
    repeated to the next one, as docs/control.md allows."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._closed = False
        self._keep(_Connection(path))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def call(self, method: str, params: dict[str, Any] | None = None, *, deadline: float | None = None) -> tuple[Any, list[int]]:
        """Returns the result, and the descriptors that came with it, which the caller owns.
        ``deadline`` in seconds."""
        asked = Call(method, params)
        until = None if deadline is None else time.monotonic() + checked_deadline(deadline)
        connection = self._take()
        while True:
            try:
                return self._call_once(connection or self.reconnect(until), asked, until)
            except Lost as lost:
                if not isinstance(lost, NotSent):
                    asked.lost()
                connection = None
            except Gone as gone:
                return asked.without_daemon(gone), []

    def _call_once(self, connection: _Connection, asked: Call, until: float | None) -> tuple[Any, list[int]]:
        number, line = connection.lines.request(asked.method, asked.params())
        try:
            connection.send(line)
            while (message := connection.receive(until)).get("id", 0) != number:
                if "error" in message and message.get("id", 0) is None:
                    break  # an error for an unreadable request: ours, the only one
        except BaseException:  # the next call would take a late answer for its own
            connection.close()
            raise
        try:
            return connection.lines.answer(asked.method, message)
        finally:
            self._keep(connection)

    def _take(self) -> _Connection | None:
        with self._lock:
            if self._closed:
                raise Error("not_running", "using a client after it was closed", "connect again")
            while self._idle:
                connection = self._idle.pop()
                if connection.process == os.getpid():
                    return connection
                connection.close()  # the parent's: a forked child uses its own
        return None

    def _keep(self, connection: _Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def reconnect(self, until: float | None) -> _Connection:
        """Connects until a supervisor answers. A keeper alone accepts connections too: they wait
        in its backlog."""
        start = time.monotonic()
        patience = start + ABSENCE_SECONDS if until is None else min(until, start + ABSENCE_SECONDS)
        pause = RECONNECT_PAUSE_SECONDS
        while True:
            connection = _Connection(self.path)
            try:
                _, line = connection.lines.request("daemon.ping", {})
                connection.send(line)
                connection.lines.answer("daemon.ping", connection.receive(patience))
                return connection
            except Lost:
                connection.close()
            except Error as error:
                connection.close()
                if error.code == "deadline_exceeded":
                    raise nobody_answers(start) from None
                raise
            if time.monotonic() + pause >= patience:
                raise nobody_answers(start)
            time.sleep(pause)
            pause = min(2 * pause, RECONNECT_PAUSE_MAX_SECONDS)


class Notifications:
    """The messages of a subscription, on a separate connection: an endless iterator until
    ``close()``, which any thread may call. The constructor subscribes.

    Nothing is read ahead. For a slow reader the daemon keeps 1 MiB, then ends the connection. After
    that, and after a supervisor was replaced, this subscribes again. Missed events are not
    repeated; ``{"event": "resubscribed"}`` tells that some may have been missed. The daemon repeats
    log lines that it still has; duplicates are dropped here.
    """

    def __init__(self, control: Control, method: str, params: dict[str, Any]) -> None:
        self._control, self._method, self._params = control, method, params
        self._waiting: deque[dict[str, Any]] = deque()
        self._last: dict[str, Any] | None = None
        self._closed = False
        self._reading = threading.Lock()
        self._connection = _Connection(control.path)
        try:
            self._subscribe(params)
        except Lost:
            self._resume()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Ends the iteration, wherever it waits."""
        self._closed = True
        self._connection.stop()
        if self._reading.acquire(blocking=False):  # else the reader closes it
            self._connection.close()
            self._reading.release()

    def __enter__(self) -> Notifications:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        with self._reading:
            return self._next()

    def _next(self) -> dict[str, Any]:
        while not self._waiting:
            if self._closed:
                self._connection.close()
                raise StopIteration
            try:
                self._note(self._connection.receive(None))
            except Lost:
                self._resume()
            except BaseException:
                self._closed = True
                self._connection.close()
                raise
        self._last = self._waiting.popleft()
        return self._last

    def _note(self, message: dict[str, Any]) -> None:
        if "method" in message:
            self._waiting.append(message.get("params", {}))

    def _resume(self) -> None:
        while not self._closed:
            self._connection.close()
            self._connection = self._control.reconnect(None)
            try:
                self._subscribe(resumed(self._params))
            except Lost:
                continue
            if self._method == "events.subscribe":
                self._waiting.appendleft({"event": "resubscribed"})
            return

    def _subscribe(self, params: dict[str, Any]) -> None:
        number, line = self._connection.lines.request(self._method, params)
        self._connection.send(line)
        while (message := self._connection.receive(time.monotonic() + ABSENCE_SECONDS)).get("id", 0) != number:
            self._note(message)
        result, _ = self._connection.lines.answer(self._method, message)
        self._waiting.extendleft(reversed(new_lines(result.get("lines", ()), self._last)))
