"""Parses a client's channel messages: read once from a copy and checked, with the errors of
``docs/channel.md``. Also encodes answers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Sequence

from .. import layout
from ..errors import Error
from ..layout import DIRECTION, DTYPE, ERROR_NAMES, FLAG, KIND, LIMITS, MESSAGE
from ..protocol import packet
from ..tensors import DTYPE_NAMES, ITEM_BYTES

_HEADER_BYTES = layout.HEADER.size
_CODES = {name: number for number, name in ERROR_NAMES.items()}
_KINDS = {number: name for name, number in MESSAGE.items()}
_ERROR_TEXT_BYTES_MAX = 8192
_REMEDY = "speak the channel as docs/channel.md lays it out"


class Broken(Exception):
    """The client has broken the protocol: its channel ends with this error."""

    def __init__(self, attempt: str, remedy: str = _REMEDY) -> None:
        super().__init__(attempt)
        self.error = Error("protocol_violation", attempt, remedy)


class Refused(Exception):
    """One request of the client is impossible: it is answered with this error."""

    def __init__(self, request_id: int, error: Error) -> None:
        super().__init__(str(error))
        self.request_id, self.error = request_id, error


@dataclass(frozen=True)
class Lease:
    """A part of a slab, from a message."""

    slab_id: int
    offset: int
    size_bytes: int
    lease_id: int
    event_id: int = 0

    @classmethod
    def of(cls, fields: dict[str, int]) -> Lease:
        return cls(fields["slab_id"], fields["offset_bytes"], fields["size_bytes"], fields["lease_id"], fields["event_id"])


@dataclass(frozen=True)
class Tensor:
    """A tensor of an infer message."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    lease: Lease
    event_id: int


@dataclass
class Message:
    """A client's message: its kind, its request's number, and its fields."""

    kind: str
    request_id: int
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    json: dict[str, Any] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)


def parse(data: bytes) -> Message:
    """Raises ``Broken`` or ``Refused``."""
    if len(data) < _HEADER_BYTES:
        raise Broken(f"a packet of {len(data)} bytes, less than a header's {_HEADER_BYTES}")
    head = layout.HEADER.unpack(data)
    if head["magic"] != layout.MAGIC:
        raise Broken(f"a packet begins with {head['magic']:#010x}, not with {layout.MAGIC:#010x}")
    if head["version"] != layout.VERSION:
        raise Broken(f"a packet of protocol version {head['version']}, this side speaks {layout.VERSION}", "use a client and a daemon of matching releases")
    if head["size_bytes"] != len(data):
        raise Broken(f"a packet of {len(data)} bytes says it has {head['size_bytes']}")
    kind, number = _KINDS.get(head["type"], ""), head["request_id"]
    if kind in ("slab_request", "infer", "cancel", "slab_lend") and number == 0:
        raise Broken("a request with number 0", "number requests from 1")
    body = data[_HEADER_BYTES:]
    if kind == "infer":
        return _infer(body, number)
    if kind == "release":
        return _release(body)
    if kind == "cancel":
        if body:
            raise Broken("a cancel with a body")
        return Message(kind, number)
    if kind not in _FIXED:
        raise Broken(f"a message of type {head['type']} from a client")
    form = _FIXED[kind]
    if len(body) != form.size:
        raise Broken(f"a {kind} of the wrong size")
    said = form.unpack(body, checked=True)
    _check(kind, number, said)
    return Message(kind, number, said)


_FIXED = {"hello": layout.HELLO, "slab_request": layout.SLAB_REQUEST, "slab_lend": layout.SLAB_LEND, "slab_return": layout.SLAB_NAME}


