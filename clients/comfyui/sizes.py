"""How much memory a model has, or will have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import caches, daemon, learnt

WEIGHTS = (".safetensors", ".pt2", ".pt", ".pth", ".jit", ".gguf", ".bin")


def measured(rows: list[dict[str, Any]], model: str, on_gpu: bool) -> int:
    """Bytes of all processes of a model: the daemon's figure, or the worker's own report where the driver tells none, as in
    WSL2 and in containers. A process that reports neither has what is expected of it, so that it does not pass for unloaded."""
    return sum(_of_process(row, on_gpu) for row in rows if row["model"] == model and row["pid"] is not None)


def _of_process(row: dict[str, Any], on_gpu: bool) -> int:
    if not on_gpu:
        return int(row["host_bytes"] or 0)
    return row["gpu_bytes"] or (row["graphs"] or {}).get("reserved_bytes") or expected(row["model"])


def expected(model: str) -> int:
    """Bytes that a load will take: what was measured last, else its weights on disk and the caches that it makes, else 0."""
    return learnt.size(model) or _declared(model)


def held(told: dict[str, Any]) -> int:
    """Bytes of a row or a receipt: on its GPU, where it has one, else in the machine's memory."""
    return int((told["gpu_bytes"] if told["gpu_bytes"] is not None else told["host_bytes"]) or 0)


def text(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"


def weights(path: Path) -> int:
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*") if one.suffix in WEIGHTS and one.is_file())
    return path.stat().st_size if path.is_file() else 0


def _declared(model: str) -> int:
    """Of what its declaration names: a file, a package, or, as the option ``model``, a folder or a repository in the Hugging
    Face cache."""
    try:
        import yaml

        fleet = Path(daemon.ask("daemon.info")["fleet"])
        declared = yaml.safe_load(fleet.read_text())["models"][model]
        named = [declared.get("file"), declared.get("package"), (declared.get("options") or {}).get("model")]
    except Exception:  # a daemon on its way out, a file that was moved, another user's: then nothing is known
        return 0
    paths = [path for name in named if isinstance(name, str) for path in (fleet.parent / name, _cached(name)) if path.exists()]
    return sum(weights(path) + caches.of_package(path, declared) + caches.of_engine(path, declared) for path in paths)


def _cached(repository: str) -> Path:
    """The folder in which the Hugging Face Hub's library keeps the main revision of ``owner/name``."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    folder = cache / f"models--{repository.replace('/', '--')}"
    main = folder / "refs" / "main"
    return folder / "snapshots" / (main.read_text() if main.is_file() else "main")
