"""`python -m bulkhead.doctor` for tests, in a fork that has PyTorch imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

from bulkhead.doctor import run  # noqa: F401  (imports PyTorch once)
from bulkhead.doctor.__main__ import main

HERE = Path(__file__).parent
STEPS = HERE / "steps.py"


def doctor(*arguments: str, environment: dict[str, str] | None = None, folder: Path = HERE) -> subprocess.CompletedProcess[str]:
    """In a fork of this process, which has PyTorch imported; with an environment, in a process of its own."""
    if environment:
        return subprocess.run([sys.executable, "-m", "bulkhead.doctor", *arguments], capture_output=True, text=True, timeout=240,
                              cwd=folder, env={**os.environ, **environment})  # fmt: skip
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            _become_the_doctor(arguments, folder, out.fileno(), err.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())


def _become_the_doctor(arguments: tuple[str, ...], folder: Path, out: int, err: int) -> NoReturn:
    status = -1
    try:
        sys.stdout.flush()
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        os.chdir(folder)
        sys.modules.pop("steps", None)  # the tests of the library have imported it
        try:
            status = main(arguments)
        except SystemExit as asked:  # argparse
            status = asked.code if isinstance(asked.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(STEPS.read_text().splitlines(), 1) if text in line)
