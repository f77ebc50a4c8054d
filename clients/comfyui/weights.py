"""Bytes of weights on disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".safetensors", ".pt2", ".pt", ".pth", ".jit", ".gguf", ".bin")

T3 = "t3_cfg.safetensors"
#: What ChatterBox reads of a repository that has other models too, and each in two formats.
_CHATTERBOX = ("ve.safetensors", T3, "s3gen.safetensors")
#: Weights that an engine does not put onto its device with `options.language_model`.
_LAYERS = ("tfmr.", "model.language_model.", "lm_head.")


def of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(one.stat().st_size for one in _in(path))


def of_engine(folder: Path, options: dict[str, Any]) -> int:
    """Of what an engine of Bulkhead's puts onto its device."""
    files = [one for one in _in(folder) if not (folder / T3).is_file() or one.name in _CHATTERBOX]
    return sum(one.stat().st_size - (_layers(one) if "language_model" in options else 0) for one in files)


def _in(folder: Path) -> Iterator[Path]:
    return (one for one in folder.rglob("*") if one.suffix in SUFFIXES and one.is_file())


def codec(folder: Path) -> Any:
    """Returns the codec that a transformers processor names, a repository or folder, or None."""
    try:
        return json.loads((folder / "processor_config.json").read_text())["audio_tokenizer"]["audio_tokenizer_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def tensors(file: Path) -> dict[str, Any]:
    """Returns what the header of a safetensors file says of each tensor: `dtype`, `shape`,
    `data_offsets`. Empty for any other file."""
    if file.suffix != ".safetensors":
        return {}
    try:
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            said = json.loads(opened.read(min(length, file.stat().st_size)))
    except (OSError, ValueError, struct.error):
        return {}
    return {name: one for name, one in said.items() if name != "__metadata__"} if isinstance(said, dict) else {}


def _layers(file: Path) -> int:
    spans = [one["data_offsets"] for name, one in tensors(file).items() if name.startswith(_LAYERS)]
    return sum(end - begin for begin, end in spans)
