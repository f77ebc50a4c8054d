"""An engine of a fleet: what it gives to `context.graph` in its load is what is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from ..engine import LocalContext
from ..errors import Error

Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  #: what is called, with what


class _Context(LocalContext):
    """Keeps the functions and their buckets."""

    def __init__(self, options: Mapping[str, Any], device: str) -> None:
        super().__init__(options, device=device, graphs="required", model="doctor", cache=Path("."))
        self.steps: list[Step] = []

    def graph(self, fn: Callable[..., Any], buckets: Sequence[Mapping[str, Any]], *, padding: Mapping[str, float] | None = None,
              name: str = "") -> Callable[..., Any]:  # fmt: skip
        self.steps += [(fn, (), dict(bucket)) for bucket in buckets[:1]]  # buckets differ in shapes alone
        return fn


def steps(made: type, options: Mapping[str, Any], device: str) -> list[Step]:
    """Loads the engine. Errors: input_invalid where it captures nothing."""
    context = _Context(options, device)
    made().load(context)
    if not context.steps:
        raise Error("input_invalid", f"looking at engine {made.__qualname__}: its load gives nothing to context.graph",
                    "give the function of the step to context.graph, as docs/python-engines.md shows")  # fmt: skip
    return context.steps
