"""The client's side of the channel without I/O: packets in, packets out. The blocking and the
asyncio channel use it."""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping as MappingType, Sequence

from . import layout
from .errors import Error, broken
from .layout import ERROR_NAMES, FEATURE, FLAG, LIMITS, MESSAGE
from .memory import Mapping
from .shared_tensors import Output
from .slabs import Packet, Placed, Slabs

if TYPE_CHECKING:
    from .cuda import Events

_HEADER_BYTES = layout.HEADER.size
_HEADER = layout.HEADER.flat
_RESULT_MEMBERS, _TENSOR_MEMBERS = layout.HEADER.flat_members + layout.RESULT.flat_members, layout.TENSOR.flat_members
_METHOD_BYTES_MAX = layout.INFER.text_bytes_max["method"]
FEATURES = FEATURE["streaming"] | FEATURE["lending"] | FEATURE["returning"] | FEATURE["packing"]

#: Untaken parts of one answer; beyond these it is cancelled.
PARTS_MAX = 4096


def packet(kind: str, body: bytes = b"", request_id: int = 0, flags: int = 0) -> bytes:
    size = _HEADER_BYTES + len(body)
    if size > LIMITS["packet_bytes_max"]:
        raise layout.too_large(size)
    return _HEADER.pack(layout.MAGIC, layout.VERSION, MESSAGE[kind], size, flags, request_id, 0) + body


def _object(body: bytes | memoryview, at: int, size: int) -> dict[str, Any]:
    """Parses the JSON object at the end of a message."""
    if at + size != len(body):
        raise broken(f"a message of {len(body)} bytes that says it has {at + size}")
    value = json.loads(bytes(body[at:])) if size else {}
    if not isinstance(value, dict):
        raise broken("JSON that is not an object")
    return value


