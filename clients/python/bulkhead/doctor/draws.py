"""Finds where a step draws Python's random numbers, or numpy's: a replayed graph keeps those
of its capture."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
from types import FrameType
from typing import Any, Iterator

from . import findings
from .coverage import traced
from .findings import Findings
from .source import Location, is_users, line_location, name_of
from .state import reached

_REMEDY = (
    "draw on the device, torch.rand((), device=x.device), whose numbers each replay draws; or before the step, and fill a "
    "static tensor"
)


class Draws:
    """The generators that a step can reach, and their states before its latest call."""

    def __init__(self, roots: dict[str, Any]) -> None:
        self._generators: list[Any] = [random._inst]
        numpy = sys.modules.get("numpy.random")
        kinds: tuple[type, ...] = (random.Random,)
        if numpy is not None:
            self._generators.append(numpy.mtrand._rand)
            kinds += numpy.RandomState, numpy.Generator
        objects = [one for _, one in reached(roots) if isinstance(one, kinds)]
        self._generators += [one for one in objects if not isinstance(one, random.SystemRandom)]
        self.begin_call()

    def begin_call(self) -> None:
        self._before = self._states()

    @property
    def has_drawn(self) -> bool:
        return self._states() != self._before

    def restore(self) -> None:
        """To what they were before the latest call."""
        for generator, state in zip(self._generators, self._before):
            _restore(generator, state)

    @contextlib.contextmanager
    def told(self, found: Findings) -> Iterator[None]:
        """Reports the lines of user code that draw meanwhile."""
        states = self._states()
        at: Location | None = None

        def stepped(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal states, at
            if (now := self._states()) != states:
                states = now
                if at is not None:
                    reason = f"`{at.text.strip()}` draws a random number on the host: a replay keeps that of the capture"
                    found.add(findings.RNG, findings.STALE, at, reason, _REMEDY)
            running = frame.f_back if event == "return" else frame
            if running is not None and is_users(running.f_code.co_filename):
                at = line_location(os.path.abspath(running.f_code.co_filename), running.f_lineno, name_of(running.f_code))
            return stepped

        def called(frame: FrameType, event: str, argument: Any) -> Any:
            return stepped(frame, event, argument) if is_users(frame.f_code.co_filename) else None

        with traced(called):
            yield

    def _states(self) -> list[Any]:
        return [_state(one) for one in self._generators]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    has_bits = hasattr(generator, "bit_generator")
    return pickle.dumps(generator.bit_generator.state if has_bits else generator.get_state(legacy=False))


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = pickle.loads(state)
    else:
        generator.set_state(pickle.loads(state))
