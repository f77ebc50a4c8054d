"""The client's half of the channel without any I/O: packets in, packets out. Both the blocking and the asyncio channel drive it."""

from __future__ import annotations

import json
import struct
import weakref
from collections import deque
from typing import Any, Iterable, Iterator, Mapping as MappingType, Sequence

from . import layout
from .errors import Error
from .layout import DIRECTION, ERROR_NAMES, FEATURE, FLAG, KIND, LIMITS, MESSAGE
from .memory import ALIGNMENT, Allocator, Mapping
from .tensors import DTYPE_NAMES, DTYPE_NUMBERS, ITEM_BYTES, TensorView, check_shape, element_count

_HEADER_BYTES = layout.HEADER.size


def packet(kind: str, body: bytes = b"", request_id: int = 0, flags: int = 0) -> bytes:
    size = _HEADER_BYTES + len(body)
    if size > LIMITS["packet_bytes_max"]:
        raise Error("input_invalid", f"a message of {size} bytes", "send fewer tensors or smaller parameters")
    return layout.HEADER.pack(magic=layout.MAGIC, version=layout.VERSION, type=MESSAGE[kind], size_bytes=size, flags=flags,
                              request_id=request_id) + body  # fmt: skip


class _InputSlab:
    def __init__(self, number: int, mapping: Mapping) -> None:
        self.number = number
        self.mapping = mapping
        self.allocator = Allocator(mapping.size_bytes)


class _InputLease:
    """Bytes of an input slab. Given back to the allocator when nothing looks at them and no request uses them."""

    def __init__(self, slab: _InputSlab, offset: int, size_bytes: int, generation: int) -> None:
        self.slab = slab
        self.offset, self.size_bytes, self.generation = offset, size_bytes, generation
        weakref.finalize(self, slab.allocator.release, offset, size_bytes)

    def reference(self) -> bytes:
        return layout.LEASE.pack(slab_id=self.slab.number, offset_bytes=self.offset, size_bytes=self.size_bytes,
                                 generation=self.generation)  # fmt: skip


class Input(TensorView):
    """Room in the input slab: fill it in place, then pass it to ``infer``.

    Given back when it is released (``with``, or ``release()``), no array looks at it any more, and no request uses it.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], lease: _InputLease) -> None:
        super().__init__(dtype, shape, lease.slab.mapping.view(lease.offset, lease.size_bytes, lease))
        self.lease: _InputLease | None = lease

    def release(self) -> None:
        self._data = None
        self.lease = None

    def __enter__(self) -> Input:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _OutputLease:
    def __init__(self, mapping: Mapping, reference: bytes, releases: deque[bytes]) -> None:
        self.mapping = mapping
        weakref.finalize(self, releases.append, reference)


class Output(TensorView):
    """A result in the worker's slab, read-only. It goes back to the worker when nothing looks at it any more.

    It stays readable after the worker has died; holding it then keeps that memory, and the receipt says so.
    """

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        super().__init__(dtype, shape, data)
        self.name = name

    def release(self) -> None:
        self._data = None


class Reply(MappingType[str, Output]):
    """The outputs by name, in the method's order."""

    def __init__(self, outputs: Iterable[Output], values: dict[str, Any], queued_us: int, run_us: int) -> None:
        self._outputs = {output.name: output for output in outputs}
        self.values_json = values  #: results that are no tensors
        self.queued_us = queued_us  #: in the worker, before it started
        self.run_us = run_us  #: in the model

    def __getitem__(self, name: str) -> Output:
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"Reply({', '.join(repr(output) for output in self._outputs.values())})"


class Request:
    """One request in flight."""

    def __init__(self, number: int, method: str, inputs: Sequence[Input], retry_safe: bool) -> None:
        self.number = number
        self.method = method
        self.retry_safe = retry_safe
        self.parts: deque[Reply] = deque()  #: of a streamed request, not yet taken
        self.error: Error | None = None
        self.done = False
        self.abandoned = False
        self.until = 0.0  # the caller's own patience, on its clock
        # The worker borrows these until it answers, whatever the caller does with them.
        self._borrowed = [one.lease for one in inputs]

    def finish(self, error: Error | None = None) -> None:
        self.error = error
        self.done = True
        self._borrowed.clear()


def _broken(attempt: str) -> Error:
    return Error("protocol_violation", attempt, "use a client and a daemon of matching releases")


