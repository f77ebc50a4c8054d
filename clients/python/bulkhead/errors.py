"""The one error type, spelled as everywhere in Bulkhead."""

from __future__ import annotations

import math
import numbers

DEADLINE_SECONDS_MAX = 20 * 86400.0  #: poll(2) takes an int of milliseconds: 24 days


class Error(Exception):
    """What failed, the attempt, and what the caller can change.

    Branch on ``code``; it is one of the names in ``docs/operations.md`` such as ``"worker_lost"``
    or ``"queue_full"``.
    """

    def __init__(self, code: str, attempt: str, remedy: str = "") -> None:
        super().__init__(code, attempt, remedy)
        self.code = code
        self.attempt = attempt
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.code}: {self.attempt}" + (f"; {self.remedy}" if self.remedy else "")

    def during(self, step: str) -> Error:
        """Returns the error with one step of context in front."""
        return Error(self.code, f"{step}: {self.attempt}", self.remedy)

    def again(self) -> Error:
        """Returns a copy to raise again: a raised exception keeps its frames, and their tensors."""
        return Error(self.code, self.attempt, self.remedy)


def broken(attempt: str) -> Error:
    """The error for a peer that broke the protocol."""
    return Error("protocol_violation", attempt, "use a client and a daemon of matching releases")


def checked_deadline(deadline: float | None, default: float = 0.0) -> float:
    """Returns a caller's deadline in seconds; ``default`` if it is None."""
    if deadline is None:
        return default
    if not isinstance(deadline, numbers.Real) or not math.isfinite(deadline) or deadline > DEADLINE_SECONDS_MAX:
        raise Error("input_invalid", f"a deadline of {deadline!r}", f"give seconds, at most {DEADLINE_SECONDS_MAX:.0f}, or None for the default")
    return float(deadline)
