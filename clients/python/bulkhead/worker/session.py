"""The worker's side of one channel (``docs/channel.md``). The client is not trusted: its data are
read once and checked."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Mapping

from .. import layout
from ..engine import Method
from ..errors import Error
from ..layout import FEATURE, KIND
from ..protocol import PARTS_MAX, packet
from . import declaration, messages
from .log import say
from .messages import Broken, Message, Output, Refused
from .packets import FULL, NOT_TAKEN, PacketStream
from .requests import Dispatcher, Request
from .slabs import INPUT, OUTPUT, Budget, ChannelSlabs

HELLO_SECONDS = 10.0
UNREAD_STREAM_SECONDS = 10.0  #: a stream fails if its client takes no part for this long
VIOLATIONS_MAX = 16
IN_FLIGHT_MAX = 64
_OFFERED = FEATURE["lending"] | FEATURE["returning"]

AWAITING_HELLO, OPEN, DRAINING, REFUSED, CLOSED = "awaiting_hello", "open", "draining", "refused", "closed"


@dataclass(frozen=True)
class ChannelLimits:
    """The fleet file's limits, in bytes and seconds."""

    input_bytes: int
    output_bytes: int
    bytes_max: int
    idle_seconds: float


@dataclass(frozen=True)
class Serving:
    """What all channels of a worker share."""

    loop: asyncio.AbstractEventLoop
    dispatcher: Dispatcher
    methods: Mapping[str, Method]
    description: bytes  #: the welcome's JSON
    model: str
    replica: int
    generation: int
    label: str  #: of the slabs, for receipts
    in_flight_max: int
    request_seconds: float
    limits: ChannelLimits
    budget: Budget
    admit: Callable[[ChannelSession], None]  #: raises if a new channel is refused
    opened: Callable[[ChannelSession], None]
    refused: Callable[[ChannelSession, Error], None]
    ended: Callable[[ChannelSession], None]  #: called once, when nothing of it is left
    flushed: Callable[[], None]


