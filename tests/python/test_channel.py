"""The Python client's half of the channel against a worker that says what the test wants."""

from __future__ import annotations

import array
import gc
import os
import unittest
from concurrent.futures import ThreadPoolExecutor

import bulkhead
from bulkhead import layout
from bulkhead.channel import Channel
from bulkhead.layout import FEATURE, LIMITS
from bulkhead.shared_tensors import Arena
from fake_worker import FakeWorker
from opened import Opened


class Opening(Opened):
    def test_says_who_it_is_and_learns_who_answers(self) -> None:
        channel = self.open()
        self.assertEqual((channel.model, channel.generation), ("fake", 7))
        self.assertIn("forward", channel.methods)

    def test_descriptors_do_not_leak(self) -> None:
        gc.collect()  # what earlier tests' fake workers still map
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            worker = FakeWorker()
            with ThreadPoolExecutor(1) as pool:
                opening = pool.submit(Channel, worker.client_end)
                worker.open()
                opening.result(10).close()
            worker.close()
        del worker, opening
        gc.collect()
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)


class Inference(Opened):
    def test_inputs_of_every_kind_arrive_as_they_are(self) -> None:
        channel = self.open()
        values = [0.5, -1.0, 2.0]
        kinds = {"list": values, "array": array.array("f", values), "view": memoryview(array.array("f", values)), "tuple": tuple(values)}
        try:
            import numpy

            kinds["numpy"] = numpy.array(values, numpy.float32)
            kinds["numpy, strided"] = numpy.array([[v, 9.0] for v in values], numpy.float32)[:, 0]
        except ImportError:
            pass
        try:
            import torch

            kinds["torch"] = torch.tensor(values)
            self.refused("input_invalid", lambda: channel.infer(x=torch.zeros(1, requires_grad=True)))
        except ImportError:
            pass
        for name, kind in kinds.items():
            with self.subTest(name):
                self.serve(self.worker.answer_next)
                self.assertEqual(channel.infer(x=kind)["y"].tolist(), values)

    def test_what_lies_in_the_slab_already_is_not_copied(self) -> None:
        channel = self.open()
        with channel.allocate((4,)) as room:
            room.data.cast("f")[2] = 5.0
            seen: list[int] = []

            def serve() -> None:
                for _ in range(2):
                    head, body = self.worker.expect("infer")
                    seen.append(self.worker.tensors(body)[0]["lease"]["offset_bytes"])
                    self.worker.answer(head["request_id"], [1.0])

            self.serve(serve)
            channel.infer(x=room)
            channel.infer(x=room)
            self.assertEqual(seen[0], seen[1])
        self.refused("input_invalid", lambda: channel.infer(x=room))

    def test_parameters_are_told_from_inputs_by_the_declaration(self) -> None:
        channel = self.open()

        def serve() -> None:
            head, body = self.worker.expect("infer")
            infer = layout.INFER.unpack(body)
            self.assertEqual((infer["tensor_count"], infer["deadline_ms"]), (1, 1500))
            self.assertEqual(body[-infer["json_bytes"] :], b'{"scale":2}')
            self.worker.answer(head["request_id"], [1.0])

        thread = self.serve(serve)
        channel.infer(x=[1.0], scale=2, deadline=1.5)
        thread.join()

    def test_an_output_is_a_view_that_goes_back_when_nobody_looks_any_more(self) -> None:
        channel = self.open()
        self.serve(lambda: self.worker.answer_next(offset=64, lease_id=9))
        reply = channel.infer(x=[1.0, 2.0])
        view = reply["y"].data
        self.assertTrue(view.readonly)
        del reply
        gc.collect()
        self.serve(self.worker.answer_next)
        channel.infer(x=[3.0])  # nothing to give back yet
        del view
        gc.collect()

        self.assertNotIn((64, 9), self.worker.released)
        self.serve(self.worker.answer_next).join(0)
        channel.infer(x=[4.0])
        self.assertIn((64, 9), self.worker.released)

    def test_what_goes_back_rides_in_the_packet_of_the_next_request(self) -> None:
        channel = self.open(features=FEATURE["packing"])
        self.serve(self.worker.answer_next)
        channel.infer(x=[1.0])
        gc.collect()

        def serve() -> None:
            self.assertEqual(layout.RELEASE.unpack(self.worker.expect("release")[1])["count"], 1)
            self.assertTrue(self.worker.packed)
            self.worker.answer_next()

        thread = self.serve(serve)
        channel.infer(x=[2.0])
        thread.join()

    def test_at_most_so_many_messages_are_packed_and_never_a_descriptor(self) -> None:
        channel = self.open(features=FEATURE["packing"] | FEATURE["lending"], in_flight=32)
        core, most = channel.core, LIMITS["packed_messages_max"]
        for _ in range(most + 1):
            core.submit("forward", [], {}, None, False)
        core.slabs.lend(Arena().allocate((1,), "uint8"))

        self.assertEqual(core.next_packet()[2], most)
        for left in (2, 1):
            while len(core.outgoing) > left:
                core.outgoing.popleft()
            data, mapping, messages = core.next_packet()
            self.assertEqual((messages, mapping is not None, data), (1, left == 1, core.outgoing[0][0]))

    def test_bad_inputs_have_one_clear_error_each_and_scalars_and_empty_ones_are_good(self) -> None:
        channel = self.open()
        for value in ([[1.0], [1.0, 2.0]], [1.0, [2.0]], object(), ["a"]):
            with self.subTest(value), self.assertRaises(bulkhead.Error):
                channel.infer(x=value)
        self.refused("dtype_unsupported", lambda: channel.allocate((1,), "float8"))
        self.assertEqual(channel.allocate(()).shape, ())
        self.assertEqual(channel.place([]).tolist(), [])
        self.assertEqual(channel.allocate((2, 0, 3)).tolist(), [[], []])


class Deaths(Opened):

    def test_a_forked_child_does_not_keep_the_channel(self) -> None:
        channel = self.open()
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write_end)
            os.read(read_end, 1)  # until the test ends
            os._exit(0)
        channel.close()
        self.assertEqual(self.worker.socket.recv(10), b"")
        os.close(write_end)
        os.close(read_end)
        os.waitpid(child, 0)


if __name__ == "__main__":
    unittest.main()
