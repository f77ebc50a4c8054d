"""GPU slabs from Python: against the fake driver of $BULKHEAD_LIBCUDA, or, without it, a real GPU
where there is one."""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import gc
import os
import socket
import subprocess
import sys
import tempfile
import unittest
import uuid
from pathlib import Path
from typing import Iterator

import bulkhead
from bulkhead import cuda, dlpack, layout
from bulkhead.channel import Channel
from bulkhead.layout import FEATURE, KIND, MESSAGE
from bulkhead.protocol import ChannelCore, packet
from daemon import EchoDaemon

try:
    GPU: cuda.Gpu | None = cuda.gpu(0)
except bulkhead.Error as error:
    GPU, reason = None, error.attempt
IS_FAKE = bool(os.environ.get("BULKHEAD_LIBCUDA"))


def new_stream() -> int:
    assert GPU is not None
    stream = ctypes.c_void_p()
    GPU.call("cuStreamCreate", ctypes.byref(stream), 1)
    return stream.value or 0


class OnGpu(unittest.TestCase):
    def setUp(self) -> None:
        if GPU is None:
            self.skipTest(f"no GPU here: {reason}")
        self.stream = new_stream()
        self.sources: list[array.array[float]] = []  # alive until their copies were made
        self.addCleanup(GPU.call, "cuStreamSynchronize", self.stream)

    def write(self, room: bulkhead.Input, values: list[float]) -> bulkhead.Input:
        """In the order of the stream."""
        assert GPU is not None
        self.sources.append(array.array("f", values))
        GPU.copy(room.address, self.sources[-1].buffer_info()[0], 4 * len(values), self.stream)
        return room


