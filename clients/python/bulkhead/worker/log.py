"""Log lines in the C++ worker's format; the daemon adds time and worker."""

from __future__ import annotations

import contextlib
import os

LEVELS = ("trace", "debug", "info", "warn", "error")
_least = 2


def set_level(name: str) -> None:
    global _least
    _least = LEVELS.index(name) if name in LEVELS else _least


def say(level: str, text: str) -> None:
    """Any thread. Writes to the descriptor: an engine may have replaced ``sys.stderr``."""
    if LEVELS.index(level) >= _least:
        with contextlib.suppress(OSError):  # the reader has gone
            os.write(2, f"{level}: {text}\n".encode("utf-8", "replace"))
