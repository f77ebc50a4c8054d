"""How much memory a model has, or will have."""

from __future__ import annotations

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
    """What its declaration names: a file, a package, or a folder among its options."""
    try:
        import yaml

        fleet = Path(daemon.ask("daemon.info")["fleet"])
        declared = yaml.safe_load(fleet.read_text())["models"][model]
        named = [declared.get("file"), declared.get("package"), *(declared.get("options") or {}).values()]
    except Exception:  # a daemon on its way out, a file that was moved, another user's: then nothing is known
        return []
    return [path for name in named if isinstance(name, str) and (path := fleet.parent / name).exists()]
