"""Engines for tests: small, quick to load, and as ill-behaved as they are asked to be."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import bulkhead
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
            raise MemoryError("64 GiB asked for, 8 free")
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


class Words:
    """Gives its input back, and has memory of a fake GPU. Takes a negative number for a request
    that does not end."""

    def load(self, context: Context) -> None:
        held = Path(os.environ["HELD_IN"], str(os.getpid()))
        held.with_suffix(".new").write_text(os.environ["HELD_BYTES"])
        held.with_suffix(".new").rename(held)

    @method(inputs=[Tensor("x", "float32", ["n=1..8"])], outputs=[Tensor("y", "float32", ["n=1..8"])])
    def forward(self, *, x: Any) -> Result:
        if x[0] < 0:
            threading.Event().wait()
        return Result(y=x)


class Speaker(Words):
    """Has its answer from the model that `options.language_model` names, as Bulkhead's engines do:
    loaded for a request, by a channel of its own."""

    def load(self, context: Context) -> None:
        super().load(context)
        self.words = str(context.options["language_model"])
        self.client = bulkhead.connect(name=context.model)

    @method(inputs=[Tensor("x", "float32", ["n=1..8"])], outputs=[Tensor("y", "float32", ["n=1..8"])])
    def forward(self, *, x: Any) -> Result:
        with self.client.open(self.words) as channel:
            return Result(y=channel.infer(x=x)["y"].numpy().copy())
