"""A command for tests, in a fork that has PyTorch imported: a process of its own takes
seconds for that."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def run(main: Callable[[], int], arguments: tuple[str, ...] = (), folder: Path = Path()) -> subprocess.CompletedProcess[str]:
    """`main` in a fork, in `folder`; ``arguments`` are what the result says was run."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            become(main, folder, out.fileno(), err.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())


def become(main: Callable[[], int], folder: Path, out: int, err: int) -> NoReturn:
    status = -1
    try:
        sys.stdout.flush()
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        os.chdir(folder)
        try:
            status = main()
        except SystemExit as asked:  # argparse
            status = asked.code if isinstance(asked.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
