"""The asyncio channel against a worker that says what the test wants."""

from __future__ import annotations

import asyncio
import gc
import unittest

import bulkhead
from bulkhead import layout
from bulkhead.layout import FEATURE
from fake_worker import FakeWorker


class Opened(unittest.IsolatedAsyncioTestCase):
    features = 0
    in_flight = 4

    async def asyncSetUp(self) -> None:
        self.worker = FakeWorker()
        self.channel = await self.open_to(self.worker)

    async def asyncTearDown(self) -> None:
        self.channel.close()
        self.worker.close()

    async def open_to(self, worker: FakeWorker) -> bulkhead.aio.Channel:
        opening = asyncio.ensure_future(bulkhead.aio.Channel.open(worker.client_end))
        await asyncio.to_thread(worker.open, features=self.features, in_flight=self.in_flight)
        return await opening

    def echo(self, count: int) -> None:
        for at in range(count):
            self.worker.answer_next(offset=64 * at, lease_id=at + 1)


class Inference(Opened):

    async def test_what_exceeds_the_requests_in_flight_waits_its_turn(self) -> None:
        serving = asyncio.ensure_future(asyncio.to_thread(self.echo, 200))
        replies = await asyncio.gather(*(self.channel.infer(x=[float(i)]) for i in range(200)))
        await serving
        self.assertEqual([reply["y"].tolist() for reply in replies], [[float(i)] for i in range(200)])

    async def test_a_turn_that_does_not_come_in_time(self) -> None:
        first = [asyncio.ensure_future(self.channel.infer(x=[1.0])) for _ in range(self.in_flight)]
        await asyncio.to_thread(lambda: [self.worker.expect("infer") for _ in first])
        with self.assertRaises(bulkhead.Error) as caught:
            await self.channel.infer(x=[1.0], deadline=0.01)
        self.assertEqual(caught.exception.code, "deadline_exceeded")
        self.assertIn("in flight", caught.exception.attempt)
        self.worker.close()
        await asyncio.gather(*first, return_exceptions=True)

    async def test_tasks_that_are_cancelled_while_they_wait_their_turn_lose_none(self) -> None:
        tasks = [asyncio.ensure_future(self.channel.infer(x=[1.0])) for _ in range(4 * self.in_flight)]
        asked = await asyncio.to_thread(lambda: [self.worker.expect("infer")[0]["request_id"] for _ in range(self.in_flight)])
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)

        def serve() -> None:
            for _ in asked[1:]:
                self.worker.expect("cancel")
            for number in asked:
                self.worker.error(number, 9) if number != asked[0] else self.worker.answer(number, [1.0])
            self.echo(2 * self.in_flight)

        serving = asyncio.ensure_future(asyncio.to_thread(serve))
        await tasks[0]
        await asyncio.gather(*(self.channel.infer(x=[2.0]) for _ in range(2 * self.in_flight)))
        await serving

    async def test_cancelled_tasks_leave_no_lease_behind(self) -> None:
        for _ in range(20):
            task = asyncio.ensure_future(self.channel.infer(x=[1.0] * 1000))
            head, _ = await asyncio.to_thread(self.worker.expect, "infer")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(self.worker.expect, "cancel")
            await asyncio.to_thread(self.worker.answer, head["request_id"], [1.0])  # it came first
        del task
        serving = asyncio.ensure_future(asyncio.to_thread(self.echo, 1))
        await self.channel.infer(x=[1.0])
        await serving
        gc.collect()
        (slab,) = self.channel.core.slabs._inputs
        self.assertTrue(slab.allocator.is_empty)
        self.assertGreaterEqual(len(self.worker.released), 19)

    async def test_the_deadline_that_is_sent_is_what_is_left_of_it(self) -> None:
        task = asyncio.ensure_future(self.channel.infer(x=[1.0], deadline=100.0))
        head, body = await asyncio.to_thread(self.worker.expect, "infer")
        self.assertTrue(99_000 < layout.INFER.unpack(body)["deadline_ms"] <= 100_000)
        self.worker.answer(head["request_id"], [1.0])
        await task


class Lending(Opened):
    features = FEATURE["lending"] | FEATURE["returning"]

    async def test_a_result_goes_to_the_next_worker_and_comes_back_when_the_first_has_ended(self) -> None:
        serving = asyncio.ensure_future(asyncio.to_thread(self.echo, 1))
        first = await self.channel.infer(x=[1.0, 2.0])
        await serving
        other = FakeWorker()
        self.addCleanup(other.close)
        second = await self.open_to(other)
        self.addCleanup(second.close)

        def serve() -> int:
            number, _ = other.borrow()
            other.answer_next()
            return number

        lending = asyncio.ensure_future(asyncio.to_thread(serve))
        reply = await second.infer(x=first["y"])
        self.assertEqual(reply["y"].tolist(), [1.0, 2.0])
        number = await lending
        self.worker.close()  # nobody asks the second channel to do anything: the loop tells it
        self.assertEqual(await asyncio.to_thread(other.returned), number)
        self.assertEqual(first["y"].tolist(), [1.0, 2.0])

    async def test_a_slab_that_was_withdrawn_is_returned_once_nobody_looks_at_it(self) -> None:
        serving = asyncio.ensure_future(asyncio.to_thread(self.echo, 1))
        reply = await self.channel.infer(x=[1.0])
        await serving
        view = reply["y"].data
        del reply
        self.worker.name_slab("slab_withdraw", 2)
        self.worker.offer(5, "output")
        await self.channel._until(lambda: 5 in self.channel.core.slabs._outputs, 10, "the offer behind it")
        self.assertEqual(list(view.cast("f")), [1.0])
        del view
        gc.collect()
        self.assertEqual(await asyncio.to_thread(self.worker.returned), 2)


if __name__ == "__main__":
    unittest.main()
