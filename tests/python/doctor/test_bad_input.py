"""Bad input to the doctor's command line: a clear error, never a traceback of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import bulkhead
import torch
from bulkhead.doctor import __main__, diagnose
from bulkhead.doctor.fake import operators
from command import HERE, doctor, line_of


class BadInput(unittest.TestCase):
    def refused(self, *arguments: str) -> str:
        ended = doctor(*arguments)
        self.assertEqual(ended.returncode, 2, ended.stdout + ended.stderr)
        self.assertNotIn("Traceback", ended.stdout + ended.stderr)
        return ended.stdout + ended.stderr

    def test_targets_that_are_not_there(self) -> None:
        """Others are below, as documents."""
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "part.py"
            part.write_text("from .other import step\n")
            for arguments, said in {
                ("steps.py:no_such_step",): "there is no 'no_such_step' in steps.py; it has: ",
                ("steps.py",): "names no function",
                ("steps.py:clean:x",): "'steps.py:clean:x': steps.py:clean is neither a file of Python (.py) nor a package",
                ("steps.py:clean", "--inputs", "./steps:inputs"): "--inputs './steps:inputs': ./steps is neither a file of Python",
                (f"{part}:step",): "it is part of a package: write package.module:function",
            }.items():
                with self.subTest(arguments):
                    self.assertIn(said.split("; ")[0], self.refused(*arguments))

    def test_programs_are_given_a_document_whatever_fails(self) -> None:
        given = ("--inputs", "steps.py:inputs")
        with tempfile.TemporaryDirectory() as folder:
            wrong = Path(folder) / "wrong.py"
            wrong.write_text("def step(x:\n    return x\n")
            for arguments, said in {
                ("no_such_file.py:step",): "there is no file no_such_file.py",
                ("no_such_file.pt2",): "there is no file no_such_file.pt2",
                ("no_such_package.inner:step",): "needs the package 'no_such_package'",
                (f"{wrong}:step",): f"{wrong} has a syntax error in wrong.py:1: '(' was never closed",
                ("steps.py:clean", "--inputs", "steps.py:no_factory"): "--inputs 'steps.py:no_factory'",
                ("steps.py:clean", "--inputs", "steps.py:raises"): "the function of --inputs raised TypeError",
                ("steps.py:clean", *given, "--baseline", "no_such_baseline"): "reading the baseline no_such_baseline",
                ("steps.py:kills", *given[2:]): "it ended its process by SIGSEGV",
                ("steps.py:ends_process_below_python", *given): "it ended its process by exit(0)",
            }.items():
                with self.subTest(arguments):
                    ended = doctor(*arguments, "--json")
                    document = json.loads(ended.stdout)
                    self.assertEqual((ended.returncode, document["findings"], document["notes"]), (2, [], []))
                    self.assertIn(said, document["error"]["attempt"])
                    self.assertIn("remedy", document["error"])
            ended = doctor("no_such_file.py:step", "--sarif")
            (run,) = json.loads(ended.stdout)["runs"]
            (invocation,) = run["invocations"]
            self.assertEqual((ended.returncode, run["results"], invocation["executionSuccessful"]), (2, [], False))
            (told,) = invocation["toolExecutionNotifications"]
            self.assertEqual(told["level"], "error")
            self.assertIn("there is no file no_such_file.py. Remedy: name a file", told["message"]["text"])

    def test_a_missing_pytorch_is_told(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            bare = {"PYTHONPATH": f"{folder}:{Path(bulkhead.__file__).parents[1]}", "PYTHONNOUSERSITE": "1"}
            ended = subprocess.run([sys.executable, "-S", "-m", "bulkhead.doctor", "steps.py:clean", "--json"],
                                   capture_output=True, text=True,
                                   cwd=HERE, env={**os.environ, **bare}, timeout=240)  # fmt: skip
        self.assertEqual(ended.returncode, 2, ended.stderr)
        self.assertIn("PyTorch is missing in ", json.loads(ended.stdout)["error"]["attempt"])

    def test_a_baseline_that_cannot_be_written_hides_no_finding(self) -> None:
        said = self.refused("steps.py:branches", "--inputs", "steps.py:inputs", "--write-baseline", "/nowhere/baseline")
        self.assertIn("error: writing the baseline /nowhere/baseline: No such file or directory", said)
        self.assertIn("3 findings", said)

    def test_a_run_that_failed_keeps_the_baseline(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "baseline.json"
            file.write_text("kept")
            self.refused("steps.py:raises", "--inputs", "steps.py:inputs", "--write-baseline", str(file))
            self.assertEqual(file.read_text(), "kept")

    def test_what_a_callable_does_is_told_with_its_line(self) -> None:
        given = ("--inputs", "steps.py:inputs")
        squares = line_of("return torch.linalg.lstsq")
        for (step, *arguments), said in {
            ("raises", *given): [f"raised ValueError at steps.py:{line_of('raise ValueError')}: no weights for"],
            ("raises_textless", *given): [f"raised Textless at steps.py:{line_of('    raise Textless')}: without a message", "host_read"],
            # No Exception.
            ("cancelled", *given): [f"raised CancelledError at steps.py:{line_of('raise asyncio.CancelledError')}"],
            ("wrong_shape", *given): [f"raised RuntimeError at steps.py:{line_of('return x @ x')}"],
            ("asks_attribute", *given): [f"raised AttributeError at steps.py:{line_of('x.no_such_attribute')}: 'Tensor' object has no attribute"],
            ("needs_package",): [f"needs the package 'surely_not_installed' at steps.py:{line_of('import surely_not_installed')}"],
            ("lists_much", *given): [f"steps.py:{line_of('x.new_empty(1 << 25)')} reads 33554432 values into Python"],
            ("allocates_much", *given): [f"ran out of memory at steps.py:{line_of('bytearray(1 << 60)')}: MemoryError\n  give smaller inputs"],
            ("trains", *given): [f"computes gradients at steps.py:{line_of('x.sum().backward()')}, which are off here", "leave the backward pass out"],
            ("of_a_driver", *given): [f"needs a GPU at steps.py:{line_of('return torch.quantize_per_tensor')}: "],
            ("least_squares", *given): [f"needs a GPU at steps.py:{squares}: ", f"{squares}:12 dynamic_shape (prevents capture)"],
            ("custom", *given): [f"skipped: doctor_test::secret at steps.py:{line_of('torch.ops.doctor_test.secret')}: it has no fake implementation",
                                 "error: steps.py:custom was not looked at to the end", "host_read"],
            ("custom_raises", *given): [f"raised RuntimeError at steps.py:{line_of('x must have three')}: x must have three dimensions"],
            ("asks_address", *given): [f"skipped: Tensor.data_ptr() at steps.py:{line_of('x.data_ptr()')}: a fake tensor has no memory"],
            ("shares_memory", *given): [f"skipped: Tensor.__dlpack__() at steps.py:{line_of('torch.from_dlpack(x)')}: a fake tensor has no memory"],
            ("attends", *given): ["skipped: flex_attention at steps.py:", "error: steps.py:attends was not looked at to the end"],
            ("exits",): [f"ended the process at steps.py:{line_of('raise SystemExit')}: SystemExit(3)"],
            ("ends_process_in_thread", *given): ["it ended its process by exit(4)"],
            ("kills",): ["steps.py:kills: it ended its process by SIGSEGV"],
            ("never_python", "--deadline", "1"): ["steps.py:never_python: it did not return within 1 s, and took no signal"],
        }.items():
            with self.subTest(step), mock.patch.object(__main__, "_GRACE_SECONDS", 0.1 if step == "never_python" else 30):
                told = self.refused(f"steps.py:{step}", *arguments)
                for text in said:
                    self.assertIn(text, told)

    def test_an_error_of_the_doctor_is_told_as_its_own(self) -> None:
        with mock.patch.object(operators, "_READING_KERNELS", 0):
            report = diagnose(lambda x: x.abs(), lambda device: (torch.ones(2, device=device),))
        self.assertRegex(report.error, r"the doctor itself failed at \S*operators\.py:\d+, .* at \S*test_bad_input\.py:\d+: TypeError: ")
        self.assertIn("report it", report.remedy)

    def test_an_error_of_a_call_that_the_doctor_passes_on_is_the_targets(self) -> None:
        for step, error in {lambda x: torch.add(x, "a"): "TypeError", lambda x: f"{x.sum():zz}": "ValueError"}.items():
            report = diagnose(step, lambda device: (torch.ones(2, device=device),))
            self.assertIn(f"raised {error} at ", report.error)

    def test_inputs_that_do_not_fit(self) -> None:
        for arguments, said in {
            ("steps.py:clean",): "steps.py:clean takes (x, lengths), and the inputs do not fit: missing a required argument: 'x'\n  give --inputs",
            ("steps.py:Decoder",): "the constructor of steps.py:Decoder takes (size), and the inputs do not fit",
            ("steps.py:Attention", "--inputs", "steps.py:inputs"): "returns (arguments of the constructor, arguments of the call)",
            ("steps.py:Decoder", "--inputs", "steps.py:inputs"): "returns (arguments of the constructor, arguments of the call)",
            ("steps.py:clean", "--inputs", "steps.py:exits"): "the function of --inputs raised TypeError",
            ("steps.py:clean", "--inputs", "steps.py:on_cpu"): "all tensors of its calls lie on the CPU",
            ("steps.py:nothing", "--inputs", "steps.py:of_module_argument"): "its calls have no tensors",
        }.items():
            with self.subTest(arguments):
                self.assertIn(said, self.refused(*arguments))

    def test_what_was_found_before_the_process_was_ended_is_told(self) -> None:
        document = json.loads(self.refused("steps.py:ends_process", "--inputs", "steps.py:inputs", "--json"))
        self.assertIn(f"ended the process at steps.py:{line_of('os._exit(0)')}: SystemExit(0)", document["error"]["attempt"])
        self.assertEqual([one["code"] for one in document["findings"]], ["host_read"])

    def test_a_process_that_the_callable_forks_may_end(self) -> None:
        ended = doctor("steps.py:ends_process_of_fork", "--inputs", "steps.py:inputs", "--json")
        self.assertEqual((ended.returncode, json.loads(ended.stdout)["findings"]), (0, []), ended.stderr)

    def test_a_callable_that_never_returns_meets_the_deadline(self) -> None:
        for step in ("steps.py:endless", "steps.py:swallows", "endless.py:step"):
            with self.subTest(step), tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "endless.py"
                file.write_text("while True:\n    pass\n")
                step = step.replace("endless.py", str(file))
                said = self.refused(step, "--deadline", "1", *(["--inputs", "steps.py:inputs"] if "swallows" in step else []))
                self.assertRegex(said, r"did not end: 1 s are over at \S*(steps|endless)\.py:")

    def test_the_deadline_begins_where_the_code_of_the_target_begins(self) -> None:
        wait = select.select
        with tempfile.NamedTemporaryFile("w+") as limits:

            def waits(*arguments: Any) -> Any:
                limits.write(f"{arguments[3]:g} ")
                limits.flush()
                return wait(*arguments)

            with mock.patch.object(select, "select", waits):
                self.assertEqual(doctor("steps.py:clean", "--inputs", "steps.py:inputs", "--deadline", "7").returncode, 0)
            limits.seek(0)
            self.assertEqual(limits.read().split(), ["600", "37"], "of PyTorch's import, then of the step and 30 s")

    def test_a_deadline_that_is_none(self) -> None:
        for deadline in ("0", "nan", "-1", "soon"):
            with self.subTest(deadline), self.assertRaises(SystemExit) as ended, contextlib.redirect_stderr(io.StringIO()) as said:
                __main__.parsed(["steps.py:clean", "--deadline", deadline])
            self.assertEqual(ended.exception.code, 2)
            self.assertIn("--deadline", said.getvalue())

    def test_a_model_of_a_fleet_without_the_program(self) -> None:
        with mock.patch.dict(os.environ, PATH="/nowhere"):
            ended, for_programs = doctor("my-voice"), doctor("my-voice", "--json")
        self.assertEqual((ended.returncode, for_programs.returncode, ended.stdout), (2, 2, ""))
        said = "a model of a fleet is found by the program bulkhead, which is not on PATH"
        self.assertIn(said, ended.stderr)
        self.assertIn(said, json.loads(for_programs.stdout)["error"]["attempt"])

    def test_a_terminal_that_cannot_show_a_letter_ends_nothing(self) -> None:
        ended = doctor("steps.py:größer", "--inputs", "steps.py:inputs", encoding="ascii")
        self.assertEqual(ended.returncode, 1, ended.stderr)
        self.assertIn("gr\\xf6\\xdfer", ended.stdout)

    def test_a_triton_kernel_is_named_and_not_launched(self) -> None:
        ended = doctor("steps.py:launches", "--inputs", "steps.py:inputs", "--json")
        report = json.loads(ended.stdout)
        self.assertIn(f"Triton kernel double at steps.py:{line_of('double[(1,)]')}", report["skipped"][0])
        self.assertEqual([one["line"] for one in report["findings"]], [line_of("return y.sum().item()")])

    def test_fake_tensors_take_no_memory(self) -> None:
        ended = doctor("steps.py:huge", "--json")  # 4 TiB each
        self.assertEqual(json.loads(ended.stdout)["findings"], [], ended.stderr)
        self.assertEqual(ended.returncode, 0)


if __name__ == "__main__":
    unittest.main()
