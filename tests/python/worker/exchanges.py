"""What a client may say wrongly on a channel, and what follows (``docs/channel.md``, Faults): the
same for every worker."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from fcntl import fcntl
from typing import Callable

from bulkhead import layout
from bulkhead.layout import DTYPE, KIND, LIMITS
from harness import Client, ask_slab



@dataclass(frozen=True)
class Exchange:
    """After ``say`` comes an error of this code for this request; ``ends``: and then
    the end of file."""

    name: str
    say: Callable[[Client], None]
    code: str = "protocol_violation"
    request: int = 0
    ends: bool = False


def _infer(**changes: object) -> Callable[[Client], None]:
    return lambda client: client.infer(5, client.tensor(**changes))  # type: ignore[arg-type]


def _header(**changes: int) -> Callable[[Client], None]:
    return lambda client: client.send("cancel", number=5, **changes)


def lend(slab: int, size: int, make: Callable[[], int]) -> Callable[[Client], None]:
    def say(client: Client) -> None:
        fd = make()
        client.send("slab_lend", layout.SLAB_LEND.pack(slab_id=slab, kind=KIND["host_memfd"], size_bytes=size), 5, [fd])
        os.close(fd)

    return say


def _memfd() -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    return fd


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def _with_descriptor(client: Client) -> None:
    fd = _memfd()
    client.send("cancel", number=5, fds=[fd])
    os.close(fd)


def _named(kind: str, number: int, body: bytes) -> Callable[[Client], None]:
    return lambda client: client.send(kind, body, number)


#: In place of the hello.
BEFORE_HELLO = [
    Exchange("an infer", lambda client: client.infer(1), ends=True),
    Exchange("a slab_request", lambda client: client.send("slab_request", ask_slab(1, 4096), 1), ends=True),
    Exchange("a cancel", lambda client: client.send("cancel", number=1), ends=True),
    Exchange("a release", lambda client: client.release(), ends=True),
    Exchange("a hello of later versions", lambda client: client.hello(low=2, high=3), ends=True),
    Exchange("a hello of earlier versions", lambda client: client.hello(low=0, high=0), ends=True),
    Exchange("a hello that is too short", lambda client: client.send("hello", bytes(72)), ends=True),
    Exchange("a hello whose client has no end", lambda client: client.send("hello", b"\1\0\1\0" + bytes(12) + b"c" * 48 + bytes(16)), ends=True),
    Exchange("a hello whose client is not UTF-8", lambda client: client.send("hello", b"\1\0\1\0" + bytes(12) + b"\xff\xfe" + bytes(62)), ends=True),
]

#: The channel ends.
BREAKING = [
    Exchange("less than a header", lambda client: client.raw(bytes(8)), ends=True),
    Exchange("more than a packet holds", lambda client: client.raw(bytes(LIMITS["packet_bytes_max"] + 1)), ends=True),
    Exchange("another magic", _header(magic=1), ends=True),
    Exchange("another version", _header(version=2), ends=True),
    Exchange("another size", _header(size_bytes=33), ends=True),
    Exchange("an unknown type", lambda client: client.send(99), ends=True),
    Exchange("a worker's message", lambda client: client.send("welcome", bytes(112)), ends=True),
    Exchange("a second hello", lambda client: client.hello(), ends=True),
    Exchange("an infer numbered 0", lambda client: client.infer(0, client.tensor()), ends=True),
    Exchange("a cancel numbered 0", lambda client: client.send("cancel"), ends=True),
    Exchange("a slab_request numbered 0", _named("slab_request", 0, ask_slab(1, 4096)), ends=True),
    Exchange("a cancel with a body", _named("cancel", 5, bytes(8)), ends=True),
    Exchange("an infer of half a body", _named("infer", 5, bytes(40)), ends=True),
    Exchange("more tensors than may be", lambda client: client.infer(5, *[client.tensor(f"x{i}") for i in range(33)]), ends=True),
    Exchange("more tensors than came", lambda client: client.infer(5, client.tensor(), tensor_count=2), ends=True),
    Exchange("more JSON than came", lambda client: client.infer(5, client.tensor(), text=b"{}", json_bytes=3), ends=True),
    Exchange("more JSON than may be", lambda client: client.infer(5, text=b" " * (LIMITS["json_bytes_max"] + 1)), ends=True),
    Exchange("a release of more than came", _named("release", 0, layout.RELEASE.pack(count=1)), ends=True),
    Exchange("a slab_return of another size", _named("slab_return", 0, bytes(4)), ends=True),
    Exchange("a descriptor with a cancel", _with_descriptor, ends=True),
    Exchange("a slab_lend without a descriptor", _named("slab_lend", 5, layout.SLAB_LEND.pack(slab_id=1 << 31, kind=1, size_bytes=4096)), ends=True),
]

#: The channel ends, if the client agreed to nothing.
UNAGREED = [
    Exchange("a slab_return", _named("slab_return", 0, layout.SLAB_NAME.pack(slab_id=1)), ends=True),
    Exchange("a slab_lend", lend(1 << 31, 4096, _memfd), ends=True),
]

#: The request fails, or the message is ignored; the channel lives on.
REFUSED = [
    Exchange("an unknown method", lambda client: client.infer(5, client.tensor(), method="backward"), "method_unknown", 5),
    Exchange("no method", lambda client: client.infer(5, client.tensor(), method=""), "input_invalid", 5),
    Exchange("an unknown input", _infer(name="z"), "input_invalid", 5),
    Exchange("no name", _infer(name=""), "input_invalid", 5),
    Exchange("no input", lambda client: client.infer(5), "input_invalid", 5),
    Exchange("an input twice", lambda client: client.infer(5, client.tensor(), client.tensor(offset=64)), "input_invalid", 5),
    Exchange("an unknown parameter", lambda client: client.infer(5, client.tensor(), text=b'{"scale": 1}'), "input_invalid", 5),
    Exchange("JSON that is none", lambda client: client.infer(5, client.tensor(), text=b"{"), "input_invalid", 5),
    Exchange("JSON that is not an object", lambda client: client.infer(5, client.tensor(), text=b"[]"), "input_invalid", 5),
    Exchange("an unknown dtype", _infer(dtype=99), "dtype_unsupported", 5),
    Exchange("another dtype", _infer(dtype=DTYPE["int32"]), "dtype_unsupported", 5),
    Exchange("another rank", _infer(dims=(2, 2)), "shape_mismatch", 5),
    Exchange("a rank beyond 8", _infer(rank=9), "shape_mismatch", 5),
    Exchange("dims beyond the rank", _infer(dims=(4, 1), rank=1), "shape_mismatch", 5),
    Exchange("a negative dim", _infer(dims=(-4,), size=16), "shape_mismatch", 5),
    Exchange("more bytes than there are", _infer(dims=(1 << 62,), size=16), "shape_mismatch", 5),
    Exchange("strides", _infer(strides=(2,)), "shape_mismatch", 5),
    Exchange("one element for all", _infer(strides=(0,)), "shape_mismatch", 5),
    Exchange("backward strides", _infer(strides=(-1,)), "shape_mismatch", 5),
    Exchange("strides beyond 64 bits", _infer(strides=((1 << 63) - 1,)), "shape_mismatch", 5),
    Exchange("a product that wraps to 0", _infer(dims=(1 << 32, 1 << 32), size=0), "shape_mismatch", 5),
    Exchange("a lease of another size", _infer(size=12), "shape_mismatch", 5),
    Exchange("more than the declared range", _infer(dims=(16777217,), size=4 * 16777217), "protocol_violation", 5),
    Exchange("lease_id 0", _infer(lease_id=0), "protocol_violation", 5),
    Exchange("an event", _infer(event=3), "protocol_violation", 5),
    Exchange("a slab that is not there", _infer(slab=77), "protocol_violation", 5),
    Exchange("an output slab", lambda client: client.infer(5, client.tensor(slab=client.output)), "protocol_violation", 5),
    Exchange("a place that is not aligned", _infer(offset=32), "protocol_violation", 5),
    Exchange("a place beyond the slab", _infer(offset=65536), "protocol_violation", 5),
    Exchange("a place beyond 64 bits", _infer(offset=(1 << 64) - 64), "protocol_violation", 5),
    Exchange("a slab of no direction", _named("slab_request", 5, ask_slab(3, 4096)), "input_invalid", 5),
    Exchange("a slab of no kind", _named("slab_request", 5, ask_slab(1, 4096, 9)), "input_invalid", 5),
    Exchange("a slab of no bytes", _named("slab_request", 5, ask_slab(1, 0)), "input_invalid", 5),
    Exchange("a slab on a GPU", _named("slab_request", 5, ask_slab(1, 4096, KIND["cuda_vmm"])), "input_invalid", 5),
    Exchange("a slab beyond the channel's bound", _named("slab_request", 5, ask_slab(1, 1 << 30)), "resources_exhausted", 5),
    Exchange("a slab beyond 64 bits", _named("slab_request", 5, ask_slab(1, (1 << 64) - 1)), "resources_exhausted", 5),
    Exchange("a loan with a low number", lend(7, 4096, _memfd), "input_invalid", 5),
    Exchange("a loan that is not a memfd", lend(1 << 31, 4096, _pipe), "protocol_violation", 5),
    Exchange("a loan that is not sealed", lend((1 << 31) + 1, 4096, _memfd), "protocol_violation", 5),
    Exchange("a release of what is not lent", lambda client: client.release(
        {"slab_id": client.output, "offset_bytes": 0, "size_bytes": 16, "lease_id": 9}), request=0),
    Exchange("a release in an input slab", lambda client: client.release(
        {"slab_id": client.input, "offset_bytes": 0, "size_bytes": 16, "lease_id": 9}), request=0),
    Exchange("the return of an output slab", lambda client: client.send("slab_return", layout.SLAB_NAME.pack(slab_id=client.output)), request=0),
    Exchange("the return of a slab that is not there", lambda client: client.send("slab_return", layout.SLAB_NAME.pack(slab_id=77)), request=0),
    Exchange("the return of a loan that is not there", _named("slab_return", 0, layout.SLAB_NAME.pack(slab_id=1 << 31)), request=0),
]  # fmt: skip


def sealed(values: list[float]) -> int:
    """As another worker's output slab."""
    fd = os.memfd_create("lent", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, 4096)
    os.pwrite(fd, array("f", values).tobytes(), 0)
    fcntl(fd, 1033, 1 | 2 | 4 | 8)
    return fd


