"""A worker's end of a channel, in the hands of a test: says exactly what it is told to."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import struct

from bulkhead import layout
from bulkhead.layout import DIRECTION, KIND, MESSAGE

F_ADD_SEALS = 1033
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 1, 2, 4, 16

METHODS = {"forward": {"inputs": [{"name": "x", "dtype": "float32", "shape": ["0..1024"]}],
                       "parameters": [{"name": "scale", "type": "number"}], "outputs": []}}  # fmt: skip


class FakeWorker:
    def __init__(self, sock: socket.socket | None = None) -> None:
        """At `sock`, whose other end a client has; or at a new pair, of which `client_end`
        is the client's."""
        if sock is None:
            self.client_end, sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(10)
        self.socket = sock
        self.slabs: dict[int, mmap.mmap] = {}
        self.released: list[tuple[int, int]] = []
        self.fds: list[int] = []  # received, not yet taken
        self.packed = b""  #: messages of the packet that came last, not yet taken

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def receive(self) -> tuple[dict, bytes]:
        if not self.packed:
            self.packed, fds, _, _ = socket.recv_fds(self.socket, 65536, 4)
            assert self.packed, "the client has gone"
            self.fds += fds
        head = layout.HEADER.unpack(self.packed)
        data, self.packed = self.packed[: head["size_bytes"]], self.packed[head["size_bytes"] :]
        return head, data[layout.HEADER.size :]

    def expect(self, kind: str) -> tuple[dict, bytes]:
        """The next message, which must be of this kind; leases given back before it
        are only noted."""
        head, body = self.receive()
        while head["type"] == MESSAGE["release"] and kind != "release":
            for i in range(layout.RELEASE.unpack(body)["count"]):
                lease = layout.LEASE.unpack(body, layout.RELEASE.size + i * layout.LEASE.size)
                self.released.append((lease["offset_bytes"], lease["lease_id"]))
            head, body = self.receive()
        assert head["type"] == MESSAGE[kind], (head["type"], kind)
        return head, body

    def send(self, kind: str | int, body: bytes = b"", request_id: int = 0, flags: int = 0, fds: list[int] = [], **header: int) -> None:
        number = MESSAGE[kind] if isinstance(kind, str) else kind
        members = {"magic": layout.MAGIC, "version": layout.VERSION, "type": number, "size_bytes": layout.HEADER.size + len(body),
                   "flags": flags, "request_id": request_id, **header}  # fmt: skip
        socket.send_fds(self.socket, [layout.HEADER.pack(**members) + body], fds)

    def welcome(self, slabs: int = 2, *, in_flight: int = 4, bytes_max: int = 1 << 20, features: int = 0,
                methods: dict = METHODS) -> None:  # fmt: skip
        text = json.dumps(methods).encode()
        self.send("welcome", layout.WELCOME.pack(version=1, slab_count=slabs, in_flight_max=in_flight, features=features, generation=7,
                                                 channel=3, slab_bytes_max=bytes_max, json_bytes=len(text), model="fake") + text)  # fmt: skip

    def memfd(self, size: int, direction: str, seals: int | None = None) -> int:
        fd = os.memfd_create("slab", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, size)
        if seals is None:
            seals = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW | (SEAL_FUTURE_WRITE if direction == "output" else 0)
        self._last = mmap.mmap(fd, size)
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
        return fd

    def offer(self, number: int, direction: str, size: int = 65536, *, request_id: int = 0, fd: int | None = None, said: int | None = None) -> None:
        if fd is None:
            fd = self.memfd(size, direction)
            self.slabs[number] = self._last
        body = layout.SLAB_OFFER.pack(slab_id=number, direction=DIRECTION[direction], kind=KIND["host_memfd"], size_bytes=said or size)
        self.send("slab_offer", body, request_id, fds=[fd])
        os.close(fd)

    def open(self, **welcome: object) -> None:
        """The usual beginning: hello, welcome, one input and one output slab."""
        self.expect("hello")
        self.welcome(**welcome)
        self.offer(1, "input")
        self.offer(2, "output")

    def name_slab(self, kind: str, number: int, request_id: int = 0) -> None:
        self.send(kind, layout.SLAB_NAME.pack(slab_id=number), request_id)

    def returned(self) -> int:
        _, body = self.expect("slab_return")
        return layout.SLAB_NAME.unpack(body)["slab_id"]

    def borrow(self) -> tuple[int, mmap.mmap]:
        """Takes the next loan, as a worker does: its id, and its memory, read-only."""
        head, body = self.expect("slab_lend")
        lend = layout.SLAB_LEND.unpack(body)
        fd = self.fds.pop()
        assert os.fstat(fd).st_size == lend["size_bytes"]
        assert fcntl.fcntl(fd, 1034) & (SEAL_SEAL | SEAL_SHRINK | SEAL_GROW | SEAL_FUTURE_WRITE) == 23, "not sealed as a loan must be"
        memory = self.slabs[lend["slab_id"]] = mmap.mmap(fd, lend["size_bytes"], prot=mmap.PROT_READ)
        os.close(fd)
        self.name_slab("slab_accepted", lend["slab_id"], head["request_id"])
        return lend["slab_id"], memory

    def tensors(self, body: bytes) -> list[dict]:
        count = layout.INFER.unpack(body)["tensor_count"]
        return [layout.TENSOR.unpack(body, layout.INFER.size + i * layout.TENSOR.size) for i in range(count)]

    def floats(self, tensor: dict) -> list[float]:
        lease = tensor["lease"]
        count = lease["size_bytes"] // 4
        return list(struct.unpack_from(f"<{count}f", self.slabs[lease["slab_id"]], lease["offset_bytes"]))

    def answer(self, request_id: int, values: list[float], *, offset: int = 0, lease_id: int = 1, slab: int = 2, flags: int = 0,
               **tensor: object) -> None:  # fmt: skip
        struct.pack_into(f"<{len(values)}f", self.slabs[slab], offset, *values)
        lease = layout.LEASE.pack(slab_id=slab, offset_bytes=offset, size_bytes=4 * len(values), lease_id=lease_id)
        members = {"name": "y", "dtype": 9, "rank": 1, "lease": lease, "dims": [len(values)], "strides": [1], **tensor}
        self.send("result", layout.RESULT.pack(tensor_count=1, queued_us=1, run_us=2) + layout.TENSOR.pack(**members), request_id, flags)

    def answer_next(self, values: list[float] | None = None, **tensor: object) -> None:
        """Answers the next request; without values, with those of its first input."""
        head, body = self.expect("infer")
        self.answer(head["request_id"], self.floats(self.tensors(body)[0]) if values is None else values, **tensor)

    def error(self, request_id: int, code: int, attempt: str = "it failed", remedy: str = "mend it") -> None:
        texts = attempt.encode(), remedy.encode()
        self.send("error", layout.ERROR.pack(code=code, attempt_bytes=len(texts[0]), remedy_bytes=len(texts[1])) + b"".join(texts), request_id)
