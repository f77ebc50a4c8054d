"""SHA-256 of a file."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
