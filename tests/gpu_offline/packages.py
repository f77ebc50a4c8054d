"""Packages for a GPU of sm_90, made on a machine without one: python tests/gpu_offline/packages.py
FOLDER [NAME ...]

Writes FOLDER/NAME, a package as `python -m bulkhead.export` makes it with weights and manifest
(mlp: the one file FOLDER/mlp.pt2), for each NAME, or for all (--list prints their names); checks it
by `python -m bulkhead.export --check`; opens the library of each function (wrappers.py); and prints
a line each: name, functions, kernels, seconds, MB. A package that is there is kept until what makes
it changes. Those of tests/gpu/make_models.py have its names and its options: a GPU machine to which
FOLDER is carried need not compile them.

Exits with 1 where one could not be made, and makes the others nevertheless; nothing is left of that
one, and what its export said is on standard error.
Exits with 77, and makes nothing, where CUDA's toolkit or Triton's ptxas is missing, which it names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "clients" / "python"), str(ROOT / "tests" / "gpu")]

import make_models  # noqa: E402
import requirements  # noqa: E402

TARGET = "sm_90"
TINY = "tests/python/export/tiny_models.py"
#: Those of the GPU tests.
CARRIED = {name: (source, options) for name, (source, options, _) in make_models.GENERATING.items()}
FEW = ["--length", "128", "--slots", "2", "--slots-max", "4", "--chunk", "40"]
#: Where the model comes from, and the options of its export. `mlp` is besides.
PACKAGES = {
    **CARRIED,
    "bfloat16": ("scripts/models/make_test_models.py:tiny_generate", [*FEW, "--dtype", "bfloat16"]),
    "int8": ("scripts/models/make_test_models.py:tiny_generate", [*FEW, "--dtype", "bfloat16", "--weights", "int8"]),
    "int4": ("scripts/models/make_test_models.py:tiny_generate", [*FEW, "--dtype", "bfloat16", "--weights", "int4"]),
    "qwen3_vl": (f"{TINY}:qwen3_vl", FEW),
    "higgs_codec": (f"{TINY}:higgs_audio_v2_with_codec", ["--family", "higgs_audio_v2", *FEW]),
}
NAMES = ("mlp", *PACKAGES)
FILES = {"mlp": "mlp.pt2"}  #: of packages that are not a folder of their name
SOURCES = (Path(__file__), ROOT / "tests" / "gpu" / "make_models.py", ROOT / TINY, ROOT / "scripts" / "models" / "make_test_models.py")


def made(name: str, folder: Path) -> str:
    """Makes one unless it is current; returns what follows its name in the line that is printed."""
    package, made_by, stamp = folder / FILES.get(name, name), folder / f".{name}.compiled-by", requirements.stamp(*SOURCES)
    if package.exists() and made_by.exists() and made_by.read_text() == stamp:
        return "is current"
    remove(package)
    try:
        done = export(name, folder)
    except RuntimeError:
        remove(package)
        raise
    made_by.write_text(stamp)
    return done


def remove(package: Path) -> None:
    if package.is_dir():
        shutil.rmtree(package)
    else:
        package.unlink(missing_ok=True)


def export(name: str, folder: Path) -> str:
    start = time.monotonic()
    if name == "mlp":
        files = [folder / FILES[name]]
        said([str(Path(__file__)), "--mlp", str(folder)])
    else:
        source, options = PACKAGES[name]
        said(["-m", "bulkhead.export", str(ROOT / source), str(folder / name), "--target", TARGET, *options])
        said(["-m", "bulkhead.export", "--check", str(folder / name)])
        files = sorted((folder / name).iterdir())
    functions = [file for file in files if file.suffix == ".pt2"]
    said([str(Path(__file__).with_name("wrappers.py")), *map(str, functions)])
    size = sum(file.stat().st_size for file in files)
    return f"{len(functions):2} functions {sum(map(kernels, functions)):4} kernels {time.monotonic() - start:6.1f} s {size / 1e6:7.2f} MB"


def said(arguments: list[str]) -> None:
    """Runs Python in a process of its own, since it remembers the GPU that it was given."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/clients/python:{os.environ.get('PYTHONPATH', '')}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stdout)


def kernels(function: Path) -> int:
    with zipfile.ZipFile(function) as opened:
        return sum(name.endswith(".cubin") for name in opened.namelist())


def save_mlp(folder: Path) -> None:
    """As make_models.py makes it, which draws its weights first of all."""
    import torch
    from bulkhead.export import absent_gpu

    absent_gpu.install(TARGET)
    torch.manual_seed(0)
    make_models.save_package("mlp", make_models.Mlp(), folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--mlp", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print(*NAMES, sep="\n")
        return 0
    if options.folder is None:
        parser.error("give a FOLDER")
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"no package is named {unknown[0]!r}; names are: {', '.join(NAMES)}")
    if missing := requirements.missing():
        print(f"skipped: {missing}", file=sys.stderr)
        return requirements.SKIPPED
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.mlp:
        save_mlp(folder)
        return 0
    status = 0
    for name in options.names or NAMES:
        try:
            print(f"{name:<14} {made(name, folder)}", flush=True)
        except RuntimeError as wrong:
            status = 1
            print(f"{name:<14} FAILED", flush=True)
            print(wrong, file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
