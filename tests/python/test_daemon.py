"""The Python client against real processes: the built daemon, its workers, its models."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import bulkhead

BUILD = Path(os.environ["BULKHEAD_BUILD"])
SOURCE = Path(__file__).resolve().parents[2]

FLEET = f"""
version: 1
defaults: {{device: cpu, threads: 1}}
models:
  minilm:
    runtime: aoti
    package: {BUILD}/models/minilm.pt2
    inputs:
      input_ids: {{dtype: int64, shape: [1, n=1..256]}}
      attention_mask: {{dtype: int64, shape: [1, n=1..256]}}
    warmup: {{input_ids: [1, 16], attention_mask: [1, 16]}}
    outputs: {{embedding: {{dtype: float32, shape: [1, 384]}}}}
  silero-vad:
    runtime: torchscript
    file: {BUILD}/models/silero_vad.jit
    state: {{scope: channel, reset: reset_states}}
    inputs: {{x: {{dtype: float32, shape: [1, 512]}}}}
    parameters: {{sr: {{type: integer, default: 16000}}}}
    outputs: {{probability: {{dtype: float32, shape: [1, 1]}}}}
"""

IDS = [[101, 7592, 102]]
MASK = [[1, 1, 1]]


class Daemon:
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="bh-")
        fleet = Path(self.folder.name, "fleet.yaml")
        fleet.write_text(FLEET)
        self.socket = str(Path(self.folder.name, "run", "control.sock"))
        self.output = open(Path(self.folder.name, "out"), "wb")
        environment = {**os.environ, "XDG_CACHE_HOME": str(BUILD / "test-cache")}
        self.process = subprocess.Popen([str(BUILD / "bin" / "bulkheadd"), "--socket", self.socket, str(fleet)],
                                        stdout=self.output, stderr=self.output, env=environment)  # fmt: skip
        until = time.monotonic() + 20
        while not os.path.exists(self.socket) and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.output.close()
        self.folder.cleanup()


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

    def test_an_output_that_is_kept_is_named_in_the_receipt(self) -> None:
        reply = self.client.infer("minilm", input_ids=IDS, attention_mask=MASK)
        (receipt,) = self.client.unload("minilm")
        self.assertFalse(receipt["verified"])
        self.assertEqual([holder["pid"] for holder in receipt["held_by"]], [os.getpid()])
        self.assertEqual(len(reply["embedding"].tolist()[0]), 384)  # and stays readable

    def test_a_dead_worker_is_told_and_retry_safe_hides_it(self) -> None:
        self.client.infer("minilm", input_ids=IDS, attention_mask=MASK)
        os.kill(self.pid("minilm"), signal.SIGKILL)
        with self.assertRaises(bulkhead.Error) as caught:
            for _ in range(100):  # what was answered before the end of file is no error
                self.client.infer("minilm", input_ids=IDS, attention_mask=MASK)
        self.assertEqual(caught.exception.code, "worker_lost")
        self.client.infer("minilm", input_ids=IDS, attention_mask=MASK)  # the next process
        os.kill(self.pid("minilm"), signal.SIGKILL)
        for _ in range(20):
            reply = self.client.infer("minilm", input_ids=IDS, attention_mask=MASK, retry_safe=True)
        self.assertEqual(reply["embedding"].shape, (1, 384))

    def test_the_stateful_model_serves_one_channel(self) -> None:
        with self.client.open("silero-vad") as channel:
            silence = channel.infer(x=[[0.0] * 512], sr=16000)["probability"].tolist()[0][0]
            self.assertLess(silence, 0.1)
            with self.assertRaises(bulkhead.Error) as caught:
                self.client.open("silero-vad")
            self.assertEqual(caught.exception.code, "busy")

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
                replies = await asyncio.gather(*(client.infer("minilm", input_ids=IDS, attention_mask=MASK) for _ in range(8)))
                self.assertEqual({reply["embedding"].shape for reply in replies}, {(1, 384)})

        asyncio.run(work())

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

    def test_a_supervisor_that_is_replaced_is_not_noticed(self) -> None:
        self.client.infer("minilm", input_ids=IDS, attention_mask=MASK)
        before = self.pid("minilm")
        os.kill(self.client.info()["supervisor_pid"], signal.SIGKILL)
        self.assertEqual(self.client.infer("minilm", input_ids=IDS, attention_mask=MASK)["embedding"].shape, (1, 384))
        self.assertEqual(self.pid("minilm"), before)

    def test_events_tell_of_a_load(self) -> None:
        self.client.unload("minilm")
        seen: list[str] = []
        ready = threading.Event()
        subscribed = threading.Event()

        def follow() -> None:
            with bulkhead.connect(self.daemon.socket) as watcher:
                subscribed.set()
                for event in watcher.events("minilm"):
                    if event["event"] == "state":
                        seen.append(event["to"])
                    if "ready" in seen or "loading" in seen:
                        ready.set()
                        return

        thread = threading.Thread(target=follow)
        thread.start()
        subscribed.wait(10)
        until = time.monotonic() + 30
        while not ready.is_set() and time.monotonic() < until:  # until a load came after the subscription
            self.client.load("minilm")
            if not ready.wait(0.2):
                self.client.unload("minilm")
        self.assertTrue(ready.is_set(), seen)
        thread.join(10)

    def test_the_timeline_is_the_same_as_that_of_the_cpp_client(self) -> None:
        voices = [f"/usr/share/sounds/alsa/Front_{side}.wav" for side in ("Center", "Left")]
        if not all(map(os.path.exists, voices)):
            self.skipTest("no voices: Debian's alsa-utils is not installed")
        ours = self._timeline([sys.executable, str(SOURCE / "clients/python/examples/vad_timeline.py")], voices)
        theirs = self._timeline([str(BUILD / "bin" / "vad_timeline")], voices)
        self.assertEqual(ours, theirs)
        self.assertIn("speech in Front_Left.wav", "\n".join(ours))

    def _timeline(self, command: list[str], voices: list[str]) -> list[str]:
        done = subprocess.run([*command, "--socket", self.daemon.socket, *voices], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines()[:-1]  # the last line tells times


if __name__ == "__main__":
    unittest.main()