class WithWorker(OnGpu):
    kind = "cuda_vmm"

    def setUp(self) -> None:
        super().setUp()
        self.start()

    def start(self) -> None:
        """A new worker, and a channel to it."""
        assert GPU is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.worker = subprocess.Popen([sys.executable, str(Path(__file__).with_name("gpu_worker.py")), str(theirs.fileno()), self.kind],
                                       pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
        theirs.close()
        self.addCleanup(self.worker.stdout.close)
        self.addCleanup(self.worker.wait)
        self.addCleanup(self.worker.stdin.close)
        self.channel = Channel(ours, client="test", deadline=60, events=cuda.Events(GPU, self.stream))
        self.addCleanup(self.channel.close)

    def says(self) -> list[str]:
        return self.worker.stdout.readline().split()

    def tell(self, word: str) -> None:
        self.worker.stdin.write(word + "\n")
        self.worker.stdin.flush()

    def filled(self, values: list[float]) -> bulkhead.Input:
        """An input on the GPU, written there in the order of the channel's stream."""
        return self.write(self.channel.allocate((len(values),), "float32", on_gpu=True), values)


class Vmm(WithWorker):
    imports = ("cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuIpcOpenEventHandle")
    unmaps = "cuMemUnmap"

    def test_inputs_and_results_stay_on_the_gpu(self) -> None:
        said = self.says()
        self.assertEqual(said[2], "True", "the GPU's UUID was not told")
        self.assertTrue(self.channel.results_on_gpu(1 << 20))
        room = self.filled([1.0, 2.0, 3.0])
        self.assertEqual(room.device, (cuda.DLPACK_CUDA, 0))
        reply = self.channel.infer(x=room)
        # In a GPU slab, behind the client's event.
        self.assertEqual(self.says(), ["infer", "True", "True"])
        output = reply["y"]
        self.assertEqual(output.device, (cuda.DLPACK_CUDA, 0))
        self.assertEqual(output.cpu().tolist(), [1.0, 2.0, 3.0])
        interface = output.__cuda_array_interface__
        self.assertEqual((interface["shape"], interface["typestr"], interface["data"]), ((3,), "<f4", (output.address, True)))
        # As if it were the CPU's.
        for use in (lambda: room.data, lambda: room.numpy(), lambda: room.tolist()):
            with self.assertRaises(bulkhead.Error) as caught:
                use()
            self.assertEqual(caught.exception.code, "input_invalid")

    def test_host_inputs_go_into_host_slabs(self) -> None:
        self.says()
        self.channel.infer(x=[7.0])
        self.assertEqual(self.says(), ["infer", "False", "False"])

    def test_a_result_is_released_behind_what_reads_it(self) -> None:
        self.says()
        self.channel.results_on_gpu(1 << 20)
        reply = self.channel.infer(x=self.filled([1.0]))
        self.says()
        other = new_stream()
        capsule = reply["y"].__dlpack__(stream=other, max_version=(1, 0))
        self.assertEqual(reply["y"].lease.streams, {other})
        del reply
        gc.collect()
        self.channel.settle()
        del capsule  # the last that looked at it
        gc.collect()
        self.channel.settle()
        word, _, event = self.says()
        self.assertEqual(word, "release")
        self.assertIn(int(event), (2, 4))

    @unittest.skipUnless(IS_FAKE, "needs a driver that writes down what it is asked")
    def test_who_reads_or_writes_a_tensor_waits_for_the_recording_behind_its_last_use(self) -> None:
        with tempfile.TemporaryDirectory() as folder, logged(Path(folder, "log")) as log:
            self.start()
            self.says()
            self.channel.results_on_gpu(1 << 20)
            log.write_text("")
            other = new_stream()
            output = self.channel.infer(x=self.filled([1.0]))["y"]
            capsule = output.__dlpack__(stream=other, max_version=(1, 0))
            del output, capsule
            gc.collect()
            self.channel.settle()
            self.channel.close()
            gc.collect()
            calls = self.calls(log)
        # The input is written, and the request is sent; the worker; the result, for the channel's
        # stream and for the one that reads it.
        self.assertEqual(calls[:7], ["client cuMemcpyAsync s0", "client cuEventRecord s0 A", "worker cuStreamWaitEvent s1 A", "worker cuMemcpyAsync s1",
                                     "worker cuEventRecord s1 B", "client cuStreamWaitEvent s0 B", "client cuStreamWaitEvent s2 B"])  # fmt: skip
        # It is released behind both, whichever comes first.
        self.assertEqual({calls[7], calls[9]}, {"client cuEventRecord s0 C", "client cuEventRecord s2 C"})
        self.assertEqual([calls[8], *calls[10:12]], ["client cuStreamWaitEvent s3 C", "client cuStreamWaitEvent s3 C", "client cuEventRecord s3 D"])
        # Both slabs are let go of when nothing uses them any more.
        self.assertEqual(calls[12:], 2 * ["client cuCtxSynchronize", f"client {self.unmaps}"])

    def calls(self, log: Path) -> list[str]:
        """Process, call, stream, event; streams have numbers and events letters, as they
        first come."""
        processes, streams, events = {str(os.getpid()): "client", str(self.worker.pid): "worker"}, {"0": ""}, {"0": ""}
        lines = []
        for process, call, stream, event in map(str.split, log.read_text().splitlines()):
            on = streams.setdefault(stream if stream == "0" else process + stream, f" s{len(streams) - 1}")
            lines.append(f"{processes[process]} {call}{on}{events.setdefault(event, ' ' + chr(ord('A') + len(events) - 1))}")
        return lines

    def test_dlpack_in_both_directions_and_no_copy_on_the_way_out(self) -> None:
        self.says()
        self.channel.results_on_gpu(1 << 20)
        first = self.channel.infer(x=self.filled([4.0, 5.0]))["y"]
        seen = dlpack.read(Foreign(first), self.stream)
        self.assertEqual((seen.address, seen.shape, seen.dtype, seen.device), (first.address, (2,), "float32", (cuda.DLPACK_CUDA, 0)))
        again = self.channel.infer(x=Foreign(first))["y"]  # somebody else's: copied on the GPU
        self.assertEqual(again.cpu().tolist(), [4.0, 5.0])
        again = self.channel.infer(x=first)["y"]  # a result as the next input
        self.assertEqual(again.cpu().tolist(), [4.0, 5.0])
        with self.assertRaises(BufferError):
            first.__dlpack__(stream=1)  # cannot be told that it may only be read

    def test_an_unload_gets_its_memory_back(self) -> None:
        self.says()
        self.channel.results_on_gpu(1 << 20)
        output = self.channel.infer(x=self.filled([1.0]))["y"]
        self.says()
        self.tell("unload")
        returned = []
        while not returned:  # the input slab: nothing looks at it
            self.channel.settle()
            gc.collect()
            self.channel.settle()
            returned = self.channel.core.ended is None and not self.channel.core.slabs._inputs[1:] and [self.says()]
        self.assertEqual(returned[0][0], "returned")
        self.assertEqual(output.cpu().tolist(), [1.0])
        del output
        gc.collect()
        self.channel.settle()
        words = [self.says()[0] for _ in range(2)]
        self.assertEqual(sorted(words), ["release", "returned"])

    def test_a_worker_that_dies_takes_no_result_along(self) -> None:
        self.says()
        self.channel.results_on_gpu(1 << 20)
        output = self.channel.infer(x=self.filled([6.0]))["y"]
        self.assertEqual(output.cpu().tolist(), [6.0])
        self.tell("die")
        self.worker.wait()
        self.assertFalse(self.channel.is_open)
        if self.kind == "cuda_vmm":
            self.assertEqual(output.cpu().tolist(), [6.0])

    @unittest.skipUnless(IS_FAKE, "needs a driver that fails when told to")
    def test_who_cannot_import_goes_on_with_host_slabs(self) -> None:
        for function in self.imports:
            for asks_first in (lambda: self.channel.results_on_gpu(1 << 20), lambda: self.channel.allocate((1,), on_gpu=True)):
                self.start()
                self.says()
                with self.subTest(function), fails(f"{function} 304"):
                    with self.assertLogs("bulkhead", "WARNING"):
                        try:
                            self.assertFalse(asks_first())
                        except bulkhead.Error as error:
                            self.assertIn(function, error.attempt)
                    self.assertEqual(self.says()[0], "returned")
                    with self.assertRaises(bulkhead.Error) as caught:
                        self.channel.allocate((1,), on_gpu=True)
                    self.assertEqual(caught.exception.code, "not_permitted")
                    self.assertIn(function, caught.exception.attempt)
                    self.assertFalse(self.channel.results_on_gpu(1 << 20))
                    self.assertEqual(self.channel.infer(x=[8.0])["y"].tolist(), [8.0])

    @unittest.skipUnless(IS_FAKE, "needs a driver that fails when told to")
    def test_a_slab_of_the_workers_own_that_cannot_be_imported_fails_what_lies_in_it(self) -> None:
        self.says()
        self.assertTrue(self.channel.results_on_gpu(1 << 20))
        room = self.filled([1.0])
        held = self.channel.infer(x=room)
        self.assertEqual(self.says()[0], "infer")
        self.tell("grow")
        function = "cuMemMap" if self.kind == "cuda_vmm" else "cuIpcOpenMemHandle"
        with fails(f"{function} 2"), self.assertLogs("bulkhead", "WARNING"):
            with self.assertRaises(bulkhead.Error) as caught:
                self.channel.infer(x=room)
        self.assertEqual(caught.exception.code, "out_of_memory")
        self.assertIn(function, caught.exception.attempt)
        with self.assertRaises(bulkhead.Error) as caught:
            # As long as the slab is there, though the driver would map it now.
            self.channel.infer(x=room)
        self.assertEqual(caught.exception.code, "out_of_memory")
        self.assertEqual(self.channel.infer(x=[8.0])["y"].tolist(), [8.0])
        said = [self.says() for _ in range(5)]
        self.assertEqual([words[0] for words in said], ["infer", "release", "infer", "release", "infer"])
        lost = said[1][1]
        self.assertEqual(said[3][1], lost)  # both went back, though nobody had read them

        self.tell("shrink")
        # In the first slab again.
        self.assertEqual(self.channel.infer(x=room)["y"].cpu().tolist(), [1.0])
        self.channel.settle()
        said = [self.says() for _ in range(4)]
        self.assertIn(["returned", lost], said)
        self.assertEqual(held["y"].cpu().tolist(), [1.0])


class Legacy(Vmm):
    kind = "cuda_ipc"
    imports = ("cuIpcOpenMemHandle", "cuIpcOpenEventHandle")
    unmaps = "cuIpcCloseMemHandle"


class Offers(OnGpu):
    """Of a worker that is spoken by hand."""

    def setUp(self) -> None:
        super().setUp()
        assert GPU is not None
        self.core = ChannelCore("test", events=cuda.Events(GPU, self.stream))
        self.core.receive(packet("welcome", layout.WELCOME.pack(version=1, in_flight_max=3, features=FEATURE["cuda_ipc"] | FEATURE["returning"],
                                                                slab_bytes_max=1 << 20, model="m")), [])  # fmt: skip

    def offer(self, number: int, from_worker: int = 1) -> None:
        """With a handle of no event."""
        body = layout.EVENT_OFFER.pack(event_id=number, from_worker=from_worker, handle=[255] * 64)
        self.core.receive(packet("event_offer", body), [])

    def test_one_that_cannot_be_opened_here_is_the_end_of_the_gpu_and_not_of_the_channel(self) -> None:
        with self.assertLogs("bulkhead", "WARNING"):
            self.offer(1)
        self.assertIsNone(self.core.ended)
        self.assertIsNone(self.core.slabs.gpu_kind)

    def test_what_the_protocol_does_not_allow_ends_the_channel(self) -> None:
        for wrong in ((0, 1), (9, 2), (1, 1), (1, 0), (65, 1)):
            with self.subTest(wrong), self.assertLogs("bulkhead", "WARNING"):
                self.setUp()
                for number in range(1, 65 if wrong[0] == 65 else 9):
                    self.offer(number, number % 2)
                self.assertIsNone(self.core.ended)
                self.offer(*wrong)
                self.assertEqual(self.core.ended.code, "protocol_violation")

    @unittest.skipUnless(IS_FAKE, "no GPU has told yet what it says to such memory")
    def test_slabs_that_cannot_be_imported_fail_the_requests_whose_results_lie_in_them_and_no_other(self) -> None:
        for opens_events in (True, False):
            with self.subTest(opens_events=opens_events), self.assertLogs("bulkhead", "WARNING"):
                self.setUp()
                requests = [self.core.submit("forward", [], {}, None, False) for _ in range(3)]
                self.assertTrue(self.core.slabs.ask_for_gpu_results(4096))
                if not opens_events:
                    self.offer(1)
                self.core.outgoing.clear()
                # The first has no room for the second result.
                for slab, asked, request in zip((1, 2), (requests[-1].number + 1, 0), requests):
                    offered = layout.SLAB_OFFER.pack(slab_id=slab, direction=2, kind=KIND["cuda_ipc"], size_bytes=4096) + bytes([255] * 64)
                    self.core.receive(packet("slab_offer", offered, asked), [])
                    lease = layout.LEASE.pack(slab_id=slab, size_bytes=4096, lease_id=1)
                    tensor = layout.TENSOR.pack(name="y", dtype=2, rank=1, dims=[4096], strides=[1], event_id=1, lease=lease)
                    self.core.receive(packet("result", layout.RESULT.pack(tensor_count=1) + tensor, request.number), [])
                self.core.receive(packet("result", layout.RESULT.pack(), requests[2].number), [])
                self.assertIsNone(self.core.ended)
                self.assertFalse(self.core.slabs.gpu_results())
                why = self.core.slabs.gpu_refused
                self.assertEqual([None if one.error is None else one.error.code for one in requests], [why.code, why.code, None])
                self.assertIn(why.attempt, requests[0].error.attempt)
                self.core.settle()
                sent = [(layout.HEADER.unpack(data)["type"], data[layout.HEADER.size :]) for data, _ in self.core.outgoing]
                self.assertEqual([layout.SLAB_NAME.unpack(body)["slab_id"] for kind, body in sent if kind == MESSAGE["slab_return"]], [1, 2])
                self.assertEqual([layout.RELEASE.unpack(body)["count"] for kind, body in sent if kind == MESSAGE["release"]], [2])


class ThroughTheDaemon(OnGpu):
    """A worker of C++ that echoes on the GPU."""

    @classmethod
    def setUpClass(cls) -> None:
        if GPU is not None:
            cls.daemon = EchoDaemon(uuid.UUID(bytes=GPU.uuid))
            cls.addClassCleanup(cls.daemon.stop)

    def test_blocking(self) -> None:
        with bulkhead.connect(self.daemon.socket) as client:
            channel = client.open("echo", gpu=0, stream=self.stream)
            self.assertTrue(channel.results_on_gpu(1 << 20))
            room = self.write(channel.allocate((3,), on_gpu=True), [1.0, 2.0, 3.0])
            first = channel.infer(x=room)["y"]
            self.assertEqual(first.device, (cuda.DLPACK_CUDA, 0))
            # A result of one channel is an input of the next.
            with client.open("echo", gpu=0, stream=self.stream) as other:
                self.assertEqual(other.infer(x=first)["y"].tolist(), [1.0, 2.0, 3.0])
            self.assertEqual(first.cpu().tolist(), [1.0, 2.0, 3.0])
            channel.close()
            del first, room
            (receipt,) = client.unload("echo")
            self.assertEqual((receipt["ended"], receipt["verified"], receipt["held_by"]), ("drained", True, []), receipt)

    def test_asyncio(self) -> None:
        async def work() -> None:
            async with bulkhead.aio.connect(self.daemon.socket) as client:
                channel = await client.open("echo", gpu=0, stream=self.stream)
                self.assertTrue(await channel.results_on_gpu(1 << 20))
                rooms = [self.write(await channel.allocate((2,), on_gpu=True), [float(i), 0.5]) for i in range(8)]

                async def one(room: bulkhead.Input) -> list[float]:
                    output = (await channel.infer(x=room))["y"]
                    self.assertEqual(output.device, (cuda.DLPACK_CUDA, 0))
                    return output.cpu().tolist()

                for _ in range(20):
                    tasks = [asyncio.ensure_future(one(room)) for room in rooms]
                    await asyncio.sleep(0)  # they are sent
                    for task in tasks[1::2]:
                        task.cancel()
                    answers = await asyncio.gather(*tasks, return_exceptions=True)
                    self.assertEqual(answers[::2], [[float(i), 0.5] for i in range(0, 8, 2)])
                    self.assertTrue(all(isinstance(answer, asyncio.CancelledError) for answer in answers[1::2]), answers)
                # Whose exceptions keep frames, and those their inputs.
                del rooms, tasks, task, answers
                gc.collect()
                (receipt,) = await client.unload("echo")  # the loop gives the memory back meanwhile
                self.assertEqual((receipt["ended"], receipt["verified"], receipt["held_by"]), ("drained", True, []), receipt)

        asyncio.run(work())


@contextlib.contextmanager
def logged(log: Path) -> Iterator[Path]:
    """The fake driver's calls, in this process and those that it starts."""
    os.environ["BULKHEAD_FAKE_CUDA_LOG"] = str(log)
    try:
        yield log
    finally:
        del os.environ["BULKHEAD_FAKE_CUDA_LOG"]


@contextlib.contextmanager
def fails(how: str) -> Iterator[None]:
    """The fake driver does, in this process."""
    os.environ["BULKHEAD_FAKE_CUDA_FAIL"] = how
    try:
        yield
    finally:
        del os.environ["BULKHEAD_FAKE_CUDA_FAIL"]


class Foreign:
    """Another library's tensor, as far as anybody can see."""

    def __init__(self, tensor: bulkhead.Output) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None) -> object:
        return self._tensor.__dlpack__(stream=stream, max_version=(1, 0))


class WithoutGpu(unittest.TestCase):
    def test_a_driver_that_is_not_there(self) -> None:
        code = "import bulkhead.cuda as c\ntry: c.gpu(0)\nexcept Exception as e: print(e.code)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "BULKHEAD_LIBCUDA": "/nowhere.so"})
        self.assertEqual(done.stdout.strip(), "load_failed", done.stderr)


if __name__ == "__main__":
    unittest.main()