def _altered_infer(client: Client, altered: tuple[int, bytes]) -> None:
    client.altered = altered
    client.infer(5, client.tensor())


def _altered_hello(client: Client, altered: tuple[int, bytes]) -> None:
    client.altered = altered
    client.hello()


def _altered_ask_slab(client: Client, altered: tuple[int, bytes]) -> None:
    client.altered = altered
    client.send("slab_request", ask_slab(1, 4096), 5)


def _altered_release(client: Client, altered: tuple[int, bytes]) -> None:
    client.infer(4, client.tensor())
    _, lease = client.result(4)
    client.altered = altered
    client.release(lease)


def _altered_lend(client: Client, altered: tuple[int, bytes]) -> None:
    fd = sealed([1.0])
    client.altered = altered
    client.send("slab_lend", layout.SLAB_LEND.pack(slab_id=LIMITS["lent_slab_id_min"], kind=1, size_bytes=4096), 5, [fd])
    os.close(fd)


def _altered_return(client: Client, altered: tuple[int, bytes]) -> None:
    client.altered = altered
    client.send("slab_return", layout.SLAB_NAME.pack(slab_id=client.output))


#: Each message of a client, whose packet is altered.
MESSAGES = {"hello": _altered_hello, "infer": _altered_infer, "slab_request": _altered_ask_slab, "release": _altered_release, "slab_lend": _altered_lend, "slab_return": _altered_return}
