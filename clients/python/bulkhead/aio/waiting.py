"""Waits on an event loop with deadlines. Nothing that arrives at the moment of a
cancellation is lost."""

from __future__ import annotations

import asyncio
from collections import deque

from ..errors import Error


class Waiters:
    """Tasks that wait until something may have changed."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def wait(self, seconds: float, attempt: str) -> None:
        loop = asyncio.get_running_loop()
        one: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(max(seconds, 0), _expire, one, attempt)
        self._waiting.add(one)
        try:
            await one
        finally:
            timer.cancel()
            self._waiting.discard(one)

    def wake(self) -> None:
        for one in self._waiting:
            if not one.done():
                one.set_result(None)


class Turns:
    """A limited number of turns at a time, first come, first served."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: deque[asyncio.Future[None]] = deque()

    async def take(self, seconds: float, attempt: str) -> None:
        if self._free > 0 and not self._queue:
            self._free -= 1
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(max(seconds, 0), _expire, turn, attempt)
        self._queue.append(turn)
        try:
            await turn
        except BaseException:
            if turn in self._queue:
                self._queue.remove(turn)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give()  # granted at the moment of the cancellation
            raise
        finally:
            timer.cancel()

    def give(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                return turn.set_result(None)
        self._free += 1

    def end(self, error: Error) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_exception(error.again())


def _expire(one: asyncio.Future[None], attempt: str) -> None:
    if not one.done():
        one.set_exception(Error("deadline_exceeded", attempt, "allow more time"))
