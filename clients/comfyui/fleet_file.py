"""The daemon's fleet file, as it is now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import daemon


def read() -> tuple[Path, dict[str, Any]]:
    """Returns its folder and its models. Raises if it cannot be read."""
    import yaml

    fleet = Path(daemon.ask("daemon.info")["fleet"])
    return fleet.parent, yaml.safe_load(fleet.read_text())["models"]
