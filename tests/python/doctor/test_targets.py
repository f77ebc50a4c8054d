"""Targets that are not functions, and the compiler's own view."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import steps
import torch
from bulkhead.doctor import diagnose
from bulkhead.doctor.exported import Program
from bulkhead.errors import Error
from command import line_of as line_in_steps


def line_of(text: str) -> int:
    return next(
        number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line and "line_of" not in line
    )


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        kept = y[y > 0]
        return kept * 2


class Exported(unittest.TestCase):
    def test_a_program_is_looked_at_with_its_own_example_inputs_by_lines_of_source(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "masked.pt2"
            for args, kwargs in (((torch.ones(4, 8),), {}), ((), {"x": torch.ones(4, 8)})):
                torch.export.save(torch.export.export(Masked(), args, kwargs), file)
                program = Program(file)
                report = diagnose(program, program.inputs)
                self.assertEqual((report.error, report.calls), ("", 3))
                found = [(Path(one.file), one.line, one.code, one.function) for one in report.findings]
                self.assertEqual(found, [(Path(__file__), line_of("kept = y[y > 0]"), "dynamic_shape", "forward")])

    def test_what_is_no_exported_program_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "not.pt2"
            file.write_bytes(b"not a program")
            with self.assertRaises(Error) as caught, self.assertNoLogs():
                Program(file)
        self.assertEqual(caught.exception.code, "input_invalid")
        self.assertIn("not.pt2", caught.exception.attempt)


class Gated(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2


def in_text() -> Any:
    names: dict[str, Any] = {}
    exec("def step(x):\n    y = x * 2\n    return y * y.max().item()\n", names)  # noqa: S102
    return names["step"]


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        x = x * 2
    return x


class WithoutLines(unittest.TestCase):
    """Nothing that has no line of a user's file is passed over."""

    def found(self, target: Any, factory: Any) -> list[tuple[str, str, int, str]]:
        report = diagnose(target, factory, name="TARGET")
        self.assertEqual(report.error, "")
        return [(one.code, one.file, one.line, one.function) for one in report.findings]

    def test_a_graph_module_has_the_lines_of_its_code(self) -> None:
        ((code, file, line, function),) = self.found(torch.fx.symbolic_trace(Gated()), steps.one_input)
        self.assertEqual((code, function), ("dynamic_shape", "forward"))
        self.assertRegex(file, r"^<eval_with_key>")

    def test_code_that_was_never_in_a_file(self) -> None:
        self.assertEqual(self.found(in_text(), steps.one_input), [("host_read", "<string>", 3, "step")])

    def test_what_has_no_lines_at_all_is_the_target(self) -> None:
        ((code, file, line, _),) = self.found(scripted, steps.one_input)
        self.assertEqual((code, file, line), ("host_read", "TARGET", 0))
        self.assertEqual(
            self.found(torch.nn.Linear(8, 8), steps.one_input), [("host_copy", "TARGET", 0, "Linear")], "it was not moved"
        )

    def test_nodes_of_a_program_without_a_trace(self) -> None:
        exported = torch.export.export(Masked(), (torch.ones(4, 8),))
        for node in exported.graph.nodes:
            node.meta.pop("stack_trace", None)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "masked.pt2"
            torch.export.save(exported, file)
            program = Program(file)
            ((code, name, line, _),) = self.found(program, program.inputs)
            self.assertEqual((code, name, line), ("dynamic_shape", str(file), 0))


