"""An engine's own `unload`, which comes between the last answer and `drained`."""

from __future__ import annotations

import os
import tempfile
import unittest
from pathlib import Path

from harness import Worker


class Unload(unittest.TestCase):
    def unloading(self) -> tuple[Worker, Path]:
        """One that has begun its unload, and the pipe on which that waits."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        pipe = Path(folder.name, "pipe")
        os.mkfifo(pipe)
        worker = Worker("python", engine="Unloads", options={"pipe": str(pipe)})
        self.addCleanup(worker.close)
        worker.load()
        client = worker.open_channel()
        client.hold()
        client.infer(1, client.tensor())
        worker.expect("busy")
        worker.send("drain", deadline_ms=60_000)
        client.expect("closing")
        client.let_go()
        self.assertTrue(any(b"unload is called" in line for line in worker.process.stderr))  # type: ignore[union-attr]
        client.result(1)  # what was in flight has its answer before
        return worker, pipe

    def test_an_engines_unload_is_called_once_and_drained_comes_after_it(self) -> None:
        worker, pipe = self.unloading()
        worker.send("drain", deadline_ms=50_000)
        worker.send("statistics_asked")
        self.assertEqual(worker.expect("statistics")["in_flight"], 0)
        pipe.write_text("")
        worker.expect("drained")
        self.assertEqual(worker.process.wait(20), 0)
        self.assertNotIn(b"unload is called", worker.process.stderr.read())  # type: ignore[union-attr]

    def test_an_unload_that_raises_is_told_in_the_log_and_the_drain_ends_well(self) -> None:
        worker, pipe = self.unloading()
        pipe.write_text("raise")
        worker.expect("drained")
        self.assertEqual(worker.process.wait(20), 0)
        self.assertIn(b"RuntimeError: the weights are gone already", worker.process.stderr.read())  # type: ignore[union-attr]

    def test_an_unload_that_hangs_ends_at_the_drains_deadline(self) -> None:
        worker, _ = self.unloading()
        worker.send("drain", deadline_ms=100)  # of two deadlines the earlier holds
        self.assertEqual(worker.process.wait(20), 1)
        with self.assertRaises(EOFError):
            worker.expect("drained")


if __name__ == "__main__":
    unittest.main()
