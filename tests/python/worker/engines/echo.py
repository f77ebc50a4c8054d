"""What the minimal worker in C++ does: gives its input back, after a while if it is told to."""

import time
from typing import Any

from bulkhead.engine import Context, Tensor, method

ANY = ["0..16777216"]


class Echo:
    def load(self, context: Context) -> None:
        self.run_seconds = context.options.get("run_ms", 0) / 1000

    @method(inputs=[Tensor("x", "float32", ANY)], outputs=[Tensor("y", "float32", ANY)])
    def forward(self, *, x: Any) -> Any:
        time.sleep(self.run_seconds)
        return {"y": x}


class Fails(Echo):
    def load(self, context: Context) -> None:
        raise RuntimeError("the weights are of another model")


class Loads(Echo):
    """For ever."""

    def load(self, context: Context) -> None:
        super().load(context)
        while True:
            context.progress(1, 2)
            time.sleep(0.01)
