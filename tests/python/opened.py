"""A channel that is open to a fake worker: what most tests begin with."""

from __future__ import annotations

import threading
import unittest
from concurrent.futures import ThreadPoolExecutor

import bulkhead
from bulkhead.channel import Channel
from fake_worker import FakeWorker


class Opened(unittest.TestCase):
    def setUp(self) -> None:
        self.workers: list[FakeWorker] = []
        self.worker = self.another()

    def open(self, **welcome: int) -> Channel:
        return self.open_to(self.worker, **welcome)

    def another(self) -> FakeWorker:
        worker = FakeWorker()
        self.addCleanup(worker.close)
        self.addCleanup(worker.client_end.close)
        self.workers.append(worker)
        return worker

    def open_to(self, worker: FakeWorker, **welcome: int) -> Channel:
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(Channel, worker.client_end, client="test")
            worker.open(**welcome)
            channel = opening.result(10)
        self.addCleanup(channel.close)
        return channel

    def serve(self, body) -> threading.Thread:
        def run() -> None:
            try:
                body()
            except BaseException:
                for worker in self.workers:  # or the client would wait for ever
                    worker.close()
                raise

        thread = threading.Thread(target=run)
        thread.start()
        self.addCleanup(thread.join)
        return thread

    def refused(self, code: str, call) -> bulkhead.Error:
        with self.assertRaises(bulkhead.Error) as caught:
            call()
        self.assertEqual(caught.exception.code, code, str(caught.exception))
        return caught.exception
