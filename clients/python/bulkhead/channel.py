"""A direct, blocking connection to one worker. One thread at a time; different channels may run on
different threads."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

from . import descriptors
from .errors import Error, checked_deadline
from .layout import LIMITS
from .placing import PlacingChannel, Steps, T
from .protocol import ChannelCore, Reply, Request
from .shared_tensors import Input

if TYPE_CHECKING:
    from .cuda import Events

OPEN_SECONDS = 10.0  #: from hello to the last announced slab
SLAB_SECONDS = 30.0  #: for one more slab; the worker prefaults at least 0.5 GiB a second
SEND_SECONDS = 10.0  #: maximum wait for room in the socket
GRACE_SECONDS = 2.0  #: after a request's own deadline, which the worker enforces
PATIENCE_SECONDS = 3600.0  #: if none was given
# Plain numbers: computing with the enumerations of `socket` makes an object each time.
_AT_ONCE, _CUT = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL), int(socket.MSG_CTRUNC)
BURST = 512  #: packets read in one turn; more than a worker queues for a client

_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_in_child() -> None:
    """Closes the channels in a forked child, which would keep them open; their memory is not mapped
    there (MADV_DONTFORK)."""
    for one in list(_channels):
        one._forked()


os.register_at_fork(after_in_child=_close_in_child)


def receive(sock: socket.socket, core: ChannelCore) -> None:
    """Receives one packet into the core. Raises BlockingIOError if there is none."""
    try:
        data, fds, flags = descriptors.receive(sock, LIMITS["packet_bytes_max"], 4)
    except (BlockingIOError, InterruptedError):
        raise
    except ConnectionResetError:
        # Raised once if the dead peer had left packets of ours unread; what it sent can
        # still be read.
        return None
    except OSError as error:
        return core.end(Error("worker_lost", f"reading the channel: {error.strerror}"))
    if flags & _CUT:
        for fd in fds:
            os.close(fd)
        return core.end(Error("resources_exhausted", "receiving a slab: this process has no free descriptor",
                              "close channels, or raise the limit on open files (ulimit -n)"))  # fmt: skip
    return core.receive(data, fds) if data else core.end_of_file()


def send(sock: socket.socket, core: ChannelCore) -> None:
    """Sends the first waiting packet. Raises BlockingIOError if there is no room."""
    data, mapping, messages = core.next_packet()
    if mapping is None:
        sock.send(data, _AT_ONCE)
    else:
        socket.send_fds(sock, [data], [mapping.fd], _AT_ONCE)
    for _ in range(messages):
        core.outgoing.popleft()


class Channel(PlacingChannel):
    """Made by ``Client.open``. Arrays of a reply are views of memory that the worker lends."""

    def __init__(self, sock: socket.socket, *, client: str = "bulkhead-py", deadline: float = OPEN_SECONDS, stateful: bool = True,
                 events: Events | None = None) -> None:  # fmt: skip
        """Opens the channel on a socket from another source, and owns it. ``stateful``: requests
        depend on earlier ones on the same channel. ``events``: its part in a GPU."""
        until = time.monotonic() + checked_deadline(deadline, OPEN_SECONDS)
        sock.setblocking(False)
        self._socket = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._sending = threading.Lock()  # a dropped answer may be cancelled on any thread
        self.stateful = stateful
        self.core = ChannelCore(client, events=events)
        _channels.add(self)
        weakref.finalize(self, sock.close).atexit = False
        while not self.core.is_open:
            self._raise_if_ended()
            if not self._pump(until):
                self.close()
                raise Error("deadline_exceeded", "opening a channel: the worker has not said welcome in time",
                            "see `bulkhead ps`; `bulkhead restart` gives it a new process")  # fmt: skip

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent: the worker has neither ended nor announced its end, as
        far as received."""
        self.settle()
        return self.core.accepts

    def close(self) -> None:
        """Ends the channel; the worker drops waiting requests. Outputs stay readable."""
        self.core.end(Error("cancelled", "the channel was closed by this client"))
        self._socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allocate(self, shape: Sequence[int], dtype: Any = "float32", *, on_gpu: bool = False) -> Input:
        """Allocates one tensor in the memory shared with the worker; fill it in place,
        nothing is copied.

        ``on_gpu``: in memory of the channel's GPU; write it on the channel's stream.
        """
        self._raise_if_ended()
        return self._waited(self._allocated(shape, dtype, on_gpu))

    def results_on_gpu(self, size_bytes: int) -> bool:
        """Places later results in GPU memory, in a slab of ``size_bytes`` at first. False if this
        worker shares no GPU: results then stay in CPU memory."""
        return self._waited(self._results_placed(size_bytes))

    def _waited(self, steps: Steps[T]) -> T:
        try:
            while True:
                condition, attempt = next(steps)
                until = time.monotonic() + SLAB_SECONDS
                while not condition() and self.core.ended is None:
                    if not self._pump(until):
                        raise Error("deadline_exceeded", attempt, "look at `bulkhead why` of this model")
                self._raise_if_ended()
                self._flush(until)  # a slab that could not be mapped is returned
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def place(self, value: Any, dtype: str | None = None) -> Input:
        """Copies any library's tensor once into the memory shared with the worker, to be sent any
        number of times.

        ``dtype`` is for nested lists, which have none. A tensor on the channel's GPU is copied on
        that GPU, in stream order.
        """
        return self._waited(self._copied(value, dtype))[0]

    def infer(self, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward", parameters: Mapping[str, Any] | None = None,
              deadline: float | None = None, retry_safe: bool = False, **named: Any) -> Reply:  # fmt: skip
        """Sends one request and waits. Keyword arguments are inputs, or parameters where the method
        declares them.

        ``deadline`` in seconds; None means the model's own. ``retry_safe`` is passed to the worker;
        only ``Client.infer`` sends a request again.
        """
        return self.wait(self.submit(inputs, method=method, parameters=parameters, deadline=deadline, retry_safe=retry_safe, **named))

    def submit(self, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward", parameters: Mapping[str, Any] | None = None,
               deadline: float | None = None, retry_safe: bool = False, **named: Any) -> Request:  # fmt: skip
        """Sends one request for ``wait`` or ``stream``. Raises ``queue_full`` if
        ``core.in_flight_max`` are in flight."""
        patience = checked_deadline(deadline, PATIENCE_SECONDS)
        self._take_what_came()
        self._raise_if_ended()
        declared = self.core.declared(method)
        tensors, more = declared.split({**inputs, **named} if inputs else named)
        own = self.core.slabs.own  # the fast path
        placed = [(name, own(value) or self._waited(self._placed(value, declared.dtypes.get(name)))) for name, value in tensors.items()]
        request = self.core.submit(method, placed, {**more, **parameters} if parameters else more, deadline, retry_safe)
        now = time.monotonic()
        request.until = now + patience + GRACE_SECONDS
        self._flush(now + SEND_SECONDS)
        return request

    def wait(self, request: Request) -> Reply:
        """Returns the answer; of a streamed one the last part."""
        reply = None
        try:
            while not request.done:
                self._await_part(request)
                while request.parts:
                    reply = request.parts.popleft()
        except BaseException:
            self._abandon(request)
            raise
        while request.parts:
            reply = request.parts.popleft()
        if request.error is not None:
            raise request.error.again()
        if reply is None:
            raise Error("input_invalid", f"waiting for request {request.number} ({request.method}): its answer was already taken",
                        "wait once for each request, and keep the reply")  # fmt: skip
        return reply

    def stream(self, request: Request) -> Parts:
        """Yields a streamed answer's parts as they arrive, or any other method's one answer.
        Cancelled if left early."""
        return Parts(self, request)

    def _await_part(self, request: Request) -> None:
        if not self._pump(request.until) and not request.done and not request.parts:
            raise Error("deadline_exceeded", f"request {request.number} ({request.method}) of {self.model}: no answer in time",
                        "allow more time")  # fmt: skip

    def _abandon(self, request: Request) -> None:
        """Any thread, at any point; never waits. Cancels the request, or leaves that to a send
        that is under way."""
        if request.done or request.abandoned:
            return
        self.core.abandon(request)
        if not self._sending.acquire(blocking=False):
            return
        try:
            while self.core.outgoing:
                send(self._socket, self.core)
        except (OSError, IndexError):
            pass  # full, or ended: the channel's next user does the rest
        finally:
            self._sending.release()

    def cancel(self, request: Request) -> None:
        """Cancels the request. It ends with ``cancelled`` unless it has finished."""
        self.core.cancel(request)
        self._flush(time.monotonic() + SEND_SECONDS)

    def settle(self) -> None:
        """Handles the worker's messages, and returns what is no longer referenced. Every
        request does this; call it if a channel rests for long, so that its worker and others
        can free memory."""
        self._take_what_came()
        self.core.settle()
        self._flush(time.monotonic() + SEND_SECONDS)

    # --- the socket

    def _raise_if_ended(self) -> None:
        if self.core.ended is not None:
            self._socket.close()
            raise self.core.ended.again()

    def _forked(self) -> None:
        self._sending = threading.Lock()  # another thread of the parent may hold the old one
        self.core.end(Error("worker_lost", "using a channel of the parent process after a fork", "open another one in the child"))
        self._socket.close()

    def _pump(self, until: float) -> bool:
        """Sends what waits and takes one packet. False if ``until`` passes first."""
        self._flush(until)
        if self.core.ended is not None:
            return True
        if not self._readable.poll(max((until - time.monotonic()) * 1000 + 1, 0)):
            return False
        self._receive_one()
        return True

    def _take_what_came(self) -> None:
        for _ in range(BURST):
            if self.core.ended is not None or not self._readable.poll(0):
                return
            self._receive_one()

    def _receive_one(self) -> None:
        try:
            receive(self._socket, self.core)
        except (BlockingIOError, InterruptedError):
            pass  # there was no packet after all

    def _wait_for_room(self, until: float) -> bool:
        """Waits for room, or for something to read."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        left = until - time.monotonic()
        return left > 0 and bool(poll.poll(left * 1000 + 1))

    def _flush(self, until: float) -> None:
        if self.core.outgoing:
            with self._sending:
                self._send_what_waits(until)

    def _send_what_waits(self, until: float) -> None:
        """Reads meanwhile, because a worker may itself be waiting until its answers are read."""
        outgoing = self.core.outgoing
        while outgoing and self.core.ended is None:
            try:
                send(self._socket, self.core)
            except (BlockingIOError, InterruptedError):
                if not self._wait_for_room(until):
                    return
                self._receive_one()
            except OSError:
                # Reads what it had sent, up to the end of file, so that no answer is lost.
                self._take_what_came()
                if self.core.ended is None:
                    self.core.end_of_file()


class Parts(Iterator[Reply]):
    """Made by ``Channel.stream``. Closing or dropping it before the end, even before the first
    part, cancels the request."""

    def __init__(self, channel: Channel, request: Request) -> None:
        self.channel = channel
        self.request = request
        self._over = False

    def __next__(self) -> Reply:
        request = self.request
        try:
            while not self._over:
                if request.parts:
                    return request.parts.popleft()
                if not request.done:
                    self.channel._await_part(request)
                    continue
                self._over = True
                if request.error is not None:
                    raise request.error.again()
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Stops the worker; received parts are dropped."""
        self._over = True
        self.channel._abandon(self.request)

    def __del__(self) -> None:
        self.close()
