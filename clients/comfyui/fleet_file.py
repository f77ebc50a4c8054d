"""The daemon's fleet file, as it is now."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from . import daemon

_text = ""
_models: dict[str, Any] = {}


def read() -> tuple[Path, dict[str, Any]]:
    """Returns its folder and its models, with the keys that `defaults` gives them. Raises if it
    cannot be read."""
    global _text, _models
    import yaml

    fleet = Path(daemon.ask("daemon.info")["fleet"])
    text = fleet.read_text()
    if text != _text:  # parsing takes longer than all else of a short run
        said = yaml.safe_load(text)
        _models = {name: {**(said.get("defaults") or {}), **told} for name, told in said["models"].items()}
        _text = text
    return fleet.parent, _models


def with_language_model(model: str) -> list[str]:
    """Returns the model and, if its `options.language_model` names another model of the fleet, that
    one too: the engine has it loaded for its first request. Only the model if the file cannot
    be read."""
    try:
        _, models = read()
        other = (models[model].get("options") or {}).get("language_model")
        return [model, other] if isinstance(other, str) and other in models else [model]
    except Exception as error:  # as in sizes
        logging.debug("Bulkhead: it is not known whether %s uses another model: %s", model, error)
        return [model]
