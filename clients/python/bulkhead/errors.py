"""One error type, spelled as everywhere in Bulkhead."""

from __future__ import annotations

import math
import numbers

DEADLINE_SECONDS_MAX = 20 * 86400.0  #: poll(2) takes milliseconds in an int: 24 days


class Error(Exception):
    """What failed, what was being attempted, and what the caller can change.

    Branch on ``code``; it is one of the names in ``docs/operations.md`` such as ``"worker_lost"`` or ``"queue_full"``.
    """

    def __init__(self, code: str, attempt: str, remedy: str = "") -> None:
        super().__init__(code, attempt, remedy)
        self.code = code
        self.attempt = attempt
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.code}: {self.attempt}" + (f"; {self.remedy}" if self.remedy else "")

    def during(self, step: str) -> Error:
        """The same error with one step of context in front."""
        return Error(self.code, f"{step}: {self.attempt}", self.remedy)

    def again(self) -> Error:
        """To be raised once more: an exception that was raised keeps the frames it went through, and their tensors."""
        return Error(self.code, self.attempt, self.remedy)


def broken(attempt: str) -> Error:
    """The other side does not keep to the protocol."""
    return Error("protocol_violation", attempt, "use a client and a daemon of matching releases")


def checked_deadline(deadline: float | None, default: float = 0.0) -> float:
    """Seconds, of what a caller gave; ``default`` where that is None."""
    if deadline is None:
        return default
    if not isinstance(deadline, numbers.Real) or not math.isfinite(deadline) or deadline > DEADLINE_SECONDS_MAX:
        raise Error("input_invalid", f"a deadline of {deadline!r}", f"give seconds, at most {DEADLINE_SECONDS_MAX:.0f}, or None for the default")
    return float(deadline)
