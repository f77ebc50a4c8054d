"""GPU slabs from Python: against the fake driver of $BULKHEAD_LIBCUDA, or, without it, a real GPU where there is one."""

from __future__ import annotations

import array
import ctypes
import gc
import os
import socket
import subprocess
import sys
import unittest
from pathlib import Path

import bulkhead
from bulkhead import cuda, dlpack
from bulkhead.channel import Channel

try:
    GPU: cuda.Gpu | None = cuda.gpu(0)
except bulkhead.Error as error:
    GPU, reason = None, str(error)
IS_FAKE = bool(os.environ.get("BULKHEAD_LIBCUDA"))


@unittest.skipIf(GPU is None, "no GPU and no fake driver")
class WithWorker(unittest.TestCase):
    kind = "cuda_vmm"

    def setUp(self) -> None:
        assert GPU is not None
        self.stream = ctypes.c_void_p()
        GPU.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.worker = subprocess.Popen([sys.executable, str(Path(__file__).with_name("gpu_worker.py")), str(theirs.fileno()), self.kind],
                                       pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
        theirs.close()
        self.addCleanup(self.worker.stdout.close)
        self.addCleanup(self.worker.wait)
        self.addCleanup(self.worker.stdin.close)
        self.channel = Channel(ours, client="test", deadline=60, events=cuda.Events(GPU, self.stream.value or 0))
        self.addCleanup(self.channel.close)

    def says(self) -> list[str]:
        return self.worker.stdout.readline().split()

    def tell(self, word: str) -> None:
        self.worker.stdin.write(word + "\n")
        self.worker.stdin.flush()

    def filled(self, values: list[float]) -> bulkhead.Input:
        """An input on the GPU, written there in the order of the channel's stream."""
        room = self.channel.allocate((len(values),), "float32", on_gpu=True)
        self.source = array.array("f", values)  # alive until the copy was made
        assert GPU is not None
        GPU.copy(room.address, self.source.buffer_info()[0], 4 * len(values), self.stream.value or 0)
        return room


class Vmm(WithWorker):
    def test_inputs_and_results_stay_on_the_gpu(self) -> None:
        said = self.says()
        self.assertEqual(said[2], "True", "the GPU's UUID was not told")
        self.assertTrue(self.channel.results_on_gpu(1 << 20))
        room = self.filled([1.0, 2.0, 3.0])
        self.assertEqual(room.device, (cuda.DLPACK_CUDA, 0))
        reply = self.channel.infer(x=room)
        self.assertEqual(self.says(), ["infer", "True", "True"])  # in a GPU slab, behind the client's event
        output = reply["y"]
        self.assertEqual(output.device, (cuda.DLPACK_CUDA, 0))
        self.assertEqual(output.cpu().tolist(), [1.0, 2.0, 3.0])
        interface = output.__cuda_array_interface__
        self.assertEqual((interface["shape"], interface["typestr"], interface["data"]), ((3,), "<f4", (output.address, True)))

    def test_a_result_is_released_behind_what_reads_it(self) -> None:
        self.says()
        self.channel.results_on_gpu(1 << 20)
        reply = self.channel.infer(x=self.filled([1.0]))
        self.says()
        other = ctypes.c_void_p()
        GPU.call("cuStreamCreate", ctypes.byref(other), 1)
        capsule = reply["y"].__dlpack__(stream=other.value, max_version=(1, 0))
        self.assertEqual(reply["y"].lease.streams, {other.value})
        del reply
        gc.collect()
        self.channel.settle()
        del capsule  # the last that looked at it
        gc.collect()
        self.channel.settle()
        word, _, event = self.says()
        self.assertEqual(word, "release")
        self.assertIn(int(event), (2, 4))

    def test_dlpack_in_both_directions_and_no_copy_on_the_way_out(self) -> None:
        self.says()
        self.channel.results_on_gpu(1 << 20)
        first = self.channel.infer(x=self.filled([4.0, 5.0]))["y"]
        seen = dlpack.read(Foreign(first), self.stream.value)
        self.assertEqual((seen.address, seen.shape, seen.dtype, seen.device), (first.address, (2,), "float32", (cuda.DLPACK_CUDA, 0)))
        again = self.channel.infer(x=Foreign(first))["y"]  # somebody else's: copied on the GPU
        self.assertEqual(again.cpu().tolist(), [4.0, 5.0])
        again = self.channel.infer(x=first)["y"]  # a result as the next input
        self.assertEqual(again.cpu().tolist(), [4.0, 5.0])
        with self.assertRaises(BufferError):
            first.__dlpack__(stream=1)  # cannot be told that it may only be read

    def test_host_inputs_go_into_host_slabs(self) -> None:
        self.says()
        self.channel.infer(x=[7.0])
        self.assertEqual(self.says(), ["infer", "False", "False"])

    def test_reading_gpu_memory_as_the_cpus_is_an_error(self) -> None:
        room = self.channel.allocate((2,), "float32", on_gpu=True)
        for use in (lambda: room.data, lambda: room.numpy(), lambda: room.tolist()):
            with self.assertRaises(bulkhead.Error) as caught:
                use()
            self.assertEqual(caught.exception.code, "input_invalid")

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
        self.says()
        function = "cuMemImportFromShareableHandle" if self.kind == "cuda_vmm" else "cuIpcOpenMemHandle"
        os.environ["BULKHEAD_FAKE_CUDA_FAIL"] = f"{function} 304"
        self.addCleanup(os.environ.pop, "BULKHEAD_FAKE_CUDA_FAIL")
        with self.assertLogs("bulkhead", "WARNING"):
            self.assertFalse(self.channel.results_on_gpu(1 << 20))
        self.assertEqual(self.says()[0], "returned")
        with self.assertRaises(bulkhead.Error) as caught:
            self.channel.allocate((1,), on_gpu=True)
        self.assertEqual(caught.exception.code, "not_permitted")
        self.assertEqual(self.channel.infer(x=[8.0])["y"].tolist(), [8.0])


class Legacy(Vmm):
    kind = "cuda_ipc"


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
