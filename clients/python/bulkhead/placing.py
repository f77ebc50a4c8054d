"""Shared by the blocking and the asyncio channel: makes tensors readable for the worker."""

from __future__ import annotations

from typing import Any, Callable, Generator, Sequence, TypeVar

from .memory import CPU
from .protocol import ChannelCore
from .shared_tensors import Input, SlabTensor
from .slabs import Placed
from .tensors import Source, dtype_name

T = TypeVar("T")
#: Yields a condition to wait for, and the error's text if the wait fails; continues once it holds.
Steps = Generator[tuple[Callable[[], bool], str], None, T]


class PlacingChannel:
    """What a channel knows of its worker, and the steps of placing a tensor. Subclasses
    implement the waiting."""

    core: ChannelCore

    @property
    def model(self) -> str:
        """The model's name."""
        return self.core.model

    @property
    def generation(self) -> int:
        """The worker's generation; the model's next process has another."""
        return self.core.generation

    @property
    def methods(self) -> dict[str, Any]:
        """As the worker describes them:
        ``{"forward": {"inputs": [{"name", "dtype", "shape"}], …}}``."""
        return self.core.methods

    def _grown(self) -> Steps[None]:
        yield lambda: not self.core.slabs.growing, "waiting for one more slab"

    def _allocated(self, shape: Sequence[int], dtype: Any, on_gpu: bool) -> Steps[Input]:
        name = dtype_name(dtype)
        while (found := self.core.slabs.try_allocate(shape, name, on_gpu=on_gpu)) is None:
            yield from self._grown()
        return found

    def _results_placed(self, size_bytes: int) -> Steps[bool]:
        yield from self._grown()  # a slab that an earlier call no longer waits for
        if not self.core.slabs.ask_for_gpu_results(size_bytes):
            return False
        yield from self._grown()
        return self.core.slabs.gpu_results()

    def _copied(self, value: Any, dtype: str | None) -> Steps[tuple[Input, object]]:
        """Copies the tensor. Also returns what must live until the copy is made."""
        slabs = self.core.slabs
        if isinstance(value, SlabTensor) and slabs.gpu_kind is None:
            value = value.cpu()
        source = Source.of(value, dtype, slabs.gpu_stream)
        room = yield from self._allocated(source.shape, source.dtype, source.device != CPU)
        return room, slabs.fill(room, source)

    def _placed(self, value: Any, dtype: str | None) -> Steps[Placed]:
        """Copies only if the worker cannot read the tensor in place."""
        if placed := self.core.slabs.own(value):
            return placed
        if isinstance(value, SlabTensor) and value.lease is not None:
            if loan := self.core.slabs.lend(value):
                yield lambda: not loan.pending, "waiting for the worker to take a loan"
                if loan.refused is None:
                    return Placed(value, loan.slab_id, loan)
        copy, keep = yield from self._copied(value, dtype)
        placed = self.core.slabs.own(copy)
        assert placed is not None
        placed.keep = keep
        return placed