def _check(kind: str, number: int, said: dict[str, Any]) -> None:
    if kind == "hello":
        if said["client"] is None:
            raise Broken("a client name that is not terminated or not printable UTF-8")
        if not said["version_min"] <= layout.VERSION <= said["version_max"]:
            raise Broken(f"a client that speaks versions {said['version_min']} to {said['version_max']}, this worker speaks {layout.VERSION}",
                         "use a client and a daemon of matching releases")  # fmt: skip
    elif kind == "slab_request":
        if said["direction"] not in DIRECTION.values() or said["kind"] not in KIND.values() or said["size_bytes"] == 0:
            raise Refused(number, Error("input_invalid", f"a slab of direction {said['direction']}, kind {said['kind']}, {said['size_bytes']} bytes",
                                        "ask for a known direction and kind, and at least one byte"))  # fmt: skip
    elif kind == "slab_lend":
        if said["kind"] not in KIND.values() or said["size_bytes"] == 0 or said["slab_id"] < LIMITS["lent_slab_id_min"]:
            raise Refused(number, Error("input_invalid", f"lending slab {said['slab_id']} of kind {said['kind']}, {said['size_bytes']} bytes",
                                        f"lend a slab of a known kind, at least one byte, with a number of at least {LIMITS['lent_slab_id_min']}"))  # fmt: skip


def _release(body: bytes) -> Message:
    size = layout.RELEASE.size
    count = layout.RELEASE.unpack(body)["count"] if len(body) >= size else -1
    if not 0 <= count <= LIMITS["release_leases_max"] or len(body) != size + count * layout.LEASE.size:
        raise Broken(f"a release announces {count} leases and brings {len(body)} bytes", f"send at most {LIMITS['release_leases_max']} leases in one release")
    leases = [Lease.of(layout.LEASE.unpack(body, size + index * layout.LEASE.size)) for index in range(count)]
    return Message("release", 0, leases=leases)


def _infer(body: bytes, number: int) -> Message:
    if len(body) < layout.INFER.size:
        raise Broken("an infer shorter than its fixed part")
    said = layout.INFER.unpack(body, checked=True)
    count, json_bytes = said["tensor_count"], said["json_bytes"]
    if count > LIMITS["tensors_max"]:
        raise Broken(f"{count} tensors in one message", f"send at most {LIMITS['tensors_max']} tensors")
    if json_bytes > LIMITS["json_bytes_max"]:
        raise Broken(f"{json_bytes} bytes of JSON in one message", f"send at most {LIMITS['json_bytes_max']} bytes of JSON")
    left = len(body) - layout.INFER.size
    if left != count * layout.TENSOR.size + json_bytes:
        raise Broken(f"{count} tensors and {json_bytes} bytes of JSON announced, {left} bytes sent")
    message = Message("infer", number, said)
    try:
        for index in range(count):
            message.tensors.append(_tensor(layout.TENSOR.unpack(body, layout.INFER.size + index * layout.TENSOR.size, checked=True)))
        message.json = _object(body[len(body) - json_bytes :] if json_bytes else b"")
        if not said["method"]:
            raise Error("input_invalid", "a method name that is empty, not terminated or not printable", "name the method in at most 63 bytes")
    except Error as error:
        raise Refused(number, error) from None
    return message


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant) if text else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Error("input_invalid", f"{len(text)} bytes that are not a JSON object", "send one JSON object, or nothing")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _tensor(said: dict[str, Any]) -> Tensor:
    name, rank, lease = said["name"], said["rank"], said["lease"]
    if not name:
        raise Error("input_invalid", "a tensor whose name is empty, not terminated or not printable UTF-8", "name each tensor in at most 55 bytes")
    where = f'tensor "{name}"'
    if rank > LIMITS["rank_max"]:
        raise Error("shape_mismatch", f"{where}: rank {rank}", f"send at most {LIMITS['rank_max']} dimensions")
    if any(said["dims"][rank:]) or any(said["strides"][rank:]):
        raise Error("shape_mismatch", f"{where}: dims or strides beyond rank {rank}", "fill unused dims and strides with 0")
    shape, strides = said["dims"][:rank], said["strides"][:rank]
    if said["dtype"] not in DTYPE.values():
        raise Error("dtype_unsupported", f"{where}: reading a tensor of dtype number {said['dtype']}", "send one of the dtypes that docs/channel.md lists")
    dtype = DTYPE_NAMES[said["dtype"]]
    if any(size < 0 for size in shape):
        raise Error("shape_mismatch", f"{where}: shape {list(shape)} has a negative dim", "send dims of 0 or more")
    if math.prod(size or 1 for size in shape) * ITEM_BYTES[dtype] > (1 << 63) - 1:
        raise Error("shape_mismatch", f"{where}: shape {list(shape)} of {dtype} exceeds 2^63 bytes", "send a smaller tensor")
    if lease["lease_id"] == 0:
        raise Error("protocol_violation", f"{where}: its lease_id is 0", "count the leases of a slab from 1")
    size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if size_bytes != lease["size_bytes"]:
        raise Error("shape_mismatch", f"{where}: {dtype} {list(shape)} has {size_bytes} bytes, its lease {lease['size_bytes']}", "lease exactly the tensor's bytes")
    if 0 not in shape and any(size != 1 and stride != wanted for size, stride, wanted in zip(shape, strides, layout.contiguous_strides(shape))):
        raise Error("shape_mismatch", f"{where}: strides {list(strides)} of shape {list(shape)} are not contiguous", "make the tensor contiguous before it is sent")
    return Tensor(name, dtype, shape, Lease.of(lease), said["event_id"])