class Declared:
    """A method from ``welcome``: the names of its parameters, and the dtypes of its inputs."""

    def __init__(self, described: MappingType[str, Any]) -> None:
        self.parameters = frozenset(one["name"] for one in described.get("parameters", ()))
        self.dtypes = {one["name"]: str(one["dtype"]) for one in described.get("inputs", ())}

    def split(self, named: MappingType[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits arguments into inputs and parameters."""
        if self.parameters.isdisjoint(named):
            return dict(named), {}
        inputs = {name: value for name, value in named.items() if name not in self.parameters}
        return inputs, {name: value for name, value in named.items() if name in self.parameters}


class Reply(MappingType[str, Output]):
    """The outputs by name, in the method's order."""

    def __init__(self, outputs: Iterable[Output], values: dict[str, Any], queued_us: int, run_us: int, more: bool = False) -> None:
        self._outputs = {output.name: output for output in outputs}
        self.values_json = values  #: results that are not tensors
        self.queued_us = queued_us  #: in the worker, before it started
        self.run_us = run_us  #: in the model
        self.more = more  #: further parts of this answer follow

    def __getitem__(self, name: str) -> Output:
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"Reply({', '.join(repr(output) for output in self._outputs.values())})"


class Request:
    """One request in flight: for ``Channel.wait``, ``stream`` and ``cancel``."""

    def __init__(self, number: int, method: str, inputs: list[Placed]) -> None:
        self.number = number
        self.method = method
        self.parts: deque[Reply] = deque()  #: of a streamed request, not taken yet
        self.error: Error | None = None
        self.done = False
        self.abandoned = False
        #: How it must end, whatever still arrives: its parts cannot be kept or read.
        self.spoiled: Error | None = None
        self.until = 0.0  # the caller's deadline, on its clock
        self.on_change: Callable[[], None] = lambda: None
        # The worker borrows these until it answers, even if the caller drops them.
        self._borrowed = inputs

    def answer(self, part: Reply) -> None:
        """Called by the channel: a part has arrived."""
        if not self.abandoned and self.spoiled is None:
            self.parts.append(part)
            self.on_change()

    def finish(self, error: Error | None = None) -> None:
        """Called by the channel: nothing more arrives."""
        self.error = self.spoiled or error
        self.done = True
        self._borrowed.clear()
        self.on_change()


class ChannelCore:
    """State of one channel. ``outgoing`` holds packets to send; ``receive`` takes
    packets that arrived.

    ``wake`` is called, on any thread, when ``settle`` has work that cannot wait for the next
    request.
    """

    def __init__(self, client: str, wake: Callable[[], None] = lambda: None, events: Events | None = None) -> None:
        self.outgoing: deque[Packet] = deque()
        self.model = ""
        self.generation = 0
        self.methods: dict[str, Any] = {}
        self._declared: dict[str, Declared] = {}
        self.in_flight_max = 0
        self.features = 0  #: agreed
        self.ended: Error | None = None  #: the reason; set once
        self.slabs = Slabs(self.outgoing, self._send, wake, events)
        self._slab_count: int | None = None
        self._requests: dict[int, Request] = {}
        self._last = 0
        self._closing: Error | None = None
        self._channel_error: Error | None = None
        self._spoken = FEATURES | (0 if events is None else events.gpu.features)
        body = layout.HELLO.pack(version_min=layout.VERSION, version_max=layout.VERSION, features=self._spoken,
                                 gpu=bytes(16) if events is None else events.gpu.uuid,
                                 client=layout.printable(client).encode("utf-8")[:47].decode("utf-8", "ignore"))  # fmt: skip
        self._send("hello", body)

    def _send(self, kind: str, body: bytes = b"", *, number: int = 0, ask: bool = False, fd_of: Mapping | None = None) -> int:
        if ask:
            self._last += 1
            number = self._last
        self.outgoing.append((packet(kind, body, number), fd_of))
        return number

    def next_packet(self) -> tuple[bytes, Mapping | None, int]:
        """The next packet, and how many messages of ``outgoing`` it packs: each packet costs
        both sides a call."""
        data, mapping = self.outgoing[0]
        count = len(self.outgoing)
        if count == 1 or mapping is not None or not self.features & FEATURE["packing"]:
            return data, mapping, 1
        messages = [data]
        size = len(data)
        for at in range(1, min(count, LIMITS["packed_messages_max"])):
            data, mapping = self.outgoing[at]
            size += len(data)
            if mapping is not None or size > LIMITS["packet_bytes_max"]:
                break
            messages.append(data)
        return b"".join(messages), None, len(messages)

    def declared(self, method: str) -> Declared:
        """The worker's description of a method; an empty one for an unknown method."""
        if (known := self._declared.get(method)) is None:
            known = Declared(self.methods.get(method, {}))
            if method in self.methods:
                self._declared[method] = known
        return known

    @property
    def is_open(self) -> bool:
        return self._slab_count is not None and len(self.slabs) >= self._slab_count

    @property
    def accepts(self) -> bool:
        """Neither ended nor closing."""
        return self.ended is None and self._closing is None

    @property
    def died(self) -> bool:
        """Whether it ended without a request of either side."""
        return self.ended is not None and self.ended.code == "worker_lost" and self._closing is None

    @property
    def is_full(self) -> bool:
        """Whether the limit of requests in flight is reached."""
        return len(self._requests) >= self.in_flight_max

    # --- requests

    def submit(self, method: str, inputs: Sequence[tuple[str, Placed]], parameters: MappingType[str, Any], deadline: float | None,
               retry_safe: bool) -> Request:  # fmt: skip
        """``deadline`` in seconds; None means the model's own."""
        if self.ended is not None:
            raise self.ended.again()
        if self._closing is not None:
            raise Error(self._closing.code, f"sending a request to {self.model}: it accepts no more",
                        "open a new channel once the model is ready again")  # fmt: skip
        if self.is_full:
            raise Error("queue_full", f"{len(self._requests)} requests of this channel are in flight, its bound",
                        "wait for an earlier request first")  # fmt: skip
        try:
            text = json.dumps(dict(parameters), separators=(",", ":"), allow_nan=False).encode() if parameters else b""
        except (TypeError, ValueError, RecursionError) as error:
            raise Error("input_invalid", f"parameters that are not JSON: {error}", "pass numbers that are finite, text, lists and dictionaries") from None
        if len(inputs) > LIMITS["tensors_max"] or len(text) > LIMITS["json_bytes_max"]:
            raise Error("input_invalid", f"sending {len(inputs)} tensors and {len(text)} bytes of parameters",
                        f"send at most {LIMITS['tensors_max']} tensors and {LIMITS['json_bytes_max']} bytes, or a shorter text")  # fmt: skip
        milliseconds = 0 if deadline is None else min(max(int(deadline * 1000), 1), 0xFFFFFFFF)
        members = [layout.text_field("Infer.method", method, _METHOD_BYTES_MAX), milliseconds, len(inputs), 0, len(text), 0]
        for name, placed in inputs:
            members += placed.members(name)
        number = self._last + 1
        data = layout.INFER_MESSAGE.pack(number, FLAG["retry_safe"] if retry_safe else 0, len(inputs), members, text)
        self._last = number
        self.settle()  # first: the worker may need the room for this very request
        self.outgoing.append((data, None))
        request = self._requests[number] = Request(number, method, [placed for _, placed in inputs])
        return request

    def cancel(self, request: Request) -> None:
        if not request.done and self.ended is None:
            self._send("cancel", number=request.number)

    def abandon(self, request: Request) -> None:
        """The caller no longer waits; the worker still borrows the inputs until it answers."""
        request.abandoned = True
        self.cancel(request)

    def settle(self) -> None:
        """Tells the worker what is no longer needed; called before each request at the latest."""
        if self.ended is None and self._slab_count is not None:
            self.slabs.settle()

    # --- messages from the worker

    def receive(self, data: bytes, fds: list[int]) -> None:
        """Takes over the descriptors and empties the list. If the worker breaks the protocol, ends
        the channel; ``ended`` then has the reason."""
        try:
            self._receive(data, fds)
        except Error as error:
            self.end(error)
        except (struct.error, KeyError, ValueError, RecursionError) as error:
            self.end(broken(f"a message that cannot be read: {error}"))
        finally:
            while fds:
                os.close(fds.pop())

    def _receive(self, data: bytes, fds: list[int]) -> None:
        # One struct per message; each request has a result, so that comes first.
        whole = layout.RESULT_MESSAGE.of(data)
        members = (whole or _HEADER).unpack_from(data)
        magic, version, kind, size, flags, request_id = members[:6]
        if magic != layout.MAGIC or version != layout.VERSION or size != len(data):
            raise broken("a packet that does not belong to this protocol")
        if fds and kind != MESSAGE["slab_offer"]:
            raise broken(f"{len(fds)} descriptors with a message of type {kind}")
        if self._slab_count is None and kind not in (MESSAGE["welcome"], MESSAGE["error"]):
            raise broken("the worker spoke before its welcome")
        self._channel_error = None
        if kind == MESSAGE["result"] and whole is not None:
            return self._on_result(members, data, whole.size, request_id, bool(flags & FLAG["more"]))
        body = memoryview(data)[_HEADER_BYTES:]
        if kind == MESSAGE["welcome"]:
            self._on_welcome(body)
        elif kind == MESSAGE["slab_offer"]:
            self.slabs.on_offer(body, request_id, fds)
        elif kind == MESSAGE["error"]:
            self._on_error(body, request_id)
        elif kind == MESSAGE["closing"]:
            closing = layout.CLOSING.unpack(body)
            self._closing = Error(ERROR_NAMES.get(closing["code"], "internal"), "the worker is closing")
            self.slabs.retire()
        elif kind == MESSAGE["slab_accepted"]:
            self.slabs.on_accepted(body, request_id)
        elif kind == MESSAGE["slab_withdraw"]:
            self.slabs.on_withdraw(body)
        elif kind == MESSAGE["event_offer"]:
            self.slabs.on_event(body)
        else:
            raise broken(f"a message of unknown type {kind}")

    def _on_welcome(self, body: memoryview) -> None:
        if self._slab_count is not None:
            raise broken("a second welcome")
        welcome = layout.WELCOME.unpack(body)
        if welcome["version"] != layout.VERSION or welcome["in_flight_max"] == 0 or welcome["slab_count"] > LIMITS["slabs_max"]:
            raise broken("a welcome whose numbers make no sense")
        self.methods = _object(body, layout.WELCOME.size, welcome["json_bytes"])
        self.model, self.generation = welcome["model"], welcome["generation"]
        self.in_flight_max = welcome["in_flight_max"]
        self.features = welcome["features"] & self._spoken
        self.slabs.agree(self.features, welcome["slab_bytes_max"])
        self._slab_count = welcome["slab_count"]

    def _on_result(self, members: tuple[Any, ...], data: bytes, text_at: int, request_id: int, more: bool) -> None:
        tensor_count, _, json_bytes, queued_us, run_us = members[7:12]
        request = self._requests.get(request_id)
        if request is None or (more and not self.features & FEATURE["streaming"]):
            raise broken(f"a result for request {request_id}, which is not in flight")
        if len(members) != _RESULT_MEMBERS + tensor_count * _TENSOR_MEMBERS:
            raise broken(f"a result of {tensor_count} tensors")
        outputs = []
        why: Error | None = None
        for at in range(_RESULT_MEMBERS, len(members), _TENSOR_MEMBERS):
            output = self.slabs.output(members, at)
            if isinstance(output, Error):
                why = output.during(f"request {request_id} ({request.method}): its result cannot be mapped")
            else:
                outputs.append(output)
        reply = Reply(outputs, _object(data, text_at, json_bytes), queued_us, run_us, more)
        if why is None:
            request.answer(reply)
            if more and len(request.parts) >= PARTS_MAX:
                why = Error("resources_exhausted", f"request {request_id} ({request.method}): {len(request.parts)} parts came, and the caller took none",
                            "take the parts as they come")  # fmt: skip
        if why is not None and request.spoiled is None:
            request.spoiled = why
            if more:
                self.cancel(request)
        if not more:
            del self._requests[request_id]
            request.finish()

    def _on_error(self, body: memoryview, request_id: int) -> None:
        told = layout.ERROR.unpack(body)
        at = layout.ERROR.size
        attempt = bytes(body[at : at + told["attempt_bytes"]]).decode("utf-8", "replace")
        at += told["attempt_bytes"]
        error = Error(ERROR_NAMES.get(told["code"], "internal"), attempt, bytes(body[at : at + told["remedy_bytes"]]).decode("utf-8", "replace"))
        if request_id == 0:
            self._channel_error = error
            if self._slab_count is None:
                raise error
        elif not self.slabs.on_refusal(request_id, error):
            request = self._requests.pop(request_id, None)
            if request is None:
                raise broken(f"an error for request {request_id}, which is not in flight")
            request.finish(error)

    def end_of_file(self) -> None:
        if self._channel_error is not None:
            return self.end(self._channel_error)
        why = "it was unloaded" if self._closing is not None else "its process has ended"
        self.end(Error("worker_lost", f"{self.model or 'the worker'} is gone: {why}",
                       "`bulkhead why` tells the reason; open a new channel to load it again"))  # fmt: skip

    def end(self, error: Error) -> None:
        """Ends unanswered requests with the reason. Earlier outputs stay readable."""
        if self.ended is not None:
            return
        self.ended = error
        self.slabs.end()
        self.outgoing.clear()
        for request in self._requests.values():
            request.finish(error.during(f"request {request.number} ({request.method})"))
        self._requests.clear()