class ChannelSession:
    """Used on the loop's thread, except ``slabs`` and ``post_part``."""

    def __init__(self, serving: Serving, sock: socket.socket, number: int, client_pid: int) -> None:
        self._serving, self.number, self.client_pid = serving, number, client_pid
        limits = serving.limits
        self.slabs = ChannelSlabs(f"{serving.label}{number}:", limits.bytes_max, limits.idle_seconds, serving.budget)
        self.client = ""
        self.state = AWAITING_HELLO
        self._features = 0
        self._in_flight: list[Request] = []
        self._parts: deque[tuple[Request, bytes, list[Output]]] = deque()
        self._unread_since = 0.0
        self._violations = 0
        self._ended = False
        self._stream = PacketStream(serving.loop, sock, 4, self._on_packet, self.close, self._on_flushed)
        self._hello_timer = serving.loop.call_later(HELLO_SECONDS, self._no_hello)
        self._idle_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self.state in (OPEN, DRAINING)

    @property
    def is_closed(self) -> bool:
        return self.state in (REFUSED, CLOSED)

    @property
    def descriptor(self) -> int:
        return self._stream.descriptor

    @property
    def is_flushed(self) -> bool:
        return self.is_closed or (self._stream.outbox_empty and not self._parts)

    @property
    def ignored_frames(self) -> int:
        return self._stream.ignored_frames

    # --- messages from the client

    def _on_packet(self, data: bytes, fds: list[int], fds_lost: bool) -> None:
        left = list(fds)
        try:
            message = messages.parse(data)
            if fds_lost and message.kind == "slab_lend":
                raise Refused(message.request_id, Error("resources_exhausted", "taking a lent slab: the worker has no free descriptor",
                                                        "close channels, or raise the limit on open files (ulimit -n) of the daemon"))  # fmt: skip
            if len(left) != (message.kind == "slab_lend"):
                raise Broken(f"a client's packet brings {len(left)} descriptors", "send one with slab_lend only: the worker makes the slabs")
            self._check_order(message)
            self._handle(message, left)
        except Broken as broken:
            self._break_off(broken.error)
        except Refused as refused:
            self._serving.dispatcher.count_refused()
            self._send(messages.error(refused.request_id, refused.error))
        finally:
            for fd in left:
                os.close(fd)

    def _check_order(self, message: Message) -> None:
        if message.kind == "hello" and self.state != AWAITING_HELLO:
            raise Broken("a second hello", "say hello once, first of all")
        if message.kind != "hello" and self.state == AWAITING_HELLO:
            raise Broken("a message before hello", "say hello first of all")

    def _handle(self, message: Message, fds: list[int]) -> None:
        if message.kind == "hello":
            self._on_hello(message)
        elif message.kind == "infer":
            self._on_infer(message)
        elif message.kind == "cancel":
            self._serving.dispatcher.cancel(self.number, message.request_id)
        elif message.kind == "release":
            for lease in message.leases:
                if not self.is_closed:
                    self._counted(0, partial(self.slabs.release, lease))
            self._watch_idle_slabs()
        elif message.kind == "slab_request":
            self._on_slab_request(message)
        elif message.kind == "slab_lend":
            self._on_slab_lend(message, fds)
        else:
            self._on_slab_return(message.fields["slab_id"])

    def _on_hello(self, message: Message) -> None:
        self._hello_timer.cancel()
        self.client = message.fields["client"]
        streams = any(method.streams for method in self._serving.methods.values())
        self._features = message.fields["features"] & (_OFFERED | (FEATURE["streaming"] if streams else 0))
        try:
            self._serving.admit(self)
            self.slabs.add(INPUT, self._serving.limits.input_bytes)
            self.slabs.add(OUTPUT, self._serving.limits.output_bytes)
        except Error as error:
            return self.refuse(error)
        serving = self._serving
        body = layout.WELCOME.pack(version=layout.VERSION, slab_count=2, in_flight_max=serving.in_flight_max, features=self._features,
                                   generation=serving.generation, channel=self.number, slab_bytes_max=serving.limits.bytes_max,
                                   replica=serving.replica, json_bytes=len(serving.description), model=serving.model)  # fmt: skip
        self.state = OPEN
        self._send(packet("welcome", body + serving.description))
        self._send_offers()
        if self.is_open:
            say("debug", f'channel {self.number} opened for "{self.client}", pid {self.client_pid}')
            serving.opened(self)

    def _on_infer(self, message: Message) -> None:
        number = message.request_id
        if any(request.number == number and not request.answered for request in self._in_flight):
            # Not as an answer to that number: the client would take it for the first request's.
            return self._count_violation(0, Error("protocol_violation", f"request number {number} is in flight already",
                                                  "number the requests that are in flight differently"))  # fmt: skip
        try:
            self._submit(message)
        except Error as error:
            self._serving.dispatcher.count_refused()
            if error.code == "protocol_violation":
                return self._count_violation(number, error)
            self._send(messages.error(number, error))

    def _submit(self, message: Message) -> None:
        serving = self._serving
        if self.state != OPEN:
            raise Error("worker_draining", "the worker is draining and takes no new requests",
                        "open a new channel: it leads to the model's next worker")  # fmt: skip
        unanswered = sum(not request.answered for request in self._in_flight)
        if unanswered >= serving.in_flight_max:
            raise Error("queue_full", f"this channel has {unanswered} requests in flight, its part of the queue",
                        "wait for answers before sending more, or raise `queue` of the model")  # fmt: skip
        method = declaration.find(serving.methods, message.fields["method"])
        arguments: dict[str, Any] = {}
        for index, tensor in enumerate(message.tensors):
            try:
                arguments[tensor.name] = self.slabs.input(tensor)
            except Error as error:
                raise error.during(f'tensor "{tensor.name}"') from None
            self._check_overlap(tensor, message.tensors[:index])
        declaration.check_inputs(method, message.tensors)
        arguments.update(declaration.check_parameters(method, message.json))
        asked = message.fields["deadline_ms"] / 1000
        deadline = time.monotonic() + (min(asked, serving.request_seconds) if asked else serving.request_seconds)
        request = Request(message.request_id, self, method, message.tensors, arguments, deadline)
        request.streams = method.streams and bool(self._features & FEATURE["streaming"])
        self._in_flight.append(request)
        try:
            serving.dispatcher.submit(request)
        except Error:
            self._in_flight.remove(request)
            raise

    def _check_overlap(self, tensor: messages.Tensor, before: list[messages.Tensor]) -> None:
        for other in before:
            if _collide(tensor.lease, other.lease):
                raise Error("protocol_violation", f'tensor "{tensor.name}" overlaps tensor "{other.name}" of the same request',
                            "give each tensor bytes of its own, or let two of them name the very same lease")  # fmt: skip
        for request in self._in_flight:
            for other in () if request.answered else request.tensors:
                if _collide(tensor.lease, other.lease):
                    raise Error("protocol_violation",
                                f'tensor "{tensor.name}" overlaps tensor "{other.name}" of request {request.number}, which is in flight',
                                "reuse input bytes only after the request that reads them was answered")  # fmt: skip

    def _on_slab_request(self, message: Message) -> None:
        said, number = message.fields, message.request_id
        if said["kind"] != KIND["host_memfd"]:
            raise Refused(number, Error("input_invalid", f"a slab of kind {said['kind']}", "ask for host_memfd: welcome agreed to no such kind"))
        if self._counted(number, lambda: self.slabs.add(said["direction"], said["size_bytes"], number)):
            self._send_offers()

    def _on_slab_lend(self, message: Message, fds: list[int]) -> None:
        said, number = message.fields, message.request_id
        if not self._features & FEATURE["lending"]:
            raise _not_agreed()
        if said["kind"] != KIND["host_memfd"]:
            raise Refused(number, Error("input_invalid", f"a loan of kind {said['kind']}", "lend host_memfd"))
        if self._counted(number, lambda: self.slabs.lend(said["slab_id"], said["size_bytes"], fds.pop())):
            self._send(packet("slab_accepted", layout.SLAB_NAME.pack(slab_id=said["slab_id"]), number))

    def _on_slab_return(self, slab_id: int) -> None:
        if not self._features & FEATURE["lending" if slab_id >= layout.LIMITS["lent_slab_id_min"] else "returning"]:
            raise _not_agreed()
        self._counted(0, lambda: self.slabs.give_back(slab_id))
        self._drop_returned()

    def _counted(self, number: int, act: Callable[[], object]) -> bool:
        """Whether the action succeeded; else the client got an error."""
        try:
            act()
        except Error as error:
            if error.code == "protocol_violation":
                self._count_violation(number, error)
            else:
                self._send(messages.error(number, error))
            return False
        return True

    def _count_violation(self, number: int, error: Error) -> None:
        self._violations += 1
        if self._violations > VIOLATIONS_MAX:
            return self._break_off(error)
        self._send(messages.error(number, error))

    # --- messages from the worker

    def post_part(self, request: Request, outputs: list[Output], text: bytes) -> None:
        """Main thread: sends one more part of an answer, unless others wait. The loop's thread
        would contend with the engine for the interpreter's lock."""
        data = messages.result(request.number, outputs, text, more=True)
        with self._stream.lock:
            if request.answered or self.is_closed:
                return self.take_back(outputs)
            if not self._parts and not self.slabs.has_offers and self._stream.send_direct(data):
                return
            if not self._parts:
                self._unread_since = time.monotonic()
            self._parts.append((request, data, outputs))
        self._serving.loop.call_soon_threadsafe(self._part_waits, request)

    def _part_waits(self, request: Request) -> None:
        self._send_parts()
        if len(self._parts) > PARTS_MAX:
            self._end_unread(request)

    def _send_parts(self) -> None:
        while self._parts and self.is_open:
            if not self._stream.has_room():
                if self._unread_timer is None:
                    self._unread_timer = self._serving.loop.call_later(UNREAD_STREAM_SECONDS, self._look_at_unread)
                return
            self._unread_since = time.monotonic()
            with self._stream.lock:
                _, data, _ = self._parts.popleft()
                self._send_offers()
                self._send(data)

    def _look_at_unread(self) -> None:
        self._unread_timer = None
        if not self._parts or self.is_closed:
            return
        left = self._unread_since + UNREAD_STREAM_SECONDS - time.monotonic()
        if left > 0:
            self._unread_timer = self._serving.loop.call_later(left, self._look_at_unread)
        else:
            self._end_unread(self._parts[0][0])

    def _end_unread(self, request: Request) -> None:
        error = Error(
            "cancelled", f"request {request.number}: its client took no part of the stream for {round(time.monotonic() - self._unread_since, 1)} s, "
            f"and {len(self._parts)} wait", "read the parts as they come, or open the channel without streaming")  # fmt: skip
        if request.answered:  # its answer waits behind its parts
            self.fail(request, error)
        else:
            self._serving.dispatcher.end(request, error)

    def answer(self, request: Request) -> None:
        """Sends the ended request's result or error."""
        if self.is_closed:
            return self.take_back(request.outputs)
        if request.error is not None:
            return self.fail(request, request.error)
        queued, ran = (round(seconds * 1e6) for seconds in (request.started - request.received, request.ended - request.started))
        data = messages.result(request.number, request.outputs, request.text, queued_us=max(queued, 0), run_us=max(ran, 0))
        with self._stream.lock:
            its_parts_wait = any(part[0] is request for part in self._parts)
            if its_parts_wait:
                request.answered = True
                self._parts.append((request, data, request.outputs))  # behind them
        if its_parts_wait:
            return self._send_parts()
        self._send_offers()  # of slabs that may hold its result
        self._send(data)

    def fail(self, request: Request, error: Error) -> None:
        """Answers with this error; drops parts that the client did not get."""
        with self._stream.lock:
            for part in [part for part in self._parts if part[0] is request]:
                self._parts.remove(part)
                self.take_back(part[2])
        self._send(messages.error(request.number, error))

    def take_back(self, outputs: list[Output]) -> None:
        """Of an answer, or a part, that was not delivered."""
        for output in outputs:
            self.slabs.release(output.lease)

    def let_go(self, request: Request) -> None:
        """Releases its inputs, which are not read again."""
        request.arguments.clear()
        if request in self._in_flight:
            self._in_flight.remove(request)
        self._drop_returned()
        self._watch_idle_slabs()
        self._end_if_unused()

    def drain(self, seconds: float) -> None:
        if self.state == OPEN:
            self.state = DRAINING
            self._send(messages.closing("worker_draining", round(seconds * 1000)))

    def refuse(self, error: Error) -> None:
        if not self.is_closed:
            self._serving.refused(self, error)
            self._break_off(error, REFUSED)

    def _no_hello(self) -> None:
        if self.state == AWAITING_HELLO:
            self.close("its client said no hello in time")

    def _send(self, data: bytes, fd: int | None = None) -> None:
        if self.is_closed:
            return
        sent = self._stream.send(data, () if fd is None else (fd,))
        if sent == FULL:
            self.close("its client does not read its answers")
        elif sent == NOT_TAKEN:
            self.close("the kernel refuses a packet with a descriptor: too many are in flight")

    def _send_offers(self) -> None:
        # A part that the main thread sends must come after its slab's offer.
        with self._stream.lock:
            for data, fd in self.slabs.take_offers():
                self._send(data, fd)

    def _break_off(self, error: Error, how: str = CLOSED) -> None:
        if not self.is_closed:
            self._send(messages.error(0, error))
            self.close(str(error), how)

    def _on_flushed(self) -> None:
        self._send_parts()
        self._drop_returned()
        self._serving.flushed()

    def _drop_returned(self) -> None:
        # Waits for an empty outbox, which may hold such a slab's offer with its descriptor.
        if self.is_open and self._stream.outbox_empty:
            read = {tensor.lease.slab_id for request in self._in_flight for tensor in request.tensors}
            self.slabs.drop_returned(lambda slab_id: slab_id in read)

    def _watch_idle_slabs(self) -> None:
        if not self.is_open or not self._features & FEATURE["returning"] or self._idle_timer is not None:
            return
        if (due := self.slabs.idle_due()) is not None:
            self._idle_timer = self._serving.loop.call_at(due, self._withdraw_idle)

    def _withdraw_idle(self) -> None:
        self._idle_timer = None
        if self.is_open:
            for slab_id in self.slabs.withdraw_idle():
                self._send(packet("slab_withdraw", layout.SLAB_NAME.pack(slab_id=slab_id)))
            self._watch_idle_slabs()

    def close(self, reason: str, how: str = CLOSED) -> None:
        if self.is_closed:
            return
        say("debug" if self.is_open else "info", f'channel {self.number} of "{self.client}", pid {self.client_pid}, closed: {reason}')
        for timer in (self._hello_timer, self._idle_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        with self._stream.lock:
            self.state = how
            self._parts.clear()
            self._stream.close()
        self._serving.dispatcher.drop(self.number)
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self.is_closed and not self._in_flight and not self._ended:
            self._ended = True
            self.slabs.drop_all()
            self._serving.ended(self)


def _not_agreed() -> Broken:
    return Broken("a message that was not agreed", "send what hello and welcome both name")


def _collide(a: messages.Lease, b: messages.Lease) -> bool:
    """Ignores lent slabs: nothing writes to them while a result in them is held."""
    if a.slab_id != b.slab_id or a.slab_id >= layout.LIMITS["lent_slab_id_min"]:
        return False
    overlap = a.offset < b.offset + b.size_bytes and b.offset < a.offset + a.size_bytes
    return overlap and (a.offset, a.size_bytes, a.lease_id) != (b.offset, b.size_bytes, b.lease_id)
