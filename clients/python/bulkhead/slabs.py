"""One channel's slabs, without I/O: the worker's own, and other workers' slabs, lent to it,
which hold results."""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Protocol, Sequence

from . import layout
from .errors import Error, broken
from .layout import DIRECTION, FEATURE, KIND, LIMITS
from .memory import ALIGNMENT, CPU, Allocator, Mapping, Region
from .shared_tensors import Input, Lease, Output, SlabTensor, leased_room
from .tensors import DTYPE_NAMES, DTYPE_NUMBERS, ITEM_BYTES, Source, check_shape, element_count

if TYPE_CHECKING:
    from .cuda import Events

_NAME_BYTES_MAX = layout.TENSOR.text_bytes_max["name"]
_RANK_MAX = LIMITS["rank_max"]
IDLE_SECONDS = 30.0  #: an input slab other than the first is returned after being empty this long


class Send(Protocol):
    """Queues one message, with the mapping's descriptor. Returns the request's number."""

    def __call__(self, kind: str, body: bytes, *, ask: bool = False, fd_of: Mapping | None = None) -> int: ...


#: One message to send, and the mapping whose descriptor goes with it.
Packet = tuple[bytes, "Mapping | None"]


class Loan:
    """A loan of other memory, mapped by this channel's worker."""

    def __init__(self, slab_id: int, mapping: Region) -> None:
        self.slab_id = slab_id
        self.pending = True
        self.refused: Error | None = None
        self.mapping = weakref.ref(mapping)
        self.users: weakref.WeakSet[Placed] = weakref.WeakSet()

    @property
    def is_over(self) -> bool:
        """Its owner reclaims it or is gone, and no request uses it."""
        mapping = self.mapping()
        return not self.pending and not self.users and (mapping is None or mapping.retired)


class Placed:
    """A tensor that the worker can read. It borrows the bytes for as long as this lives."""

    def __init__(self, tensor: SlabTensor, slab_id: int, loan: Loan | None = None) -> None:
        assert tensor.lease is not None
        self.dtype, self.shape, self.lease, self._slab_id = tensor.dtype, tensor.shape, tensor.lease, slab_id
        self.keep: object = None  #: source of a copy that is still queued on a stream
        if loan is not None:
            loan.users.add(self)

    def members(self, name: str) -> tuple[Any, ...]:
        """Members of its TensorDescriptor."""
        lease = self.lease
        written = 0 if lease.events is None else lease.events.record_behind(lease.streams)
        return (layout.text_field("TensorDescriptor.name", name, _NAME_BYTES_MAX), DTYPE_NUMBERS[self.dtype],
                len(self.shape), 0, written, self._slab_id, 0, lease.offset, lease.size_bytes, lease.lease_id,
                *_dims_and_strides(self.shape))  # fmt: skip


@functools.lru_cache(maxsize=256)
def _dims_and_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    rest = (0,) * (_RANK_MAX - len(shape))
    return (*shape, *rest, *layout.contiguous_strides(shape), *rest)


@functools.lru_cache(maxsize=256)
def _shape_and_bytes(extents: tuple[int, ...], dtype: str) -> tuple[tuple[int, ...], int]:
    shape = check_shape(extents)
    return shape, element_count(shape) * ITEM_BYTES[dtype]


@functools.lru_cache(maxsize=256)
def _name(field: bytes) -> str:
    return field.partition(b"\0")[0].decode()


class _InputSlab:
    def __init__(self, number: int, region: Region) -> None:
        self.number, self.region = number, region
        self.allocator = Allocator(region.size_bytes)
        self.empty_since: float | None = None


class _Unmapped(Region):
    """A worker's output slab that could not be mapped here: a request with a result in it fails."""

    def __init__(self, size_bytes: int, device: tuple[int, int], why: Error) -> None:
        super().__init__(0, size_bytes, False, device)
        self.why = why


class _Growing:
    """A requested slab."""

    def __init__(self, request: int, size_bytes: int, direction: int, kind: int) -> None:
        self.request, self.size_bytes, self.direction, self.kind = request, size_bytes, direction, kind


