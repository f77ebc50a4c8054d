"""`python -m bulkhead.doctor` for tests, in a fork of a process that has run the doctor before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
import torch
from bulkhead.doctor import diagnose
from bulkhead.doctor.__main__ import main

HERE = Path(__file__).parent
STEPS = HERE / "steps.py"

diagnose(lambda x: x * 2 if x.sum() > 0 else x, lambda device: torch.ones(1, device=device))


def doctor(*arguments: str, environment: dict[str, str] = {}, encoding: str = "", folder: Path = HERE) -> subprocess.CompletedProcess[str]:
    """``encoding``: of its output."""

    def main_here() -> int:
        sys.modules.pop("steps", None)  # the tests of the library have imported it
        os.environ.update(environment)
        if encoding:
            sys.stdout.reconfigure(encoding=encoding)  # type: ignore[union-attr]
        return main(arguments)

    return forked.run(main_here, arguments, folder)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(STEPS.read_text().splitlines(), 1) if text in line)
