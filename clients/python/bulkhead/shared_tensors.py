"""Tensors in memory shared with workers: inputs to fill, and outputs to read."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any, Callable, Sequence

from . import dlpack
from .errors import Error
from .memory import ALIGNMENT, CPU, Allocator, Mapping, Region
from .tensors import ITEM_BYTES, TensorView, array_type, check_shape, element_count

if TYPE_CHECKING:
    from .cuda import Events


PAGE_BYTES = 4096
ARENA_BYTES_MAX = 1 << 30  #: default size of a client's own shared memory


class Lease:
    """Some bytes of a region. Returns them when they have no reader and no request uses them."""

    def __init__(self, region: Region, offset: int, size_bytes: int, lease_id: int, events: Events | None = None, ready: int = 0) -> None:
        self.region = region
        self.offset, self.size_bytes, self.lease_id = offset, size_bytes, lease_id
        self.events = events  #: the channel's, if the region is device memory
        self.ready = ready  #: the event that a reader's stream waits for
        #: Streams that have read or written it, besides the channel's.
        self.streams: set[int] = set()
        self._dropped: tuple[Callable[..., None], tuple[Any, ...]] | None = None

    def when_dropped(self, tell: Callable[..., None], *what: Any) -> None:
        """Calls ``tell(*what)`` on the thread that drops the last reference, at any point, even at
        the interpreter's end."""
        self._dropped = tell, what

    def __del__(self) -> None:
        if self._dropped is not None:
            tell, what = self._dropped
            tell(*what)

    def view(self) -> memoryview | None:
        return self.region.view(self.offset, self.size_bytes, self) if isinstance(self.region, Mapping) else None


