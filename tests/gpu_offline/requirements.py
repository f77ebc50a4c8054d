"""What compiling for a GPU needs, and a GPU is not among it; and what makes that which is
compiled stale."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77  #: the exit status by which CTest knows a test as skipped
#: Whose versions decide what is compiled.
PACKAGES = ("torch", "triton", "transformers", "chatterbox-tts")


def stamp(*sources: Path) -> str:
    """Of all that decides what the exporter makes: `sources`, its own files, and the versions of
    PACKAGES. Call it where none of them is missing."""
    digest = hashlib.sha256(" ".join(map(importlib.metadata.version, PACKAGES)).encode())
    exporter = (ROOT / "clients" / "python" / "bulkhead" / "export").rglob("*")
    for source in (*sources, *sorted(file for file in exporter if file.suffix in (".py", ".h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def stub_of_libcuda() -> str:
    """The file that a program links where no driver is; empty where the toolkit has none."""
    from torch.utils import cpp_extension

    home = Path(cpp_extension.CUDA_HOME or "/")
    folders = (home / "lib64", home / "lib", *home.glob("targets/*/lib"))
    return next((str(folder / "stubs" / "libcuda.so") for folder in folders if (folder / "stubs" / "libcuda.so").is_file()), "")


def missing() -> str:
    """What this machine lacks, in words; empty where it lacks nothing."""
    import torch
    from torch.utils import cpp_extension

    if torch.version.cuda is None:
        return "this PyTorch is for CPUs alone"
    if cpp_extension.CUDA_HOME is None:
        return "CUDA's toolkit is missing: install the one of PyTorch's version of CUDA, and set CUDA_HOME"
    if not (Path(cpp_extension.CUDA_HOME) / "include" / "cuda.h").is_file():
        return f"CUDA's toolkit in {cpp_extension.CUDA_HOME} has no headers"
    try:
        from triton import knobs

        knobs.nvidia.ptxas  # noqa: B018  looks for it
    except (ImportError, RuntimeError) as wrong:
        return f"Triton's ptxas is missing: {wrong}"
    if not stub_of_libcuda():
        return f"CUDA's toolkit in {cpp_extension.CUDA_HOME} has no stub of libcuda"
    for package in ("transformers", "chatterbox-tts"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is missing"
    if shutil.which("c++") is None and shutil.which("g++") is None:
        return "a C++ compiler is missing"
    return ""