class Compiler(unittest.TestCase):
    def test_inductor_names_the_tensor_of_the_cpu_for_which_it_skips_cuda_graphs(self) -> None:
        report = diagnose(steps.with_host_argument, steps.host_argument, compiler=True)
        (found,) = report.findings
        self.assertEqual((found.code, report.notes), ("host_copy", []))
        self.assertRegex(found.reason, r"\. torch\.compile: skipping cudagraphs due to cpu device \(\w+\)$")

    def test_inductor_names_the_argument_that_a_step_writes_to_and_leaves_out_a_buffer(self) -> None:
        report = diagnose(steps.Table, steps.table_inputs, compiler=True)
        line = line_in_steps("  cache.index_copy_")
        self.assertEqual(report.findings, [], "a graph may write to both: their addresses stay")
        (note,) = report.notes
        self.assertEqual((note.file, note.line, note.function), (steps.__file__, line, "forward"))
        self.assertEqual(note.reason, "torch.compile: skipping cudagraphs due to mutated inputs (1 instances)")

    def test_inductor_names_the_operator_that_capture_scalar_outputs_brings_into_the_graph(self) -> None:
        report = diagnose(steps.scalar_in_graph, steps.inputs, compiler=True)
        said = " ".join(one.reason for one in [*report.findings, *report.notes])
        self.assertIn(
            "skipping cudagraphs due to disabling cudagraphs due to incompatible op aten._local_scalar_dense.default", said
        )

    def test_a_conditional_is_no_read_to_the_compiler(self) -> None:
        report = diagnose(steps.conditional, steps.inputs, compiler=True)
        self.assertEqual((report.error, [one.code for one in report.findings]), ("", ["host_read"]))
        self.assertNotIn("graph break", " ".join(one.reason for one in [*report.findings, *report.notes]))

    def test_a_graph_break_joins_the_finding_of_its_line(self) -> None:
        report = diagnose(steps.branches, steps.inputs, compiler=True)
        first = report.findings[0]
        self.assertIn("torch.compile: graph break, a branch depends on data", first.reason)
        self.assertEqual([one.code for one in report.findings], ["host_read"] * 3)

    def test_where_dynamo_gives_up_is_told(self) -> None:
        """Also of a break before the first operator, where it compiles nothing, and of a function
        that it leaves to Python."""
        for step, line, said in ((steps.breaks_at_once, 'os.getuid()', "graph break"),
                                 (steps.breaks_in_loop, 'os.getgid()',
                                  "all of breaks_in_loop runs without a graph, Attempted to call function marked as skipped"),
                                 (steps.yields, "def yields",
                                  "all of yields runs without a graph, Attempt to trace generator")):  # fmt: skip
            with self.subTest(step.__name__):
                (note,) = diagnose(step, steps.inputs, compiler=True).notes
                self.assertEqual((note.file, note.line, note.function), (steps.__file__, line_in_steps(line), step.__name__))
                self.assertIn(said, note.reason)

    def test_functions_of_torch_are_compiled(self) -> None:
        """Nothing is said of them. Dynamo's table of them refuses two that are the same object: a
        stand-in for both."""
        self.assertEqual(diagnose(steps.calls_torch, steps.inputs, compiler=True).notes, [])
        handlers = getattr(torch._dynamo.variables.torch.TorchInGraphFunctionVariable, "_get_handlers", dict)()
        self.assertTrue(not handlers or torch.cuda.current_stream in handlers, "no stand-in is left there")

    def test_a_read_that_dynamo_alone_sees_is_a_note(self) -> None:
        report = diagnose(steps.argmax_on_cpu, steps.inputs, compiler=True)
        line = line_in_steps("int(np.argmax(values))")
        self.assertEqual([(one.code, one.line) for one in report.findings], [("host_read", line - 1)])
        self.assertEqual([one.line for one in report.notes], [line])

    def test_what_the_compiler_cannot_do_without_a_driver_is_no_reason_of_its_own(self) -> None:
        said = [one.reason for one in diagnose(steps.of_gru, steps.inputs, compiler=True).notes]
        self.assertFalse([one for one in said if "gives up" in one], said)

    def test_what_names_no_line_is_told_at_the_target(self) -> None:
        with mock.patch("torch._inductor.compile_fx.compile_fx", side_effect=RuntimeError("no back end")):
            (note,) = diagnose(steps.clean, steps.inputs, compiler=True).notes
        self.assertEqual((note.file, note.line), (steps.__file__, line_in_steps("def clean")))
        self.assertEqual(note.reason, "torch.compile: Inductor gives up, no back end")


if __name__ == "__main__":
    unittest.main()
