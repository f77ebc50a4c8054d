"""What callers get wrong ends in a bulkhead.Error that says what to change, and the
channel goes on."""

from __future__ import annotations

import asyncio
import math
import unittest
from concurrent.futures import ThreadPoolExecutor

import bulkhead
from bulkhead import layout
from bulkhead.channel import Channel
from bulkhead.errors import DEADLINE_SECONDS_MAX
from bulkhead.shared_tensors import Arena
from bulkhead.control.verbs import with_deadline
from opened import Opened

BAD_DEADLINES = (math.nan, math.inf, -math.inf, 1e12, "1", [1])


class Misuse(Opened):
    def setUp(self) -> None:
        super().setUp()
        self.channel = self.open()

    def mended(self, code: str, call) -> None:
        self.assertTrue(self.refused(code, call).remedy, "no remedy is told")

    def answered(self, deadline: float = 10) -> None:
        """The channel serves as before."""

        self.serve(lambda: self.worker.answer_next([1.0]))
        self.assertEqual(self.channel.infer(x=[0.0], deadline=deadline)["y"].tolist(), [1.0])

    def test_shapes_that_are_none(self) -> None:
        arena = Arena()
        for shape in ((1 << 62, 4), (1 << 62, 1 << 62, 0), (1 << 64,), "abc", "12", (1.5,), (-1,), 3, (1,) * 9, None):
            for allocate in (self.channel.allocate, lambda shape: arena.allocate(shape, "float32")):
                with self.subTest(shape=shape):
                    self.mended("shape_mismatch", lambda: allocate(shape))
        self.mended("resources_exhausted", lambda: self.channel.allocate((1 << 40,)))
        self.answered()

    def test_deadlines_that_are_none(self) -> None:
        for deadline in BAD_DEADLINES:
            with self.subTest(deadline=deadline):
                self.mended("input_invalid", lambda: self.channel.submit(x=[0.0], deadline=deadline))
                self.mended("input_invalid", lambda: with_deadline({}, deadline))
                self.mended("input_invalid", lambda: bulkhead.channel.Channel(self.worker.client_end, deadline=deadline))
        self.answered(DEADLINE_SECONDS_MAX)

    def test_deadlines_that_are_none_on_a_loop(self) -> None:
        worker = self.another()

        async def work() -> None:
            opening = asyncio.ensure_future(bulkhead.aio.Channel.open(worker.client_end))
            await asyncio.to_thread(worker.open)
            async with await opening as channel:
                for deadline in BAD_DEADLINES:
                    with self.subTest(deadline=deadline), self.assertRaises(bulkhead.Error) as caught:
                        await channel.infer(x=[0.0], deadline=deadline)
                    self.assertEqual(caught.exception.code, "input_invalid")

        asyncio.run(work())

    def test_waiting_twice(self) -> None:
        self.serve(lambda: self.worker.answer_next([1.0]))
        request = self.channel.submit(x=[0.0])
        self.channel.wait(request)
        self.mended("input_invalid", lambda: self.channel.wait(request))

    def test_names_that_are_no_text(self) -> None:
        for name in ("forward\0junk", "x\ny", "\x7f", "\x9b", "\u202eback", "\ud800", "ö" * 32):
            with self.subTest(name=name):
                for call in (lambda: self.channel.submit(x=[0.0], method=name), lambda: self.channel.submit({name: [0.0]})):
                    refused = self.refused("input_invalid", call)
                    self.assertIn("printable UTF-8", refused.remedy)
                    self.assertNotIn("\0", refused.attempt)
        self.answered()

    def test_a_clients_name_that_is_no_text_is_mended(self) -> None:
        worker = self.another()
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(Channel, worker.client_end, client="a\0b\ud800\n")
            _, body = worker.expect("hello")
            self.assertEqual(layout.HELLO.unpack(body)["client"], "a?b??")
            worker.welcome(0)
            opening.result(10).close()

    def test_values_that_cannot_be_sent(self) -> None:
        class Kept:
            def __dlpack_device__(self) -> tuple[int, int]:
                return 1, 0

            def __dlpack__(self, **_: object) -> object:
                raise BufferError("Can't export tensors that require gradient")

        knot: list = []
        knot.append(knot)
        for value in (object(), {1, 2}, math.nan, knot, b"bytes", {(1, 2): 3}):
            with self.subTest(value=type(value)):
                self.mended("input_invalid", lambda: self.channel.submit(x=[0.0], scale=value))
        self.mended("dtype_unsupported", lambda: self.channel.submit(x=[1e300]))
        self.assertIn("detach", self.refused("input_invalid", lambda: self.channel.submit(x=Kept())).remedy)
        self.answered()


if __name__ == "__main__":
    unittest.main()
