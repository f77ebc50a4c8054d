"""A worker's end of a channel with GPU slabs, in a process of its own, as CUDA's handles need it:
`gpu_worker.py FD KIND`.

Answers each request by its first input plus nothing: copied on its own stream from slab to slab,
behind the client's event, and told before it is done. Says on standard output what it saw. A line
on standard input: `unload` withdraws; `grow` adds an output slab, which results lie in from then
on; `shrink` withdraws that; `die` ends at once.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p

from bulkhead import cuda, layout
from bulkhead.layout import FEATURE, KIND, MESSAGE
from fake_worker import FakeWorker

GRANULARITY = 2 << 20


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [("type", c_int), ("handles", c_int), ("where", c_int), ("device", c_int), ("win32", c_void_p), ("flags", ctypes.c_ubyte * 8)]


class GpuWorker(FakeWorker):
    def __init__(self, sock: socket.socket, kind: str) -> None:
        super().__init__(sock)
        self.kind = kind
        self.gpu = cuda.gpu(0)
        self.library = ctypes.CDLL(os.environ.get("BULKHEAD_LIBCUDA") or "libcuda.so.1")
        self.gpu.driver.call("cuCtxPushCurrent", self.gpu._context)
        self.stream = c_void_p()
        self.cuda("cuStreamCreate", byref(self.stream), 1)
        self.regions: dict[int, int] = {}
        self.events: dict[int, c_void_p] = {}

    def cuda(self, function: str, *arguments: object) -> None:
        status = getattr(self.library, function)(*arguments)
        assert status == 0, f"{function}: {status}"

    def offer_gpu(self, number: int, direction: str, request_id: int, size: int) -> None:
        size = -(-size // GRANULARITY) * GRANULARITY
        address, handle, fd = c_uint64(), c_ulonglong(), c_int(-1)
        body = layout.SLAB_OFFER.pack(slab_id=number, direction=layout.DIRECTION[direction], kind=KIND[self.kind], size_bytes=size)
        if self.kind == "cuda_ipc":
            ipc = (ctypes.c_char * 64)()
            self.cuda("cuMemAlloc_v2", byref(address), c_size_t(size))
            self.cuda("cuIpcGetMemHandle", ipc, address)
            self.send("slab_offer", body + bytes(ipc), request_id)
        else:
            properties = Properties(1, 1, 1, self.gpu.device)
            access = (c_int * 3)(1, self.gpu.device, 3)
            self.cuda("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_ulonglong(0))
            self.cuda("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_ulonglong(0))
            self.cuda("cuMemMap", address, c_size_t(size), c_size_t(0), handle, c_ulonglong(0))
            self.cuda("cuMemSetAccess", address, c_size_t(size), access, c_size_t(1))
            self.cuda("cuMemExportToShareableHandle", byref(fd), handle, 1, c_ulonglong(0))
            self.send("slab_offer", body, request_id, fds=[fd.value])
            os.close(fd.value)
        self.regions[number] = address.value

    def offer_events(self) -> None:
        for number in range(1, 5):
            event, handle = c_void_p(), (ctypes.c_char * 64)()
            self.cuda("cuEventCreate", byref(event), 4 | 2)
            self.cuda("cuIpcGetEventHandle", handle, event)
            self.events[number] = event
            self.send("event_offer", layout.EVENT_OFFER.pack(event_id=number, from_worker=number % 2, handle=list(bytes(handle))))

    def open_gpu(self) -> None:
        _, body = self.expect("hello")
        hello = layout.HELLO.unpack(body)
        print("hello", hello["features"] & (FEATURE["cuda_vmm"] | FEATURE["cuda_ipc"]), bytes(hello["gpu"]) == self.gpu.uuid, flush=True)
        agreed = FEATURE[self.kind] | FEATURE["returning"] | FEATURE["lending"]
        self.welcome(2, features=agreed, bytes_max=64 << 20)
        self.offer(1, "input")
        self.offer(2, "output")
        self.offer_events()

    def serve(self) -> None:
        turn, next_slab = 0, 3
        while True:
            ready, _, _ = select.select([self.socket, sys.stdin], [], [])
            if sys.stdin in ready:
                word = sys.stdin.readline().strip()
                if not word:
                    return  # the test has ended
                if word == "die":
                    os._exit(9)
                if word == "unload":
                    self.send("closing", layout.CLOSING.pack(code=14, deadline_ms=5000))
                    for number in self.regions:
                        self.name_slab("slab_withdraw", number)
                if word == "grow":
                    self.offer_gpu(next_slab, "output", 0, GRANULARITY)
                    next_slab += 1
                if word == "shrink":
                    self.name_slab("slab_withdraw", max(self.regions))
                    del self.regions[max(self.regions)]
                continue
            try:
                head, body = self.receive()
            except (AssertionError, ConnectionResetError):
                return  # the client has gone
            kind, number = head["type"], head["request_id"]
            if kind == MESSAGE["slab_request"]:
                request = layout.SLAB_REQUEST.unpack(body)
                direction = "input" if request["direction"] == 1 else "output"
                if request["kind"] == KIND["host_memfd"]:
                    self.offer(next_slab, direction, request["size_bytes"], request_id=number)
                else:
                    self.offer_gpu(next_slab, direction, number, request["size_bytes"])
                next_slab += 1
            elif kind == MESSAGE["infer"]:
                (tensor,) = self.tensors(body)
                lease = tensor["lease"]
                turn = (turn + 1) % 32
                out = max((slab for slab in self.regions if slab != lease["slab_id"]), default=None)
                print("infer", lease["slab_id"] in self.regions, tensor["event_id"] in (2, 4), flush=True)
                if lease["slab_id"] not in self.regions or out is None:
                    self.answer(number, self.floats(tensor) if lease["slab_id"] in self.slabs else [0.0], lease_id=turn + 1)
                    continue
                if tensor["event_id"]:
                    self.cuda("cuStreamWaitEvent", self.stream, self.events[tensor["event_id"]], 0)
                size, offset = lease["size_bytes"], 65536 * turn
                self.gpu.driver.call("cuMemcpyAsync", self.regions[out] + offset, self.regions[lease["slab_id"]] + lease["offset_bytes"], size, self.stream)
                event = 1 + 2 * (turn % 2)
                self.cuda("cuEventRecord", self.events[event], self.stream)
                result = layout.LEASE.pack(slab_id=out, offset_bytes=offset, size_bytes=size, lease_id=turn + 1)
                described = layout.TENSOR.pack(name="y", dtype=tensor["dtype"], rank=tensor["rank"], dims=tensor["dims"], strides=tensor["strides"],
                                               event_id=event, lease=result)  # fmt: skip
                self.send("result", layout.RESULT.pack(tensor_count=1) + described, number)
            elif kind == MESSAGE["release"]:
                for at in range(layout.RELEASE.unpack(body)["count"]):
                    lease = layout.LEASE.unpack(body, layout.RELEASE.size + at * layout.LEASE.size)
                    print("release", lease["slab_id"], lease["event_id"], flush=True)
            elif kind == MESSAGE["slab_return"]:
                print("returned", struct.unpack_from("<I", body)[0], flush=True)


if __name__ == "__main__":
    worker = GpuWorker(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    worker.open_gpu()
    worker.serve()
