"""A published package under the doctor: what was found against a list that was checked by hand, and
remedies on a patched copy."""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

#: Where scripts/install --tests puts a folder of packages for each.
BUILD = Path(__file__).parents[3] / "build"
#: What may read a value, copy it, or make a tensor of the CPU: a factory whose line
#: gives it no device.
FORMS = re.compile(r"\.item\(|\.cpu\(|\.to\(|torch\.tensor\(|torch\.from_numpy\(|torch\.\w*Tensor\(|"
                   r"torch\.(arange|zeros|ones|full|empty|rand|randn|randint|randperm|linspace|logspace|eye|hann_window)\((?!.*device)")  # fmt: skip


class Checked(NamedTuple):
    """A line of a list. ``code`` is `-` where the line has one of FORMS, or reads a value, and is
    not a finding."""

    file: str
    line: int
    code: str
    fate: str  #: `mended` in the patched copy, `stays` there, or `after`: found only there


class Patch(NamedTuple):
    """Lines ``first`` to ``last`` of a file become ``text``, at the indentation of the first.
    Line numbers stay."""

    file: str
    first: int
    last: int
    text: str


def checked(file: Path) -> list[Checked]:
    """Of lines FILE:LINE CODE FATE [why]; those that begin with `#` are left out."""
    rows = [line.split(maxsplit=3) for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return [Checked(row[0].rsplit(":", 1)[0], int(row[0].rsplit(":", 1)[1]), row[1], row[2]) for row in rows]


def found(package: str, beside: str) -> Path | None:
    """The folder of a package, in build/``beside`` or else in the environment."""
    spec = importlib.machinery.PathFinder.find_spec(package, [str(BUILD / beside), *sys.path])
    return Path(spec.submodule_search_locations[0]) if spec is not None and spec.submodule_search_locations else None


def patched(package: Path, patches: list[Patch], folder: Path) -> None:
    """A copy of the package in ``folder``."""
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for patch in patches:
        path = folder / patch.file
        lines = path.read_text().split("\n")
        indentation = re.match(" *", lines[patch.first - 1])
        new = [f"{indentation[0] if indentation else ''}{line}" for line in patch.text.split("\n")]
        lines[patch.first - 1 : patch.last] = new + [""] * (patch.last - patch.first + 1 - len(new))
        path.write_text("\n".join(lines))


def examined(module: str, beside: str, before: list[Path]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What `examine.py` says in a process of its own, with ``before`` and build/``beside`` first on
    the path, and the outputs on the CPU."""
    path = os.pathsep.join([*map(str, before), str(BUILD / beside), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).parent / "examine.py"), module, folder]
        ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900,
                               cwd=Path(__file__).parent)  # fmt: skip
        if ended.returncode:
            raise RuntimeError(ended.stderr[-2000:])
        return json.loads((Path(folder) / "examined.json").read_text()), torch.load(Path(folder) / "outputs.pt")
