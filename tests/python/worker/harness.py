"""A worker of either kind, and the daemon's and a client's ends of its sockets in the
hands of a test."""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import mmap
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bulkhead import layout
from bulkhead.layout import DIRECTION, DTYPE, ERROR_NAMES, FEATURE, FLAG, KIND, MESSAGE

HERE = Path(__file__).resolve().parent
START = HERE.parents[2] / "clients/python/bulkhead/worker/start.py"
BUILD = Path(os.environ["BULKHEAD_BUILD"])
PROGRAMS = {"minimal": BUILD / "minimal/bin/bulkhead-worker", "torch": BUILD / "bin/bulkhead-worker"}
SECONDS = 20.0
PROMPT = 4096  #: its place in the input
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

ECHO = {"inputs": {"x": {"dtype": "float32", "shape": ["0..16777216"]}}, "parameters": {},
        "outputs": {"y": {"dtype": "float32", "shape": ["0..16777216"]}}, "buckets": [], "padding": {}, "warmup": {}}  # fmt: skip
CHANNEL = {"input": 65536, "output": 65536, "max": 4 << 20, "count": 4, "worker_max": 16 << 20, "idle": "30000ms", "huge_pages": False}


@functools.cache
def cache() -> str:
    """The daemon's, for packages that are unpacked."""
    folder = tempfile.mkdtemp(prefix="bh-")
    atexit.register(shutil.rmtree, folder)
    return folder


