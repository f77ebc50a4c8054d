"""The half for a GPU, on a stand-in for `torch.cuda`: the order of a capture, and CUDA's
errors in words.

These tests run on no GPU."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
import unittest
from collections import Counter
from typing import Any, Iterator
from unittest import mock

import torch
from bulkhead.doctor import Finding, Report, costs, report, run
from bulkhead.doctor.calls import Deferred
from bulkhead.doctor.capture import capture, explain
from torch.utils._python_dispatch import TorchDispatchMode


class Cuda:
    """Refuses a synchronisation while it captures, as CUDA does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.capturing = False

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    class Graph:
        def __init__(self, cuda: Cuda) -> None:
            self.cuda = cuda

        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            self.cuda.calls.append("capture")
            self.cuda.capturing = True

        def capture_end(self) -> None:
            self.cuda.capturing = False

        def replay(self) -> None:
            pass

    def CUDAGraph(self) -> Graph:
        return self.Graph(self)

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    def current_stream(self) -> Stream:
        return self.Stream()

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.calls.append("on side")
        yield

    def synchronize(self) -> None:
        self.refuse()

    def is_available(self) -> bool:
        return False

    def refuse(self) -> None:
        if self.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class Captures(unittest.TestCase):
    def test_a_step_is_warmed_up_timed_and_captured(self) -> None:
        cuda, runs = Cuda(), []
        captured = capture(lambda: runs.append(len(cuda.calls)), [], cuda)
        self.assertEqual((cuda.calls, captured.failure, captured.error), (["on side", "on side", "capture"], None, ""))
        self.assertEqual(runs[:3], [1, 1, 1])
        self.assertEqual(runs[-1], 3, "the last run is the capture's")
        self.assertTrue(captured.document([])["captured"])

    def test_the_line_that_is_refused_is_named_and_each_finding_has_its_cost(self) -> None:
        cuda = Cuda()
        x = torch.ones(4)

        def step() -> Any:
            count = x.sum().item(); cuda.refuse()  # noqa: E702
            return count

        line = step.__code__.co_firstlineno + 1
        found = Finding("host_read", "prevents_capture", __file__, line, 1, "step", "", "")
        captured = capture(step, [found], cuda, "cpu")
        assert captured.failure is not None
        self.assertEqual(list(captured.costs), [(__file__, line)])
        failed = captured.document([captured.failure])["failed_at"]
        self.assertEqual(
            (failed["file"], failed["has_finding"], captured.document([found])["failed_at"]["has_finding"]),
            (__file__, True, False),
        )
        self.assertFalse(captured.document([])["captured"])
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
            "CUDA error: operation failed due to a previous error during capture (901)": "an earlier line has invalidated the "
                                                                                         "capture (901)",
            "CUDA error: capturing stream has unjoined work": "work on another stream is not joined (904)",
            "CUDA error: operation would make the legacy stream depend on a capturing blocking stream": "the default stream",
            "cudaErrorStreamCaptureInvalidated": "an earlier line has invalidated the capture (901)",
            "cudaErrorStreamCaptureUnjoined": "work on another stream is not joined (904)",
            "CUDA error: 906": "the line uses the default stream, which waits for all others (906)",
            "CUDA error 908: cudaErrorStreamCaptureWrongThread": "another thread",
            "CUDA error: 900": "the line does what a capture refuses",
            "CUDA out of memory. Tried to allocate 900.00 MiB": "the graphs' memory pool has no room",
            "a matrix of 901 rows": "ValueError: a matrix of 901 rows",
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned": "pageable host "
                                                                                                                  "memory",
        }.items():
            with self.subTest(text):
                finding = explain(failing(text))
                assert finding is not None
                self.assertIn(told, finding.reason)
                is_memory = "out of memory" in text
                self.assertEqual((finding.code, finding.file), ("out_of_memory" if is_memory else "host_read", __file__))
                self.assertEqual("declare fewer or smaller buckets" in finding.remedy, is_memory)


