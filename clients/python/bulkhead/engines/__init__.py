"""Engines for ``runtime: python``; a fleet file names them as ``bulkhead.engines.NAME:CLASS``. See docs/engines.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def declared(engine: str) -> dict[str, Any]:
    """The methods of one of these engines, named as in a fleet file, as its worker will describe them; empty for any other. What
    the engine needs is not imported: ``declarations.json`` was made by scripts/declarations.py."""
    told: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("declarations.json").read_text())
    return told.get(engine, {})
