"""The channel's messages, from ``wire.json``, the file that the C++ side is tested against too."""

from __future__ import annotations

import functools
import json
import re
import struct
from pathlib import Path
from typing import Any, Sequence

from .errors import Error

_SPEC: dict[str, Any] = json.loads((Path(__file__).parent / "wire.json").read_text("utf-8"))

MAGIC: int = _SPEC["magic"]
VERSION: int = _SPEC["version"]
LIMITS: dict[str, int] = _SPEC["limits"]
MESSAGE: dict[str, int] = _SPEC["enums"]["MessageType"]
DTYPE: dict[str, int] = _SPEC["enums"]["DType"]
DIRECTION: dict[str, int] = _SPEC["enums"]["SlabDirection"]
KIND: dict[str, int] = _SPEC["enums"]["SlabKind"]
FLAG: dict[str, int] = _SPEC["enums"]["Flag"]
FEATURE: dict[str, int] = _SPEC["enums"]["Feature"]
ERROR_NAMES: dict[int, str] = {value: name for name, value in _SPEC["enums"]["ErrorCode"].items()}

#: Control characters, line separators, direction marks (as in ipc/base/text.cpp), and
# lone surrogates.
_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q"}


class Layout:
    """One struct: packs keyword arguments, unpacks to a dict. Omitted members are 0.

    ``flat`` is the fast form for requests: all members in order, nested structs inline, and text as
    bytes.
    """

    def __init__(self, name: str) -> None:
        spec = _SPEC["structs"][name]
        self.name = name
        self.size: int = spec["size"]
        code = flat = ""
        self.text_bytes_max: dict[str, int] = {}
        self.offset: dict[str, int] = {}
        self._members: list[tuple[str, str, int, Layout | None]] = []  # name, kind, count, nested
        for member, kind in spec["fields"]:
            base, _, count_text = kind.partition("[")
            count = int(count_text[:-1]) if count_text else 1
            nested = Layout(base) if base in _SPEC["structs"] else None
            self.offset[member] = struct.calcsize("<" + code)
            if base == "char":
                self.text_bytes_max[member] = count - 1
            if nested is not None:
                code += f"{nested.size}s"
                flat += nested.flat.format[1:]
            else:
                one = f"{count}s" if base == "char" else (str(count) if count_text else "") + _CODES[base]
                code, flat = code + one, flat + one
            self._members.append((member, "char" if base == "char" else ("many" if count_text else "one"), count, nested))
        self._struct = struct.Struct("<" + code)
        self.flat: struct.Struct = struct.Struct("<" + flat)
        assert self._struct.size == self.flat.size == self.size, name
        self.flat_members = len(self.flat.unpack(bytes(self.size)))

    def pack(self, **values: Any) -> bytes:
        """Raises ``input_invalid`` for text that is not printable or too long."""
        flat: list[Any] = []
        for member, kind, count, nested in self._members:
            if nested is not None:
                value = values.pop(member, None)
                flat.append(value if value is not None else bytes(nested.size))
            elif kind == "char":
                flat.append(text_field(f"{self.name}.{member}", values.pop(member, ""), count - 1))
            elif kind == "many":
                items = list(values.pop(member, ()))
                flat.extend(items + [0] * (count - len(items)))
            else:
                flat.append(values.pop(member, 0))
        if values:
            raise TypeError(f"{self.name} has no {', '.join(values)}")
        return self._struct.pack(*flat)

    def unpack(self, data: bytes | memoryview, offset: int = 0, *, checked: bool = False) -> dict[str, Any]:
        """Raises ``struct.error`` if the data is too short. ``checked``: a text that is
        unterminated or not printable is None; otherwise it is accepted, and invalid UTF-8 raises
        ``UnicodeDecodeError``."""
        flat = self._struct.unpack_from(data, offset)
        result: dict[str, Any] = {}
        at = 0
        for member, kind, count, nested in self._members:
            if nested is not None:
                result[member] = nested.unpack(flat[at])
                at += 1
            elif kind == "char":
                result[member] = _checked_text(flat[at]) if checked else flat[at].split(b"\0", 1)[0].decode("utf-8")
                at += 1
            elif kind == "many":
                result[member] = flat[at : at + count]
                at += count
            else:
                result[member] = flat[at]
                at += 1
        return result


