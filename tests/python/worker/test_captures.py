"""Captures of ``context.graph`` by PyTorch itself: on a GPU, or on tests/fakes/fake_cudart, where
no kernel computes."""

from __future__ import annotations

import os
import unittest

import torch
from bulkhead.doctor.capture import capture
from bulkhead.worker.graphs import Graphs

FAKE = "fake_cudart" in os.environ.get("LD_PRELOAD", "")


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + torch.rand_like(x)


def reads(x: torch.Tensor) -> torch.Tensor:
    return noisy(x) + x.sum().item()


def row(length: int) -> torch.Tensor:
    return torch.ones(1, length, device="cuda")


@unittest.skipUnless(torch.cuda.is_available(), "no GPU here")
class Captures(unittest.TestCase):
    def setUp(self) -> None:
        self.graphs = Graphs("cuda", "preferred")

    def captured(self) -> list[tuple[str, list[list[int]], int]]:
        return [(one["method"], one["shapes"], one["hits"]) for one in self.graphs.report()["buckets"]]

    def test_one_that_fails_leaves_random_numbers_earlier_graphs_and_later_captures_whole(self) -> None:
        earlier = self.graphs.add(noisy, [{"x": row(8)}], padding={}, name="earlier")
        failed = self.graphs.add(reads, [{"x": row(4)}, {"x": row(2)}], padding={}, name="reads")
        self.assertEqual([one["cause"] for one in self.graphs.report()["failures"]], ["host_read"] * 2)
        self.assertEqual(failed(x=row(4)).shape, (1, 4))
        self.assertEqual(self.graphs.report()["eager"], {"capture_failed": 1})

        later = self.graphs.add(noisy, [{"x": row(16)}, {"x": row(32)}], padding={}, name="later")
        for graphed, length in ((earlier, 8), (later, 16), (later, 32)):
            graphed(x=row(length))
        self.assertEqual(self.captured(), [("earlier", [[1, 8]], 1), ("later", [[1, 32]], 1), ("later", [[1, 16]], 1)])

    def test_the_doctor_captures_on_behind_one_that_fails(self) -> None:
        x = row(4)
        failure = capture(lambda: reads(x), [], torch.cuda).failure
        assert failure is not None
        self.assertEqual((failure.code, failure.function), ("host_read", "reads"))
        self.assertEqual(capture(lambda: noisy(x), [], torch.cuda).error, "")

    @unittest.skipIf(FAKE, "no kernel computes here")
    def test_a_replay_computes_what_the_function_does_and_draws_new_random_numbers(self) -> None:
        plus = self.graphs.add(lambda x: x * 3 + 1, [{"x": row(8)}], padding={"x": 0.0}, name="plus")
        self.assertEqual(plus(x=row(8)).tolist(), [[4.0] * 8])
        self.assertEqual(plus(x=row(5) * 2).tolist(), [[7.0] * 5 + [1.0] * 3])
        noise = self.graphs.add(noisy, [{"x": row(8)}], padding={}, name="noise")
        first = noise(x=row(8)).clone()
        self.assertFalse(torch.equal(first, noise(x=row(8))))


if __name__ == "__main__":
    unittest.main()
