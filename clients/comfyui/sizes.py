"""How much memory a model has, or will have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import daemon, learnt

WEIGHTS = (".safetensors", ".pt2", ".pt", ".pth", ".jit", ".gguf", ".bin")


def measured(rows: list[dict[str, Any]], model: str, on_gpu: bool) -> int:
    """Bytes of all processes of a model: the daemon's figure, or the worker's own report where the driver tells none, as in
    WSL2 and in containers. A process that reports neither has what is expected of it, so that it does not pass for unloaded."""
    return sum(_of_process(row, on_gpu) for row in rows if row["model"] == model and row["pid"] is not None)


def _of_process(row: dict[str, Any], on_gpu: bool) -> int:
    if not on_gpu:
        return row["host_bytes"] or 0
    return row["gpu_bytes"] or (row["graphs"] or {}).get("reserved_bytes") or expected(row["model"])


def expected(model: str) -> int:
    """Bytes that a load will take: what was measured last, else its weights on disk, else 0."""
    return learnt.size(model) or sum(map(weights, _files(model)))


def weights(path: Path) -> int:
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*") if one.suffix in WEIGHTS and one.is_file())
    return path.stat().st_size if path.is_file() else 0


def _files(model: str) -> list[Path]:
    """What its declaration names: a file, a package, or, as the option ``model``, a folder or a repository in the Hugging
    Face cache."""
    try:
        import yaml

        fleet = Path(daemon.ask("daemon.info")["fleet"])
        declared = yaml.safe_load(fleet.read_text())["models"][model]
        named = [declared.get("file"), declared.get("package"), (declared.get("options") or {}).get("model")]
    except Exception:  # a daemon on its way out, a file that was moved, another user's: then nothing is known
        return []
    return [path for name in named if isinstance(name, str) for path in (fleet.parent / name, _cached(name)) if path.exists()]


def _cached(repository: str) -> Path:
    """The folder in which the Hugging Face Hub's library keeps the main revision of ``owner/name``."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    folder = cache / f"models--{repository.replace('/', '--')}"
    main = folder / "refs" / "main"
    return folder / "snapshots" / (main.read_text() if main.is_file() else "main")
