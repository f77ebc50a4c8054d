"""The doctor over the corpus, where it must find exactly what each file expects, and over the blind
sets, which only measure it."""

from __future__ import annotations

import re
import unittest
from pathlib import Path

import torch._dynamo
from bulkhead.doctor import diagnose
from findings import Case, cases

FOLDER = Path(__file__).parent / "corpus"
SETTINGS = {"suppress_errors": False, "capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False}


class Score:
    """Of one set of cases: how many findings were right, wrong and missed."""

    def __init__(self) -> None:
        self.functions = self.clean = self.right = self.published = 0
        self.broken: list[str] = []  #: runs that did not come to their end
        self.wrong: list[str] = []
        self.missed: list[str] = []

    def add(self, case: Case) -> None:
        self.functions += 1
        self.clean += not case.expected
        self.published += names_its_origin(case)
        expected = {(str(case.file), line, code) for line, code in case.expected}
        report = diagnose(case.target, case.factory)
        if (report.error, report.skipped, report.calls) != ("", [], 3):
            self.broken.append(f"{case.name}: {report.calls} calls; {report.error}; {report.skipped}")
        found = {(str(Path(finding.file).resolve()), finding.line, finding.code) for finding in report.findings}
        self.right += len(expected & found)
        self.wrong += [f"{case.name}: {Path(file).name}:{line} {code}" for file, line, code in sorted(found - expected)]
        self.missed += [f"{case.name}: {Path(file).name}:{line} {code}" for file, line, code in sorted(expected - found)]

    def __str__(self) -> str:
        precision = self.right / max(1, self.right + len(self.wrong))
        recall = self.right / max(1, self.right + len(self.missed))
        figures = (
            f"{self.functions} functions, {self.clean} of them clean, {self.right + len(self.missed)} findings:"
            f" precision {precision:.1%}, recall {recall:.1%}"
        )
        return "\n  ".join([figures, *(f"wrong  {one}" for one in self.wrong), *(f"missed {one}" for one in self.missed),
                              *(f"broken {one}" for one in self.broken)])  # fmt: skip


def scored(files: list[Path]) -> Score:
    score = Score()
    for file in files:
        with torch._dynamo.config.patch(SETTINGS):
            for case in cases(file.resolve()):
                score.add(case)
    return score


def names_its_origin(case: Case) -> bool:
    """Whether the line above the case names a package, its version and a file."""
    named = rf"^# [\w-]+ \d[\d.]*, [\w/]+\.py\b.*\n(?:def|class) {case.name}\b"
    return re.search(named, case.file.read_text(), re.MULTILINE) is not None


class Corpus(unittest.TestCase):
    def test_finds_what_each_line_expects(self) -> None:
        score = scored([file for file in sorted(FOLDER.glob("*.py")) if not file.stem.startswith("blind")])
        print(f"\ncorpus: {score}")
        self.assertGreaterEqual(score.functions, 60)
        self.assertGreaterEqual(score.clean * 4, score.functions)
        self.assertGreaterEqual(score.published, 10)
        self.assertFalse(score.wrong + score.missed + score.broken, "printed above")

    def test_blind_sets(self) -> None:
        """Each file corpus/blind*.py is one, of the form that findings.py says. They measure; what
        they miss fails no test."""
        for file in sorted(FOLDER.glob("blind*.py")):
            with self.subTest(file.stem):
                score = scored([file])
                print(f"\n{file.stem}: {score}")
                self.assertEqual(score.broken, [])
                self.assertGreaterEqual(score.functions, 15)


if __name__ == "__main__":
    unittest.main()
