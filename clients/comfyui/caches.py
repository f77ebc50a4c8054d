"""Bytes of the key-value caches that a model makes when it loads, computed from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ENGINE_LENGTHS = (1024, 4096, 8192)  #: positions, where an engine's options say no `cache_lengths`
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def of_package(folder: Path, declared: dict[str, Any]) -> int:
    """For `runtime: generate`: by the package's manifest; values of the fleet file
    take precedence."""
    said = _read(folder / "manifest.json")
    try:
        kv, told = said["kv"], {**said, **(declared.get("generate") or {})}
        return int(2 * kv["layers"] * kv["heads"] * kv["dim"] * said["rows"] * told["length"] * told["slots"] * _DTYPE_BYTES[said["dtypes"]["kv"]])
    except (KeyError, TypeError):
        return 0


def of_engine(folder: Path, declared: dict[str, Any]) -> int:
    """For Bulkhead's engines that load a transformers model: one cache for each of its lengths."""
    if not str(declared.get("engine", "")).startswith("bulkhead.engines.") or declared.get("graphs") == "off":
        return 0
    said, options = _read(folder / "config.json"), declared.get("options") or {}
    text = said.get("text_config") or said
    try:
        heads, width = text["num_attention_heads"], text["hidden_size"]
        dim, kept = text.get("head_dim") or width // heads, text.get("num_key_value_heads") or heads
        dtype = options.get("dtype", "auto")
        dtype = (said.get("dtype") or said.get("torch_dtype") or text.get("dtype")) if dtype == "auto" else dtype
        positions = sum(options.get("cache_lengths", ENGINE_LENGTHS))
        return int(2 * text["num_hidden_layers"] * kept * dim * positions * _DTYPE_BYTES[dtype or "float32"])
    except (KeyError, TypeError):
        return 0


def _read(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
