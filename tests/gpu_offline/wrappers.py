"""Opens the library of each compiled function: python tests/gpu_offline/wrappers.py
FUNCTION.pt2 ...

With RTLD_NOW, beside LibTorch and the toolkit's stub of libcuda, so that a symbol which
neither has is an error here, and not on a GPU. In a process of its own: LibTorch and the stub
become global in it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "clients" / "python")]

import requirements  # noqa: E402
from bulkhead.export import functions  # noqa: E402


def open_wrapper(function: Path, folder: str) -> None:
    with zipfile.ZipFile(function) as package:
        (name,) = [name for name in package.namelist() if name.endswith(".wrapper.so")]
        ctypes.CDLL(package.extract(name, folder), mode=os.RTLD_NOW)


def main() -> None:
    functions.share_libtorch()
    ctypes.CDLL(requirements.stub_of_libcuda(), mode=ctypes.RTLD_GLOBAL)
    for function in sys.argv[1:]:
        with tempfile.TemporaryDirectory(prefix="bh-gpu-") as folder:
            open_wrapper(Path(function), folder)


if __name__ == "__main__":
    main()
