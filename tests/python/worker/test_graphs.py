"""``context.graph``: the order of a capture, what a replay reads and writes, and what is counted;
on a CPU, and on a stand-in."""

from __future__ import annotations

import sys
import unittest
from typing import Any
from unittest import mock

import torch
from bulkhead.engine import LocalContext
from bulkhead.errors import Error
from bulkhead.worker.graphs import Graphs
from bulkhead.worker.host import device_name
from bulkhead.worker.loading import ran_out_of_memory
from fake_cuda import FakeCuda

WARM = ["side waits for main", "fn on side", "fn on side", "fn on side", "main waits for side", "synchronize", "empty_cache",
        "begin in pool 1", "fn on side captured", "end", "synchronize"]  # fmt: skip


def bucket(length: int) -> dict[str, Any]:
    return {"x": torch.zeros(1, length)}


class OnTheStandIn(unittest.TestCase):
    def setUp(self) -> None:
        self.cuda = FakeCuda()
        self.told: list[tuple[int, int, str]] = []

    def graphs(self, mode: str = "preferred") -> Graphs:
        return Graphs("cpu", mode, progress=lambda *told: self.told.append(told), cuda=self.cuda)

    def double(self, x: torch.Tensor) -> torch.Tensor:
        self.cuda.ran()
        return x * 2

    def test_each_bucket_is_warmed_up_on_a_side_stream_and_captured_the_largest_first_in_one_pool(self) -> None:
        graphs = self.graphs()
        graphs.add(self.double, [bucket(4), bucket(16)], padding={}, name="double")
        self.assertEqual(self.cuda.calls, WARM * 2)
        self.assertEqual(self.told, [(0, 2, "double [1,16]"), (1, 2, "double [1,4]"), (2, 2, "")])
        graphs.add(self.double, [bucket(2)], padding={}, name="again")
        self.assertEqual(self.cuda.pools, 1)
        report = graphs.report()
        self.assertEqual(report["pool_bytes"], 3 * 1024)
        self.assertEqual([report[f"{what}_bytes"] for what in ("allocated", "reserved", "peak")], [3 * 512, 3 * 1024, 6 * 1024])

    def test_a_call_fills_static_buffers_replays_and_is_counted(self) -> None:
        graphs = self.graphs()
        double = graphs.add(self.double, [bucket(4), bucket(8)], padding={"x": 7}, name="double")
        self.cuda.calls.clear()
        first = double(x=torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        self.assertEqual(first.tolist(), [[2.0, 4.0, 6.0, 8.0]])
        second = double(x=torch.tensor([[5.0, 5.0, 5.0, 5.0]]))
        self.assertEqual(second.data_ptr(), first.data_ptr())
        self.assertEqual(first.tolist(), [[10.0] * 4], "a static buffer: the next call writes it again")
        padded = double(x=torch.ones(1, 6))
        self.assertEqual(padded.tolist(), [[2.0] * 6 + [14.0] * 2])
        self.assertEqual(self.cuda.calls, ["replay"] * 3)
        eager = double(x=torch.ones(1, 9))
        self.assertEqual(tuple(eager.shape), (1, 9))
        report = graphs.report()
        counted = [(one["method"], one["shapes"], one["hits"], one["pads"]) for one in report["buckets"]]
        self.assertEqual(counted, [("double", [[1, 8]], 1, 1), ("double", [[1, 4]], 2, 0)])
        self.assertEqual((report["mode"], report["eager"]), ("captured", {"no_bucket": 1}))
        self.assertTrue(all(one["capture_ms"] >= 0 for one in report["buckets"]))

    def test_without_padding_a_smaller_call_is_eager_and_its_reason_is_told(self) -> None:
        graphs = self.graphs()
        double = graphs.add(self.double, [bucket(4)], padding={}, name="double")
        double(x=torch.ones(1, 3))
        double(x=torch.ones(1, 4, dtype=torch.float64))
        self.assertEqual(graphs.report()["eager"], {"padding_not_declared": 1, "no_bucket": 1})

    def test_constants_choose_among_buckets(self) -> None:
        graphs = self.graphs()
        cache = torch.zeros(8)

        def step(x: torch.Tensor, length: int) -> torch.Tensor:
            return cache[:length].sum() + x

        stepped = graphs.add(step, [{"x": torch.zeros(1), "length": length} for length in (4, 8)], padding={}, name="step")
        cache.fill_(1)
        self.assertEqual([float(stepped(x=torch.zeros(1), length=length)) for length in (4, 8)], [4.0, 8.0])
        stepped(x=torch.zeros(1), length=5)
        self.assertEqual(graphs.report()["eager"], {"no_bucket": 1})

    def test_what_cannot_be_captured_runs_eagerly_where_graphs_are_preferred(self) -> None:
        graphs = self.graphs()

        def waits(x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] == 4:
                self.cuda.synchronize()
            return x + 1

        plus = graphs.add(waits, [bucket(4), bucket(8)], padding={}, name="plus")
        self.assertEqual(plus(x=torch.zeros(1, 4)).tolist(), [[1.0] * 4])
        report = graphs.report()
        self.assertEqual([one["shapes"] for one in report["buckets"]], [[[1, 8]]])
        (failure,) = report["failures"]
        self.assertEqual((failure["method"], failure["shapes"]), ("plus", [[1, 4]]))
        self.assertIn("not permitted when stream is capturing", failure["reason"])
        self.assertEqual(report["eager"], {"capture_failed": 1})
        self.assertIsNone(self.cuda.capturing, "the stream has left the capture")

    def test_a_failed_capture_is_told_as_the_doctor_tells_it(self) -> None:
        refused = RuntimeError("CUDA error: operation not permitted when stream is capturing")

        def reads(x: torch.Tensor) -> torch.Tensor:
            count = x.sum().item()
            return x + count

        graphs = self.graphs()
        # Three runs of warm-up, then the capture.
        with mock.patch.object(torch.Tensor, "item", side_effect=[1, 1, 1, refused]):
            graphs.add(reads, [bucket(4)], padding={}, name="reads")
        (failure,) = graphs.report()["failures"]
        line = reads.__code__.co_firstlineno + 1
        self.assertEqual(failure["cause"], "host_read")
        self.assertIn(f"test_graphs.py:{line} in ", failure["reason"])
        self.assertIn("`count = x.sum().item()`: the line does what a capture refuses (CUDA's error 900)", failure["reason"])
        self.assertIn("torch.where", failure["remedy"])

    def test_it_is_an_error_where_graphs_are_required(self) -> None:
        def waits(x: torch.Tensor) -> torch.Tensor:
            self.cuda.synchronize()
            return x

        with self.assertRaises(Error) as caught:
            self.graphs("required").add(waits, [bucket(4)], padding={}, name="waits")
        self.assertEqual(caught.exception.code, "capture_failed")
        self.assertIn("graphs: preferred", caught.exception.remedy)

    def test_off_captures_nothing(self) -> None:
        graphs = self.graphs("off")
        double = graphs.add(self.double, [bucket(4)], padding={}, name="double")
        self.assertEqual(double(x=torch.ones(1, 4)).tolist(), [[2.0] * 4])
        self.assertEqual(self.cuda.calls, ["fn on main"])
        none = {"allocated_bytes": 0, "reserved_bytes": 0, "peak_bytes": 0}
        self.assertEqual(graphs.report(), {"mode": "off", "pool_bytes": 0, "buckets": [], "eager": {"graphs_off": 1}, **none})


class OnAGpuWithoutTorch(unittest.TestCase):
    def test_torchs_own_error_is_known_by_its_name(self) -> None:
        self.assertTrue(ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")))
        self.assertFalse(ran_out_of_memory(RuntimeError("CUDA error")))

    def test_nothing_imports_it_before_the_engine_does(self) -> None:
        with mock.patch.dict(sys.modules, torch=None):
            self.assertEqual(Graphs("cuda", "preferred").report(), {"mode": "eager", "pool_bytes": 0, "buckets": [], "eager": {}})
            self.assertEqual(device_name("cuda"), "cuda")
        self.assertEqual(device_name("cuda"), "cuda", "torch is there, and uses no GPU")


class OnACpu(unittest.TestCase):
    def test_the_same_static_buffers_and_the_reason_no_gpu(self) -> None:
        context = LocalContext()
        seen: set[int] = set()

        def split(x: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.add(x.data_ptr())
            return {"even": x[:, ::2] + 0, "odd": x[:, 1::2] + 0}

        graphed = context.graph(split, [bucket(4)], padding={"x": -1.0}, name="split")
        first = graphed(x=torch.tensor([[0.0, 1.0, 2.0, 3.0]]))
        addresses = {name: tensor.data_ptr() for name, tensor in first.items()}
        second = graphed(x=torch.tensor([[5.0, 6.0, 7.0]]))
        self.assertEqual({name: tensor.data_ptr() for name, tensor in second.items()}, addresses)
        self.assertEqual((second["even"].tolist(), second["odd"].tolist()), ([[5.0, 7.0]], [[6.0, -1.0]]))
        self.assertEqual(len(seen), 1)
        self.assertEqual(context._graphs.report(), {"mode": "eager", "pool_bytes": 0, "buckets": [], "eager": {"no_gpu": 2}})


if __name__ == "__main__":
    unittest.main()
