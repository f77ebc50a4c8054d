"""What an export may replace, and how it does."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

from ..errors import Error
from . import manifest


def check(out: Path, source: str | None = None) -> None:
    """`out` may be absent, empty, or a package, which a complete new one then replaces. `source` is
    the command's argument.

    Errors: input_invalid for anything else, which would be lost."""
    attempt = f"exporting to {out}"
    if source is not None and (read := _read_from(source)) is not None and (read == out.resolve() or out.resolve() in read.parents):
        raise Error("input_invalid", f"{attempt}, where {source} itself lies", "give another folder: this one would be replaced")
    if not out.exists():
        return
    if not out.is_dir():
        raise Error("input_invalid", f"{attempt}, which is a file", "give a folder")
    try:
        empty = not any(out.iterdir())
    except OSError as wrong:
        raise Error("input_invalid", f"{attempt}: {wrong.strerror}", "give another folder") from None
    if not empty and not _is_package(out):
        raise Error("input_invalid", f"{attempt}, which holds something else than a package",
                    f"give a new folder, an empty one, or one with a {manifest.FILE} of {manifest.FORMAT}")  # fmt: skip


def replace(partial: Path, out: Path) -> None:
    """Removes a package that `out` held only once the complete one stands there. Copies it first
    where it lies in an image of a container, whose folders cannot be renamed."""
    before = out.with_name(f".{out.name}.before")
    shutil.rmtree(before, ignore_errors=True)
    try:
        if out.exists():
            out.rename(before)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copytree(out, before, symlinks=True)
        shutil.rmtree(out)
    partial.rename(out)
    shutil.rmtree(before, ignore_errors=True)


def _read_from(source: str) -> Path | None:
    """The folder or file; None if `source` names a module."""
    for said in (source, source.rpartition(":")[0]):
        if said and Path(said).exists():
            return Path(said).resolve()
    return None


def _is_package(folder: Path) -> bool:
    try:
        said = json.loads((folder / manifest.FILE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("format") == manifest.FORMAT
