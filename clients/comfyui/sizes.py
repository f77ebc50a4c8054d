"""How much memory a model has, or will have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import caches, fleet_file, learnt, weights


def of_process(row: dict[str, Any], on_gpu: bool) -> int:
    """Returns a process' bytes: the daemon's figure, or the worker's own report if the driver gives
    none, as in WSL2 and in containers. With neither, the expected size, so that the model does not
    seem unloaded."""
    if not on_gpu:
        return int(row["host_bytes"] or 0)
    return row["gpu_bytes"] or (row["graphs"] or {}).get("reserved_bytes") or expected(row)


def expected(row: dict[str, Any]) -> int:
    """Returns the bytes that a load will take: the last measurement, else weights on disk plus
    caches, else the daemon's estimate, else 0."""
    return learnt.size(row["model"]) or _on_disk(row["model"]) or int((row.get("memory") or {}).get("estimated") or 0)


def held(told: dict[str, Any]) -> int:
    """Returns the bytes of a row or a receipt: on its GPU if it has one, else in host memory."""
    return int((told["gpu_bytes"] if told["gpu_bytes"] is not None else told["host_bytes"]) or 0)


def text(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"


def _on_disk(model: str) -> int:
    """Returns the size on disk of what its declaration names: a file, a package, or the option
    ``model``, and those that an engine of Bulkhead's has besides or instead: a folder, or a
    repository in the Hugging Face cache."""
    try:
        folder, models = fleet_file.read()
        return _of_declared(folder, models[model])
    except Exception:
        # A daemon on its way out, a file that was moved, another user's: then nothing is known.
        return 0


def _of_declared(folder: Path, declared: dict[str, Any]) -> int:
    from bulkhead.engines import declared as declared_by_engine

    options = declared.get("options") or {}
    if not (own := declared_by_engine(str(declared.get("engine")))):
        paths = _found(folder, declared.get("file"), declared.get("package"), options.get("model"))
        return sum(weights.of(path) + caches.of_package(path, declared) for path in paths)
    named = {option: options.get(option, repository) for option, repository in own["repositories"].items()}
    paths = _found(folder, *named.values())
    codecs = [codec for path in paths for codec in _found(folder, weights.codec(path)) if not codec.is_relative_to(path)]
    kept = sum(caches.of_engine(path, declared, own["cache_lengths"]) for path in _found(folder, named.get("model")))
    return kept + sum(weights.of_engine(path, options) for path in paths + codecs)


def _found(folder: Path, *names: Any) -> list[Path]:
    places = [(folder / name, _cached(name)) for name in names if isinstance(name, str)]
    return [next(path for path in place if path.exists()) for place in places if any(path.exists() for path in place)]


def _cached(repository: str) -> Path:
    """Returns the folder where the Hugging Face Hub's library keeps the main revision of
    ``owner/name``."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    folder = cache / f"models--{repository.replace('/', '--')}"
    main = folder / "refs" / "main"
    return folder / "snapshots" / (main.read_text() if main.is_file() else "main")
