"""Engines for ``runtime: python``; a fleet file names them as ``bulkhead.engines.NAME:CLASS``. See
docs/engines.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def declared(engine: str) -> dict[str, Any]:
    """What is known of one of these engines before it is loaded; empty for others: ``methods``, in
    the fleet file's spelling, as its worker will describe them; ``repositories``, by option, which
    it loads where that is left out; ``cache_lengths``, as that option where it is left out. Does
    not import the engine: scripts/declarations.py made ``declarations.json``."""
    told: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("declarations.json").read_text())
    return told.get(engine, {})
