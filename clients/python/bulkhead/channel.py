"""A direct line to one worker, blocking. Used by one thread at a time; several channels may be used from several threads."""

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
SLAB_SECONDS = 30.0  #: for one more slab: the worker prefaults 0.5 GiB a second at worst
SEND_SECONDS = 10.0  #: a full socket is waited for this long
GRACE_SECONDS = 2.0  #: beyond a request's own deadline, which the worker keeps
PATIENCE_SECONDS = 3600.0  #: where none was given
# Plain numbers: what the enumerations of `socket` compute is an object each time.
_AT_ONCE, _CUT = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL), int(socket.MSG_CTRUNC)
BURST = 512  #: packets read at once, more than a worker keeps for a client

_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child would keep the channel open; its memory is not there anyway (MADV_DONTFORK)."""
    for one in list(_channels):
        one._forked()


os.register_at_fork(after_in_child=_close_in_child)


def receive(sock: socket.socket, core: ChannelCore) -> None:
    """One packet into the core. Raises BlockingIOError when there is none."""
    try:
        data, fds, flags = descriptors.receive(sock, LIMITS["packet_bytes_max"], 4)
    except (BlockingIOError, InterruptedError):
        raise
    except OSError as error:
        # Reset once, when the dead peer had left packets of ours unread: what it had sent is still there.
        if not isinstance(error, ConnectionResetError):
            return core.end(Error("worker_lost", f"reading the channel: {error.strerror}"))
        return None
    if flags & _CUT:
        for fd in fds:
            os.close(fd)
        return core.end(Error("resources_exhausted", "receiving a slab: this process has no free descriptor",
                              "close channels, or raise the limit on open files (ulimit -n)"))  # fmt: skip
    return core.receive(data, fds) if data else core.end_of_file()


def send(sock: socket.socket, core: ChannelCore) -> None:
    """The first packet of what waits. Raises BlockingIOError when there is no room."""
    data, mapping, messages = core.next_packet()
    if mapping is None:
        sock.send(data, _AT_ONCE)
    else:
        socket.send_fds(sock, [data], [mapping.fd], _AT_ONCE)
    for _ in range(messages):
        core.outgoing.popleft()


class Channel(PlacingChannel):
    """``Client.open`` makes one. A worker lends what it answers: arrays of a reply are views of its memory."""

    def __init__(self, sock: socket.socket, *, client: str = "bulkhead-py", deadline: float = OPEN_SECONDS, stateful: bool = True,
                 events: Events | None = None) -> None:  # fmt: skip
        """Speaks the channel on a socket that came from elsewhere, and owns it. ``stateful``: what requests mean depends on
        those before them, on this very channel. ``events``: its part in a GPU."""
        until = time.monotonic() + checked_deadline(deadline, OPEN_SECONDS)
        sock.setblocking(False)
        self._socket = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._sending = threading.Lock()  # a dropped answer is cancelled from wherever it was collected
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
        """Whether requests may be sent: the worker has neither ended nor said that it will, as far as was heard here."""
        self.settle()
        return self.core.accepts

    def close(self) -> None:
        """The worker drops what waits. Outputs stay readable."""
        self.core.end(Error("cancelled", "the channel was closed by this client"))
        self._socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allocate(self, shape: Sequence[int], dtype: Any = "float32", *, on_gpu: bool = False) -> Input:
        """Room for one tensor in the memory shared with the worker: fill it in place, nothing is copied.

        ``on_gpu``: in memory of the GPU that the channel was opened with; to be written on its stream.
        """
        self._raise_if_ended()
        return self._waited(self._allocated(shape, dtype, on_gpu))

    def results_on_gpu(self, size_bytes: int) -> bool:
        """From now on results lie in memory of the GPU, of which the worker makes so much at first. False, and results stay in
        CPU memory, where no GPU is shared with this worker."""
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
                self._flush(until)  # one that could not be mapped is returned
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def place(self, value: Any, dtype: str | None = None) -> Input:
        """Copies a tensor of anybody's into the memory shared with the worker, once, to be sent often.

        ``dtype`` is of nested lists, which have none of their own. What lies on the channel's GPU stays there, in the order of
        its stream.
        """
        return self._waited(self._copied(value, dtype))[0]

    def infer(self, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward", parameters: Mapping[str, Any] | None = None,
              deadline: float | None = None, retry_safe: bool = False, **named: Any) -> Reply:  # fmt: skip
        """Sends one request and waits. Keyword arguments are inputs, or parameters where the method declares them.

        ``deadline`` in seconds; without one the model's own holds. ``retry_safe`` is told to the worker; it is
        ``Client.infer`` that sends again.
        """
        return self.wait(self.submit(inputs, method=method, parameters=parameters, deadline=deadline, retry_safe=retry_safe, **named))

    def submit(self, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward", parameters: Mapping[str, Any] | None = None,
               deadline: float | None = None, retry_safe: bool = False, **named: Any) -> Request:  # fmt: skip
        """As many may be in flight as ``core.in_flight_max`` says; one more is ``queue_full``. Pass it to ``wait`` or ``stream``."""
        patience = checked_deadline(deadline, PATIENCE_SECONDS)
        self._take_what_came()
        self._raise_if_ended()
        declared = self.core.declared(method)
        tensors, more = declared.split({**inputs, **named} if inputs else named)
        own = self.core.slabs.own  # without the steps of placing
        placed = [(name, own(value) or self._waited(self._placed(value, declared.dtypes.get(name)))) for name, value in tensors.items()]
        request = self.core.submit(method, placed, {**more, **parameters} if parameters else more, deadline, retry_safe)
        now = time.monotonic()
        request.until = now + patience + GRACE_SECONDS
        self._flush(now + SEND_SECONDS)
        return request

    def wait(self, request: Request) -> Reply:
        """Its answer; of a streamed one the last part."""
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
        """The parts of a streamed answer as they come; the one answer of any other. Cancelled when left before its end."""
        return Parts(self, request)

    def _await_part(self, request: Request) -> None:
        if not self._pump(request.until) and not request.done and not request.parts:
            raise Error("deadline_exceeded", f"request {request.number} ({request.method}) of {self.model}: no answer in time",
                        "allow more time")  # fmt: skip

    def _abandon(self, request: Request) -> None:
        """On any thread, and in the middle of anything: never waits. Where packets are just being sent, this one is too."""
        if request.done or request.abandoned:
            return
        self.core.abandon(request)
        if not self._sending.acquire(blocking=False):
            return
        try:
            while self.core.outgoing:
                send(self._socket, self.core)
        except (OSError, IndexError):
            pass  # full, or ended: whoever uses the channel next does what is to be done
        finally:
            self._sending.release()

    def cancel(self, request: Request) -> None:
        """The request then ends with ``cancelled``, unless it was already finished."""
        self.core.cancel(request)
        self._flush(time.monotonic() + SEND_SECONDS)

    def settle(self) -> None:
        """Hears what the worker has said, and gives back what nobody looks at any more. Every request does; call it where a
        channel rests for long, so that its worker and others can let go of memory."""
        self._take_what_came()
        self.core.settle()
        self._flush(time.monotonic() + SEND_SECONDS)

    # --- the socket

    def _raise_if_ended(self) -> None:
        if self.core.ended is not None:
            self._socket.close()
            raise self.core.ended.again()

    def _forked(self) -> None:
        self._sending = threading.Lock()  # the parent's may be held
        self.core.end(Error("worker_lost", "using a channel of the parent process after a fork", "open another one in the child"))
        self._socket.close()

    def _pump(self, until: float) -> bool:
        """Sends what waits and takes one packet. False when the time has come first."""
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
            pass  # it was not there after all

    def _wait_for_room(self, until: float) -> bool:
        """Or for something to read."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        left = until - time.monotonic()
        return left > 0 and bool(poll.poll(left * 1000 + 1))

    def _flush(self, until: float) -> None:
        if self.core.outgoing:
            with self._sending:
                self._send_what_waits(until)

    def _send_what_waits(self, until: float) -> None:
        """A worker may itself wait until its answers are read, so that is done meanwhile."""
        outgoing = self.core.outgoing
        while outgoing and self.core.ended is None:
            try:
                send(self._socket, self.core)
            except (BlockingIOError, InterruptedError):
                if not self._wait_for_room(until):
                    return
                self._receive_one()
            except OSError:
                # What it had delivered is read up to the end of file, so that answers are not lost with it.
                self._take_what_came()
                if self.core.ended is None:
                    self.core.end_of_file()


class Parts(Iterator[Reply]):
    """``Channel.stream`` makes one. Closed or dropped before the end, even before the first part, it cancels the request."""

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
        """The worker stops; parts that came are forgotten."""
        self._over = True
        self.channel._abandon(self.request)

    def __del__(self) -> None:
        self.close()
