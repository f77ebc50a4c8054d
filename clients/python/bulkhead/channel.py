"""A direct line to one worker, blocking. Used by one thread at a time; several channels may be used from several threads."""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from typing import Any, Iterator, Mapping, Sequence

from .errors import Error
from .layout import LIMITS
from .protocol import ChannelCore, Input, Reply, Request
from .tensors import Source, dtype_name

OPEN_SECONDS = 10.0  #: from hello to the last announced slab
SLAB_SECONDS = 10.0
SEND_SECONDS = 10.0  #: a full socket is waited for this long
GRACE_SECONDS = 2.0  #: beyond a request's own deadline, which the worker keeps
PATIENCE_SECONDS = 3600.0  #: where none was given

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child would keep the channel open; its memory is not there anyway (MADV_DONTFORK)."""
    for one in list(_sockets):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


def receive(sock: socket.socket, core: ChannelCore) -> None:
    """One packet into the core. Raises BlockingIOError when there is none."""
    try:
        data, fds, flags, _ = socket.recv_fds(sock, LIMITS["packet_bytes_max"], 4)
    except (BlockingIOError, InterruptedError):
        raise
    except OSError as error:
        # Reset once, when the dead peer had left packets of ours unread: what it had sent is still there.
        if not isinstance(error, ConnectionResetError):
            return core.end(Error("worker_lost", f"reading the channel: {error.strerror}"))
        return None
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        return core.end(Error("resources_exhausted", "receiving a slab: this process has no free descriptor",
                              "close channels, or raise the limit on open files (ulimit -n)"))  # fmt: skip
    return core.receive(data, fds) if data else core.end_of_file()


def split_arguments(core: ChannelCore, method: str, named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and parameters, by what the method declares."""
    declared = core.methods.get(method, {})
    parameters = {one["name"] for one in declared.get("parameters", ())}
    inputs = {name: value for name, value in named.items() if name not in parameters}
    return inputs, {name: value for name, value in named.items() if name in parameters}


def declared_dtype(core: ChannelCore, method: str, name: str) -> str | None:
    for one in core.methods.get(method, {}).get("inputs", ()):
        if one["name"] == name:
            return str(one["dtype"])
    return None