# --- to the client


@dataclass(frozen=True)
class Output:
    """A tensor of a result, and its place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    lease: Lease

    def pack(self) -> bytes:
        rank = len(self.shape)
        lease = layout.LEASE.pack(slab_id=self.lease.slab_id, offset_bytes=self.lease.offset, size_bytes=self.lease.size_bytes,
                                  lease_id=self.lease.lease_id)  # fmt: skip
        return layout.TENSOR.pack(name=self.name, dtype=DTYPE["boolean" if self.dtype == "bool" else self.dtype], rank=rank, lease=lease,
                                  dims=self.shape, strides=layout.contiguous_strides(self.shape))  # fmt: skip


def json_text(values: dict[str, Any]) -> bytes:
    """Raises ``inference_failed`` for values that are not JSON, or too large."""
    if not values:
        return b""
    try:
        text = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Error("inference_failed", f"values of the result that are not JSON: {error}", "return finite numbers, text, lists and dictionaries") from None
    if len(text) > LIMITS["json_bytes_max"]:
        raise Error("inference_failed", f"values of the result have {len(text)} bytes as JSON, at most {LIMITS['json_bytes_max']} are possible",
                    "return what is large as a tensor")  # fmt: skip
    return text


def result(request_id: int, outputs: Sequence[Output], text: bytes, *, more: bool = False, queued_us: int = 0, run_us: int = 0) -> bytes:
    body = layout.RESULT.pack(tensor_count=len(outputs), json_bytes=len(text), queued_us=queued_us, run_us=run_us)
    return packet("result", body + b"".join(output.pack() for output in outputs) + text, request_id, FLAG["more"] if more else 0)


def error(request_id: int, failure: Error) -> bytes:
    attempt, remedy = _cut(failure.attempt), _cut(failure.remedy)
    body = layout.ERROR.pack(code=_CODES.get(failure.code, _CODES["internal"]), attempt_bytes=len(attempt), remedy_bytes=len(remedy))
    return packet("error", body + attempt + remedy, request_id)


def closing(code: str, deadline_ms: int) -> bytes:
    return packet("closing", layout.CLOSING.pack(code=_CODES[code], deadline_ms=min(deadline_ms, 0xFFFFFFFF)))


def _cut(text: str) -> bytes:
    clean = "".join(c if c in "\n\t" else layout.printable(c) for c in text)
    return clean.encode("utf-8", "replace")[:_ERROR_TEXT_BYTES_MAX].decode("utf-8", "ignore").encode()


