"""The control socket: JSON-RPC 2.0, one object a line, descriptors beside it."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from typing import Any, Callable, Iterator

from .errors import Error

_LINE_MAX = 1 << 20
#: How long a supervisor may take to come back after it died; the keeper holds the socket meanwhile.
RECONNECT_SECONDS = 30.0

Notify = Callable[[str, "dict[str, Any]"], None]


def find_socket(given: str | os.PathLike[str] | None = None) -> str:
    """``given``, else $BULKHEAD_SOCKET, $XDG_RUNTIME_DIR/bulkhead/control.sock, /run/bulkhead/control.sock."""
    if given:
        return os.fspath(given)
    if named := os.environ.get("BULKHEAD_SOCKET"):
        return named
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(runtime, "bulkhead", "control.sock")
    return "/run/bulkhead/control.sock"


class _Lost(Exception):
    """The connection ended before the answer came."""


class Control:
    """One connection, made again when a supervisor was replaced under it. Any thread may call; calls take turns."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._fds: list[int] = []
        self._last_id = 0
        self._connect(time.monotonic() + RECONNECT_SECONDS)

    def close(self) -> None:
        self._drop()

    def call(self, method: str, params: dict[str, Any] | None = None, *, deadline: float | None = None, again: bool = False,
             notify: Notify | None = None) -> tuple[Any, list[int]]:  # fmt: skip
        """The result and the descriptors that came with it, which are the caller's then.

        A call whose connection ended before its answer is sent again to the next supervisor; ``again`` adds the parameter
        of that name then, for methods that have it.
        """
        with self._lock:
            until = None if deadline is None else time.monotonic() + deadline
            sent = dict(params or {})
            while True:
                try:
                    if self._socket is None:
                        self._connect(time.monotonic() + RECONNECT_SECONDS if until is None else until)
                    return self._call_once(method, sent, until, notify)
                except _Lost:
                    self._drop()
                    if method == "daemon.stop":
                        return {"receipts": []}, []
                    if again:
                        sent["again"] = True

    def notifications(self, subscribe: str, params: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Subscribes and yields what comes, until this connection is closed. Subscribes anew after a restart."""
        waiting: list[tuple[str, dict[str, Any]]] = []
        while True:
            self.call(subscribe, params, notify=lambda method, said: waiting.append((method, said)))
            try:
                while True:
                    while waiting:
                        yield waiting.pop(0)
                    message = self._read(None)
                    if "method" in message:
                        waiting.append((message["method"], message.get("params", {})))
            except _Lost:
                self._drop()

    def _connect(self, until: float) -> None:
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                sock.connect(self.path)
            except OSError as error:
                sock.close()
                if isinstance(error, PermissionError):
                    raise Error("not_permitted", f"connecting to {self.path}", "run as the daemon's user") from None
                raise Error("not_running", f"connecting to {self.path}: {error.strerror}",
                            "start one: bulkhead up FLEET.yaml") from None  # fmt: skip
            self._socket, self._buffer = sock, b""
            return

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _call_once(self, method: str, params: dict[str, Any], until: float | None, notify: Notify | None) -> tuple[Any, list[int]]:
        assert self._socket is not None
        self._last_id += 1
        line = json.dumps({"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}) + "\n"
        try:
            self._socket.sendall(line.encode())
        except OSError:
            raise _Lost from None
        while True:
            message = self._read(until)
            if message.get("id") != self._last_id:
                if notify is not None and "method" in message:
                    notify(message["method"], message.get("params", {}))
                continue
            if "error" in message:
                data = message["error"].get("data", {})
                raise Error(data.get("code", "internal"), data.get("attempt", message["error"].get("message", "")), data.get("remedy", ""))
            result = message["result"]
            count = result.get("fds", 0) if isinstance(result, dict) else 0
            if count > len(self._fds):
                raise Error("resources_exhausted", f"{method}: {count - len(self._fds)} descriptors were lost on the way",
                            "raise the limit on open files (ulimit -n)")  # fmt: skip
            fds, self._fds = self._fds[:count], self._fds[count:]
            return result, fds

    def _read(self, until: float | None) -> dict[str, Any]:
        sock = self._socket
        if sock is None:
            raise _Lost
        while b"\n" not in self._buffer:
            if until is not None:
                left = until - time.monotonic()
                poll = select.poll()
                poll.register(sock, select.POLLIN)
                if left <= 0 or not poll.poll(left * 1000 + 1):
                    self._drop()  # an answer that comes late would be taken for the next call's
                    raise Error("deadline_exceeded", "waiting for the daemon's answer", "allow more time")
            try:
                data, fds, _, _ = socket.recv_fds(sock, 65536, 16)
            except OSError:
                raise _Lost from None
            self._fds.extend(fds)
            if not data:
                raise _Lost
            self._buffer += data
            if len(self._buffer) > 2 * _LINE_MAX:
                raise Error("protocol_violation", "an answer of more than 1 MiB", "use a client and a daemon of matching releases")
        line, self._buffer = self._buffer.split(b"\n", 1)
        message = json.loads(line)
        if not isinstance(message, dict):
            raise Error("protocol_violation", "an answer that is no JSON object", "use a client and a daemon of matching releases")
        return message
