"""Parts of an answer, which the engine's thread sends itself: in order, and never after the last
word. The loop's thread is this one too, and runs when a test says so."""

from __future__ import annotations

import asyncio
import socket
import unittest
from types import SimpleNamespace
from typing import Any, Callable
from unittest import mock

from bulkhead import layout
from bulkhead.engine import Method
from bulkhead.errors import Error
from bulkhead.worker import messages
from bulkhead.worker.messages import Output
from bulkhead.worker.requests import Dispatcher, Request
from bulkhead.worker.session import OPEN, ChannelLimits, ChannelSession
from bulkhead.worker.slabs import OUTPUT, Budget


class Parts(unittest.TestCase):
    def setUp(self) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self.addCleanup(self.loop.close)
        self.peer, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.addCleanup(self.peer.close)
        self.peer.setblocking(False)
        serving: Any = SimpleNamespace(loop=self.loop, dispatcher=mock.Mock(), label="", budget=Budget(1 << 20), limits=ChannelLimits(4096, 4096, 1 << 20, 60.0),
                                       ended=mock.Mock(), flushed=mock.Mock())  # fmt: skip
        self.session = ChannelSession(serving, ours, 1, 0)
        self.addCleanup(self.session.close, "the test ends")
        self.session.state = OPEN
        self.session.slabs.add(OUTPUT, 1 << 18)
        self.session.slabs.take_offers()
        self.request = Request(1, self.session, mock.Mock(spec=Method), [], {}, deadline=0.0)
        self.session._in_flight.append(self.request)
        self.posted = 0

    def output(self) -> Output:
        lease, _ = self.session.slabs.allocate(64)
        return Output("y", "float32", (16,), lease)

    def post(self) -> Output:
        """One more part, which tells its number."""
        output = self.output()
        self.session.post_part(self.request, [output], b"%d" % self.posted)
        self.posted += 1
        return output

    def post_until_some_wait(self) -> None:
        while not self.session._parts:
            self.post()
        self.post()

    def came(self) -> list[int | str]:
        """The numbers of parts that have come, and the codes of errors."""
        all: list[int | str] = []
        while True:
            try:
                data = self.peer.recv(65536)
            except BlockingIOError:
                return all
            head, body = layout.HEADER.unpack(data), data[layout.HEADER.size :]
            if head["type"] == layout.MESSAGE["error"]:
                all.append(layout.ERROR_NAMES[layout.ERROR.unpack(body)["code"]])
            else:
                all.append(int(body[layout.RESULT.size + layout.TENSOR.size :]))

    def run_loop(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))

    def is_free(self, output: Output) -> bool:
        try:
            self.session.slabs.release(output.lease)
        except Error:
            return True
        return False

    def test_one_is_sent_without_the_loop(self) -> None:
        self.post()
        self.post()
        self.assertEqual(self.came(), [0, 1])

    def test_one_comes_behind_those_that_wait_though_the_socket_has_room_again(self) -> None:
        self.post_until_some_wait()
        came = self.came()
        self.post()
        self.assertEqual(self.came(), [])
        while len(came) < self.posted:
            self.run_loop()
            came += self.came()
        self.assertEqual(came, list(range(self.posted)))
        self.post()
        self.assertEqual(self.came(), [self.posted - 1])

    def test_one_comes_behind_what_the_loop_could_not_send_yet(self) -> None:
        while self.session._stream.outbox_empty:
            self.session._send(messages.error(9, Error("queue_full", "of another request")))
        came = self.came()
        self.post()
        self.assertEqual(self.came(), [])
        while came[-1] != 0:
            self.run_loop()
            came += self.came()
        self.assertEqual(set(came[:-1]), {"queue_full"})

    def test_after_the_last_word_none_is_sent_and_its_memory_is_free(self) -> None:
        self.post_until_some_wait()
        self.request.answered = True
        late = self.post()
        self.session.fail(self.request, Error("cancelled", "by its client"))
        self.assertTrue(self.is_free(late))
        came = self.came()
        self.run_loop()
        came += self.came()
        self.assertEqual(came, [*range(len(came) - 1), "cancelled"])
        self.post()
        self.assertEqual(self.came(), [])

    def test_of_a_channel_that_is_closed_its_memory_is_free(self) -> None:
        self.session.close("its client has gone")
        self.assertTrue(self.is_free(self.post()))

    def test_of_the_answer_of_a_cancelled_request_its_memory_is_free(self) -> None:
        ends: list[Callable[[], None]] = []
        nothing = mock.Mock()
        dispatcher = Dispatcher(self.loop, run=lambda _, end: ends.append(end), activity=nothing, settled=nothing,
                                ran_out=nothing, overrun=nothing)  # fmt: skip
        dispatcher.bound = 1
        dispatcher.submit(self.request)
        dispatcher.cancel(1, 1)
        self.request.outputs = [late := self.output()]
        (end,) = ends
        end()
        self.assertTrue(self.is_free(late))
        self.assertEqual(self.came(), ["cancelled"])

    def test_one_whose_client_has_gone_ends_the_channel(self) -> None:
        self.peer.close()
        self.post()
        self.run_loop()
        self.assertTrue(self.session.is_closed)


if __name__ == "__main__":
    unittest.main()
