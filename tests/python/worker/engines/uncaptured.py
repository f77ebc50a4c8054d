"""Engines whose step reads a value. Their GPU is the tests' stand-in, in whose capture the read
fails with CUDA's error, or ends the process."""

import os
import signal
import sys
from pathlib import Path
from typing import Any, Iterable
from unittest import mock

import torch
from bulkhead.engine import Context, Tensor, method

sys.path.append(str(Path(__file__).resolve().parent.parent))
from fake_cuda import FakeCuda  # noqa: E402

WARM_UPS = [1.0] * 3
REFUSED = RuntimeError("CUDA error: operation not permitted when stream is capturing")


class Uncaptured:
    def load(self, context: Context) -> None:
        buckets = [{"x": torch.zeros(1, 4, device=context.device)}]
        graphs = getattr(context, "_graphs", None)
        if graphs is None:  # the doctor looks at it
            context.graph(self.compute, buckets, name="compute")
            return
        graphs._cuda = FakeCuda()
        with mock.patch.object(torch.Tensor, "item", side_effect=self.reads()):
            self.step = context.graph(self.compute, buckets, name="compute")

    def reads(self) -> Iterable[float | Exception]:
        return [*WARM_UPS, REFUSED]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:
            return x * 2
        return x

    @method(inputs=[Tensor("x", "float32", [1, 4])], outputs=[Tensor("y", "float32", [1, 4])])
    def forward(self, *, x: Any) -> Any:
        return {"y": self.step(x=torch.as_tensor(x)).numpy()}


class Crashes(Uncaptured):
    def reads(self) -> Iterable[float | Exception]:
        yield from WARM_UPS
        os.kill(os.getpid(), signal.SIGSEGV)


class Many(Uncaptured):
    """Reads in ten lines; its scale is a variable of the fleet."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = x * float(os.environ["SCALE"])
        x = x * x[0, 0].item()
        x = x * x[0, 1].item()
        x = x * x[0, 2].item()
        x = x * x[0, 3].item()
        x = x * x.sum().item()
        x = x * x.amin().item()
        x = x * x.amax().item()
        x = x * x.mean().item()
        x = x * x.std().item()
        return x * x.norm().item()