class Slabs:
    """``outgoing`` and ``send`` take messages; ``wake`` is called, on any thread, when ``settle``
    has work. ``events``: the channel's part in a GPU, if it has one."""

    def __init__(self, outgoing: deque[Packet], send: Send, wake: Callable[[], None], events: Events | None = None) -> None:
        self._outgoing = outgoing
        self._send = send
        self._wake = wake
        self.events = events
        self._gpu_agreed: int | None = None
        self._gpu_refused: Error | None = None
        self._features = 0
        self._bytes_max = 0
        self._bytes = 0
        self._inputs: list[_InputSlab] = []
        self._outputs: dict[int, Region] = {}
        #: Returned, because they could not be mapped; results may still come that lie in them.
        self._refused: dict[int, _Unmapped] = {}
        self._growing: _Growing | None = None
        self._growth_refused: Error | None = None
        self._loans: weakref.WeakKeyDictionary[Region, Loan] = weakref.WeakKeyDictionary()
        self._open_loans: list[Loan] = []
        self._asked: dict[int, Loan] = {}
        self._last_loan = LIMITS["lent_slab_id_min"] - 1
        # Appended by dropped leases, on any thread.
        self._releases: deque[tuple[int, int, int, int, set[int] | None]] = deque()
        self._unmapped: deque[tuple[int, int]] = deque()
        #: The worker may be asking for one at the same time.
        self._returned_unasked: set[int] = set()

    def agree(self, features: int, bytes_max: int) -> None:
        self._features, self._bytes_max = features, bytes_max
        if self.events is not None and features & FEATURE["returning"]:
            kinds = [kind for kind in ("cuda_vmm", "cuda_ipc") if features & FEATURE[kind]]
            self._gpu_agreed = KIND[kinds[0]] if kinds else None

    @property
    def gpu_refused(self) -> Error | None:
        """Why no more GPU memory is requested: one of its slabs, or the worker's events, could
        not be imported."""
        return self._gpu_refused or (None if self.events is None else self.events.refused)

    @property
    def gpu_kind(self) -> int | None:
        """The kind of GPU slabs, if agreed and possible."""
        return None if self.gpu_refused is not None else self._gpu_agreed

    def __len__(self) -> int:
        return len(self._inputs) + len(self._outputs) + len(self._open_loans)

    # --- inputs

    def try_allocate(self, shape: Sequence[int], dtype: str, *, on_gpu: bool = False) -> Input | None:
        """None: a slab was requested; call again when ``growing`` is false."""
        dims = check_shape(shape)
        self._raise_refusal()
        if on_gpu and self.gpu_kind is None:
            why = "" if self.gpu_refused is None else f" ({self.gpu_refused.attempt})"
            raise Error("not_permitted", f"an input on the GPU: no GPU memory is shared with this worker{why}",
                        "open the channel with the GPU that the model is on; else allocate it in CPU memory")  # fmt: skip
        for slab in self._inputs:
            if (slab.region.device != CPU) == on_gpu:
                found = leased_room(slab.region, slab.allocator, dtype, dims, self.events if on_gpu else None)
                if found is not None:
                    return found
        if self._growing is None:
            self._ask_for_input(element_count(dims) * ITEM_BYTES[dtype], on_gpu)
        return None

    @property
    def gpu_stream(self) -> int | None:
        """The stream for copies of GPU tensors; None if no GPU is shared with this worker."""
        return None if self.events is None or self.gpu_kind is None else self.events.stream

    @property
    def growing(self) -> bool:
        return self._growing is not None

    def _raise_refusal(self) -> None:
        if self._growth_refused is not None:
            refused, self._growth_refused = self._growth_refused, None
            raise refused

    def _ask_for_input(self, size: int, on_gpu: bool) -> None:
        left = self._bytes_max - self._bytes
        needed = size + ALIGNMENT
        if needed > left or len(self) >= LIMITS["slabs_max"]:
            raise Error("resources_exhausted",
                        f"{size} bytes of input; the channel's slabs hold {self._bytes} of at most {self._bytes_max} bytes",
                        "drop inputs that are no longer needed, or raise the model's channel.max")  # fmt: skip
        have = sum(slab.region.size_bytes for slab in self._inputs if (slab.region.device != CPU) == on_gpu)
        kind = self.gpu_kind if on_gpu and self.gpu_kind is not None else KIND["host_memfd"]
        self._ask_for_slab(max(needed, min(have, left // 2)), DIRECTION["input"], kind)

    def _ask_for_slab(self, size: int, direction: int, kind: int) -> None:
        body = layout.SLAB_REQUEST.pack(direction=direction, kind=kind, size_bytes=size)
        self._growing = _Growing(self._send("slab_request", body, ask=True), size, direction, kind)

    def ask_for_gpu_results(self, size_bytes: int) -> bool:
        """Not while ``growing``: slabs are requested one at a time. Once ``growing`` is false,
        ``gpu_results`` tells whether results lie on the GPU. False: they will not."""
        if self.gpu_kind is None:
            return False
        self._growth_refused = None  # an earlier refusal that no call waits for
        self._ask_for_slab(size_bytes, DIRECTION["output"], self.gpu_kind)
        return True

    def gpu_results(self) -> bool:
        """Whether there is a slab for them. Raises the worker's refusal."""
        self._raise_refusal()
        return any(region.device != CPU for region in self._outputs.values())

    def own(self, value: object) -> Placed | None:
        """Its place, if it lies in an input slab of this channel."""
        if isinstance(value, SlabTensor) and value.lease is not None:
            for slab in self._inputs:
                if slab.region is value.lease.region:
                    return Placed(value, slab.number)
        return None

    def fill(self, room: Input, source: Source) -> object:
        """Copies the source. Returns what must live until the copy is done: on a GPU later,
        in stream order."""
        if room.device == CPU:
            if source.data.nbytes:
                room.data[:] = source.data
            return None
        assert self.events is not None
        if source.device != room.device:
            raise Error("input_invalid", f"a tensor on GPU {source.device[1]}, on a channel with GPU {room.device[1]}",
                        "open the channel with that GPU, or move the tensor")  # fmt: skip
        self.events.gpu.copy(room.address, source.address, room.nbytes, self.events.stream)
        return source.keep

    # --- loans

    def lend(self, tensor: SlabTensor) -> Loan | None:
        """The loan of the tensor's slab, usable when no longer ``pending``; None: copy it."""
        assert tensor.lease is not None
        mapping = tensor.lease.region
        if not isinstance(mapping, Mapping):
            return None  # GPU slabs are not lent
        loan = self._loans.get(mapping)
        if loan is None and not mapping.retired and self._features & FEATURE["lending"] and len(self) < LIMITS["slabs_max"]:
            self._last_loan += 1
            loan = self._loans[mapping] = Loan(self._last_loan, mapping)
            body = layout.SLAB_LEND.pack(slab_id=loan.slab_id, kind=KIND["host_memfd"], size_bytes=mapping.size_bytes)
            self._asked[self._send("slab_lend", body, ask=True, fd_of=mapping)] = loan
            self._open_loans.append(loan)
            mapping.on_change(self._wake)
        return loan if loan is not None and loan.refused is None else None

    def _unwatch(self, loan: Loan) -> None:
        if (mapping := loan.mapping()) is not None:
            mapping.off_change(self._wake)

    # --- messages from the worker

    def on_offer(self, body: memoryview, request_id: int, fds: list[int]) -> None:
        offer = layout.SLAB_OFFER.unpack(body)
        number, size, direction, kind = offer["slab_id"], offer["size_bytes"], offer["direction"], offer["kind"]
        what = f"slab {number} of {size} bytes"
        if kind not in (KIND["host_memfd"], self._gpu_agreed) or direction not in DIRECTION.values():
            raise broken(f"{what} is of a kind that was not agreed")
        handle = bytes(body[layout.SLAB_OFFER.size :])
        if len(fds) != (kind != KIND["cuda_ipc"]) or len(handle) != (64 if kind == KIND["cuda_ipc"] else 0):
            raise broken(f"{what} brings {len(fds)} descriptors and {len(handle)} bytes")
        if size == 0 or size > self._bytes_max - self._bytes:
            raise broken(f"{what} exceeds the channel's bound of {self._bytes_max} bytes")
        if len(self) >= LIMITS["slabs_max"]:
            raise broken(f"{what} is one slab too many")
        if number >= LIMITS["lent_slab_id_min"] or number in self._outputs or any(slab.number == number for slab in self._inputs):
            raise broken(f"{what} has an id that is in use")
        asked = self._growing if request_id != 0 else None
        if request_id != 0 and (asked is None or asked.request != request_id or size < asked.size_bytes or direction != asked.direction
                                or kind != asked.kind):  # fmt: skip
            raise broken(f"{what} is not what was asked for")
        if asked is not None:
            self._growing = None
        writable = direction == DIRECTION["input"]
        region: Region
        if kind == KIND["host_memfd"]:
            region = Mapping.of_slab(fds.pop(), size, writable=writable)
        else:
            from .cuda import import_slab

            assert self.events is not None
            try:
                region = import_slab(self.events, kind, size, writable, fds, handle)
            except Error as error:
                region = _Unmapped(size, self.events.gpu.dlpack_device, error.again())
                if writable or asked is not None or self.gpu_refused is not None:
                    if not writable:
                        self._refused[number] = region
                    return self._do_without(number, region.why, tell=writable and asked is not None)
                # The worker added it by itself: it is returned when it is withdrawn.
        self._bytes += size
        if writable:
            self._inputs.append(_InputSlab(number, region))
        else:
            self._outputs[number] = region

    def _do_without(self, number: int, why: Error, tell: bool) -> None:
        self._gpu_refused = why
        if tell:
            self._growth_refused = Error("not_permitted", f"mapping slab {number} of the worker's on the GPU: {why.attempt}",
                                         "host slabs are used instead")  # fmt: skip
        self._return_unasked(number)

    def _return_unasked(self, number: int) -> None:
        self._returned_unasked.add(number)
        self._send("slab_return", layout.SLAB_NAME.pack(slab_id=number))

    def on_withdraw(self, body: memoryview) -> None:
        number = layout.SLAB_NAME.unpack(body)["slab_id"]
        if number in self._returned_unasked:  # its return was already on its way
            self._returned_unasked.remove(number)
            self._refused.pop(number, None)
            return
        region = self._outputs.pop(number, None)
        for slab in self._inputs:
            if slab.number == number:
                region = slab.region
                self._inputs.remove(slab)
                break
        if region is None or not self._features & FEATURE["returning"]:
            raise broken(f"the worker withdraws slab {number}, which is not there")
        size, unmapped, wake = region.size_bytes, self._unmapped, self._wake

        def give_back() -> None:
            unmapped.append((number, size))
            wake()

        region.on_unmap(give_back)
        region.retire()
        if isinstance(region, _Unmapped):
            give_back()

    def on_event(self, body: memoryview) -> None:
        offer = layout.EVENT_OFFER.unpack(body)
        if self.events is None or self._gpu_agreed is None:
            raise broken("an event that was not agreed")
        self.events.on_offer(offer["event_id"], offer["from_worker"], bytes(offer["handle"]))

    def on_accepted(self, body: memoryview, request_id: int) -> None:
        loan = self._asked.pop(request_id, None)
        if loan is None or layout.SLAB_NAME.unpack(body)["slab_id"] != loan.slab_id:
            raise broken(f"the worker accepts a loan (request {request_id}) that it was not asked about")
        loan.pending = False

    def on_refusal(self, request_id: int, error: Error) -> bool:
        """Whether the error answers a request of these slabs."""
        if self._growing is not None and self._growing.request == request_id:
            self._growing = None
            self._growth_refused = error
        elif loan := self._asked.pop(request_id, None):
            loan.pending, loan.refused = False, error
            self._open_loans.remove(loan)
            self._unwatch(loan)
        else:
            return False
        return True

    def output(self, members: tuple[Any, ...], at: int) -> Output | Error:
        """Returns the tensor whose descriptor begins there, or the error if its slab could not
        be mapped here."""
        field, number, rank, _, ready, slab_id, _, offset, lease_bytes, lease_id = members[at : at + 10]
        name = _name(field)
        dtype = DTYPE_NAMES.get(number)
        region = self._outputs.get(slab_id) or self._refused.get(slab_id)
        if dtype is None or rank > _RANK_MAX or region is None:
            raise broken(f'output "{name}" has an unknown dtype, rank or slab')
        try:
            shape, size = _shape_and_bytes(members[at + 10 : at + 10 + rank], dtype)
        except Error as error:
            raise broken(f'output "{name}" is {error.attempt}') from None
        if size != lease_bytes or offset % ALIGNMENT or offset + size > region.size_bytes:
            raise broken(f'output "{name}" of {size} bytes does not lie in its slab')
        if isinstance(region, _Unmapped):
            self._releases.append((slab_id, offset, size, lease_id, None))
            return region.why
        events = self.events if region.device != CPU else None
        if ready != 0:
            if events is None or not events.knows(ready):
                raise broken(f'output "{name}" names an event {ready} that was not offered')
            events.wait(ready)
        lent = Lease(region, offset, size, lease_id, events, ready)
        lent.when_dropped(self._releases.append, (slab_id, offset, size, lease_id, None if events is None else lent.streams))
        return Output(name, dtype, shape, lent)

    # --- returning

    def settle(self, now: float | None = None) -> None:
        """Tells the worker what is no longer needed."""
        while self._releases:
            count = min(len(self._releases), LIMITS["release_leases_max"])
            members = [count, 0]
            for _ in range(count):
                members += self._let_go(*self._releases.popleft())
            self._outgoing.append((layout.RELEASE_MESSAGE.pack(0, 0, count, members), None))
        if self._open_loans:
            for loan in [one for one in self._open_loans if one.is_over]:
                self._open_loans.remove(loan)
                self._unwatch(loan)
                if (mapping := loan.mapping()) is not None:
                    del self._loans[mapping]
                self._send("slab_return", layout.SLAB_NAME.pack(slab_id=loan.slab_id))
        while self._unmapped:
            number, size = self._unmapped.popleft()
            self._bytes -= size
            self._send("slab_return", layout.SLAB_NAME.pack(slab_id=number))
        if len(self._inputs) > 1 and self._features & FEATURE["returning"]:
            self._return_idle_inputs(time.monotonic() if now is None else now)

    def _let_go(self, slab_id: int, offset: int, size_bytes: int, lease_id: int, streams: set[int] | None) -> tuple[int, ...]:
        """Members of its LeaseRef. Queued GPU reads of it may still run."""
        event_id = 0 if streams is None or self.events is None else self.events.record_behind(streams)
        return slab_id, event_id, offset, size_bytes, lease_id

    def _return_idle_inputs(self, now: float) -> None:
        for slab in self._inputs[1:]:
            if not slab.allocator.is_empty:
                slab.empty_since = None
            elif slab.empty_since is None:
                slab.empty_since = now
            elif now - slab.empty_since >= IDLE_SECONDS:
                self._inputs.remove(slab)
                self._bytes -= slab.region.size_bytes
                self._return_unasked(slab.number)

    def retire(self) -> None:
        """The worker ends soon: workers that borrow its memory must return it."""
        for region in self._outputs.values():
            region.retire()

    def end(self) -> None:
        """Drops the channel's own references; a tensor that is still referenced keeps its slab."""
        self.retire()
        self._growing = None
        for loan in self._asked.values():
            loan.pending = False
        self._asked.clear()
        for loan in self._open_loans:
            self._unwatch(loan)
        self._inputs.clear()
        self._outputs.clear()
        self._open_loans.clear()
        if self.events is not None:
            self.events.close()
