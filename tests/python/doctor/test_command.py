"""The doctor's command line: its forms of report and its exit status; and the library."""

from __future__ import annotations

import json
import os
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import steps
import torch
from bulkhead.doctor import diagnose
from bulkhead.doctor.fake import functions
from bulkhead.doctor.fake.watch import Watch
from bulkhead.doctor.remedies import cpu_tensor
from bulkhead.doctor.source import Use
from command import HERE, STEPS, doctor, line_of
from findings import imported


class Reports(unittest.TestCase):
    def report(self, step: str, *options: str, inputs: str = "inputs") -> Any:
        """What --json gives."""
        ended = doctor(step if ":" in step else f"steps.py:{step}", "--inputs", f"steps.py:{inputs}", "--json", *options)
        document = json.loads(ended.stdout)
        prevents = any(one["severity"] == "prevents_capture" for one in document["findings"])
        self.assertEqual((ended.returncode, document.get("error")), (int(prevents), None), ended.stderr)
        return document

    def found(self, step: str, inputs: str = "inputs") -> Any:
        return self.report(step, inputs=inputs)["findings"]

    def found_in(self, text: str) -> Any:
        """In a file whose `step` is given what steps.inputs gives."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "of_text.py"
            file.write_text(text)
            return self.found(f"{file}:step")

    def test_each_step_has_these_lines_found_and_no_other(self) -> None:
        for (step, inputs), lines in {
            ("clean", "inputs"): [],
            # A coroutine runs to its end; what it or an asynchronous generator gives is not read.
            ("awaited", "inputs"): ["return lengths.max().item()"],
            ("tensor_awaited", "inputs"): [],
            ("tensors_yielded", "inputs"): [],
            ("not_a_number", "inputs"): [],  # NaN does not change
            ("of_module", "inputs"): ["return x + table *"],  # made on the GPU when it is imported
            ("captures_itself", "inputs"): ["y = x * lengths.min().item()"],
            ("made", "one_input"): ["self.scale = torch.full"],  # a module of the file is moved
        }.items():
            with self.subTest(step):
                self.assertEqual([one["line"] for one in self.found(step, inputs)], [line_of(line) for line in lines])

    def test_all_places_of_a_path_are_found_in_one_run(self) -> None:
        found = self.found("branches")
        first = line_of("if lengths.max() > 2")
        self.assertEqual([(one["line"], one["code"], one["severity"], one["use"]) for one in found],
                         [(line, "host_read", "prevents_capture", use)
                          for line, use in ((first, "if"), (first + 2, "range"), (first + 3, "slice"))])  # fmt: skip
        self.assertEqual((found[0]["column"], found[0]["function"], Path(found[0]["file"])), (8, "branches", STEPS))
        self.assertIn("`lengths.max() > 2` is True with these inputs; the other branch was not run", found[0]["reason"])
        self.assertIn("torch.where(lengths.max() > 2, a, b)", found[0]["remedy"])

    def shown(self, target: str, source: str) -> tuple[str, str, str]:
        """A line of the text, the one with carets below it, and all of it."""
        lines = doctor(target, "--inputs", "steps.py:inputs").stdout.splitlines()
        at = next(index for index, line in enumerate(lines) if source in line)
        return lines[at], lines[at + 1], " ".join(" ".join(lines).split())

    def test_text_shows_the_line_and_a_caret_under_the_expression(self) -> None:
        """Of two operands under the one that is read."""
        for step, source, expression, said in (
            ("branches", "if lengths.max() > 2:", "lengths.max() > 2", "steps.py:branches: 3 findings (3 prevents capture)"),
            ("second_of_two", "and not x.any():", "x.any()", "torch.where(~(x.any()), a, b)"),
        ):
            with self.subTest(step):
                line, carets, text = self.shown(f"steps.py:{step}", source)
                self.assertEqual((carets.index("^"), carets.count("^")), (line.index(expression), len(expression)))
                self.assertIn(said, text)

    def test_columns_count_characters(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tabs.py"
            file.write_text("def step(x, lengths):\n\treturn '漢字',\tx.sum().item()\n")
            line, carets, _ = self.shown(f"{file}:step", "x.sum().item()")
            (found,) = self.found(f"{file}:step")
        self.assertEqual((found["column"], found["end_column"]), (15, 29))
        self.assertEqual((carets.index("^"), carets.count("^")), (line.index("x.sum()") + 2, len("x.sum().item()")),
                         "each of 漢字 is two columns wide")  # fmt: skip

    def test_two_reads_of_a_line_are_two_findings(self) -> None:
        found = self.found_in("def step(x, lengths):\n    return x.sum().item() + x.max().item()\n")
        self.assertEqual([(one["line"], one["column"], one["end_column"]) for one in found], [(2, 12, 26), (2, 29, 43)])

    def test_what_is_read_is_named_as_it_is_written(self) -> None:
        written, bound = self.found_in(
            "import torch\ndef step(x, lengths):\n    out = torch.zeros(2)\n    out[1] = x[0, 1]\n    return out, x[:, : lengths[1]]\n"
        )
        self.assertTrue(written["reason"].startswith("`out[1]` reads a value that the GPU computes"), written)
        self.assertTrue(bound["reason"].startswith("`:, :lengths[1]` reads a value"), bound)

    def test_a_growing_cache_is_told_where_it_grows_and_hides_no_number(self) -> None:
        """Remedies are the conditions without their reads."""
        found = self.found("Attention", "attention_inputs")
        grows, asked = line_of("self.cache = torch.cat"), line_of("if not x.any().item()")
        self.assertEqual([(one["line"], one["code"]) for one in found],
                         [(grows, "python_state"), (grows + 1, "baked_constant"), (asked, "host_read"),
                          (asked + 2, "host_read")])  # fmt: skip
        self.assertIn("torch.where(~(x.any()), a, b)", found[2]["remedy"])
        self.assertIn("torch.where(x.max() > 1, a, b)", found[3]["remedy"])
        self.assertIn("`x.max().item()` is ", found[3]["reason"])

    def test_state_of_a_module_that_the_step_calls_is_looked_at(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "counting_helper.py").write_text(
                "COUNT = 0\n\n\ndef note(x):\n    global COUNT\n    COUNT += 1\n    return x * 2\n"
            )
            (Path(folder) / "step.py").write_text(
                "import counting_helper\n\n\ndef step(x, lengths):\n    return counting_helper.note(x)\n"
            )
            (found,) = self.found(f"{folder}/step.py:step")
        self.assertEqual((Path(found["file"]).name, found["line"], found["code"]), ("counting_helper.py", 6, "python_state"))

    def test_the_greater_of_two_is_a_clamp_or_a_maximum(self) -> None:
        found = self.found_in("def step(x, lengths):\n    peak, floor = x.max(), x.min()\n    a = max(peak, 1e-6)\n"
                              "    b = min(-1, peak - floor)\n    c = max(peak, floor)\n    d = min(peak, floor, 2.0)\n"
                              "    return a, b, c, d, max(x[0])\n")  # fmt: skip
        self.assertEqual([one["remedy"].split(": use ")[1] for one in found],
                         ["peak.clamp(min=1e-06)", "(peak - floor).clamp(max=-1)", "torch.maximum(peak, floor)",
                          "torch.minimum(peak, floor).clamp(max=2.0)", "the tensor's own, x.max()"])  # fmt: skip

    def test_a_copy_names_all_lines_that_make_what_it_is_computed_from(self) -> None:
        *made, copied = self.found_in("import torch\ndef step(x, lengths):\n    a = torch.ones(8)\n    b = torch.arange(8)\n"
                                      "    both = a * b\n    return x.sum() * both.to(x.device)\n")  # fmt: skip
        self.assertEqual([(one["line"], one["code"]) for one in made], [(3, "cpu_tensor"), (4, "cpu_tensor")])
        self.assertRegex(copied["remedy"], r"not needed once \S*of_text\.py:3 and \S*of_text\.py:4 are mended")

    def test_a_method_of_a_class_is_called_of_an_object(self) -> None:
        printed, greatest = self.found("Attention.token", "token_inputs")
        self.assertEqual([one["function"] for one in (printed, greatest)], ["Attention.token"] * 2)
        self.assertIn("write it after the replay", printed["remedy"])
        self.assertIn("x.max()", greatest["remedy"])

    def test_a_module_that_is_not_moved_is_told_once_where_it_is_made(self) -> None:
        """One in a plain object, in a list of a module, and in a variable."""
        (held,) = self.found("Holder", "token_inputs")
        self.assertEqual((held["code"], held["line"]), ("cpu_tensor", line_of("self.held = nn.Linear")))
        self.assertIn("move it once, before the step: nn.Linear(8, 8).to(device)", held["remedy"])
        unseen, plain, unmoved = self.found("of_unmoved")
        self.assertEqual(
            (unseen["line"], plain["line"], unmoved["line"]),
            (line_of("self.listed = [nn.Linear"), line_of("self.bias = torch.zeros(8)"), line_of("unmoved = Unmoved()")),
        )
        self.assertEqual(unmoved["remedy"], "move it once, before the step: Unmoved().to(device)")
        self.assertIn("keep `nn.Linear(8, 8)` in an attribute of the module, or in a torch.nn.ModuleList", unseen["remedy"])
        self.assertIn('self.register_buffer("bias", torch.zeros(8)', plain["remedy"])

    def test_what_a_target_does_with_its_output_is_not_part_of_the_report(self) -> None:
        for step in ("closes_output", "without_output", "writes_below_python"):
            with self.subTest(step):
                ended = doctor(f"steps.py:{step}", "--inputs", "steps.py:inputs", "--json")
                document = json.loads(ended.stdout)
                self.assertEqual((ended.returncode, document["calls"], document["findings"]), (0, 3, []))
                self.assertEqual("nor this" in ended.stderr, step == "writes_below_python")

    def sarif(self, step: str, *options: str, inputs: str = "inputs") -> Any:
        (run,) = json.loads(doctor(step, "--inputs", f"steps.py:{inputs}", "--sarif", *options).stdout)["runs"]
        return run

    def test_sarif_names_the_rule_and_the_region(self) -> None:
        (result,) = self.sarif("steps.py:Decoder", inputs="decoder_inputs")["results"]
        region = result["locations"][0]["physicalLocation"]
        self.assertEqual((result["ruleId"], result["level"]), ("cpu_tensor", "error"))
        self.assertEqual(
            (region["artifactLocation"]["uri"], region["region"]["startLine"]), ("steps.py", line_of("self.scale = torch.full"))
        )
        self.assertIn("register_buffer", result["message"]["text"])

    def test_what_the_compiler_says_of_other_lines_has_its_place_in_each_form(self) -> None:
        diagnose(steps.clean, steps.inputs, compiler=True)  # imports for the three below
        shown = doctor("steps.py:breaks", "--inputs", "steps.py:inputs", "--compile")
        self.assertEqual(shown.returncode, 0, "a graph break prevents no capture: " + shown.stdout + shown.stderr)
        places = [(line_of(text), name) for text, name in (('os.getppid(); torch._dynamo', "breaks"), ('os.getpgrp()', "note"))]
        for line, name in places:
            self.assertIn(
                f"note: steps.py:{line} in {name}: torch.compile: graph break, Attempted to call function marked as skipped",
                shown.stdout,
            )
        document = self.report("breaks", "--compile")
        notes = document["notes"]
        self.assertEqual(document["findings"], [])
        self.assertEqual([(one["line"], one["column"], one["function"], Path(one["file"])) for one in notes],
                         [(line, 5, name, STEPS) for line, name in places])  # fmt: skip
        self.assertTrue(all(one["reason"].startswith("torch.compile: graph break") for one in notes))
        self.assertIn("Dynamo does not know how to trace", notes[0]["reason"])
        self.assertIn(". torch.compile: graph break, Call to `torch._dynamo.graph_break()`", notes[0]["reason"], "one note a line")
        run = self.sarif("steps.py:breaks", "--compile")
        self.assertEqual([(one["ruleId"], one["level"], one["message"]["text"]) for one in run["results"]],
                         [("torch_compile", "note", one["reason"]) for one in notes])  # fmt: skip
        regions = [one["locations"][0]["physicalLocation"] for one in run["results"]]
        self.assertEqual(
            [(one["artifactLocation"]["uri"], one["region"]["startLine"]) for one in regions],
            [("steps.py", line) for line, _ in places],
        )
        self.assertIn("torch_compile", {rule["id"] for rule in run["tool"]["driver"]["rules"]})

    def test_sarif_names_a_file_by_a_uri(self) -> None:
        with tempfile.TemporaryDirectory(dir=HERE) as folder:
            file = Path(folder) / "a step.py"
            file.write_text("def step(x, lengths):\n    return x.sum().item()\n")
            (result,) = self.sarif(f"{file}:step")["results"]
        self.assertEqual(
            result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"], f"{Path(folder).name}/a%20step.py"
        )

    def test_a_baseline_accepts_what_it_was_written_with_and_nothing_else(self) -> None:
        """In every working directory."""
        with tempfile.TemporaryDirectory(dir=HERE) as folder:
            file = Path(folder) / "baseline.json"
            self.assertEqual(doctor("steps.py:branches", "--inputs", "steps.py:inputs", "--write-baseline", str(file)).returncode, 1)
            self.assertEqual({one["file"] for one in json.loads(file.read_text())["accepted"]}, {"../steps.py"})
            accepted = doctor(f"{STEPS}:branches", "--inputs", f"{STEPS}:inputs", "--baseline", "baseline.json", folder=Path(folder))
            self.assertEqual(accepted.returncode, 0, accepted.stdout + accepted.stderr)
            self.assertIn("3 accepted by the baseline", accepted.stdout)
            self.assertEqual(doctor("steps.py:Decoder", "--inputs", "steps.py:decoder_inputs", "--baseline", str(file)).returncode, 1)

    def test_a_baseline_hides_as_many_equal_findings_as_it_accepts(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "baseline.json"
            doctor("steps.py:equal_lines", "--inputs", "steps.py:inputs", "--write-baseline", str(file))
            both = json.loads(file.read_text())["accepted"]
            self.assertEqual(both, both[:1] * 2)
            for accepted in (both, both[:1]):
                file.write_text(json.dumps({"accepted": accepted}))
                ended = doctor("steps.py:equal_lines", "--inputs", "steps.py:inputs", "--baseline", str(file))
                self.assertEqual(ended.returncode, 2 - len(accepted), ended.stdout)
                self.assertIn(f"{len(accepted)} accepted by the baseline", ended.stdout)

    def test_settings_of_the_environment_are_findings(self) -> None:
        with mock.patch.dict(os.environ, TORCHDYNAMO_SUPPRESS_ERRORS="1"):
            (found,) = self.found("clean")
        self.assertEqual((found["code"], found["function"]), ("hidden_setting", "TORCHDYNAMO_SUPPRESS_ERRORS"))


class Library(unittest.TestCase):
    def test_what_the_target_sets_is_undone(self) -> None:
        available, name = torch.cuda.is_available(), torch.cuda.is_available
        report = diagnose(steps.sets_environment, steps.inputs)
        self.assertEqual([finding.code for finding in report.findings], ["hidden_setting"])
        self.assertNotIn("TORCHDYNAMO_SUPPRESS_ERRORS", os.environ)
        self.assertEqual((torch.cuda.is_available(), torch.cuda.is_available), (available, name))
        self.assertEqual(torch.zeros(2).sum().item(), 0.0)

    def test_a_number_that_was_varied_is_what_the_caller_gave(self) -> None:
        sampling = types.SimpleNamespace(temperature=0.7)

        def given(device: Any) -> Any:
            return torch.ones(2, 8, device=device), sampling

        report = diagnose(lambda x, sampling: x / sampling.temperature, given)
        self.assertEqual([finding.code for finding in report.findings], ["baked_constant"])
        self.assertEqual(sampling.temperature, 0.7)

    def test_remedies_name_the_device_and_the_buffer_that_the_line_has(self) -> None:
        first, typed, _, read = (finding.remedy for finding in diagnose(steps.moves, steps.inputs).findings)
        self.assertEqual(first, "give it the device: torch.zeros(8, device=lengths.device)")
        self.assertNotIn("LongTensor", typed)
        self.assertIn("torch.stack", read)
        spread, copied, later = diagnose(steps.moves_later, steps.inputs).findings
        self.assertEqual(spread.remedy, "give it the device: torch.zeros(8, device=lengths.device)")
        self.assertEqual(copied.remedy, f"not needed once steps.py:{spread.line} is mended")
        self.assertTrue(later.remedy.startswith("compute on the whole tensor instead of in a loop over its values"), later.remedy)
        made, moved = (finding.remedy for finding in diagnose(steps.Moves, steps.token_inputs).findings)
        self.assertTrue(made.startswith('self.register_buffer("table", torch.ones(8), persistent=False)'), made)
        self.assertTrue(moved.startswith('in __init__, self.register_buffer("table", '), moved)
        written, _, spans = (finding.remedy for finding in diagnose(steps.Counts, steps.token_inputs).findings)
        self.assertIn("x.index_copy_(dim, position, new)", written)
        self.assertEqual(spans, "give it the device: torch.linspace(0, 1, 8, dtype=frame.dtype, device=frame.device)")

    def test_what_takes_no_device_is_made_once(self) -> None:
        remedies = self.remedies_of(
            "import numpy, torch\ndef step(x, lengths):\n    return x + torch.from_numpy(numpy.ones(8)).to(x.device)\n"
        )  # fmt: skip
        self.assertEqual(sorted(remedies), [3])
        read = cpu_tensor(Use("value", "torch.frombuffer(row, dtype=torch.uint8)"), "frombuffer", in_init=False, is_module=False)
        for remedy in (remedies[3], read):
            self.assertTrue(remedy.startswith("make it once, before the step, on the device"), remedy)
        kept = cpu_tensor(Use("value", "torch.from_numpy(rows)"), "from_numpy", in_init=True, is_module=False)
        self.assertEqual(kept, "make it on the device once: torch.from_numpy(rows).to(device)")

    def test_a_distribution_checks_its_arguments_and_a_text_is_written_after_the_replay(self) -> None:
        remedies = self.remedies_of(
            "import torch\ndef step(x, lengths):\n    y = torch.distributions.Normal(x.abs(), x.exp()).mean\n    label = str(y.mean())\n"
            "    z = torch.distributions.Normal(y, x, validate_args=False).sample()\n    return y + z, label, '{}'.format(x.sum())\n"
        )  # fmt: skip
        self.assertEqual(sorted(remedies), [3, 4, 5, 6])
        self.assertIn("validate_args=False", remedies[3])
        self.assertNotIn("validate_args=False leaves", remedies[5])
        for line in (4, 6):
            self.assertEqual(remedies[line], "return the tensor, and write it after the replay, outside the step")

    def test_a_remedy_of_state_names_the_owner_and_copies_no_python_value(self) -> None:
        remedies = self.remedies_of(
            "from collections import deque\nclass Slots:\n    def __init__(self):\n        self.free, self.seen = [], set()\n"
            "        self.last, self.of_name, self.kept, self.count = deque(), {}, [], 0\nSLOTS = Slots()\nCOUNTS = {'calls': 0}\n"
            "def keep(items):\n    items.append(1)\ndef step(x, lengths):\n    slots = SLOTS\n    slots.free.append(1)\n"
            "    SLOTS.seen.add(len(slots.seen))\n    slots.last.appendleft(2)\n    slots.of_name[len(slots.of_name)] = 3\n"
            "    slots.count += 1\n    COUNTS['calls'] += 1\n    keep(slots.kept)\n    return x * 2\n"
        )  # fmt: skip
        outside = {10: "SLOTS.kept", 12: "slots.free", 13: "SLOTS.seen", 14: "slots.last", 15: "slots.of_name"}
        inside = {16: "slots.count", 17: "COUNTS['calls']"}
        self.assertEqual(sorted(remedies), sorted(outside | inside))
        for line, owner in outside.items():
            self.assertEqual(remedies[line], f"change `{owner}` outside the step, after the replay")
        for line, owner in inside.items():
            self.assertIn(f"changed in place: {owner}.copy_(new)", remedies[line])

    def remedies_of(self, text: str) -> dict[int, str]:
        """Of the first finding of each line of a file whose `step` is given what
        steps.inputs gives."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "of_text.py"
            file.write_text(text)
            report = diagnose(imported(file).step, steps.inputs)
        self.assertEqual(report.error, "")
        return {one.line: one.remedy for one in reversed(report.findings)}

    def test_what_a_capture_copies_from_the_host_has_a_severity(self) -> None:
        """The corpus has its code: a pinned copy prevents capture where the host waits for it, a
        tensor without dimensions where it is copied."""
        module = imported(HERE / "corpus/host_tensors.py")
        for name, severity in {"pinned_and_waited": "prevents_capture", "pinned_part_not_waited": "stale", "scaled_by_host_scalar": "stale",
                               "chosen_or_zero": "prevents_capture", "written_where_indexed": "prevents_capture",
                               "split_by_tensor": "stale"}.items():  # fmt: skip
            with self.subTest(name):
                found = diagnose(getattr(module, name), module.CASES[name]).findings
                self.assertEqual([one.severity for one in found], [severity])

    def test_a_generator_that_is_registered_with_a_graph_is_no_finding(self) -> None:
        found = [diagnose(steps.drawn, factory).findings for factory in (steps.with_generator, steps.with_registered_generator)]
        self.assertEqual([[one.code for one in each] for each in found], [["rng"], []])

    def test_a_loop_that_waits_for_a_number_ends_and_names_its_branch(self) -> None:
        report = diagnose(steps.waits_for_number, steps.unbounded)
        self.assertEqual((report.error, [one.code for one in report.findings]), ("", ["host_read"] * 2))
        self.assertIn(f"it decides `token != wanted` in line {line_of('while token != wanted')}, of which one way was run",
                      report.findings[-1].reason)  # fmt: skip

    def test_what_is_read_now_and_tested_later_names_the_branch(self) -> None:
        def told(text: str) -> str:
            return str(next(one.reason for one in found if one.line == line_of(text)))

        found = diagnose(steps.decides_later, steps.inputs).findings
        decides = "it decides `{}` in line {}, of which one way was run"
        self.assertIn(
            "here `first` is [3, 2] with these inputs; " + decides.format("first[0] > 2", line_of("if first[0] > 2")),
            told("first = lengths.tolist()"),
        )
        self.assertIn(
            "here `is_quiet` is False with these inputs; " + decides.format("is_quiet", line_of("if is_quiet")),
            told("is_quiet = "),
        )
        self.assertIn(
            f"here it is 2 with these inputs; `level` follows from it, and decides `level < -80` in line {line_of('if level')}, ",
            told("level = "),
        )
        self.assertIn(
            f"`length` follows from it, and decides `length == 0` in line {line_of('if length == 0')}, ",
            told("for length in lengths.tolist()"),
        )
        self.assertNotIn("; here", told("table = torch.arange(lengths.max()"), "a tensor: its own test is a read")

        found = diagnose(steps.best_of_unknown, steps.unbounded).findings
        self.assertEqual(
            [one.line for one in found],
            [line_of("best = x.sum"), line_of("count = x.long()"), line_of("x.max().item() if count")],
        )
        self.assertIn("as its value is not known; `best` follows from it, and decides `best == 0`", told("best = x.sum"))

    def test_cases_that_a_value_decides_are_named(self) -> None:
        (found,) = diagnose(steps.in_cases, steps.inputs).findings
        self.assertEqual(found.use, "match")
        self.assertIn(
            "it decides the case of `match lengths.max().item()`; here `lengths.max().item()` is 3 with these inputs; the other "
            "cases were not run",
            found.reason,
        )
        self.assertIn("torch.where(lengths.max() == a, one, other)", found.remedy)

    def test_a_list_of_numbers_is_not_searched_for_tensors_one_by_one(self) -> None:
        with mock.patch.object(functions, "tree_map", side_effect=functions.tree_map) as mapped:
            report = diagnose(lambda x: x + torch.tensor([1.0] * 4, device=x.device), lambda device: torch.ones(4, device=device))
        self.assertEqual([one.code for one in report.findings], ["host_copy"])
        self.assertFalse([call for call in mapped.call_args_list if call.args[1] == [1.0] * 4])

    def test_two_runs_give_the_same_report(self) -> None:
        def random_branch(x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

        reports = [diagnose(random_branch, lambda device: torch.randn(1, device=device)).findings for _ in range(16)]
        self.assertEqual(reports, reports[:1] * 16)

    def test_a_list_of_many_numbers_is_read_at_once(self) -> None:
        with mock.patch.object(Watch, "read") as read:
            report = diagnose(lambda x: x.tolist(), lambda device: torch.ones(100, 2, device=device))
        self.assertEqual((report.error, read.call_count), ("", report.calls))

    def test_the_step_sees_a_gpu(self) -> None:
        seen: list[object] = []
        diagnose(lambda: seen.append(steps.host_of_gpu()))
        self.assertEqual(seen[0], (True, "a GPU that is not there", "cuda"))


if __name__ == "__main__":
    unittest.main()
