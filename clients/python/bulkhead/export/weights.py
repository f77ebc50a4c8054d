"""One safetensors file for all functions of a package: each tensor once, whatever the functions call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from .digest import sha256


def save(constants: dict[str, dict[str, Tensor]], file: Path) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Writes what each function (by file name) asks for; returns the manifest's `weights`, and its `constants`: where a
    function's name for a tensor is not the one in the file."""
    from safetensors.torch import save_file

    stored: dict[str, Tensor] = {}
    name_of: dict[tuple[Any, ...], str] = {}
    renamed: dict[str, dict[str, str]] = {}
    for function, wanted in constants.items():
        for name, tensor in wanted.items():
            same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if tensor.numel() == 0 or same not in name_of:
                unique = name
                while unique in stored:  # another tensor has this name in another function
                    unique += "'"
                name_of[same] = unique
                stored[unique] = tensor.detach().cpu().contiguous()
            if name_of[same] != name:
                renamed.setdefault(function, {})[name] = name_of[same]
    save_file(stored, str(file))
    file.chmod(file.parent.stat().st_mode & 0o666)  # it is written for its owner alone; the worker may be another
    return {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256(file)}, renamed


def read(file: Path, device: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(str(file), device=device)
    return tensors
