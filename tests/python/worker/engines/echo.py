"""What the minimal worker in C++ does: gives its input back, once that does not begin with a
negative number, runs out of memory where that is infinite, and generates."""

import sys
import time
from typing import Any

import numpy
from bulkhead.engine import Context, Integer, Result, Tensor, Text, method

ANY = ["0..16777216"]


class Echo:
    def load(self, context: Context) -> None:
        pass

    @method(inputs=[Tensor("x", "float32", ANY)], outputs=[Tensor("y", "float32", ANY)])
    def forward(self, *, x: Any) -> Any:
        while x.size and x[0] < 0:  # until the client writes another number there
            time.sleep(0.001)
        return {"y": numpy.empty(1 << 58) if x.size and numpy.isinf(x[0]) else x}


class Fails(Echo):
    def load(self, context: Context) -> None:
        raise RuntimeError("the weights are of another model")


class OnAGpu(Echo):
    """Loads only where a file is there already. Imports torch if it is told to."""

    def load(self, context: Context) -> None:
        super().load(context)
        open(context.options["granted"]).close()
        if "torch" in context.options:
            import torch  # noqa: F401


class Unloads(Echo):
    """Its unload reads from a pipe what it shall do, and waits for that."""

    def load(self, context: Context) -> None:
        super().load(context)
        self.pipe = context.options["pipe"]

    def unload(self) -> None:
        print("unload is called", file=sys.stderr)
        with open(self.pipe) as pipe:
            if pipe.read() == "raise":
                raise RuntimeError("the weights are gone already")


class Generates(Echo):
    """Numbers that follow the last token of its prompt, one a part; after the first, once the
    prompt does not begin with 0. Runs out of memory where that is negative."""

    def load(self, context: Context) -> None:
        super().load(context)
        for step in range(1, 9):
            context.progress(step, 8)

    @method(inputs=[Tensor("tokens", "int64", ["1..64"])], parameters=[Integer("max_new_tokens", 16)], outputs=[Tensor("tokens", "int64", ["0.."])])
    def generate(self, *, tokens: Any, max_new_tokens: int) -> Any:
        given = [int(tokens[-1]) + 1 + index for index in range(max_new_tokens)]
        for index, token in enumerate(given):
            yield Result(values={"tokens": [token], "index": index})
            while tokens[0] == 0:  # until the client writes another number there
                time.sleep(0.001)
            if tokens[0] < 0:
                raise MemoryError("no room for the next token")
        return {"tokens": numpy.array(given)}


    @method(inputs=[Tensor("x", "float32", ANY)], parameters=[Integer("times", 1)], outputs=[Tensor("y", "float32", ANY)])
    def repeat(self, *, x: Any, times: int) -> Any:
        for _ in range(times):
            yield {"y": x}
        return {"y": x}


class Seeing(Echo):
    """Answers with what it was given, word by word, with the names that Bulkhead's Qwen3-VL has."""

    @method(inputs=[Tensor("images", "uint8", ["1..", "1..", "1..", 3], optional=True)], parameters=[Text("prompt")])
    def answer(self, *, prompt: str, images: Any = None) -> Any:
        told = f"{prompt} {None if images is None else images.tolist()}"
        for word in told.split(" "):
            yield Result(values={"text": f"{word} "})
        return Result(values={"text": f"{told} "})


class Loads(Echo):
    """For ever."""

    def load(self, context: Context) -> None:
        super().load(context)
        while True:
            context.progress(1, 2)
            time.sleep(0.01)
