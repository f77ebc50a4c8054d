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
from bulkhead.layout import FEATURE, FLAG, LIMITS
from bulkhead.shared_tensors import Arena
from fake_worker import SEAL_GROW, SEAL_SEAL, FakeWorker
from opened import Opened


class Opening(Opened):
    def test_says_who_it_is_and_learns_who_answers(self) -> None:
        channel = self.open()
        self.assertEqual((channel.model, channel.generation, channel.core.number), ("fake", 7, 3))
        self.assertIn("forward", channel.methods)

    def test_a_refusal_is_the_error(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(Channel, self.worker.client_end)
            self.worker.expect("hello")
            self.worker.error(0, 18, "it has its one client")
            self.refused("busy", lambda: opening.result(10))

    def test_a_worker_that_dies_before_welcome(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(Channel, self.worker.client_end)
            self.worker.expect("hello")
            self.worker.close()
            self.refused("worker_lost", lambda: opening.result(10))

    def test_a_worker_that_says_nothing(self) -> None:
        self.refused("deadline_exceeded", lambda: Channel(self.worker.client_end, deadline=0.05))

    def broken(self, speak) -> None:
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(Channel, self.worker.client_end)
            self.worker.expect("hello")
            speak()
            self.refused("protocol_violation", lambda: opening.result(10))

    def test_bad_slabs_are_refused_before_they_are_mapped(self) -> None:
        cases = {
            "unsealed": lambda: self.worker.offer(1, "input", fd=self.worker.memfd(4096, "input", SEAL_SEAL | SEAL_GROW), size=4096),
            "an output that the worker's peer could write": lambda: self.worker.offer(1, "output", fd=self.worker.memfd(4096, "input"), size=4096),
            "smaller than said": lambda: self.worker.offer(1, "input", fd=self.worker.memfd(4096, "input"), size=8192),
            "a pipe": lambda: self.worker.offer(1, "input", fd=os.pipe()[0], size=4096),
            "beyond the bound": lambda: self.worker.offer(1, "input", size=2 << 20),
        }
        for name, offer in cases.items():
            with self.subTest(name):
                self.worker = self.another()
                self.broken(lambda: (self.worker.welcome(), offer()))

    def test_headers_that_lie(self) -> None:
        for member, value in {"magic": 1, "version": 9, "size_bytes": 33}.items():
            with self.subTest(member):
                self.worker = self.another()
                self.broken(lambda: self.worker.send("welcome", b"", **{member: value}))
        with self.subTest("a message before welcome"):
            self.worker = self.another()
            self.broken(lambda: self.worker.send("closing", layout.CLOSING.pack(code=14)))

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
        self.serve(lambda: self.worker.answer_next(offset=64, generation=9))
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

    def test_inputs_are_not_reused_while_the_worker_borrows_them(self) -> None:
        channel = self.open()
        first = channel.submit(x=[1.0, 2.0])
        second = channel.submit(x=[3.0, 4.0])
        head1, body1 = self.worker.expect("infer")
        head2, body2 = self.worker.expect("infer")
        offsets = [self.worker.tensors(body)[0]["lease"]["offset_bytes"] for body in (body1, body2)]
        self.assertNotEqual(*offsets)
        self.worker.answer(head2["request_id"], [2.0], offset=128, generation=2)
        self.worker.answer(head1["request_id"], [1.0], generation=3)
        self.assertEqual(channel.wait(first)["y"].tolist(), [1.0])
        self.assertEqual(channel.wait(second)["y"].tolist(), [2.0])
        gc.collect()
        channel.submit(x=[5.0])
        _, body = self.worker.expect("infer")
        self.assertIn(self.worker.tensors(body)[0]["lease"]["offset_bytes"], offsets)

    def test_a_full_input_slab_grows_and_a_refused_growth_is_told(self) -> None:
        channel = self.open()

        def grow() -> None:
            head, body = self.worker.expect("slab_request")
            self.worker.offer(3, "input", layout.SLAB_REQUEST.unpack(body)["size_bytes"], request_id=head["request_id"])

        self.serve(grow)
        room = channel.allocate((20_000,), "float64")
        self.assertEqual(room.nbytes, 160_000)

        def refuse() -> None:
            head, _ = self.worker.expect("slab_request")
            self.worker.error(head["request_id"], 19)

        self.serve(refuse)
        self.refused("resources_exhausted", lambda: channel.allocate((30_000,), "float64"))
        self.refused("resources_exhausted", lambda: channel.allocate((1 << 30,), "float64"))

    def test_bad_inputs_have_one_clear_error_each(self) -> None:
        channel = self.open()
        for value in ([[1.0], [1.0, 2.0]], [1.0, [2.0]], object(), ["a"]):
            with self.subTest(value):
                with self.assertRaises(bulkhead.Error):
                    channel.infer(x=value)
        self.refused("dtype_unsupported", lambda: channel.allocate((1,), "float8"))
        self.refused("shape_mismatch", lambda: channel.allocate((-1,)))
        self.refused("shape_mismatch", lambda: channel.allocate((1,) * 9))

    def test_scalars_and_empty_tensors(self) -> None:
        channel = self.open()
        self.assertEqual(channel.allocate(()).shape, ())
        self.assertEqual(channel.place([]).tolist(), [])
        self.assertEqual(channel.allocate((2, 0, 3)).tolist(), [[], []])

    def test_more_in_flight_than_agreed(self) -> None:
        channel = self.open(in_flight=2)
        channel.submit(x=[1.0])
        channel.submit(x=[1.0])
        self.refused("queue_full", lambda: channel.submit(x=[1.0]))

    def test_the_workers_error_is_ours(self) -> None:
        channel = self.open()

        def serve() -> None:
            head, _ = self.worker.expect("infer")
            self.worker.error(head["request_id"], 10, "too long", "make it shorter")

        self.serve(serve)
        error = self.refused("shape_mismatch", lambda: channel.infer(x=[1.0]))
        self.assertEqual((error.attempt, error.remedy), ("too long", "make it shorter"))

    def test_streams_come_part_by_part(self) -> None:
        channel = self.open(features=FEATURE["streaming"])

        def serve() -> None:
            head, _ = self.worker.expect("infer")
            for part in range(3):
                self.worker.answer(head["request_id"], [float(part)], offset=64 * part, generation=part + 1, flags=FLAG["more"] if part < 2 else 0)

        self.serve(serve)
        self.assertEqual([part["y"].tolist()[0] for part in channel.stream(channel.submit(x=[1.0]))], [0.0, 1.0, 2.0])

    def test_a_stream_that_nobody_agreed_to(self) -> None:
        channel = self.open()

        self.serve(lambda: self.worker.answer_next([1.0], flags=FLAG["more"]))
        self.refused("protocol_violation", lambda: channel.infer(x=[1.0]))


class Deaths(Opened):
    def test_what_was_delivered_before_the_end_is_handed_out(self) -> None:
        channel = self.open()
        first, second = channel.submit(x=[1.0]), channel.submit(x=[2.0])
        self.worker.answer_next([8.0])
        self.worker.close()
        reply = channel.wait(first)
        self.refused("worker_lost", lambda: channel.wait(second))
        self.assertEqual(reply["y"].tolist(), [8.0])  # still readable
        self.refused("worker_lost", lambda: channel.infer(x=[1.0]))

    def test_what_was_delivered_is_handed_out_even_when_the_end_is_found_by_sending(self) -> None:
        channel = self.open()
        first, second = channel.submit(x=[1.0]), channel.submit(x=[2.0])
        self.worker.answer_next([8.0])
        self.worker.close()
        channel.cancel(second)  # sends before it reads
        self.assertEqual(channel.wait(first)["y"].tolist(), [8.0])
        self.refused("worker_lost", lambda: channel.wait(second))

    def test_outputs_that_do_not_lie_where_they_are_said_to(self) -> None:
        for tensor in ({"dtype": 99}, {"rank": 9}, {"dims": [2]}, {"dims": [-1]}):
            with self.subTest(tensor):
                self.worker = self.another()
                channel = self.open()

                thread = self.serve(lambda: self.worker.answer_next([1.0], **tensor))
                with self.assertRaises(bulkhead.Error) as caught:
                    channel.infer(x=[1.0])
                self.assertIn(caught.exception.code, ("protocol_violation", "shape_mismatch"))
                thread.join()

    def test_a_deadline_that_the_worker_does_not_keep(self) -> None:
        channel = self.open()
        request = channel.submit(x=[1.0], deadline=0.01)
        request.until = 0.0
        self.refused("deadline_exceeded", lambda: channel.wait(request))
        self.worker.expect("infer")
        self.worker.expect("cancel")

    def test_closing_refuses_what_is_new_and_answers_what_is_under_way(self) -> None:
        channel = self.open()
        request = channel.submit(x=[1.0])
        head, _ = self.worker.expect("infer")
        self.worker.send("closing", layout.CLOSING.pack(code=14, deadline_ms=1000))
        self.worker.answer(head["request_id"], [1.0])
        self.assertEqual(channel.wait(request)["y"].tolist(), [1.0])
        self.refused("worker_draining", lambda: channel.infer(x=[1.0]))

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
