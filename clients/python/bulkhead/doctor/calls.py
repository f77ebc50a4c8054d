"""Prepares and makes the call: checks that the inputs fit, collects what an engine passes to
`context.graph`, and runs generators and coroutines to their end."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from ..engine import LocalContext
from ..errors import Error
from .source import one_line

Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  #: a callable with its arguments

OF_FUNCTION = (
    "give --inputs FILE.py:FACTORY, a function of the device that returns the arguments: a tuple, or a dictionary of names"
)
OF_CLASS = ("--inputs names a function of the device that returns (arguments of the constructor, arguments of the call), each a "
            "tuple or a "
            "dictionary")  # fmt: skip


@dataclass(frozen=True)
class Deferred:
    """A callable imported once the run has begun, so that what its module does with `torch.cuda`
    uses the same fake GPU."""

    load: Callable[[], Any]


@dataclass(frozen=True)
class Method:
    """A method of a class, called on an object that the run makes."""

    of: type
    name: str


def arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, dict):
        return (), given
    return (given if isinstance(given, tuple) else (given,)), {}


def fits(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str, remedy: str) -> None:
    """Errors: input_invalid if the arguments do not fit the signature."""
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = one_line(str(signature).split(" -> ")[0], 200)
        raise Error("input_invalid", f"{what} takes {parameters}, and the inputs do not fit: {error}", remedy) from None


def called(step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns what ``step`` returns. Runs a generator or a coroutine to its end."""
    result = step(*args, **kwargs)
    if inspect.isgenerator(result):
        return list(result)
    if not inspect.isasyncgen(result) and not inspect.iscoroutine(result):
        return result
    kept: list[Any] = []
    asyncio.run(_kept(kept, result))
    return kept if inspect.isasyncgen(result) else kept[0]


async def _kept(kept: list[Any], result: Any) -> None:
    """Keeps what it gives out of the task's result, whose text asyncio makes, which would
    read a tensor."""
    if inspect.isasyncgen(result):
        kept += [item async for item in result]
    else:
        kept.append(await result)


class _Context(LocalContext):
    """Records the functions and their buckets."""

    def __init__(self, options: Mapping[str, Any], device: str) -> None:
        super().__init__(options, device=device, graphs="required", model="doctor", cache=Path("."))
        self.steps: list[Step] = []

    def graph(self, fn: Callable[..., Any], buckets: Sequence[Mapping[str, Any]], *, padding: Mapping[str, float] | None = None,
              name: str = "") -> Callable[..., Any]:  # fmt: skip
        # Buckets differ only in shapes.
        self.steps += [(fn, (), dict(bucket)) for bucket in buckets[:1]]
        return fn


def of_engine(made: type, options: Mapping[str, Any], device: str) -> list[Step]:
    """Loads the engine. Errors: input_invalid if it captures nothing."""
    context = _Context(options, device)
    made().load(context)
    if not context.steps:
        raise Error("input_invalid", f"looking at engine {made.__qualname__}: its load gives nothing to context.graph",
                    "give the function of the step to context.graph, as docs/python-engines.md shows")  # fmt: skip
    return context.steps