class Message:
    """A message of each request, packed or unpacked with one struct: header, own members, and the
    members of the tensors or leases that it lists; the member ``counter`` has their number."""

    def __init__(self, kind: str, own: Layout, counter: str, listed: Layout) -> None:
        self._kind = MESSAGE[kind]
        self._head, self._listed = HEADER.flat.format + own.flat.format[1:], listed.flat.format[1:]
        self._count_at = HEADER.size + own.offset[counter]
        self._structs: dict[int, struct.Struct] = {}

    def _of(self, count: int) -> struct.Struct:
        one = self._structs[count] = struct.Struct(self._head + count * self._listed)
        return one

    def pack(self, number: int, flags: int, count: int, members: Sequence[Any], text: bytes = b"") -> bytes:
        """``members``: all except the header's, in order. ``text`` follows them. Raises
        ``input_invalid`` if a packet is too small for it."""
        one = self._structs.get(count) or self._of(count)
        size = one.size + len(text)
        if size > LIMITS["packet_bytes_max"]:
            raise too_large(size)
        return one.pack(MAGIC, VERSION, self._kind, size, flags, number, 0, *members) + text

    def of(self, data: bytes) -> struct.Struct | None:
        """The struct that unpacks all members, the header's first. None if it is another
        message, or incomplete. Looks only at a count's low byte: for counts over 255, the caller
        compares the member."""
        if len(data) <= self._count_at or data[_TYPE_AT] != self._kind:
            return None
        count = data[self._count_at]
        return self._structs.get(count) or self._of(count)


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """In elements, row-major; sizes of 0 count as 1."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * (shape[axis] or 1)
    return strides


def too_large(size: int) -> Error:
    return Error("input_invalid", f"a message of {size} bytes", "send fewer tensors or smaller parameters")


def printable(text: str) -> str:
    """Replaces characters that no text field accepts by question marks."""
    return _UNPRINTABLE.sub("?", text)


def _checked_text(field: bytes) -> str | None:
    text, end, _ = field.partition(b"\0")
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return decoded if end and not _UNPRINTABLE.search(decoded) else None


@functools.lru_cache(maxsize=256)
def text_field(what: str, text: str, bytes_max: int) -> bytes:
    """Raises ``input_invalid`` for text that is not printable or too long."""
    remedy = f"name it in printable UTF-8, at most {bytes_max} bytes"
    if _UNPRINTABLE.search(text):
        raise Error("input_invalid", f"{what} is {text!a}, which cannot be printed", remedy)
    encoded = text.encode("utf-8")
    if len(encoded) > bytes_max:
        raise Error("input_invalid", f"{what} has {len(encoded)} bytes, at most {bytes_max} fit", remedy)
    return encoded


HEADER = Layout("Header")
_TYPE_AT = HEADER.offset["type"]
HELLO = Layout("Hello")
WELCOME = Layout("Welcome")
SLAB_REQUEST = Layout("SlabRequest")
SLAB_OFFER = Layout("SlabOffer")
LEASE = Layout("LeaseRef")
TENSOR = Layout("TensorDescriptor")
INFER = Layout("Infer")
RESULT = Layout("InferResult")
ERROR = Layout("ErrorBody")
RELEASE = Layout("Release")
CLOSING = Layout("Closing")
SLAB_LEND = Layout("SlabLend")
SLAB_NAME = Layout("SlabName")
EVENT_OFFER = Layout("EventOffer")

INFER_MESSAGE = Message("infer", INFER, "tensor_count", TENSOR)
RESULT_MESSAGE = Message("result", RESULT, "tensor_count", TENSOR)
RELEASE_MESSAGE = Message("release", RELEASE, "count", LEASE)
