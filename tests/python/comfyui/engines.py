"""Engines of the canary's own: small, quick to load, and as ill-behaved as they are asked to be."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

from bulkhead.engine import Context, InvalidInput, Result, Tensor, Text, method

STEP_SECONDS = 0.01  #: between two parts, so that a client can read them


class Echo:
    """Gives its input back, or fails as it is told."""

    def load(self, context: Context) -> None:
        self.context = context

    @method(
        inputs=[Tensor("x", "float32", ["batch=1..64", "height=1..8192", "width=1..8192", "colours=1..4"])],
        parameters=[Text("fail", "")],
        outputs=[Tensor("y", "float32", ["batch=1..64", "height=1..8192", "width=1..8192", "colours=1..4"])],
    )
    def repeat(self, *, x: Any, fail: str) -> Result:
        """Gives an image back."""
        if fail == "memory":
            raise MemoryError("there is no more")
        if fail == "input":
            raise InvalidInput("reading x", "give another one")
        if fail:
            raise RuntimeError(fail)
        return Result(y=x, values={"shape": list(x.shape)})

    @method(parameters=[Text("prompt")])
    def wait(self, *, prompt: str) -> Generator[Result, None, Result]:
        """Streams until it is cancelled."""
        count, step = 0, threading.Event()
        while True:
            count += 1
            step.wait(STEP_SECONDS)
            yield Result(values={"text": str(count)})
