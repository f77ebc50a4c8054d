"""A SOCK_SEQPACKET socket on the event loop: nothing blocks, and unread packets wait in a
bounded outbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from typing import Callable, Sequence

from ..descriptors import receive

OUTBOX_MAX = 256  #: packets queued for one peer, beyond its socket's buffer
PACKETS_PER_TURN = 32  #: of one socket, before other sockets
PACKET_BYTES_MAX = 65536

YES, QUEUED, FULL, NOT_TAKEN, CLOSED = "yes", "queued", "full", "not_taken", "closed"


class PacketStream:
    """Owns the socket. Used on the loop's thread, except ``send_direct``; ``lock`` is held while a
    packet is sent or the socket is closed.

    ``on_packet(data, fds, fds_lost)`` takes over the descriptors; ``on_lost(reason)`` is called
    once; ``on_flushed()`` when the socket has room again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, fds_max: int,
                 on_packet: Callable[[bytes, list[int], bool], None], on_lost: Callable[[str], None],
                 on_flushed: Callable[[], None] = lambda: None) -> None:  # fmt: skip
        sock.setblocking(False)
        self._loop, self._socket, self._fds_max = loop, sock, fds_max
        self._on_packet, self._on_lost, self._on_flushed = on_packet, on_lost, on_flushed
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._awaits_room = False
        self.lock = threading.RLock()
        self.is_open = True
        self.ignored_frames = 0  #: empty packets received
        loop.add_reader(sock.fileno(), self._read)

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    @property
    def outbox_empty(self) -> bool:
        return not self._outbox

    def send(self, data: bytes, fds: Sequence[int] = (), reserve: int = 0) -> str:
        """Sends at once or queues; keep ``fds`` open until the outbox is empty. ``reserve``:
        packets allowed beyond the bound."""
        with self.lock:
            if not self.is_open:
                return CLOSED
            if not self._outbox:
                sent = self._try(data, fds)
                if sent != QUEUED:
                    return sent
            elif len(self._outbox) >= OUTBOX_MAX + reserve:
                return FULL
            self._outbox.append((data, tuple(fds)))
        self._await_room()
        return QUEUED

    def send_direct(self, data: bytes) -> bool:
        """Any thread: sends at once if nothing waits and the peer reads, else not at all."""
        with self.lock:
            return self.is_open and not self._outbox and self._poll(select.POLLOUT, 0) and self._try(data, ()) == YES

    def send_now(self, data: bytes, fds: Sequence[int]) -> str:
        """Sends at once or not at all; after ``queued``, try again on ``on_flushed``."""
        if not self.is_open:
            return CLOSED
        sent = self._try(data, fds) if not self._outbox else QUEUED
        if sent == QUEUED:
            self._await_room()
        return sent

    def has_room(self) -> bool:
        """Whether the peer reads. If not, ``on_flushed`` is called when it does."""
        if not self.is_open:
            return False
        if not self._outbox and self._poll(select.POLLOUT, 0):
            return True
        self._await_room()
        return False

    def flush_blocking(self, seconds: float) -> None:
        """Blocks; only for the last packets before the process ends."""
        until = time.monotonic() + seconds
        while self.is_open and self._outbox:
            if not self._poll(select.POLLOUT, until - time.monotonic()):
                return
            self._flush()

    def close(self) -> None:
        """Closes; the peer can still read what was sent. Unread packets are dropped first:
        closing a socket with unread data resets the connection, and the peer would see that
        before its answers."""
        with self.lock:
            if not self.is_open:
                return
            self.is_open = False
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RD)
                while self._socket.recv(64):
                    pass
            self._socket.close()
            self._outbox.clear()

    def _poll(self, events: int, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, events)
        return seconds >= 0 and bool(poll.poll(seconds * 1000))

    def _try(self, data: bytes, fds: Sequence[int]) -> str:
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        try:
            if fds:
                socket.send_fds(self._socket, [data], list(fds), flags)
            else:
                self._socket.send(data, flags)
        except (BlockingIOError, InterruptedError):
            return QUEUED
        except (BrokenPipeError, ConnectionError) as error:
            self._loop.call_soon_threadsafe(self._lose, error.strerror or str(error))
            return CLOSED
        except OSError:
            return NOT_TAKEN
        return YES

    def _await_room(self) -> None:
        if not self._awaits_room:
            self._awaits_room = True
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def _writable(self) -> None:
        if self._flush() and self.is_open:
            self._awaits_room = False
            self._loop.remove_writer(self._socket.fileno())
            self._on_flushed()

    def _flush(self) -> bool:
        with self.lock:
            while self._outbox and self.is_open:
                if self._try(*self._outbox[0]) == QUEUED:
                    return False
                self._outbox.popleft()
            return True

    def _read(self) -> None:
        for _ in range(PACKETS_PER_TURN):
            if not self.is_open:
                return
            try:
                data, fds, flags = receive(self._socket, PACKET_BYTES_MAX, self._fds_max)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:
                continue  # once, if the dead peer left packets unread; what it sent is still there
            except OSError as error:
                return self._lose(error.strerror or str(error))
            if not data:
                for fd in fds:
                    os.close(fd)
                if self._poll(select.POLLRDHUP, 0):
                    return self._lose("the peer has closed its end")
                self.ignored_frames += 1
                continue
            if flags & socket.MSG_TRUNC:
                data += b"\0"  # longer than any message: its size contradicts its header
            self._on_packet(data, fds, bool(flags & socket.MSG_CTRUNC))

    def _lose(self, reason: str) -> None:
        if self.is_open:
            self.close()
            self._on_lost(reason)