class ChannelCore:
    """State of one channel. ``outgoing`` holds packets to send; ``receive`` takes what came."""

    def __init__(self, client: str) -> None:
        self.outgoing: deque[bytes] = deque()
        self.model = ""
        self.replica = 0
        self.generation = 0
        self.number = 0
        self.methods: dict[str, Any] = {}
        self.in_flight_max = 0
        self.streaming = False
        self.ended: Error | None = None  #: why; set once
        self._slab_bytes_max = 0
        self._slab_count: int | None = None
        self._inputs: list[_InputSlab] = []
        self._outputs: dict[int, Mapping] = {}
        self._slab_bytes = 0
        self._requests: dict[int, Request] = {}
        self._releases: deque[bytes] = deque()  # finalizers add to it, on any thread
        self._last = 0
        self._growing: tuple[int, int] | None = None  # request and size
        self._growth_refused: Error | None = None
        self._closing: Error | None = None
        self._channel_error: Error | None = None
        body = layout.HELLO.pack(version_min=layout.VERSION, version_max=layout.VERSION, features=FEATURE["streaming"],
                                 client=client.encode("utf-8")[:47].decode("utf-8", "ignore"))  # fmt: skip
        self.outgoing.append(packet("hello", body))

    # --- opening

    @property
    def is_open(self) -> bool:
        return self._slab_count is not None and len(self._inputs) + len(self._outputs) >= self._slab_count

    # --- inputs

    def try_allocate(self, shape: Sequence[int], dtype: str) -> Input | None:
        """None: a slab was asked for; call again when ``growing`` has become false."""
        dims = check_shape(shape)
        size = element_count(dims) * ITEM_BYTES[dtype]
        if self._growth_refused is not None:
            refused, self._growth_refused = self._growth_refused, None
            raise refused
        if self.ended is not None:
            raise self.ended
        for slab in self._inputs:
            found = slab.allocator.allocate(size)
            if found is not None:
                return Input(dtype, dims, _InputLease(slab, found[0], size, found[1]))
        if self._growing is None:
            self._ask_for_slab(size)
        return None

    @property
    def growing(self) -> bool:
        return self._growing is not None and self.ended is None

    def _ask_for_slab(self, size: int) -> None:
        left = self._slab_bytes_max - self._slab_bytes
        needed = size + ALIGNMENT
        if needed > left or len(self._inputs) + len(self._outputs) >= LIMITS["slabs_max"]:
            raise Error("resources_exhausted",
                        f"{size} bytes of input; the channel's slabs hold {self._slab_bytes} of at most {self._slab_bytes_max} bytes",
                        "drop inputs that are no longer needed, or raise the model's channel.max")  # fmt: skip
        have = sum(slab.mapping.size_bytes for slab in self._inputs)
        wanted = max(needed, min(have, left // 2))
        self._last += 1
        self._growing = (self._last, wanted)
        body = layout.SLAB_REQUEST.pack(direction=DIRECTION["input"], kind=KIND["host_memfd"], size_bytes=wanted)
        self.outgoing.append(packet("slab_request", body, self._last))

    # --- requests

    def owns(self, one: Input) -> bool:
        return one.lease is not None and any(slab is one.lease.slab for slab in self._inputs)

    def submit(self, method: str, inputs: Sequence[tuple[str, Input]], parameters: MappingType[str, Any], deadline_ms: int,
               retry_safe: bool) -> Request:  # fmt: skip
        if self.ended is not None:
            raise self.ended
        if self._closing is not None:
            raise Error(self._closing.code, f"sending a request to {self.model}: it accepts no more",
                        "open a new channel once the model is ready again")  # fmt: skip
        if len(self._requests) >= self.in_flight_max:
            raise Error("queue_full", f"{len(self._requests)} requests of this channel are in flight, its bound",
                        "wait for an earlier request first")  # fmt: skip
        text = json.dumps(parameters, separators=(",", ":")).encode() if parameters else b""
        if len(inputs) > LIMITS["tensors_max"] or len(text) > LIMITS["json_bytes_max"]:
            raise Error("input_invalid", f"{len(inputs)} tensors and {len(text)} bytes of parameters",
                        f"at most {LIMITS['tensors_max']} and {LIMITS['json_bytes_max']}")  # fmt: skip
        try:
            body = layout.INFER.pack(method=method, deadline_ms=min(max(deadline_ms, 0), 0xFFFFFFFF), tensor_count=len(inputs),
                                     json_bytes=len(text))  # fmt: skip
            for name, one in inputs:
                body += self._describe(name, one)
        except ValueError as error:
            raise Error("input_invalid", str(error), "use a shorter name") from None
        self._last += 1
        request = Request(self._last, method, [one for _, one in inputs], retry_safe)
        self.flush_releases()  # first: the worker may need the room for this very request
        self.outgoing.append(packet("infer", body + text, self._last, FLAG["retry_safe"] if retry_safe else 0))
        self._requests[self._last] = request
        return request

    def _describe(self, name: str, one: Input) -> bytes:
        if one.lease is None or not self.owns(one):
            raise Error("input_invalid", f'input "{name}" was not allocated on this channel, or was released',
                        "allocate inputs on the channel they are sent on")  # fmt: skip
        strides: list[int] = []
        step = 1
        for size in reversed(one.shape):
            strides.insert(0, step)
            step *= max(size, 1)
        return layout.TENSOR.pack(name=name, dtype=DTYPE_NUMBERS[one.dtype], rank=len(one.shape), lease=one.lease.reference(),
                                  dims=one.shape, strides=strides)  # fmt: skip

    def cancel(self, request: Request) -> None:
        if not request.done and self.ended is None:
            self.outgoing.append(packet("cancel", request_id=request.number))

    def abandon(self, request: Request) -> None:
        """Nobody waits any more; the worker still borrows the inputs until it answers."""
        request.abandoned = True
        self.cancel(request)

    def flush_releases(self) -> None:
        while self._releases and self.ended is None:
            batch = [self._releases.popleft() for _ in range(min(len(self._releases), LIMITS["release_leases_max"]))]
            self.outgoing.append(packet("release", layout.RELEASE.pack(count=len(batch)) + b"".join(batch)))

    # --- what the worker says

    def receive(self, data: bytes, fds: Sequence[int]) -> None:
        """Takes over the descriptors. A worker that breaks the protocol ends the channel; ``ended`` then says why."""
        import os

        left = list(fds)
        try:
            self._receive(data, left)
        except Error as error:
            self.end(error)
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
            self.end(_broken(f"a message that cannot be read: {error}"))
        finally:
            for fd in left:
                os.close(fd)

    def _receive(self, data: bytes, fds: list[int]) -> None:
        head = layout.HEADER.unpack(data)
        if head["magic"] != layout.MAGIC or head["version"] != layout.VERSION or head["size_bytes"] != len(data):
            raise _broken("a packet that is none of this protocol")
        kind = head["type"]
        if len(fds) != (1 if kind == MESSAGE["slab_offer"] else 0):
            raise _broken(f"{len(fds)} descriptors with a message of type {kind}")
        if self._slab_count is None and kind not in (MESSAGE["welcome"], MESSAGE["error"]):
            raise _broken("the worker spoke before its welcome")
        self._channel_error = None
        body = memoryview(data)[_HEADER_BYTES:]
        if kind == MESSAGE["welcome"]:
            self._on_welcome(body)
        elif kind == MESSAGE["slab_offer"]:
            self._on_slab(body, head["request_id"], fds)
        elif kind == MESSAGE["result"]:
            self._on_result(body, head["request_id"], bool(head["flags"] & FLAG["more"]))
        elif kind == MESSAGE["error"]:
            self._on_error(body, head["request_id"])
        elif kind == MESSAGE["closing"]:
            closing = layout.CLOSING.unpack(body)
            self._closing = Error(ERROR_NAMES.get(closing["code"], "internal"), "the worker is closing")
        else:
            raise _broken(f"a message of unknown type {kind}")

    def _on_welcome(self, body: memoryview) -> None:
        if self._slab_count is not None:
            raise _broken("a second welcome")
        welcome = layout.WELCOME.unpack(body)
        if welcome["version"] != layout.VERSION or welcome["in_flight_max"] == 0 or welcome["slab_count"] > LIMITS["slabs_max"]:
            raise _broken("a welcome whose numbers make no sense")
        text = bytes(body[layout.WELCOME.size : layout.WELCOME.size + welcome["json_bytes"]])
        self.methods = json.loads(text) if text else {}
        self.model, self.replica = welcome["model"], welcome["replica"]
        self.generation, self.number = welcome["generation"], welcome["channel"]
        self.in_flight_max = welcome["in_flight_max"]
        self.streaming = bool(welcome["features"] & FEATURE["streaming"])
        self._slab_bytes_max = welcome["slab_bytes_max"]
        self._slab_count = welcome["slab_count"]

    def _on_slab(self, body: memoryview, request_id: int, fds: list[int]) -> None:
        offer = layout.SLAB_OFFER.unpack(body)
        number, size, direction = offer["slab_id"], offer["size_bytes"], offer["direction"]
        what = f"slab {number} of {size} bytes"
        if offer["kind"] != KIND["host_memfd"] or direction not in DIRECTION.values():
            raise _broken(f"{what} is of a kind that was not agreed")
        if size == 0 or size > self._slab_bytes_max - self._slab_bytes:
            raise _broken(f"{what} exceeds the channel's bound of {self._slab_bytes_max} bytes")
        if len(self._inputs) + len(self._outputs) >= LIMITS["slabs_max"]:
            raise _broken(f"{what} is one slab too many")
        if number in self._outputs or any(slab.number == number for slab in self._inputs):
            raise _broken(f"{what} has an id that is in use")
        if request_id != 0 and (self._growing is None or self._growing[0] != request_id or size < self._growing[1]
                                or direction != DIRECTION["input"]):  # fmt: skip
            raise _broken(f"{what} is not what was asked for")
        mapping = Mapping(fds.pop(), size, direction)
        if request_id != 0:
            self._growing = None
        self._slab_bytes += size
        if direction == DIRECTION["input"]:
            self._inputs.append(_InputSlab(number, mapping))
        else:
            self._outputs[number] = mapping

    def _on_result(self, body: memoryview, request_id: int, more: bool) -> None:
        result = layout.RESULT.unpack(body)
        request = self._requests.get(request_id)
        if request is None or (more and not self.streaming):
            raise _broken(f"a result for request {request_id}, which is not in flight")
        at = layout.RESULT.size
        outputs = []
        for _ in range(result["tensor_count"]):
            outputs.append(self._output(layout.TENSOR.unpack(body, at)))
            at += layout.TENSOR.size
        text = bytes(body[at : at + result["json_bytes"]])
        values = json.loads(text) if text else {}
        if not request.abandoned:
            request.parts.append(Reply(outputs, values, result["queued_us"], result["run_us"]))
        if not more:
            del self._requests[request_id]
            request.finish()

    def _output(self, described: dict[str, Any]) -> Output:
        lease = described["lease"]
        name, rank = described["name"], described["rank"]
        dtype = DTYPE_NAMES.get(described["dtype"])
        mapping = self._outputs.get(lease["slab_id"])
        if dtype is None or rank > LIMITS["rank_max"] or mapping is None:
            raise _broken(f'output "{name}" has an unknown dtype, rank or slab')
        shape = check_shape(described["dims"][:rank])
        size = element_count(shape) * ITEM_BYTES[dtype]
        offset = lease["offset_bytes"]
        if size != lease["size_bytes"] or offset % ALIGNMENT or offset + size > mapping.size_bytes:
            raise _broken(f'output "{name}" of {size} bytes does not lie in its slab')
        owner = _OutputLease(mapping, layout.LEASE.pack(**{key: lease[key] for key in ("slab_id", "offset_bytes", "size_bytes", "generation")}),
                             self._releases)  # fmt: skip
        return Output(name, dtype, shape, mapping.view(offset, size, owner))

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
        elif self._growing is not None and self._growing[0] == request_id:
            self._growing = None
            self._growth_refused = error
        else:
            request = self._requests.pop(request_id, None)
            if request is None:
                raise _broken(f"an error for request {request_id}, which is not in flight")
            request.finish(error)

    def end_of_file(self) -> None:
        if self._channel_error is not None:
            return self.end(self._channel_error)
        why = "it was unloaded" if self._closing is not None else "its process has ended"
        self.end(Error("worker_lost", f"{self.model or 'the worker'} is gone: {why}",
                       "`bulkhead why` tells the reason; open a new channel to load it again"))  # fmt: skip

    def end(self, error: Error) -> None:
        """Whoever was not answered gets the reason. Outputs that came before stay readable."""
        if self.ended is not None:
            return
        self.ended = error
        self._growing = None
        # Who still looks at a tensor keeps its slab; the channel itself holds nothing of the worker's any more.
        self._inputs.clear()
        self._outputs.clear()
        self.outgoing.clear()
        for request in self._requests.values():
            request.finish(error.during(f"request {request.number} ({request.method})"))
        self._requests.clear()
