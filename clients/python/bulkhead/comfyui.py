"""``python -m bulkhead comfyui install DIR``: installs the nodes in a ComfyUI folder, and
uninstalls them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import Error

PACK = Path(__file__).parent / "comfyui_pack"
NAME = "bulkhead"  #: of the folder in custom_nodes
UNFIT = ("__pycache__", "*.pyc", ".mypy_cache")


def install(comfyui: Path) -> str:
    """Copies the nodes, replacing an earlier copy. Returns a sentence on what was done."""
    target = _target(comfyui)
    replaced = target.exists()
    with _writing(target), tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as folder:
        copy = shutil.copytree(PACK, Path(folder, NAME), ignore=shutil.ignore_patterns(*UNFIT))
        if replaced:
            _remove(target)
        copy.rename(target)
    count = sum(1 for path in target.rglob("*") if path.is_file())
    return f"{'replaced' if replaced else 'made'} {target} with {count} files; start ComfyUI again to see its nodes"


def uninstall(comfyui: Path) -> str:
    """Removes the folder that ``install`` made, and ComfyUI's leftovers of it. Returns a sentence
    on what was done."""
    target = _target(comfyui)
    if not target.exists():
        return f"there is no {target}: nothing was done"
    done = f"removed {target}"
    learnt = comfyui / "user" / "bulkhead.json"
    with _writing(target):
        _remove(target)
        if learnt.exists():
            learnt.unlink()
            done += f" and {learnt}"
    return done + "; start ComfyUI again"


def _target(comfyui: Path) -> Path:
    nodes = comfyui / "custom_nodes"
    if not (nodes.is_dir() and (comfyui / "main.py").is_file()):
        raise Error("input_invalid", f"{comfyui} is not a ComfyUI folder: main.py and custom_nodes are not there", "name the folder with ComfyUI's main.py")
    return nodes / NAME


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # copytree's own has a list of them
        raise Error("input_invalid", f"writing {target}: {error}", "run it as the user whose ComfyUI it is, and see that the disk has room") from None


def _remove(target: Path) -> None:
    """Removes only our own folder: another project may have one of this name."""
    if target.is_symlink():
        target.unlink()
        return
    described = target / "pyproject.toml"
    if not described.is_file() or 'DisplayName = "Bulkhead"' not in described.read_text():
        raise Error("input_invalid", f"{target} was not made by this command", "move it away")
    shutil.rmtree(target)
