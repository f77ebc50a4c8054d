"""`python -m bulkhead.doctor` for tests, in a fork that has PyTorch imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
from bulkhead.doctor import run  # noqa: F401  (imports PyTorch once)
from bulkhead.doctor.__main__ import main

HERE = Path(__file__).parent
STEPS = HERE / "steps.py"


def doctor(*arguments: str, environment: dict[str, str] | None = None, folder: Path = HERE) -> subprocess.CompletedProcess[str]:
    """In a fork of this process, which has PyTorch imported; with an environment, in a
    process of its own."""
    if environment:
        return subprocess.run([sys.executable, "-m", "bulkhead.doctor", *arguments], capture_output=True, text=True, timeout=240,
                              cwd=folder, env={**os.environ, **environment})  # fmt: skip

    def main_here() -> int:
        sys.modules.pop("steps", None)  # the tests of the library have imported it
        return main(arguments)

    return forked.run(main_here, arguments, folder)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(STEPS.read_text().splitlines(), 1) if text in line)
