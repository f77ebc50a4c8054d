"""The doctor's findings: one for each place and code."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .source import Location

HOST_READ, CPU_TENSOR, HOST_COPY, DYNAMIC_SHAPE = "host_read", "cpu_tensor", "host_copy", "dynamic_shape"
PYTHON_STATE, BAKED_CONSTANT, RNG, SYNC = "python_state", "baked_constant", "rng", "sync"
HIDDEN_SETTING, DUCK_TYPED_CACHE = "hidden_setting", "duck_typed_cache"

#: The meaning of each code, in a sentence.
CODES = {
    HOST_READ: "the host reads a value that the GPU computes",
    CPU_TENSOR: "a tensor that is made on the CPU meets tensors of the GPU",
    HOST_COPY: "a step copies from host memory to the GPU",
    DYNAMIC_SHAPE: "a shape depends on values that the GPU computes",
    PYTHON_STATE: "Python objects change from call to call; a replayed graph does not change them",
    BAKED_CONSTANT: "a Python number becomes part of the captured graph",
    RNG: "random numbers come from a generator that the graph does not advance",
    SYNC: "the host waits for the GPU, or work leaves the captured stream",
    HIDDEN_SETTING: "a setting hides that graphs are lost",
    DUCK_TYPED_CACHE: "a cache is used by the names of its attributes",
}

PREVENTS_CAPTURE, RECAPTURES, SLOW, STALE = "prevents_capture", "recaptures", "slow", "stale"
SEVERITIES = {
    PREVENTS_CAPTURE: "prevents capture",
    RECAPTURES: "captures again and again",
    SLOW: "slow",
    STALE: "replays old values",
}


#: Found twice in a line, by what runs and by its source.
_OF_A_LINE = (PYTHON_STATE, HIDDEN_SETTING, DUCK_TYPED_CACHE)

Key = tuple[str, int, str, int]


def key(code: str, file: str, line: int, column: int) -> Key:
    """What is one finding: an expression for most codes."""
    return file, line, code, 0 if code in _OF_A_LINE else column


@dataclass(frozen=True)
class Finding:
    """``line`` and ``column`` count from 1; ``path`` is the chain of calls to the location,
    outermost first."""

    code: str
    severity: str
    file: str
    line: int
    column: int
    function: str
    reason: str
    remedy: str
    path: tuple[str, ...] = ()
    end_column: int = 0  #: one after the last character; 0: unknown
    use: str = ""  #: what the value was used for

    @property
    def key(self) -> Key:
        return key(self.code, self.file, self.line, self.column)

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"path": list(self.path)}


@dataclass(frozen=True)
class Note:
    """What torch.compile says of a location that has no finding; ``line`` is 0 where only the
    target is known."""

    file: str
    line: int
    column: int
    function: str
    reason: str


@dataclass
class Report:
    """``skipped`` names what could not be examined, and why. ``error`` says why the run ended
    early; empty if it did not."""

    target: str
    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    #: Of a real GPU: `capture.Captured`.
    captures: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    remedy: str = ""  #: of the error
    calls: int = 0  #: calls that ended by themselves

    def end_early(self, error: str, remedy: str) -> None:
        self.error, self.remedy = error, remedy

    @property
    def prevents_capture(self) -> bool:
        return any(finding.severity == PREVENTS_CAPTURE for finding in self.findings)

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {"findings": [finding.document() for finding in self.findings], "skipped": self.skipped,
                                    "notes": [asdict(note) for note in self.notes],
                                    "calls": self.calls}  # fmt: skip
        if self.captures:
            document["captures"] = self.captures
        if self.error:
            document["error"] = {"attempt": self.error, "remedy": self.remedy}
        return document


class Findings:
    """Collects findings; keeps the first one for each place and code."""

    def __init__(self) -> None:
        self._found: dict[Key, Finding] = {}
        self.seen: set[Key] = set()  #: keys of all findings added since this was cleared

    def add(self, code: str, severity: str, location: Location, reason: str, remedy: str, use: str = "") -> None:
        column, end = location.columns
        finding = Finding(code, severity, location.file, location.line, column, location.function, reason, remedy,
                          location.path, end, use)  # fmt: skip
        self._found.setdefault(finding.key, finding)
        self.seen.add(finding.key)

    def drop(self, one: Finding) -> None:
        del self._found[one.key]

    def at(self, code: str, location: Location) -> Finding | None:
        return self._found.get(key(code, location.file, location.line, location.columns[0]))

    def change(self, one: Finding, **changes: Any) -> None:
        self._found[one.key] = replace(one, **changes)

    def sorted(self) -> list[Finding]:
        return sorted(self._found.values(), key=lambda finding: (finding.file, finding.line, finding.column, finding.code))