class SlabTensor(TensorView):
    """A tensor in shared memory. ``with`` or ``release()`` end this object's use of it.

    Use ``torch()``, ``__dlpack__`` or ``__cuda_array_interface__`` for one on a GPU;
    ``cpu()`` copies it.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], lease: Lease) -> None:
        super().__init__(dtype, shape, None)
        self.lease: Lease | None = lease

    def release(self) -> None:
        """Using this object again is an error; arrays made from it stay valid."""
        self._data = None
        self.lease = None

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def device(self) -> tuple[int, int]:
        """As in DLPack: (1, 0) is the CPU, (2, n) the n-th GPU."""
        return CPU if self.lease is None else self.lease.region.device

    @property
    def data(self) -> memoryview:
        """The bytes, row-major."""
        if self._data is not None:
            return self._data
        if self.device != CPU:
            raise Error("input_invalid", "reading a tensor on the GPU as if it lay in CPU memory", "use torch(), __dlpack__ or cpu()")
        if self.lease is not None:
            self._data = self.lease.view()
        return super().data

    @property
    def address(self) -> int:
        """Address of the first byte: in this process, or a CUdeviceptr."""
        if self.lease is None:
            raise Error("input_invalid", "using a tensor after it was released", "allocate another one")
        return self.lease.region.address + self.lease.offset

    def _on_gpu(self) -> tuple[Lease, Events]:
        if self.lease is None or self.lease.events is None:
            raise Error("input_invalid", "using a tensor as one on the GPU", "it lies in CPU memory, or was released")
        return self.lease, self.lease.events

    def cpu(self) -> TensorView:
        """Returns itself, or a copy of a GPU tensor in CPU memory; waits for the copy."""
        if self.device == CPU:
            return self
        _, events = self._on_gpu()
        copy = bytearray(self.nbytes)
        if copy:
            room = (ctypes.c_ubyte * len(copy)).from_buffer(copy)
            events.gpu.copy(ctypes.addressof(room), self.address, len(copy), events.stream)
            events.gpu.call("cuStreamSynchronize", events.stream)
        return TensorView(self.dtype, self.shape, memoryview(copy))

    def torch(self) -> Any:
        """A view of the slab if that is writable or on a GPU; else a copy."""
        if self.device == CPU:
            return super().torch()
        from torch.utils.dlpack import from_dlpack  # type: ignore[import-not-found, unused-ignore]

        return from_dlpack(self)

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        if self.device == CPU:
            return super().__dlpack__(max_version=max_version, copy=copy)
        lease, events = self._on_gpu()
        if stream != -1:  # -1: no order wanted; else the consumer runs behind the worker
            lease.streams.add(events.admit(stream or 1, lease.ready))
        return dlpack.export_device(self, device=self.device, address=self.address, readonly=not lease.region.writable, keep=lease,
                                    max_version=max_version)  # fmt: skip

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device == CPU:
            raise AttributeError("this tensor does not lie on a GPU")
        lease, events = self._on_gpu()
        return {"version": 3, "shape": self.shape, "typestr": array_type(self.dtype), "strides": None,
                "data": (self.address, not lease.region.writable), "stream": events.stream or 1}  # fmt: skip


class Input(SlabTensor):
    """Memory for an input: fill it in place, then pass it to ``infer`` any number of times.

    Returned once it is released (``with``, or ``release()``), no array refers to it, and no request
    uses it. Do not write to it while a request that uses it is unanswered.
    """

    def __enter__(self) -> Input:
        return self


class Output(SlabTensor):
    """A result in the worker's slab, read-only. Returned to the worker when nothing refers to it.

    Readable after the worker has died; holding it then keeps that memory, as the receipt tells.
    Passed as an input to any model, it is not copied if that model's worker takes loans.
    """

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], lease: Lease) -> None:
        super().__init__(dtype, shape, lease)
        self.name = name

    def __enter__(self) -> Output:
        return self


def leased_room(region: Region, allocator: Allocator, dtype: str, shape: tuple[int, ...], events: Events | None = None) -> Input | None:
    """None if there is not enough room."""
    size = element_count(shape) * ITEM_BYTES[dtype]
    found = allocator.allocate(size)
    if found is None:
        return None
    lease = Lease(region, found[0], size, found[1], events)
    lease.when_dropped(allocator.release, found[0], size)
    return Input(dtype, shape, lease)


class Arena:
    """This process' memory for inputs of any model; each worker that receives one borrows the
    slab. Any thread."""

    def __init__(self, bytes_max: int = ARENA_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._slabs: list[tuple[Mapping, Allocator]] = []
        self._process = os.getpid()

    def allocate(self, shape: Sequence[int], dtype: str) -> Input:
        dims = check_shape(shape)
        with self._lock:
            if self._process != os.getpid():  # the parent's slabs are not mapped here
                self._slabs, self._process = [], os.getpid()
            for mapping, allocator in self._slabs:
                found = leased_room(mapping, allocator, dtype, dims)
                if found is not None:
                    return found
            needed = -(-(element_count(dims) * ITEM_BYTES[dtype] + ALIGNMENT) // PAGE_BYTES) * PAGE_BYTES
            wanted = max(needed, 2 * max((m.size_bytes for m, _ in self._slabs), default=1 << 19))
            used = sum(m.size_bytes for m, allocator in self._slabs if not allocator.is_empty)
            if needed > self.bytes_max - used:
                raise Error("resources_exhausted", f"{needed} bytes of shared memory; {used} of at most {self.bytes_max} bytes are in use",
                            "drop tensors that are no longer needed, or connect with a larger memory_bytes_max")  # fmt: skip
            for mapping, allocator in self._slabs:
                if allocator.is_empty:
                    mapping.retire()
            self._slabs = [one for one in self._slabs if not one[0].retired]
            size = max(needed, min(wanted, (self.bytes_max - used) // PAGE_BYTES * PAGE_BYTES))
            mapping = Mapping.make(size, "bulkhead-client", only_we_write=True)
            allocator = Allocator(mapping.size_bytes)
            self._slabs.append((mapping, allocator))
            found = leased_room(mapping, allocator, dtype, dims)
            assert found is not None
            return found

    def close(self) -> None:
        with self._lock:
            for mapping, _ in self._slabs:
                mapping.retire()
            self._slabs.clear()
