"""Bytes of the key-value caches that a model makes when it loads, computed from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import weights

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


def of_engine(folder: Path, declared: dict[str, Any], lengths: list[int]) -> int:
    """For Bulkhead's engines: one cache for each of these lengths, or of those in its options; none
    where its language model is another process."""
    options = declared.get("options") or {}
    # PyYAML reads a bare `off` as False.
    if declared.get("graphs") in ("off", False) or "language_model" in options:
        return 0
    try:
        position = _of_t3(folder / weights.T3) or _of_config(_read(folder / "config.json"), options.get("dtype", "auto"))
        return int(position * sum(options.get("cache_lengths", lengths)))
    except (KeyError, TypeError):
        return 0


def _of_config(said: dict[str, Any], dtype: str | None) -> int:
    """Returns the bytes of one position of a transformers model. In boson-multimodal's format, the
    layers that have a second feed-forward network count twice."""
    text = said.get("text_config") or said
    heads, width = text["num_attention_heads"], text["hidden_size"]
    dim, kept = text.get("head_dim") or width // heads, text.get("num_key_value_heads") or heads
    layers = text["num_hidden_layers"] + len(said.get("audio_dual_ffn_layers") or ())
    dtype = (said.get("dtype") or said.get("torch_dtype") or text.get("dtype")) if dtype == "auto" else dtype
    return int(2 * layers * kept * dim * _DTYPE_BYTES[dtype or "float32"])


def _of_t3(file: Path) -> int:
    """Of ChatterBox's T3, which has no config.json: in float32, of a row with the text and one
    without."""
    made = (".self_attn.k_proj.weight", ".self_attn.v_proj.weight")
    widths: list[int] = [one["shape"][0] for name, one in weights.tensors(file).items() if name.startswith("tfmr.layers.") and name.endswith(made)]
    return sum(widths) * 2 * _DTYPE_BYTES["float32"]


def _read(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
