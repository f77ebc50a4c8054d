"""`python examine.py PARTS FOLDER`: runs each part of a module on the CPU, then gives it to the doctor. FOLDER receives the outputs,
`examined.json` with the package's executed lines and the findings, and the report as text. A process of its own, since a patched copy
of a package has the same name as the package."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from bulkhead.doctor import diagnose


class Executed:
    """The lines of one package's files that a run executes."""

    def __init__(self, package: str) -> None:
        self.root = str(Path(importlib.import_module(package).__path__[0]))
        self.lines: set[tuple[str, int]] = set()

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.root):
            return None
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace


def main(module: str, folder: Path) -> None:
    parts = importlib.import_module(module)
    executed = Executed(parts.PACKAGE)
    outputs, findings, errors = [], set(), []
    for part, factory in parts.PARTS:
        torch.manual_seed(0)
        arguments = factory("cpu")
        torch.manual_seed(1)
        sys.settrace(executed.trace)
        try:
            outputs.append(part(*arguments))
        finally:
            sys.settrace(None)
        report = diagnose(part, factory)
        findings |= {(relative(one.file), one.line, one.code) for one in report.findings}
        errors += [report.error] if report.error else []
    torch.save(outputs, folder / "outputs.pt")
    lines = [(relative(file), line, Path(file).read_text().splitlines()[line - 1].strip()) for file, line in sorted(executed.lines)]
    (folder / "examined.json").write_text(json.dumps({"executed": lines, "findings": sorted(findings), "errors": errors}))


def relative(file: str) -> str:
    """To the folder that its package was imported from."""
    roots = [root for root in sys.path if root and file.startswith(root + "/")]
    return file[len(max(roots, key=len)) + 1 :] if roots else file


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
