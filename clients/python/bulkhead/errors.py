"""One error type, spelled as everywhere in Bulkhead."""

from __future__ import annotations


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
