"""One safetensors file for all functions of a package, with each tensor once, whatever names the
functions use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from .digest import sha256


def save(constants: dict[str, dict[str, Tensor]], file: Path) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Writes the constants of each function (by file name). Returns the manifest's `weights` and
    `constants`: a function's names that differ from the file's."""
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
    # safetensors writes it for its owner only; the worker may run as another user.
    file.chmod(file.parent.stat().st_mode & 0o666)
    return {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256(file)}, renamed


def read(file: Path, device: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(str(file), device=device)
    return tensors
