"""Passes a load's progress to the link: the start, each eighth and the end of a phase, else ten
times a second."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, Callable

_INTERVAL_SECONDS = 0.1
_PARTS = 8


class LoadProgress:
    """``update`` is for any thread; calls ``report`` on the loop's thread with the members
    of ``progress``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[dict[str, Any]], object]) -> None:
        self._loop, self._report = loop, report
        self._lock = threading.Lock()
        self._phase, self._marked, self._said = "", 0, 0.0
        self._latest: dict[str, Any] | None = None
        self._timer_set = False
        self._finished = False

    def update(self, phase: str, done: int, total: int, detail: str) -> None:
        told: dict[str, Any] = {"phase": phase, "done": max(int(done), 0), "total": max(int(total), 0), "unit": "steps", "detail": str(detail)[:256]}
        with self._lock:
            if self._is_mark(told):
                self._phase, self._marked, self._latest = phase, told["done"], None
                self._loop.call_soon_threadsafe(self._say, told)
                return
            self._latest = told
            if not self._timer_set:
                self._timer_set = True
                self._loop.call_soon_threadsafe(self._loop.call_at, self._said + _INTERVAL_SECONDS, self._deliver)

    def finish(self) -> None:
        """Loop's thread: reports what is left; nothing follows."""
        self._deliver()
        self._finished = True

    def _is_mark(self, told: dict[str, Any]) -> bool:
        grown = told["done"] - self._marked
        share = max(told["total"] / _PARTS, 1)
        return told["phase"] != self._phase or (bool(told["total"]) and grown > 0 and (told["done"] == told["total"] or grown >= share))

    def _deliver(self) -> None:
        with self._lock:
            self._timer_set = False
            told, self._latest = self._latest, None
        if told is not None:
            self._say(told)

    def _say(self, told: dict[str, Any]) -> None:
        if not self._finished:
            self._said = time.monotonic()
            self._report(told)
