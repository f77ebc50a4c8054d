"""What a worker may say wrongly on a channel: each ends it, whichever client hears it."""

from __future__ import annotations

import os
from typing import Any, Callable

from bulkhead import layout
from bulkhead.layout import FLAG, KIND, LIMITS
from fake_worker import SEAL_GROW, SEAL_SEAL, FakeWorker

SLAB = 65536  #: bytes of those of the usual beginning
Say = Callable[[FakeWorker], Any]


def _offer(number: int, size: int, memfd: tuple[Any, ...] = (), said: int = 0, direction: str = "input") -> Say:
    return lambda w: w.offer(number, direction, size, fd=w.memfd(*memfd) if memfd else None, said=said or None)


def _raw_offer(count: int, kind: str = "host_memfd", **members: int) -> Say:
    def say(worker: FakeWorker) -> None:
        fds = [worker.memfd(4096, "input") for _ in range(count)]
        members_of = {"slab_id": 1, "direction": 1, "kind": KIND[kind], "size_bytes": 4096, **members}
        worker.send("slab_offer", layout.SLAB_OFFER.pack(**members_of), fds=fds)
        for fd in fds:
            os.close(fd)

    return say


def _pipe(worker: FakeWorker) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    worker.offer(1, "input", fd=reading, size=4096)


def _twice(say: Say) -> Say:
    return lambda worker: (say(worker), say(worker))


#: Behind its welcome.
BAD_SLABS: dict[str, Say] = {
    "not sealed": _offer(1, 4096, (4096, "input", SEAL_SEAL | SEAL_GROW)),
    "an output that the client could write": _offer(1, 4096, (4096, "input"), direction="output"),
    "larger than its memory": _offer(1, 8192, (4096, "input")),
    "smaller than its memory": _offer(1, 4096, (8192, "input")),
    "a pipe": _pipe,
    "beyond the bound": _offer(1, 2 << 20),
    "of a kind that was not agreed": _raw_offer(1, "cuda_vmm"),
    "of no bytes": _raw_offer(1, size_bytes=0),
    "without a descriptor": _raw_offer(0),
    "with two": _raw_offer(2),
    "with an id that is in use": _twice(_offer(1, 4096)),
    "with an id of the client's own": _raw_offer(1, slab_id=LIMITS["lent_slab_id_min"]),
    "that nobody asked for": lambda w: w.offer(1, "input", request_id=9),
}  # fmt: skip

#: In place of its welcome.
BAD_WELCOMES: dict[str, Say] = {
    "another magic": lambda w: w.send("welcome", magic=1),
    "another version": lambda w: w.send("welcome", version=9),
    "another size": lambda w: w.send("welcome", size_bytes=33),
    "two bytes": lambda w: w.socket.send(b"\1\2"),
    "a message before it": lambda w: w.send("closing", layout.CLOSING.pack(code=14)),
    "an answer before it": lambda w: w.send("result", layout.RESULT.pack(), 1),
    "one too many": _twice(FakeWorker.welcome),
    "more slabs than may be": lambda w: w.welcome(65),
    "nothing in flight": lambda w: w.welcome(in_flight=0),
}  # fmt: skip


def _result(request: int = 1, flags: int = 0, fds: int = 0, count: int = 1, slab: int = 2, offset: int = 0, size: int = 4, **tensor: Any) -> Say:
    def say(worker: FakeWorker) -> None:
        lease = layout.LEASE.pack(slab_id=slab, offset_bytes=offset, size_bytes=size, lease_id=1)
        body = layout.TENSOR.pack(**{"name": "y", "dtype": 9, "rank": 1, "dims": [1], "strides": [1], "lease": lease, **tensor})
        brought = [os.dup(0) for _ in range(fds)]
        worker.send("result", layout.RESULT.pack(tensor_count=count) + body, request, flags, brought)
        for fd in brought:
            os.close(fd)

    return say


#: For the answer to request 1, of one float32.
BAD_ANSWERS: dict[str, Say] = {
    "an unknown dtype": _result(dtype=99),
    "a rank beyond 8": _result(rank=9),
    "another size": _result(size=8),
    "more elements than bytes": _result(dims=[2]),
    "a negative dim": _result(dims=[-1]),
    "a tensor beyond its slab": _result(dims=[1 << 20], size=4 << 20),
    "a place beyond its slab": _result(offset=SLAB),
    "a place beyond 64 bits": _result(offset=(1 << 64) - 64),
    "a place that is not aligned": _result(offset=4),
    "a place in the input slab": _result(slab=1),
    "a slab that is not there": _result(slab=9),
    "an event": _result(event_id=3),
    "more tensors than came": _result(count=2),
    "a descriptor": _result(fds=1),
    "to a request that was never sent": _result(request=77),
    "twice": _twice(_result()),
    "a part, though no stream was agreed": _result(flags=FLAG["more"]),
    "the error of a request that was never sent": lambda w: w.error(77, 10),
    "a second welcome": FakeWorker.welcome,
    "an unknown type": lambda w: w.send(99),
    "a client's message": lambda w: w.send("cancel", request_id=1),
    "a loan accepted, which was none": lambda w: w.name_slab("slab_accepted", LIMITS["lent_slab_id_min"], 9),
    "a slab withdrawn, which is not there": lambda w: w.name_slab("slab_withdraw", 9),
    "a slab withdrawn twice": _twice(lambda w: w.name_slab("slab_withdraw", 1)),
    "a result in a slab that was withdrawn": lambda w: (w.name_slab("slab_withdraw", 2), _result()(w)),
}  # fmt: skip
