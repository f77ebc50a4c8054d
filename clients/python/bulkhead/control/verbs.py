"""The control verbs, shared by the blocking and the asyncio client: requests, and
parsing of answers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..errors import Error, broken, checked_deadline

if TYPE_CHECKING:
    from ..cuda import Events


def with_deadline(params: dict[str, Any], deadline: float | None) -> dict[str, Any]:
    return params if deadline is None else {**params, "deadline_ms": max(1, int(checked_deadline(deadline) * 1000))}


def models(names: tuple[str, ...]) -> dict[str, Any]:
    if not names:
        raise Error("input_invalid", "no model was named", 'name models, or "*" for all of the fleet')
    return {"all": True} if names == ("*",) else {"models": list(names)}


def only_of(names: tuple[str, ...]) -> dict[str, Any]:
    return {"models": list(names)} if names else {}


def one_descriptor(fds: list[int]) -> int:
    if len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise broken(f"channel.open answered with {len(fds)} descriptors")
    return fds[0]


def is_stateful(result: dict[str, Any]) -> bool:
    """True unless the daemon says otherwise: a stateful request is valid only on its worker."""
    return result.get("stateful", True) is not False


def part_in_gpu(ordinal: int | None, stream: int) -> Events | None:
    if ordinal is None:
        return None
    from .. import cuda

    return cuda.Events(cuda.gpu(ordinal), stream)
