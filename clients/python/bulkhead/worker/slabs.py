"""The worker's side of one channel's slabs: its own memory, loans from other workers, and the
leases in them."""

from __future__ import annotations

import os
import threading
import time
from typing import Callable, Iterable, Iterator

from .. import layout
from ..errors import Error
from ..layout import DIRECTION, KIND, LIMITS
from ..memory import ALIGNMENT, Allocator, Mapping
from ..protocol import packet
from .messages import Lease, Tensor

INPUT, OUTPUT = DIRECTION["input"], DIRECTION["output"]
HOST = KIND["host_memfd"]
_LENT_MIN = LIMITS["lent_slab_id_min"]
_PAGE_BYTES = 4096
_GROWTH_BYTES = 4 << 20  #: minimum growth of an output slab, if the channel's bound allows it

Offer = tuple[bytes, int]


class Budget:
    """Bytes shared by all channels of a worker. Any thread."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        with self._lock:
            fits = self.used + size_bytes <= self.most
            self.used += size_bytes if fits else 0
            return fits

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self.used -= size_bytes


class Slab:
    """One slab and its leases."""

    def __init__(self, slab_id: int, direction: int, memory: Mapping, request_id: int, *, first: bool = False, offered: bool = False) -> None:
        self.id, self.direction, self.memory, self.request_id = slab_id, direction, memory, request_id
        self.first, self.offered = first, offered
        self.withdrawn = self.returned = False
        self.allocator = Allocator(memory.size_bytes)
        self.leases: dict[int, Lease] = {}  #: by offset; only for an output slab
        self.idle_since = time.monotonic()

    @property
    def is_loan(self) -> bool:
        return self.id >= _LENT_MIN

    @property
    def own_bytes(self) -> int:
        return 0 if self.is_loan else self.memory.size_bytes


class ChannelSlabs:
    """Any thread: the loop's thread serves the client, the main thread allocates results."""

    def __init__(self, label: str, bytes_max: int, idle_seconds: float, worker: Budget) -> None:
        self._label, self._idle_seconds, self._worker = label, idle_seconds, worker
        self._own = Budget(bytes_max)
        self._lock = threading.RLock()
        self._slabs: dict[int, Slab] = {}
        self._last_id = self._last_loan = 0

    @property
    def bytes(self) -> int:
        return self._own.used

    def add(self, direction: int, size_bytes: int, request_id: int = 0) -> Slab:
        """Makes a slab of at least ``size_bytes`` and queues its offer. Raises
        ``resources_exhausted``."""
        with self._lock:
            left = self._own.most - self._own.used
            if size_bytes <= left:
                size_bytes = min(left, -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES)
            self._check_count()
            if not self._own.take(size_bytes):
                raise Error("resources_exhausted",
                            f"a slab of {size_bytes} bytes for a channel that has {self._own.used} of its {self._own.most}",
                            "give results back sooner, or raise `channel.max` of the model")  # fmt: skip
            if not self._worker.take(size_bytes):
                self._own.give_back(size_bytes)
                raise Error("resources_exhausted",
                            f"a slab of {size_bytes} bytes; the slabs of all channels of this worker have {self._worker.used} of {self._worker.most}",
                            "close channels or give results back, or raise `channel.worker_max` of the model")  # fmt: skip
            self._last_id += 1
            slab_id = self._last_id
            try:
                memory = Mapping.make(size_bytes, f"{self._label}{slab_id}", only_we_write=direction == OUTPUT)
            except BaseException:
                self._own.give_back(size_bytes)
                self._worker.give_back(size_bytes)
                raise
            first = all(slab.direction != direction for slab in self._slabs.values())
            slab = self._slabs[slab_id] = Slab(slab_id, direction, memory, request_id, first=first)
            return slab

    def lend(self, slab_id: int, size_bytes: int, fd: int) -> None:
        """Takes over ``fd``, another worker's output slab. Raises ``protocol_violation`` or
        ``resources_exhausted``."""
        with self._lock:
            if slab_id <= self._last_loan:
                os.close(fd)
                raise Error("protocol_violation", f"lending slab {slab_id} after slab {self._last_loan}",
                            "number each loan of a channel above those before it")  # fmt: skip
            try:
                self._check_count()
            except Error:
                os.close(fd)
                raise
            self._last_loan = slab_id
            try:
                memory = Mapping.lent(fd, size_bytes)
            except Error as error:
                raise error.during(f"taking lent slab {slab_id}") from None
            self._slabs[slab_id] = Slab(slab_id, INPUT, memory, 0, offered=True)

    def _check_count(self) -> None:
        if len(self._slabs) >= LIMITS["slabs_max"]:
            raise Error("resources_exhausted", f"slab {LIMITS['slabs_max'] + 1} of a channel",
                        "ask for fewer, larger slabs, return loans, or raise `channel.input` and `channel.output`")  # fmt: skip

    @property
    def has_offers(self) -> bool:
        with self._lock:
            return any(not slab.offered for slab in self._slabs.values())

    def take_offers(self) -> list[Offer]:
        """Packets and descriptors of slabs that the client does not know yet."""
        with self._lock:
            offers = []
            for slab in self._slabs.values():
                if not slab.offered:
                    slab.offered = True
                    body = layout.SLAB_OFFER.pack(slab_id=slab.id, direction=slab.direction, kind=HOST, size_bytes=slab.memory.size_bytes)
                    offers.append((packet("slab_offer", body, slab.request_id), slab.memory.fd))
            return offers

    # --- inputs

    def input(self, tensor: Tensor) -> memoryview:
        """Returns the tensor's bytes, read-only; they keep the memory mapped. Raises
        ``protocol_violation``."""
        lease = tensor.lease
        with self._lock:
            slab = self._slabs.get(lease.slab_id)
            if slab is None or slab.direction != INPUT or slab.returned:
                why = ": it was returned" if slab is not None and slab.returned else ""
                raise Error("protocol_violation", f"slab {lease.slab_id} is not an input slab of this channel{why}",
                            "put inputs into a slab that was offered with direction input, or lent")  # fmt: skip
            size = slab.memory.size_bytes
            if lease.offset + lease.size_bytes > size or lease.offset % ALIGNMENT:
                raise Error("protocol_violation", f"{lease.size_bytes} bytes at offset {lease.offset} of slab {lease.slab_id}, which has {size} bytes",
                            f"place tensors inside the slab, at multiples of {ALIGNMENT}")  # fmt: skip
            if tensor.event_id:
                raise _unknown_event(tensor.event_id)
            return slab.memory.view(lease.offset, lease.size_bytes, slab.memory).toreadonly()

    def drop_writes(self, tensors: Iterable[Tensor]) -> None:
        """Drops what an engine wrote to inputs in loans."""
        with self._lock:
            for lease in (tensor.lease for tensor in tensors):
                slab = self._slabs.get(lease.slab_id)
                if slab is not None and slab.is_loan:
                    slab.memory.drop_writes(lease.offset, lease.size_bytes)

    # --- outputs

    def allocate(self, size_bytes: int) -> tuple[Lease, memoryview]:
        """Allocates one output; adds a slab if none has room. Raises ``resources_exhausted``."""
        with self._lock:
            if (room := self._allocate_in_existing(size_bytes)) is not None:
                return room
            in_use = sum(slab.memory.size_bytes for slab in self._outputs())
            at_least = max(size_bytes, ALIGNMENT)
            step = max(at_least, _GROWTH_BYTES, min(in_use, (self._own.most - self._own.used) // 2))
            while True:  # smaller steps until one fits, at least the needed size
                try:
                    self.add(OUTPUT, step)
                    break
                except Error:
                    if step == at_least:
                        raise
                    step = max(at_least, step // 2)
            room = self._allocate_in_existing(size_bytes)
            assert room is not None
            return room

    def _outputs(self) -> Iterator[Slab]:
        return (slab for slab in self._slabs.values() if slab.direction == OUTPUT and not slab.withdrawn and not slab.returned)

    def _allocate_in_existing(self, size_bytes: int) -> tuple[Lease, memoryview] | None:
        for slab in self._outputs():
            if (found := slab.allocator.allocate(size_bytes)) is not None:
                offset, lease_id = found
                lease = slab.leases[offset] = Lease(slab.id, offset, size_bytes, lease_id)
                return lease, slab.memory.view(offset, size_bytes, slab.memory)
        return None

    def release(self, lease: Lease) -> None:
        """Raises ``protocol_violation`` for a lease that is not held."""
        with self._lock:
            slab = self._slabs.get(lease.slab_id)
            if slab is None or slab.direction != OUTPUT:
                raise Error("protocol_violation", f"releasing a lease of slab {lease.slab_id}, which is not an output slab of this channel",
                            "give back each lease of a result once")  # fmt: skip
            if lease.event_id:
                raise _unknown_event(lease.event_id)
            if slab.leases.get(lease.offset) != lease:
                raise Error("protocol_violation",
                            f"giving back {lease.size_bytes} bytes at offset {lease.offset} of lease_id {lease.lease_id}, which are not leased",
                            "give each lease back once, as it was received")  # fmt: skip
            del slab.leases[lease.offset]
            slab.allocator.release(lease.offset, lease.size_bytes)
            if not slab.leases:
                slab.idle_since = time.monotonic()

    # --- returning

    def give_back(self, slab_id: int) -> None:
        """The client returns a slab. Raises ``protocol_violation``."""
        with self._lock:
            slab = self._slabs.get(slab_id)
            why = ("which this channel does not have" if slab is None or not slab.offered else
                   "which was returned before" if slab.returned else
                   "an output slab that was not withdrawn" if slab.direction == OUTPUT and not slab.withdrawn else "")  # fmt: skip
            if why:
                raise Error("protocol_violation", f"returning slab {slab_id}, {why}",
                            "return each slab once: a loan, an input slab, or an output slab that was withdrawn")  # fmt: skip
            assert slab is not None
            slab.returned = True

    def drop_returned(self, is_read: Callable[[int], bool]) -> None:
        """Unmaps returned slabs that no request reads."""
        with self._lock:
            for slab in [slab for slab in self._slabs.values() if slab.returned and not is_read(slab.id)]:
                self._drop(slab)

    def drop_all(self) -> None:
        """The channel has ended. An array that an engine keeps keeps its memory mapped."""
        with self._lock:
            for slab in list(self._slabs.values()):
                self._drop(slab)

    def _drop(self, slab: Slab) -> None:
        del self._slabs[slab.id]
        self._own.give_back(slab.own_bytes)
        self._worker.give_back(slab.own_bytes)

    def idle_due(self) -> float | None:
        """When the next slab may be withdrawn, on the monotonic clock."""
        with self._lock:
            return min((slab.idle_since + self._idle_seconds for slab in self._outputs() if self._is_idle(slab)), default=None)

    def withdraw_idle(self) -> list[int]:
        """Returns the ids of idle slabs: they get no more results, and the client
        must return them."""
        with self._lock:
            late = time.monotonic() - self._idle_seconds
            idle = [slab for slab in self._outputs() if self._is_idle(slab) and slab.idle_since <= late]
            for slab in idle:
                slab.withdrawn = True
            return [slab.id for slab in idle]

    @staticmethod
    def _is_idle(slab: Slab) -> bool:
        return not slab.first and slab.offered and not slab.leases


def _unknown_event(event_id: int) -> Error:
    return Error("protocol_violation", f"event {event_id}, which this channel's client does not record",
                 "name an event that was offered with from_worker = 0")  # fmt: skip
