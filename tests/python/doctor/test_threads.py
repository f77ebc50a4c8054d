"""The doctor in threads: those of the step, and those that it cannot watch."""

from __future__ import annotations

import queue
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bulkhead.doctor import diagnose
from bulkhead.doctor.fake import threads


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


def inputs(device: str) -> Any:
    return torch.ones(4, device=device)


def in_thread(function: Any) -> None:
    thread = threading.Thread(target=function, name="of the step")
    thread.start()
    thread.join()


def fails(x: torch.Tensor) -> torch.Tensor:
    def work() -> None:
        raise ValueError("no weights")

    in_thread(work)
    return x * 2


def unknown(x: torch.Tensor) -> torch.Tensor:
    in_thread(lambda: torch.ops.doctor_test.unknown_in_thread(x))
    return x * 2


class Threads(unittest.TestCase):
    def test_a_place_in_a_thread_has_the_calls_that_started_it(self) -> None:
        def step(x: torch.Tensor) -> None:
            in_thread(lambda: x.sum().item())

        found = next(one for one in diagnose(step, inputs).findings if one.code == "host_read")
        self.assertEqual(found.line, line_of("in_thread(lambda: x.sum().item())"))
        self.assertRegex(" > ".join(found.path), rf"{found.line} \S*step > \S*:{line_of('thread.start()')} in_thread$")

    def test_what_a_thread_raises_is_no_success(self) -> None:
        report = diagnose(fails, inputs)
        self.assertRegex(report.error, rf"^fails raised ValueError at \S*:{line_of('raise ValueError')}: no weights$")

    def test_a_custom_operator_in_a_thread_is_named_and_skipped(self) -> None:
        torch.library.define("doctor_test::unknown_in_thread", "(Tensor x) -> Tensor")
        report = diagnose(unknown, inputs)
        self.assertIn(f":{line_of('unknown_in_thread(x)')}: it has no fake implementation", report.skipped[0])
        self.assertEqual(report.error, "unknown was not looked at to the end")

    def test_a_thread_of_before_is_named_and_the_report_is_no_success(self) -> None:
        given: queue.Queue[Any] = queue.Queue()
        taken: queue.Queue[Any] = queue.Queue()

        def works() -> None:
            while (x := given.get()) is not None:
                taken.put(x * 2)

        worker = threading.Thread(target=works, name="of before")
        worker.start()

        def step(x: torch.Tensor) -> Any:
            given.put(x)
            return taken.get()

        try:
            report = diagnose(step, inputs)
        finally:
            given.put(None)
            worker.join()
        self.assertIn("uses tensors in threads that run since before it (of before): not all was seen", report.error)

    def test_a_thread_that_goes_on_is_named(self) -> None:
        ended = threading.Event()

        def step(x: torch.Tensor) -> torch.Tensor:
            threading.Thread(target=ended.wait, name="goes on").start()
            return x * 2

        with mock.patch.object(threads, "_END_SECONDS", 0.01):
            report = diagnose(step, inputs)
        ended.set()
        self.assertEqual((report.error, report.skipped), ("", ["thread goes on: it had not ended 0.01 s after the step returned"]))


if __name__ == "__main__":
    unittest.main()