class Counted(TorchDispatchMode):
    """How often each operator really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def reads(x: torch.Tensor) -> Any:
    count = x.sum().item()
    moved = (x * count).to("meta")
    return moved, x[x > 0], count


def line_of(text: str) -> costs.Line:
    lines, first = inspect.getsourcelines(reads)
    return __file__, first + next(number for number, line in enumerate(lines) if text in line)


class Costs(unittest.TestCase):
    """Of a GPU's clock nothing is known here: which line runs, waits and is left out."""

    def test_a_call_without_the_reads_of_a_line_is_given_what_an_earlier_call_read(self) -> None:
        x = torch.arange(4.0)
        for line, left_out in (("item()", "aten::_local_scalar_dense"), ("meta", "aten::_to_copy"), ("x > 0", "aten::index")):
            with self.subTest(line):
                with Counted() as below, costs._Answers(line_of(line)) as answers:
                    first = answers.calling(lambda: reads(x))()
                    all_runs, below.runs = below.runs, Counter()
                    answers.answering = True
                    again = answers.calling(lambda: reads(x))()
                self.assertEqual(all_runs - below.runs, Counter({left_out: 1}))
                self.assertEqual((first[2], first[1].tolist(), first[0].shape), (again[2], again[1].tolist(), again[0].shape))

    def test_a_line_without_a_read_has_no_time_without_it(self) -> None:
        found, _ = costs.measured(lambda: reads(torch.arange(4.0)), {line_of("item()"), line_of("return")}, Cuda())
        self.assertEqual(
            {line: cost.saved_ms is not None for line, cost in found.items()}, {line_of("item()"): True, line_of("return"): True}
        )
        quiet, _ = costs.measured(lambda: quiet_step(torch.ones(2)), {(__file__, quiet_step.__code__.co_firstlineno + 1)}, Cuda())
        self.assertEqual([cost.saved_ms for cost in quiet.values()], [None])

    def test_the_profile_shows_when_the_host_was_in_a_line(self) -> None:
        kernels, marks = costs.profiled(lambda: reads(torch.arange(4.0)), {line_of("item()"), line_of("meta")}, Cuda())
        self.assertEqual((kernels, [line for line, _ in marks]), ([], [line_of("item()"), line_of("meta")]))
        (first, second) = (span for _, span in marks)
        self.assertLess(first[0], first[1])
        self.assertLessEqual(first[1], second[0])

    def test_a_gap_between_kernels_is_of_the_innermost_line_that_the_host_was_in_when_it_began(self) -> None:
        outer, inner = ("a.py", 1), ("b.py", 2)
        kernels = [(0.0, 1000.0), (900.0, 2000.0), (5000.0, 6000.0), (6500.0, 7000.0), (7000.0, 7500.0), (9000.0, 9100.0)]
        total, by_line = costs.idle(kernels, [(outer, (500.0, 6100.0)), (inner, (1500.0, 2500.0)), (inner, (8000.0, 8100.0))])
        self.assertEqual((total, by_line), (5.0, {inner: 3.0, outer: 0.5}))
        self.assertEqual(costs.idle([], []), (0.0, {}))


KEPT: list[Any] = []


