"""The half for a GPU, on a stand-in for `torch.cuda`: the order of a capture, and CUDA's errors in words. No GPU has run it."""

from __future__ import annotations

import contextlib
import unittest
from typing import Any, Iterator

import torch
from bulkhead.doctor import Finding
from bulkhead.doctor.capture import capture, explain


class Cuda:
    """Refuses a synchronisation while it captures, as CUDA does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.capturing = False

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    class CUDAGraph:
        def replay(self) -> None:
            pass

    def current_stream(self) -> Stream:
        return self.Stream()

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.calls.append("on side")
        yield

    @contextlib.contextmanager
    def graph(self, graph: object, stream: object) -> Iterator[None]:
        self.calls.append("capture")
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def synchronize(self) -> None:
        self.refuse()

    def refuse(self) -> None:
        if self.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class Captures(unittest.TestCase):
    def test_a_step_is_warmed_up_timed_and_captured(self) -> None:
        cuda, runs = Cuda(), []
        captured = capture(lambda: runs.append(len(cuda.calls)), [], cuda)
        self.assertEqual((cuda.calls, captured.failure, captured.error), (["on side", "capture"], None, ""))
        self.assertEqual(runs[:3], [1, 1, 1])
        self.assertEqual(runs[-1], 2, "the last run is the capture's")
        self.assertTrue(captured.document()["captured"])

    def test_the_line_that_is_refused_is_named_and_each_finding_has_its_cost(self) -> None:
        cuda = Cuda()
        x = torch.ones(4)

        def step() -> Any:
            count = x.sum().item(); cuda.refuse()  # noqa: E702
            return count

        line = step.__code__.co_firstlineno + 1
        found = Finding("host_read", "prevents_capture", __file__, line, 1, "step", "", "")
        captured = capture(step, [found], cuda)
        assert captured.failure is not None
        self.assertEqual(list(captured.cost_ms), [(__file__, line)])
        self.assertFalse(captured.document()["captured"])
        self.assertIn("operation not permitted", captured.error)

    def test_errors_of_cuda_are_told_by_their_cause(self) -> None:
        def failing(text: str) -> BaseException:
            try:
                torch.tensor([text]).item()  # a list of a string: PyTorch raises here
            except Exception as error:
                error.args = (text,)
                return error.with_traceback(error.__traceback__)
            raise AssertionError

        for text, told in {
            "CUDA error: operation failed due to a previous error during capture (901)": "an earlier line has invalidated the capture (901)",
            "CUDA error: capturing stream has unjoined work": "work on another stream is not joined (904)",
            "CUDA error: operation would make the legacy stream depend on a capturing blocking stream": "the default stream",
            "CUDA error 908: cudaErrorStreamCaptureWrongThread": "another thread",
            "CUDA out of memory. Tried to allocate 2.00 GiB": "the graphs' memory pool has no room",
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned": "pageable host memory",
        }.items():
            with self.subTest(text):
                finding = explain(failing(text))
                assert finding is not None
                self.assertIn(told, finding.reason)
                self.assertEqual((finding.code, finding.file), ("host_read", __file__))


if __name__ == "__main__":
    unittest.main()