@functools.cache
def scripted_echo() -> str:
    """A TorchScript file that gives its input back, once that does not begin with a negative
    number: until then it holds a core, for TorchScript cannot sleep. With an infinite one it runs
    out of memory."""
    import torch

    class Echo(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            looks = 0
            # A fixed index would be read once, before the loop.
            while x.numel() > 0 and float(x[looks % 1]) < 0:
                looks += 1
            if x.numel() > 0 and bool(torch.isinf(x[0])):
                return torch.empty([1 << 58])
            return x.clone()

    file = f"{cache()}/echo.pt"
    torch.jit.script(Echo()).save(file)  # type: ignore[no-untyped-call]
    return file


class Worker:
    """A process of a worker in C++ (``minimal``, and ``torch``, which has LibTorch) or in Python
    (``python``), with the daemon's end of its link. As the keeper does, it has the kernel kill it
    when the thread that made it ends."""

    def __init__(self, kind: str, *, queue: int = 8, request: str = "30000ms", engine: str = "Echo", generates: bool = False,
                 fails: bool = False, channel: dict[str, Any] = {}, born_as: str = "echo/0#7", environment: dict[str, str] = {},
                 options: dict[str, Any] = {}) -> None:  # fmt: skip
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(SECONDS)
        own = {"BULKHEAD_WORKER": f"token:{born_as}", "BULKHEAD_CACHE": cache(), "CUDA_VISIBLE_DEVICES": "", "MINIMAL_HELD": "1", **environment}
        if fails and kind == "minimal":
            own["EVIL_LOAD"] = "throw"
        if generates:
            own["MINIMAL_GENERATES"] = "1"
            engine = "Generates"
        command = [str(PROGRAMS[kind])] if kind in PROGRAMS else [sys.executable, "-u", str(START)]
        number = theirs.fileno()

        def become() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(number, 3)

        self.process = subprocess.Popen(command, preexec_fn=become, close_fds=False, env={**os.environ, **own},
                                        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
        theirs.close()
        self.model: dict[str, Any] = {
            "name": "echo", "device": "cpu", "replicas": 1, "preload": False, "threads": 1, "graphs": "off", "queue": queue, "log_level": "info",
            "deadlines": {"load": "30000ms", "capture": "30000ms", "request": request, "drain": "10000ms", "kill": "5000ms"},
            "channel": {**CHANNEL, **channel}, "environment": {}, "state": {"scope": "none"}, "restart": "on_crash", "core_dump": 0,
        }  # fmt: skip
        if kind == "torch" and generates:
            self.model |= {"runtime": "generate", "package": str(BUILD / "models/test/tiny_long"), "generate": {"length": 32768}}
        elif kind in PROGRAMS:
            file = "/nowhere.pt" if fails else "/echo.pt" if kind == "minimal" else scripted_echo()
            self.model |= {"runtime": "torchscript", "file": file, "methods": {"forward": ECHO}}
        else:
            self.model |= {"runtime": "python", "engine": f"{HERE}/engines/echo.py:{'Fails' if fails else engine}", "options": options}
        self.fds: list[int] = []
        self.channels = 0
        self.clients: list[Client] = []

    def close(self) -> str:
        """What it had written to standard error."""
        self.link.close()
        for client in self.clients:
            client.close()
        for fd in self.fds:
            os.close(fd)
        self.process.kill()
        return self.process.communicate()[1].decode()

    def send(self, kind: str, fds: list[int] = [], **members: Any) -> None:
        socket.send_fds(self.link, [json.dumps({"type": kind, **members}).encode()], fds)

    def receive(self) -> dict[str, Any]:
        data, fds, _, _ = socket.recv_fds(self.link, 65536, 253)
        self.fds += fds
        if not data:
            raise EOFError("the worker has gone")
        message: dict[str, Any] = json.loads(data)
        return message

    def expect(self, kind: str) -> dict[str, Any]:
        """The next message of this kind; only what may come at any time may come before it."""
        while (message := self.receive())["type"] != kind:
            assert message["type"] in ("progress", "busy", "idle", "statistics", "channel_opened", "channel_closed"), (message, kind)
        return message

    def load(self) -> dict[str, Any]:
        self.hello = self.expect("hello")
        self.send("configure", model=self.model, device="cpu", protocol=1)
        return self.expect("ready")

    def offer_channel(self, number: int | None = None) -> Client:
        self.channels += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.send("channel", [theirs.fileno()], channel=number or self.channels, client_pid=os.getpid(), client_uid=0)
        theirs.close()
        self.clients.append(Client(ours))
        return self.clients[-1]

    def open_channel(self, features: int = FEATURE["returning"] | FEATURE["lending"]) -> Client:
        client = self.offer_channel()
        client.open(features)
        return client


class Client:
    """A client's end of a channel: says exactly what it is told to."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(SECONDS)
        self.memory: dict[int, mmap.mmap] = {}
        self.input = self.output = 0
        self.lease_id = 0
        self.fds: list[int] = []
        # Of the next packet: what it says from there on.
        self.altered: tuple[int, bytes] | None = None
        self.sent_bytes = 0

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    # --- sending

    def raw(self, data: bytes, fds: list[int] = []) -> None:
        if self.altered is not None:
            at, says = self.altered
            data, self.altered = data[:at] + says + data[at + len(says) :], None
        self.sent_bytes = len(data)
        socket.send_fds(self.socket, [data], fds)

    def send(self, kind: str | int, body: bytes = b"", number: int = 0, fds: list[int] = [], **header: int) -> None:
        members = {"magic": layout.MAGIC, "version": layout.VERSION, "type": MESSAGE[kind] if isinstance(kind, str) else kind,
                   "size_bytes": layout.HEADER.size + len(body), "request_id": number, **header}  # fmt: skip
        self.raw(layout.HEADER.pack(**members) + body, fds)

    def hello(self, features: int = 0, *, low: int = 1, high: int = 1) -> None:
        self.send("hello", layout.HELLO.pack(version_min=low, version_max=high, features=features, client="conformance"))

    def tensor(self, name: str = "x", *, dtype: int = DTYPE["float32"], dims: tuple[int, ...] = (4,), strides: tuple[int, ...] | None = None,
               rank: int | None = None, offset: int = 0, size: int | None = None, slab: int | None = None, lease_id: int | None = None,
               event: int = 0) -> bytes:  # fmt: skip
        self.lease_id += 1
        count = 1
        wanted: list[int] = []
        for dim in reversed(dims):
            wanted.insert(0, count)
            count *= dim
        lease = layout.LEASE.pack(slab_id=self.input if slab is None else slab, offset_bytes=offset, size_bytes=4 * count if size is None else size,
                                  lease_id=self.lease_id if lease_id is None else lease_id)  # fmt: skip
        return layout.TENSOR.pack(name=name, dtype=dtype, rank=len(dims) if rank is None else rank, event_id=event, lease=lease, dims=dims,
                                  strides=wanted if strides is None else strides)  # fmt: skip

    def infer(self, number: int, *tensors: bytes, method: str = "forward", text: bytes = b"", deadline_ms: int = 0, **infer: int) -> None:
        body = layout.INFER.pack(**{"method": method, "deadline_ms": deadline_ms, "tensor_count": len(tensors), "json_bytes": len(text), **infer})  # type: ignore[arg-type]
        self.send("infer", body + b"".join(tensors) + text, number)

    def generate(self, number: int, count: int, held: bool = False) -> None:
        """Asks for so many tokens after three. Held, it gives one until `let_go` of `PROMPT`,
        except in the worker with LibTorch, whose model cannot be held."""
        struct.pack_into("<3q", self.memory[self.input], PROMPT, 0 if held else 1, 2, 3)
        prompt = self.tensor("tokens", dtype=DTYPE["int64"], dims=(3,), offset=PROMPT, size=24)
        self.infer(number, prompt, method="generate", text=json.dumps({"max_new_tokens": count}).encode())

    def write(self, values: list[float], offset: int = 0) -> None:
        struct.pack_into(f"<{len(values)}f", self.memory[self.input], offset, *values)

    def hold(self, offset: int = 0) -> None:
        """A request with the tensor at this place runs until `let_go`."""
        self.write([-1.0], offset)

    def let_go(self, offset: int = 0) -> None:
        self.write([1.0], offset)

    def release(self, *leases: dict[str, int]) -> None:
        self.send("release", layout.RELEASE.pack(count=len(leases)) + b"".join(layout.LEASE.pack(**lease) for lease in leases))

    # --- receiving

    def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """None at the end of file."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, 65536, 4)
        except ConnectionResetError:
            return self.receive()
        self.fds += fds
        return (layout.HEADER.unpack(data), data[layout.HEADER.size :]) if data else None

    def expect(self, kind: str) -> tuple[dict[str, Any], bytes]:
        received = self.receive()
        assert received is not None, f"the end of file instead of {kind}"
        assert received[0]["type"] == MESSAGE[kind], (received, kind)
        return received

    def open(self, features: int) -> dict[str, Any]:
        self.hello(features)
        _, body = self.expect("welcome")
        self.welcome = layout.WELCOME.unpack(body)
        self.methods = json.loads(body[layout.WELCOME.size :])
        for _ in range(self.welcome["slab_count"]):
            self.take_slab()
        return self.welcome

    def take_slab(self) -> dict[str, Any]:
        return self.map_slab(*self.expect("slab_offer"))

    def map_slab(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        offer = layout.SLAB_OFFER.unpack(body)
        fd = self.fds.pop()
        assert os.fstat(fd).st_size == offer["size_bytes"]
        is_input = offer["direction"] == DIRECTION["input"]
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_input else 0)
        self.memory[offer["slab_id"]] = mmap.mmap(fd, offer["size_bytes"], prot=protection)
        os.close(fd)
        self.input, self.output = (offer["slab_id"], self.output) if is_input else (self.input, offer["slab_id"])
        return {**offer, "request_id": head["request_id"]}

    def error(self) -> tuple[str, int]:
        """Code and request of the next message, which is an error."""
        head, body = self.expect("error")
        return ERROR_NAMES[layout.ERROR.unpack(body)["code"]], head["request_id"]

    def result(self, number: int) -> tuple[list[float], dict[str, int]]:
        head, body = self.expect("result")
        assert head["request_id"] == number, head
        tensor = layout.TENSOR.unpack(body, layout.RESULT.size)
        lease = tensor["lease"]
        return list(struct.unpack_from(f"<{tensor['dims'][0]}f", self.memory[lease["slab_id"]], lease["offset_bytes"])), lease

    def part(self, number: int) -> list[int]:
        """The tokens of the first part."""
        head, body = self.expect("result")
        assert (head["request_id"], head["flags"]) == (number, FLAG["more"]), head
        values = json.loads(body[layout.RESULT.size :])
        assert values["index"] == 0, values
        return list(values["tokens"])

    def parts(self, number: int, begun: list[int]) -> tuple[list[int], list[int] | str]:
        """The tokens of all parts, the first of which have been read; then those of the whole
        answer, or its error's code."""
        streamed = list(begun)
        while True:
            received = self.receive()
            assert received is not None and received[0]["request_id"] == number, received
            head, body = received
            if head["type"] == MESSAGE["error"]:
                return streamed, ERROR_NAMES[layout.ERROR.unpack(body)["code"]]
            if not head["flags"] & FLAG["more"]:
                tensor = layout.TENSOR.unpack(body, layout.RESULT.size)
                lease = tensor["lease"]
                return streamed, list(struct.unpack_from(f"<{tensor['dims'][0]}q", self.memory[lease["slab_id"]], lease["offset_bytes"]))
            values = json.loads(body[layout.RESULT.size :])
            assert values["index"] == len(streamed), (values, len(streamed))
            streamed += values["tokens"]

    def is_over(self) -> bool:
        """Whether the end of file comes, and nothing before it."""
        return bool(select.select([self.socket], [], [], SECONDS)[0]) and self.receive() is None


def ask_slab(direction: int, size: int, kind: int = KIND["host_memfd"]) -> bytes:
    return layout.SLAB_REQUEST.pack(direction=direction, kind=kind, size_bytes=size)
