"""The worker's end of the link to the daemon (``docs/worker-link.md``).

Without a supervisor nothing reads the other end. So messages that the next hello repeats are sent
only while the socket has room; messages that must arrive wait in order, bounded.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Callable

from ..errors import Error
from . import link_messages
from .log import say
from .packets import FULL, QUEUED, NOT_TAKEN, PacketStream

FLUSH_SECONDS = 1.0
TEXT_BYTES_MAX = 8 * 1024  #: of one error in a packet
_DROPPED, _KEPT = link_messages.unread("dropped"), link_messages.unread("kept")


class WorkerLink:
    """Used on the loop's thread. ``hello(with_descriptors)`` returns a hello's members
    and descriptors."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, *,
                 on_message: Callable[[str, dict[str, Any], list[int]], None], on_lost: Callable[[], None],
                 hello: Callable[[bool], tuple[dict[str, Any], list[int]]], caught_up: Callable[[], None]) -> None:  # fmt: skip
        self._on_message, self._hello, self._caught_up = on_message, hello, caught_up
        self._stream = PacketStream(loop, sock, 4, self._on_packet, lambda _: on_lost(), self._on_flushed)
        self._hello_owed = self._dropped = False

    def send(self, kind: str, **members: Any) -> bool:
        """False if the message was dropped."""
        if kind in _DROPPED and not self._stream.has_room():
            return self._drop(kind)
        sent = self._stream.send(link_messages.encode(kind, **members), reserve=len(_KEPT) if kind in _KEPT else 0)
        return self._drop(kind) if sent == FULL else True

    def say_hello(self) -> None:
        """Sends a hello, after all waiting messages, once the peer reads."""
        self._hello_owed = True
        self._say_owed_hello()

    def flush(self) -> None:
        """Blocks, with a bound, before the process ends."""
        self._stream.flush_blocking(FLUSH_SECONDS)

    def _say_owed_hello(self) -> None:
        for with_descriptors in (True, False):
            members, fds = self._hello(with_descriptors)
            sent = self._stream.send_now(link_messages.encode("hello", **members), fds)
            if sent == QUEUED:
                return  # made again when the peer reads
            if sent != NOT_TAKEN:
                break
            say("warn", f"the kernel refuses a hello with {len(fds)} descriptors")
        self._hello_owed = self._dropped = False

    def _on_flushed(self) -> None:
        if self._hello_owed:
            self._say_owed_hello()
        elif self._dropped:
            self._dropped = False
            self._caught_up()

    def _drop(self, kind: str) -> bool:
        if not self._dropped:
            say("info", f'the daemon does not read the worker link: from "{kind}" on, messages that the next hello repeats are dropped')
        self._dropped = True
        return False

    def _on_packet(self, data: bytes, fds: list[int], fds_lost: bool) -> None:
        try:
            kind, members = link_messages.parse(data)
            if len(fds) != link_messages.descriptors(kind) and not fds_lost:
                raise Error("protocol_violation", f"{kind} with {len(fds)} descriptors")
        except Error as error:
            say("warn", f"ignored: {error}")
            for fd in fds:
                os.close(fd)
            return
        self._on_message(kind, members, fds)


def printable(text: str) -> str:
    """Returns printable text, truncated to fit a packet of the link."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text).encode("utf-8", "replace")[:TEXT_BYTES_MAX].decode("utf-8", "ignore")