class Reported(unittest.TestCase):
    def test_the_fake_run_leaves_nothing_to_the_capture(self) -> None:
        told = Report("step")

        def examine() -> None:
            KEPT.append("fake")
            told.findings, told.calls = [Finding("sync", "prevents_capture", "a.py", 1, 1, "step", "", "")], 3

        run._elsewhere(examine, told, 0)
        self.assertEqual((KEPT, told.calls, [one.code for one in told.findings]), ([], 3, ["sync"]))
        run._elsewhere(lambda: os.kill(os.getpid(), 9), told, 0)
        self.assertEqual(told.error, "step ended its process by SIGKILL")

    def test_the_fake_run_is_the_child_of_a_process_that_has_asked_no_driver(self) -> None:
        """Such a child has no driver, and the device of an index of a fake tensor asks it: what
        came after was not found."""
        ended = subprocess.run([sys.executable, "-c", inspect.getsource(asks_driver) + "asks_driver()"], capture_output=True,
                               text=True, timeout=240)  # fmt: skip
        self.assertIn(": refused a driver: False; on the GPU: ", ended.stdout, ended.stderr)

    def test_a_process_that_has_counted_its_gpus_is_told_what_to_do(self) -> None:
        told = Report("step")
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            run._elsewhere(lambda: None, told, 0)
        self.assertIn("step was not looked at with fake tensors: this process had asked for its GPUs before", told.error)
        self.assertIn("set PYTORCH_NVML_BASED_CUDA_CHECK=1", told.remedy)

    def test_what_ended_the_fake_run_is_told_beside_what_the_gpu_refused(self) -> None:
        def raises(x: torch.Tensor) -> None:
            raise ValueError("on two devices")

        told = self.captured(raises, Cuda(), "raises ended its process by SIGKILL")
        self.assertRegex(
            told.error, r"^raises ended its process by SIGKILL; on the GPU: raises raised ValueError at \S+: on two devices$"
        )

    def test_a_module_that_was_imported_is_moved_before_it_is_captured(self) -> None:
        moved = torch.nn.Linear(2, 2)
        with mock.patch.object(run, "DEVICE", "meta"), mock.patch.object(run.capture, "capture") as captured:
            captured.return_value.failure = None
            examined = run._Run(
                Deferred(lambda: moved),
                Deferred(lambda: lambda device: (torch.ones(2, 2, device=device),)),
                None,
                False,
                Report("moved"),
            )
            examined.on_gpu()
        self.assertEqual((examined._report.error, moved.weight.device.type), ("", "meta"))
        captured.assert_called_once()

    def test_a_report_has_the_capture_and_the_costs(self) -> None:
        """From the factory to the words, of a generator that is refused."""
        line = __file__, waits.__code__.co_firstlineno + 1
        with mock.patch.object(run, "DEVICE", "cpu"), mock.patch.object(torch, "cuda", Cuda()):
            examined = run._Run(waits, lambda device: (torch.ones(4, device=device),), None, False, Report("waits"))
            examined._report.findings = [Finding("host_read", "prevents_capture", *line, 1, "waits", "", "")]
            examined.on_gpu()
        (captured,) = examined._report.captures
        self.assertEqual(
            (examined._report.error, captured["captured"], [one["line"] for one in captured["costs"]]), ("", False, [line[1]])
        )
        self.assertIn("operation not permitted when stream is capturing", captured["error"])
        self.assertEqual(
            [one.code for one in examined._report.findings], ["host_read", "sync"], "the line that refused is one too"
        )
        self.assertRegex(
            report.text(examined._report),
            r"(?s)not captured: .*test_capture\.py:\d+ holds the host for [\d.]+ ms in a call.* less\n",
        )

    def captured(self, step: Any, cuda: Cuda, error: str = "") -> Report:
        told = Report(step.__name__, error=error)
        with mock.patch.object(run, "DEVICE", "cpu"), mock.patch.object(torch, "cuda", cuda):
            examined = run._Run(step, lambda device: (torch.ones(4, device=device),), None, False, told)
            examined.on_gpu()
        return examined._report

    def test_a_capture_without_room_is_no_finding_of_a_line_and_no_success(self) -> None:
        cuda = Cuda()

        def fills(x: torch.Tensor) -> float:
            if cuda.capturing:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return x.sum().item()

        told = self.captured(fills, cuda)
        (captured,) = told.document()["captures"]
        line = fills.__code__.co_firstlineno + 2
        self.assertEqual((told.findings, captured["captured"], captured["cause"], captured["failed_at"]),
                         ([], False, "out_of_memory", {"file": __file__, "line": line, "has_finding": False}))  # fmt: skip
        self.assertIn("the graphs' memory pool has no room", told.error)
        self.assertEqual(
            (told.remedy, captured["remedy"]), ("declare fewer or smaller buckets, or choose a GPU with more free memory",) * 2
        )

    def test_a_warm_up_without_room_is_told_with_its_line(self) -> None:
        def fills(x: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        told = self.captured(fills, Cuda())
        self.assertRegex(
            told.error,
            rf"^fills ran out of memory at \S*test_capture\.py:{fills.__code__.co_firstlineno + 1}: CUDA out of memory",
        )
        self.assertEqual((told.remedy, told.captures), ("give smaller inputs", []))

    def test_a_capture_that_is_refused_at_its_end_is_told_at_the_target(self) -> None:
        """Its error comes through no line of the user's."""
        with mock.patch.object(
            Cuda.Graph, "capture_end", side_effect=RuntimeError("CUDA error: capturing stream has unjoined work (904)")
        ):
            (found,) = self.captured(quiet_step, Cuda()).findings
        self.assertEqual(
            (found.file, found.line, found.code, found.function),
            (__file__, quiet_step.__code__.co_firstlineno, "sync", "quiet_step"),
        )
        self.assertIn("work on another stream is not joined (904)", found.reason)
        self.assertIn("wait_stream", found.remedy)


def waits(x: torch.Tensor) -> Iterator[Any]:
    yield x.sum().item()
    torch.cuda.synchronize()


def asks_driver() -> None:
    import torch
    from bulkhead.doctor import diagnose

    def refused(x: torch.Tensor) -> None:
        raise ValueError(f"refused a driver: {torch._C._cuda_isInBadFork()}")

    print(diagnose(lambda x: refused(x), lambda device: torch.ones(1, device=device), gpu=True).error)


def quiet_step(x: torch.Tensor) -> torch.Tensor:
    return x * 2


if __name__ == "__main__":
    unittest.main()
