"""The Python client against real processes: the built daemon, its workers, its models."""

from __future__ import annotations

import array
import asyncio
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import tracemalloc
import unittest
from pathlib import Path

import bulkhead
from daemon import GENERATING, Daemon, EchoDaemon

SOURCE = Path(__file__).resolve().parents[2]

IDS = [[101, 7592, 102]]
MASK = [[1, 1, 1]]


class WithDaemon(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.daemon = Daemon()
        cls.addClassCleanup(cls.daemon.stop)

    def setUp(self) -> None:
        self.client = bulkhead.connect(self.daemon.socket, name="test")
        self.addCleanup(self.client.close)

    def pid(self, model: str) -> int:
        return next(row["pid"] for row in self.client.ps() if row["model"] == model)

    def test_infers_by_name_and_unloads_with_a_verified_receipt(self) -> None:
        reply = self.client.infer("minilm", input_ids=IDS, attention_mask=MASK)
        self.assertEqual(reply["embedding"].shape, (1, 384))
        first = reply["embedding"].tolist()[0][:2]
        self.assertAlmostEqual(first[0], -0.0627717, places=5)
        del reply
        gc.collect()
        (receipt,) = self.client.unload("minilm")
        self.assertEqual((receipt["ended"], receipt["verified"]), ("drained", True), receipt)

    def test_memory_of_the_clients_own_is_read_by_the_worker_where_it_lies(self) -> None:
        with self.client.allocate((1, 3), "int64") as ids:
            ids.data.cast("q")[:] = memoryview(array.array("q", IDS[0]))
            lent = self.client.infer("minilm", input_ids=ids, attention_mask=MASK)["embedding"].tolist()
            self.assertTrue("memfd:bulkhead-client" in Path(f"/proc/{self.pid('minilm')}/maps").read_text(), "it was copied")
        self.assertEqual(lent, self.client.infer("minilm", input_ids=IDS, attention_mask=MASK)["embedding"].tolist())
        self.client.close()  # the loan ends with the channel

    def test_a_client_that_is_killed_with_results_in_its_hands_holds_nothing(self) -> None:
        code = """if True:
            import bulkhead, os, signal, sys
            b = bulkhead.connect(sys.argv[1])
            held = [b.infer("minilm", input_ids=[[101, 7592, 102]], attention_mask=[[1, 1, 1]]) for _ in range(3)]
            os.kill(os.getpid(), signal.SIGKILL)
        """
        died = subprocess.run([sys.executable, "-c", code, self.daemon.socket])
        self.assertEqual(died.returncode, -signal.SIGKILL)
        (receipt,) = self.client.unload("minilm")
        self.assertEqual((receipt["ended"], receipt["verified"]), ("drained", True), receipt)

    def test_the_example_of_the_channels_page_runs_as_it_is_printed(self) -> None:
        page = (SOURCE / "docs/channel.md").read_text()
        found = re.search(r"^The beginning, by hand:\n\n((?:    .*\n)+)", page, re.MULTILINE)
        assert found is not None, "docs/channel.md has lost its example"
        names: dict = {"path": self.daemon.socket}
        exec(textwrap.dedent(found[1]), names)
        self.addCleanup(names["control"].close)
        self.addCleanup(names["channel"].close)
        self.assertEqual(bulkhead.layout.HEADER.unpack(names["welcome"])["type"], bulkhead.layout.MESSAGE["welcome"])
        self.assertEqual(len(names["memory"]), names["size"])

    def test_threads_have_channels_of_their_own(self) -> None:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(10):
                    self.client.infer("minilm", input_ids=IDS, attention_mask=MASK)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_asyncio(self) -> None:
        async def work() -> None:
            async with bulkhead.aio.connect(self.daemon.socket) as client:
                events = await client.events("minilm")
                await client.unload("minilm")
                await client.load("minilm")
                replies = await asyncio.gather(*(client.infer("minilm", input_ids=IDS, attention_mask=MASK) for _ in range(200)))
                self.assertEqual({reply["embedding"].shape for reply in replies}, {(1, 384)})
                self.assertEqual(len({tuple(reply["embedding"].tolist()[0]) for reply in replies}), 1)
                del replies
                (receipt,) = await client.unload("minilm")
                self.assertEqual((receipt["ended"], receipt["verified"]), ("drained", True), receipt)
                async for event in events:
                    if event["event"] == "receipt" and event["pid"] == receipt["pid"]:
                        break
                await events.aclose()
                self.assertEqual({row["model"] for row in await client.ps()}, {"minilm", "silero-vad"})
                self.assertIn("unload", await client.why("minilm"))
                self.assertEqual((await client.info())["socket"], self.daemon.socket)

        asyncio.run(work())

    def test_every_verb(self) -> None:
        self.client.load("minilm")
        self.assertEqual({row["model"]: row["state"] for row in self.client.ps()}["minilm"], "ready")
        self.assertIn("minilm", self.client.why("minilm"))
        self.assertIsInstance(list(self.client.logs("minilm", lines=5)), list)
        self.assertEqual(self.client.info()["version"], bulkhead.__version__)
        self.assertIn("nvml", self.client.gpus())
        self.assertEqual(self.client.crashes("nobody"), [])
        self.assertEqual(self.client.reload()["unchanged"], ["minilm", "silero-vad"])
        self.assertEqual(len(self.client.restart("minilm")["receipts"]), 1)
        with self.assertRaises(bulkhead.Error):
            self.client.unload()

    def test_errors_name_what_there_is(self) -> None:
        with self.assertRaises(bulkhead.Error) as caught:
            self.client.infer("minilmm", input_ids=IDS)
        self.assertEqual(caught.exception.code, "model_unknown")
        with self.assertRaises(bulkhead.Error) as caught:
            self.client.infer("minilm", input_ids=IDS)
        self.assertEqual(caught.exception.code, "input_invalid")
        with self.assertRaises(bulkhead.Error) as caught:
            bulkhead.connect(self.daemon.socket + ".no")
        self.assertEqual(caught.exception.code, "not_running")

    def test_the_timeline_draws_speech(self) -> None:
        voices = [f"/usr/share/sounds/alsa/Front_{side}.wav" for side in ("Center", "Left")]
        if not all(map(os.path.exists, voices)):
            self.skipTest("no voices: Debian's alsa-utils is not installed")
        command = [sys.executable, str(SOURCE / "clients/python/examples/vad_timeline.py"), "--socket", self.daemon.socket, *voices]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [line.rstrip() for line in done.stdout.splitlines()]
        self.assertEqual(lines[:-1], [  # the last line tells times
            "Front_Center.wav", "   0.00 s  ████▁ █████▁", "Front_Left.wav", "   1.92 s  ████ ▁████▆",
            "speech in Front_Center.wav:  0.07-0.54 s  0.77-1.44 s", "speech in Front_Left.wav:  1.92-2.46 s  2.66-3.26 s"])


class Steady(unittest.TestCase):
    REQUESTS, BYTES = 200, 1 << 20

    def test_a_request_copies_nothing_keeps_nothing_and_faults_nothing_in(self) -> None:
        daemon = EchoDaemon()
        self.addCleanup(daemon.stop)
        client = bulkhead.connect(daemon.socket)
        self.addCleanup(client.close)
        channel = client.open("echo")
        room = channel.allocate((self.BYTES // 4,))
        room.data[:] = bytes(range(256)) * (self.BYTES // 256)

        def requests() -> None:
            for _ in range(self.REQUESTS):
                self.assertEqual(channel.infer(x=room)["y"].data[-1], 255)

        def faults() -> int:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            requests()
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        def allocated() -> tuple[int, int]:
            """Bytes that are left afterwards, and the most beside them."""
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            requests()
            peak = tracemalloc.get_traced_memory()[1]
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before, peak - before

        def leased() -> list[int]:
            return [slab.allocator._lease_id for slab in channel.core.slabs._inputs]

        requests()
        before = leased()
        self.assertEqual(min(faults() for _ in range(5)), 0)
        self.assertEqual(leased(), before, "an input was copied into the slab that it lies in")
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        requests()
        left, most = zip(*(allocated() for _ in range(5)))
        self.assertLess(min(left), self.REQUESTS)
        self.assertLess(min(most), self.BYTES // 4, "an output was copied")


class Generating(unittest.TestCase):
    GREEDY = {"temperature": 0, "ignore_stop": True}

    @classmethod
    def setUpClass(cls) -> None:
        cls.daemon = Daemon(GENERATING)
        cls.addClassCleanup(cls.daemon.stop)

    def setUp(self) -> None:
        self.client = bulkhead.connect(self.daemon.socket, name="test")
        self.addCleanup(self.client.close)

    def test_tokens_come_and_the_same_again_on_an_event_loop(self) -> None:
        generation = self.client.generate("tiny", range_of(8), max_new_tokens=30, **self.GREEDY)
        tokens = list(generation)
        self.assertEqual((len(tokens), generation.finish, generation.statistics["new_tokens"]), (30, "length", 30))

        async def run() -> list[int]:
            async with bulkhead.aio.connect(self.daemon.socket) as client:
                return [token async for token in client.generate("tiny", range_of(8), max_new_tokens=30, **self.GREEDY)]

        self.assertEqual(asyncio.run(run()), tokens)
        self.assertEqual(self.client.infer("tiny", tokens=range_of(8), method="generate", max_new_tokens=30, **self.GREEDY)["tokens"].tolist(), tokens)

    def test_a_running_generation_is_adjusted(self) -> None:
        greedy = list(self.client.generate("tiny", range_of(8), max_new_tokens=240, **self.GREEDY))

        async def on_a_loop() -> list[int]:
            async with bulkhead.aio.connect(self.daemon.socket) as client:
                generation = client.generate("tiny", range_of(8), max_new_tokens=240, **self.GREEDY)
                await anext(generation)
                await generation.adjust(do_sample=True, temperature=5.0)
                return [token async for token in generation] and generation.tokens

        def here() -> list[int]:
            generation = self.client.generate("tiny", range_of(8), max_new_tokens=240, **self.GREEDY)
            next(generation)
            generation.adjust(do_sample=True, temperature=5.0)
            return list(generation) and generation.tokens

        for run in (here, lambda: asyncio.run(on_a_loop())):
            for _ in range(100):  # it may be over before the adjustment arrives
                try:
                    tokens = run()
                except bulkhead.Error as error:
                    self.assertEqual(error.code, "input_invalid")
                    continue
                if tokens != greedy:
                    break
            self.assertEqual((len(tokens), tokens[0]), (240, greedy[0]))
            self.assertNotEqual(tokens, greedy)
        with self.client.generate("tiny", range_of(8), max_new_tokens=240, **self.GREEDY) as generation:
            next(generation)
            with self.assertRaises(bulkhead.Error) as caught:
                generation.adjust(temprature=1.0)
            self.assertEqual(caught.exception.code, "input_invalid")


def range_of(count: int) -> list[int]:
    return list(range(1, count + 1))


if __name__ == "__main__":
    unittest.main()
