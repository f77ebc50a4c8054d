"""What was learnt of each model while it ran: its methods and its size in memory. Kept in ComfyUI's
user folder, so that forms have their fields, and room is made for a model, before it is loaded."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

_models: dict[str, dict[str, Any]] | None = None


def methods(model: str) -> dict[str, Any]:
    """Returns the methods as the worker last described them; empty if the model never ran here."""
    return dict(_known().get(model, {}).get("methods", {}))


def size(model: str) -> int:
    """Returns the bytes last measured on its device; 0 if unknown."""
    return int(_known().get(model, {}).get("bytes", 0))


def learn(model: str, methods: dict[str, Any]) -> None:
    known = _known().setdefault(model, {})
    if known.get("methods") != methods:
        known["methods"] = methods
        _write()


def learn_size(model: str, size: int) -> None:
    """Writes the size if it has changed by more than 5 %: memory differs a little
    after each request."""
    known = _known().setdefault(model, {})
    if abs(known.get("bytes", 0) - size) > size // 20:
        known["bytes"] = size
        _write()


def _file() -> Path:
    import folder_paths

    return Path(folder_paths.get_user_directory(), "bulkhead.json")


def _known() -> dict[str, dict[str, Any]]:
    global _models
    if _models is None:
        try:
            read = json.loads(_file().read_text())
            _models = {name: told for name, told in read["models"].items() if isinstance(told, dict)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            _models = {}
    return _models


def _write() -> None:
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"models": _models}))
        os.replace(new, path)
    except OSError as error:
        logging.warning("Bulkhead: %s was not written: %s", path, error)