class Channel:
    """``Client.open`` makes one. A worker lends what it answers: arrays of a reply are views of its memory."""

    def __init__(self, sock: socket.socket, *, client: str = "bulkhead-py", deadline: float = OPEN_SECONDS) -> None:
        """Speaks the channel on a socket that came from elsewhere, and owns it."""
        sock.setblocking(False)
        self._socket = sock
        _sockets.add(sock)
        self.core = ChannelCore(client)
        until = time.monotonic() + deadline
        while not self.core.is_open:
            self._raise_if_ended()
            if not self._pump(until):
                self.close()
                raise Error("deadline_exceeded", "opening a channel: the worker has not said welcome in time",
                            "see `bulkhead ps`; `bulkhead restart` gives it a new process")  # fmt: skip

    @property
    def model(self) -> str:
        return self.core.model

    @property
    def generation(self) -> int:
        return self.core.generation

    @property
    def methods(self) -> dict[str, Any]:
        """As the worker describes them: ``{"forward": {"inputs": [{"name", "dtype", "shape"}], …}}``."""
        return self.core.methods

    def close(self) -> None:
        self.core.end(Error("cancelled", "the channel was closed by this client"))
        self._socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allocate(self, shape: Sequence[int], dtype: Any = "float32") -> Input:
        """Room for one tensor in the memory shared with the worker: fill it in place, nothing is copied."""
        name = dtype_name(dtype)
        until = time.monotonic() + SLAB_SECONDS
        while (found := self.core.try_allocate(shape, name)) is None:
            while self.core.growing:
                if not self._pump(until):
                    raise Error("deadline_exceeded", "waiting for one more input slab", "look at `bulkhead why` of this model")
        return found

    def place(self, value: Any, dtype: str | None = None) -> Input:
        """Copies a tensor of anybody's into the slab, once. One that lies there already stays where it is."""
        if isinstance(value, Input) and self.core.owns(value):
            return value
        source = Source.of(value, dtype)
        room = self.allocate(source.shape, source.dtype)
        if source.data.nbytes:
            room.data[:] = source.data
        return room

    def infer(self, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward", parameters: Mapping[str, Any] | None = None,
              deadline: float | None = None, **named: Any) -> Reply:  # fmt: skip
        """Sends one request and waits. Keyword arguments are inputs, or parameters where the method declares them.

        ``deadline`` in seconds; without one the model's own holds.
        """
        return self.wait(self.submit(inputs, method=method, parameters=parameters, deadline=deadline, **named))

    def submit(self, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward", parameters: Mapping[str, Any] | None = None,
               deadline: float | None = None, retry_safe: bool = False, **named: Any) -> Request:  # fmt: skip
        """As many may be in flight as ``core.in_flight_max`` says."""
        tensors, more = split_arguments(self.core, method, {**(inputs or {}), **named})
        placed = [(name, self.place(value, declared_dtype(self.core, method, name))) for name, value in tensors.items()]
        ms = 0 if deadline is None else max(1, int(deadline * 1000))
        request = self.core.submit(method, placed, {**more, **(parameters or {})}, ms, retry_safe)
        request.until = time.monotonic() + (PATIENCE_SECONDS if deadline is None else deadline) + GRACE_SECONDS
        self._flush(time.monotonic() + SEND_SECONDS)
        return request

    def wait(self, request: Request) -> Reply:
        reply = None
        for reply in self.stream(request):
            pass
        assert reply is not None  # a request ends with an answer or raises
        return reply

    def stream(self, request: Request) -> Iterator[Reply]:
        """The parts of a streamed answer as they come; the one answer of any other."""
        self.core.flush_releases()
        while True:
            while request.parts:
                yield request.parts.popleft()
            if request.done:
                break
            if not self._pump(request.until) and not request.done and not request.parts:
                self.core.abandon(request)
                self._flush(time.monotonic())
                raise Error("deadline_exceeded", f"request {request.number} ({request.method}) of {self.model}: no answer in time",
                            "allow more time")  # fmt: skip
        if request.error is not None:
            raise request.error

    def cancel(self, request: Request) -> None:
        """The request then ends with ``cancelled``, unless it was already finished."""
        self.core.cancel(request)
        self._flush(time.monotonic() + SEND_SECONDS)

    # --- the socket

    def _raise_if_ended(self) -> None:
        if self.core.ended is not None:
            self._socket.close()
            raise self.core.ended

    def _pump(self, until: float) -> bool:
        """Sends what waits and takes one packet. False when the time has come first."""
        self._flush(until)
        if self.core.ended is not None:
            return True
        try:
            receive(self._socket, self.core)
            return True
        except (BlockingIOError, InterruptedError):
            return self._poll(select.POLLIN, until)

    def _poll(self, events: int, until: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, events)
        left = until - time.monotonic()
        return left > 0 and bool(poll.poll(left * 1000 + 1))

    def _flush(self, until: float) -> None:
        """A worker may itself wait until its answers are read, so that is done meanwhile."""
        outgoing = self.core.outgoing
        while outgoing and self.core.ended is None:
            try:
                self._socket.send(outgoing[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                outgoing.popleft()
            except (BlockingIOError, InterruptedError):
                if not self._poll(select.POLLIN | select.POLLOUT, until):
                    return
                try:
                    receive(self._socket, self.core)
                except (BlockingIOError, InterruptedError):
                    pass
            except OSError:
                # What it had delivered is read up to the end of file, so that answers are not lost with it.
                while self.core.ended is None:
                    try:
                        receive(self._socket, self.core)
                    except (BlockingIOError, InterruptedError):
                        self.core.end_of_file()
