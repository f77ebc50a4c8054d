"""A daemon and a worker in the hands of a node's test."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

from bulkhead import layout
from bulkhead.layout import FLAG
from fake_daemon import Connection, FakeDaemon, Handler
from fake_worker import FakeWorker
from pack import WithPack

SPEAKER = {
    "speak": {
        "inputs": [{"name": "reference", "dtype": "float32", "shape": ["channels=1..2", "samples=1.."], "optional": True}],
        "parameters": [
            {"name": "text", "type": "string", "multiline": True},
            {"name": "temperature", "type": "number", "default": 1.0, "minimum": 0, "maximum": 2, "step": 0.05},
            {"name": "reference_rate", "type": "integer", "default": 24000},
            {"name": "voice", "type": "string", "default": "low", "choices": ["low", "high"]},
        ],
        "outputs": [{"name": "audio", "dtype": "float32", "shape": ["channels=1..2", "samples=0.."]}],
        "streams": True,
    }
}
ROW = {"model": "voice", "replica": 0, "state": "ready", "pid": 1, "device": "cpu", "host_bytes": 1 << 20, "gpu_bytes": None,
       "requests": 0, "errors": 0, "restarts": 0}  # fmt: skip
STOPPED = {**ROW, "state": "stopped", "pid": None, "host_bytes": None}
HELLO = {"model": {"model": "voice", "text": "hello"}}  #: of Generate Speech


def answering(result: Any) -> Handler:
    return lambda connection, request: connection.answer(request, result)


class OfFakes(WithPack):
    """A daemon and a worker in the test's hands."""

    def fake(self, serve: Any, methods: dict[str, Any] = SPEAKER, **handlers: Any) -> FakeDaemon:
        """``serve(worker)`` runs once the channel is open."""

        def introduce(connection: Connection, request: dict[str, Any]) -> None:
            worker = FakeWorker()
            daemon.introduce(worker, connection, request)
            worker.open(methods=methods, features=8)
            serve(worker)

        usual = {"fleet_status": answering({"models": [ROW]}), "gpu_status": answering({"nvml": False, "gpus": []}),
                 "daemon_info": answering({"version": "9.9.9", "fleet": "/no"}), "channel_open": introduce}  # fmt: skip
        daemon = FakeDaemon(**{**usual, **handlers})
        self.addCleanup(daemon.close)
        self.serve(daemon.path)
        return daemon

    def speak(self, **inputs: Any) -> Any:
        return asyncio.run(self.pack("nodes_run").GenerateSpeech.execute(**inputs))


def request(worker: FakeWorker) -> int:
    """The number of the next one."""
    number: int = worker.expect("infer")[0]["request_id"]
    return number


def send(worker: FakeWorker, number: int, values: dict[str, Any], tensors: bytes = b"", *, more: bool = False) -> None:
    """A part, or the whole, of an answer: `values`, and one tensor or none."""
    said = json.dumps(values).encode()
    head = layout.RESULT.pack(tensor_count=1 if tensors else 0, queued_us=1, run_us=2, json_bytes=len(said))
    worker.send("result", head + tensors + said, number, FLAG["more"] if more else 0)


def send_sound(worker: FakeWorker, number: int, samples: list[float], *, channels: int = 1, rate: int | None = 8000, more: bool = False) -> None:
    """`audio` [channels, samples], and its rate."""
    floats = samples * channels
    struct.pack_into(f"<{len(floats)}f", worker.slabs[2], 0, *floats)
    lease = layout.LEASE.pack(slab_id=2, offset_bytes=0, size_bytes=4 * len(floats), lease_id=1)
    tensor = layout.TENSOR.pack(name="audio", dtype=9, rank=2, lease=lease, dims=[channels, len(samples)], strides=[len(samples), 1])
    send(worker, number, {} if rate is None else {"sample_rate": rate}, tensor, more=more)
