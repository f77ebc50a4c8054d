"""The control socket without I/O: JSON-RPC 2.0, one object per line, with descriptors.
docs/control.md describes it."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Sequence

from ..errors import Error, broken

REQUEST_BYTES_MAX = 64 * 1024
ANSWER_BYTES_MAX = 1 << 20
FDS_MAX = 16  #: in one recvmsg
#: How long a dead supervisor may take to be replaced; the keeper holds the socket meanwhile.
ABSENCE_SECONDS = 30.0
#: Pause between two connections that ended without an answer; doubled each time, up to
# the second value.
RECONNECT_PAUSE_SECONDS, RECONNECT_PAUSE_MAX_SECONDS = 0.01, 0.5

#: Lines requested when the connection of a followed log has ended.
LOG_LINES = 1000

#: By method: what to do with a call that was lost with its supervisor.
_REPEAT: dict[str, str] = json.loads((Path(__file__).parent.parent / "control.json").read_text("utf-8"))["methods"]


class Lost(Exception):
    """The connection ended before the answer arrived."""


class NotSent(Lost):
    """The connection ended before the whole request was sent: the daemon did not read it."""


class Gone(Error):
    """No process listens: no daemon was started, or it has ended."""


def find_socket(given: str | os.PathLike[str] | None = None) -> str:
    """``given``, else $BULKHEAD_SOCKET, $XDG_RUNTIME_DIR/bulkhead/control.sock,
    /run/bulkhead/control.sock."""
    if given:
        return os.fspath(given)
    if named := os.environ.get("BULKHEAD_SOCKET"):
        return named
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(runtime, "bulkhead", "control.sock")
    return "/run/bulkhead/control.sock"


def connecting_failed(path: str, error: OSError) -> Error:
    if isinstance(error, PermissionError):
        return Error("not_permitted", f"connecting to {path}", "run as the daemon's user")
    return Gone("not_running", f"connecting to {path}: {error.strerror or error}", "start one: bulkhead up FLEET.yaml")


def nobody_answers(since: float) -> Error:
    return Error("deadline_exceeded", f"waiting for a supervisor: none has answered for {time.monotonic() - since:.1f} s",
                 "the keeper starts one: see logs/ beside the control socket. Workers run on meanwhile")  # fmt: skip


class Call:
    """One call, which may have to be repeated on the next connection."""

    def __init__(self, method: str, params: dict[str, Any] | None) -> None:
        self.method = method
        self.was_sent = False
        self._params = dict(params or {})
        self._asked = time.monotonic()

    def params(self) -> dict[str, Any]:
        """The parameters to send now: the deadline is what is left of it, and a load or unload
        tells that it is repeated."""
        params = dict(self._params)
        if "deadline_ms" in params:
            params["deadline_ms"] = max(1, params["deadline_ms"] - int((time.monotonic() - self._asked) * 1000))
        if self.was_sent and _REPEAT.get(self.method) == "marked":
            params["again"] = True
        return params

    def lost(self) -> None:
        """Notes that the connection ended after the call was sent. Raises if the call must
        not be repeated."""
        self.was_sent = True
        if _REPEAT.get(self.method, "never") == "never":
            raise Error("not_running", f"{self.method}: the supervisor ended before it answered; whether it was done is not known",
                        "look at ps() and info(), then ask again")  # fmt: skip

    def without_daemon(self, gone: Gone) -> Any:
        """The result of a stop that was under way; otherwise raises the error."""
        if self.method == "daemon.stop" and self.was_sent:
            return {"receipts": [], "receipts_lost": True}
        raise gone


class ControlLines:
    """What one connection has received: messages in order, and the descriptors that
    answers announce."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._fds: deque[int] = deque()
        self._last_id = 0

    def request(self, method: str, params: dict[str, Any]) -> tuple[int, bytes]:
        self._last_id += 1
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": self._last_id, "method": method}
        if params:
            message["params"] = params
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > REQUEST_BYTES_MAX:
            raise Error("input_invalid", f"{method}: a request of {len(line)} bytes", f"send at most {REQUEST_BYTES_MAX}")
        return self._last_id, line

    def feed(self, data: bytes, fds: Sequence[int]) -> None:
        self._buffer += data
        self._fds.extend(fds)

    def next(self) -> dict[str, Any] | None:
        """The next complete message. Raises ``protocol_violation``, after which the
        connection is useless."""
        end = self._buffer.find(b"\n", self._scanned)
        if end < 0:
            self._scanned = len(self._buffer)
            if len(self._buffer) > ANSWER_BYTES_MAX:
                raise broken("an answer of more than 1 MiB")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._scanned = 0
        try:
            message = json.loads(line)
        except ValueError:
            raise broken("an answer that is not JSON") from None
        if not isinstance(message, dict):
            raise broken("an answer that is not a JSON object")
        return message

    def answer(self, method: str, message: dict[str, Any]) -> tuple[Any, list[int]]:
        """Returns the result, and the descriptors that came with it, which the caller owns. Raises
        the daemon's error."""
        if "error" in message:
            error = message["error"] if isinstance(message["error"], dict) else {}
            data = error.get("data") or {}
            raise Error(str(data.get("code", "internal")), str(data.get("attempt", error.get("message", ""))), str(data.get("remedy", "")))
        result = message.get("result")
        count = result.get("fds", 0) if isinstance(result, dict) else 0
        if count > len(self._fds):
            raise Error("resources_exhausted", f"{method}: {count - len(self._fds)} descriptors were lost on the way",
                        "raise the limit on open files (ulimit -n)")  # fmt: skip
        return result, [self._fds.popleft() for _ in range(count)]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())


def new_lines(lines: Sequence[dict[str, Any]], last: dict[str, Any] | None) -> Sequence[dict[str, Any]]:
    """Of the lines that a log repeats after a reconnection, those after the last one seen."""

    def key(line: dict[str, Any]) -> list[Any]:
        return [line.get(member) for member in ("time", "replica", "generation", "stream", "text")]

    if last is not None:
        for at in range(len(lines), 0, -1):
            if key(lines[at - 1]) == key(last):
                return lines[at:]
    return lines


def resumed(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters to renew a subscription: asks for enough lines to find the last one seen."""
    return {**params, "lines": LOG_LINES} if "lines" in params else params
