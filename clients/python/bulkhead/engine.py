"""The API for engines: classes that ``runtime: python`` loads in a worker process.

    from bulkhead.engine import Context, Number, Result, Tensor, Text, method

    class Beeper:
        \"""A tone for each letter.\"""

        def load(self, context: Context) -> None:
            self.rate = int(context.options.get("rate", 16000))

        @method(
            parameters=[Text("text"), Number("pitch", 440.0, low=20, high=8000)],
            outputs=[Tensor("audio", "float32", ["channels=1", "samples=0.."])],
        )
        def speak(self, *, text, pitch):
            ...
            return Result(audio=sound, values={"sample_rate": self.rate})

``load`` and all methods run on the process' main thread, one request at a time. A generator method
streams: each ``yield`` is a part, and its return value is the whole answer. ``unload()`` is
optional; unloading ends the process. ``docs/python-engines.md`` has more.
"""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping, Protocol, Sequence, TypeVar, Union

from .errors import Error
from .tensors import DTYPE_NUMBERS

__all__ = [
    "Boolean", "Cancelled", "Choice", "Context", "Integer", "InvalidInput", "LocalContext", "Method", "MissingModel", "Number",
    "Parameter", "Result", "Tensor", "Text", "method", "methods_of",
]  # fmt: skip

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]{0,54}")
_DIM = re.compile(r"(?:([A-Za-z_][A-Za-z0-9_]{0,31})=)?([0-9]+)(?:(\.\.)([0-9]*))?")
_DIMS_MAX = 8
UNBOUNDED = (1 << 63) - 1
_MARK = "__bulkhead_method__"
_Function = TypeVar("_Function", bound=Callable[..., Any])


class InvalidInput(Error):
    """A request that the engine cannot serve as asked: its client gets ``input_invalid``
    with this text."""

    def __init__(self, attempt: str, remedy: str = "") -> None:
        super().__init__("input_invalid", attempt, remedy)


class MissingModel(Error):
    """Raised in ``load`` if a file is missing: say what to fetch and where to put it. The load
    is not retried."""

    def __init__(self, attempt: str, remedy: str = "") -> None:
        super().__init__("load_failed", attempt, remedy)


class Cancelled(BaseException):
    """The client no longer wants the answer. Not an ``Exception``, so that ``except Exception``
    does not catch it."""


@dataclass(frozen=True)
class Dim:
    """One dimension: ``low`` to ``high``, inclusive. Dimensions of one name have one
    size in a request."""

    name: str
    low: int
    high: int

    def __str__(self) -> str:
        sizes = str(self.low) if self.low == self.high else f"{self.low}..{self.high}"
        return f"{self.name}={sizes}" if self.name else sizes


@dataclass(frozen=True)
class Tensor:
    """An input or an output.

    ``shape`` has a size, ``"1..256"``, ``"1.."`` or ``"n=1.."`` per dimension. An ``optional``
    input that a request omits is not passed to the method, whose default then applies.
    """

    name: str
    dtype: str
    shape: Sequence[int | str]
    optional: bool = field(default=False, kw_only=True)
    description: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.dtype not in DTYPE_NUMBERS:
            raise TypeError(f"tensor {self.name!r} has dtype {self.dtype!r}; it is one of {', '.join(DTYPE_NUMBERS)}")
        self.dims  # noqa: B018  checked when the class is defined

    @property
    def dims(self) -> tuple[Dim, ...]:
        if len(self.shape) > _DIMS_MAX:
            raise TypeError(f"tensor {self.name!r} has {len(self.shape)} dimensions, at most {_DIMS_MAX} are possible")
        return tuple(_dim(self.name, entry) for entry in self.shape)


@dataclass(frozen=True)
class Text:
    """Text. Required without a ``default``. ``multiline`` is for forms."""

    name: str
    default: str | None = None
    multiline: bool = field(default=False, kw_only=True)
    description: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        _check_parameter(self, str)


@dataclass(frozen=True)
class Number:
    """A float, from ``low`` to ``high``, inclusive. ``step`` is for forms."""

    name: str
    default: float | None = None
    low: float | None = field(default=None, kw_only=True)
    high: float | None = field(default=None, kw_only=True)
    step: float | None = field(default=None, kw_only=True)
    description: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        _check_parameter(self, (int, float))
        _check_range(self)


@dataclass(frozen=True)
class Integer:
    """A 64-bit integer, from ``low`` to ``high``, inclusive. ``step`` is for forms."""

    name: str
    default: int | None = None
    low: int | None = field(default=None, kw_only=True)
    high: int | None = field(default=None, kw_only=True)
    step: int | None = field(default=None, kw_only=True)
    description: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        _check_parameter(self, int)
        _check_range(self)


@dataclass(frozen=True)
class Boolean:
    """True or false."""

    name: str
    default: bool | None = None
    description: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.default is not None and not isinstance(self.default, bool):
            raise TypeError(f"parameter {self.name!r} has default {self.default!r}")


@dataclass(frozen=True)
class Choice:
    """One of several words; the default is the first, unless another is given."""

    name: str
    choices: Sequence[str]
    default: str | None = None
    description: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        _check_parameter(self, str)
        if isinstance(self.choices, str) or not self.choices or not all(isinstance(word, str) for word in self.choices):
            raise TypeError(f"parameter {self.name!r} has choices {self.choices!r}; they are a list of words")
        if self.default is None:
            object.__setattr__(self, "default", self.choices[0])
        elif self.default not in self.choices:
            raise TypeError(f"parameter {self.name!r} has default {self.default!r}, which is none of its choices")


Parameter = Union[Text, Number, Integer, Boolean, Choice]


@dataclass(frozen=True)
class Method:
    """The declaration from ``@method``. ``streams`` if the function is a generator."""

    name: str
    description: str
    inputs: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...]
    outputs: tuple[Tensor, ...]
    streams: bool


def method(
    *, inputs: Sequence[Tensor] = (), parameters: Sequence[Parameter] = (), outputs: Sequence[Tensor] = (), description: str = ""
) -> Callable[[_Function], _Function]:
    """Makes a function of the class callable by clients. It gets inputs and parameters as keyword
    arguments: inputs are numpy views of the memory shared with the client, read-only and valid
    until the method returns.

    ``description`` defaults to the first paragraph of the docstring.
    """

    def declare(function: _Function) -> _Function:
        declared = Method(function.__name__, description or _first_paragraph(function), tuple(inputs), tuple(parameters),
                          tuple(outputs), inspect.isgeneratorfunction(function))  # fmt: skip
        _check_arguments(declared, function)
        setattr(function, _MARK, declared)
        return function

    return declare


def methods_of(engine: type) -> dict[str, Method]:
    """The declared methods of an engine's class, in the order of the class. Raises ``TypeError`` if
    it lacks ``load`` or methods."""
    found: dict[str, Method] = {}
    for base in reversed(engine.__mro__):
        for name, value in vars(base).items():
            if isinstance(declared := getattr(value, _MARK, None), Method):
                found[name] = declared
            else:
                found.pop(name, None)
    if not callable(getattr(engine, "load", None)):
        raise TypeError(f"class {engine.__name__} has no method load(self, context)")
    if not found:
        raise TypeError(f"class {engine.__name__} has no function with @bulkhead.engine.method")
    return found


class Result:
    """An answer, or a part of one: tensors by name (numpy arrays, or torch tensors on any device),
    and JSON ``values``."""

    def __init__(self, *, values: Mapping[str, Any] | None = None, **tensors: Any) -> None:
        self.values = dict(values or {})
        self.tensors = tensors


class Context(Protocol):
    """The worker's argument to ``load``. The engine may keep it: ``check``, ``progress``
    and ``graph``'s callables also serve requests. Used on the main thread, where load
    and requests run."""

    options: Mapping[str, Any]  #: the fleet file's ``options``, as written there
    device: str  #: ``cpu`` or ``cuda``: the only GPU that the process sees
    graphs: str  #: ``off``, ``preferred`` or ``required``
    model: str  #: its name in the fleet file
    cache: Path  #: a folder for data that can be made again; this user's, mode 0700

    def progress(self, done: int, total: int, detail: str = "") -> None:
        """During ``load``, restarts the load deadline if ``done`` grew. During a request, sends a
        streaming client a part with the values ``{"progress": {"done", "total", "detail"}}``."""

    def check(self) -> None:
        """Raises ``Cancelled`` if the request was cancelled, its deadline passed, or its channel
        ended. ``yield`` and ``progress`` check too."""

    def graph(self, fn: Callable[..., Any], buckets: Sequence[Mapping[str, Any]], *, padding: Mapping[str, float] | None = None,
              name: str = "") -> Callable[..., Any]:  # fmt: skip
        """Only in ``load``: captures ``fn`` as one CUDA graph per bucket, and returns a callable
        that replays them.

        A bucket maps the names of fn's keyword arguments to constants, or to example tensors that
        give shapes and dtypes. ``fn`` returns a tensor, or a tuple or dict of tensors, and
        otherwise reads and writes fixed memory; it runs several times here. A call uses the bucket
        of equal shapes or, with ``padding``, which names inputs and their fill values, the smallest
        one that fits. Otherwise ``fn`` itself runs, which is counted with its reason.

        The result lies in static buffers: it has the bucket's shapes, and the next call overwrites
        it. Raises ``capture_failed`` if ``graphs`` is ``required`` and a bucket cannot be captured.
        """
        ...


class LocalContext:
    """A context without a worker, for tests of an engine: it never cancels, and drops progress."""

    def __init__(self, options: Mapping[str, Any] | None = None, *, device: str = "cpu", graphs: str = "preferred",
                 model: str = "local", cache: Path = Path(".")) -> None:  # fmt: skip
        self.options = dict(options or {})
        self.device, self.graphs, self.model, self.cache = device, graphs, model, cache
        self._graphs: Any = None

    def progress(self, done: int, total: int, detail: str = "") -> None:
        pass

    def check(self) -> None:
        pass

    def graph(self, fn: Callable[..., Any], buckets: Sequence[Mapping[str, Any]], *, padding: Mapping[str, float] | None = None,
              name: str = "") -> Callable[..., Any]:  # fmt: skip
        from .worker.graphs import Graphs  # needs torch

        if self._graphs is None:
            self._graphs = Graphs(self.device, self.graphs)
        made: Callable[..., Any] = self._graphs.add(fn, buckets, padding=padding or {}, name=name)
        return made


def _dim(tensor: str, entry: int | str) -> Dim:
    if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0:
        return Dim("", entry, entry)
    matched = _DIM.fullmatch(entry) if isinstance(entry, str) else None
    if matched is None:
        raise TypeError(f"tensor {tensor!r} has dimension {entry!r}; write 512, '1..256', '1..' or 'n=1..256'")
    name, low, is_range, high = matched.groups()
    lowest = int(low)
    highest = lowest if is_range is None else int(high) if high else UNBOUNDED
    if not lowest <= highest <= UNBOUNDED:
        raise TypeError(f"tensor {tensor!r} has dimension {entry!r}, whose end is before its beginning")
    return Dim(name or "", lowest, highest)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TypeError(f"the name {name!r} is invalid; use an ASCII Python identifier of at most 55 characters")


def _check_parameter(parameter: Any, kinds: Any) -> None:
    _check_name(parameter.name)
    if parameter.default is not None and (not isinstance(parameter.default, kinds) or isinstance(parameter.default, bool)):
        raise TypeError(f"parameter {parameter.name!r} has default {parameter.default!r}")


def _check_range(parameter: Any) -> None:
    for value in (parameter.default, parameter.low, parameter.high, parameter.step):
        if value is not None and not math.isfinite(value):
            raise TypeError(f"parameter {parameter.name!r} has {value!r}; bounds and defaults are finite")
    low = -math.inf if parameter.low is None else parameter.low
    high = math.inf if parameter.high is None else parameter.high
    if low > high or (parameter.default is not None and not low <= parameter.default <= high):
        raise TypeError(f"parameter {parameter.name!r}: default {parameter.default}, low {parameter.low}, high {parameter.high}")


def _check_arguments(declared: Method, function: Callable[..., Any]) -> None:
    where = f"method {function.__qualname__}"
    names = [item.name for item in (*declared.inputs, *declared.parameters)]
    outputs = [output.name for output in declared.outputs]
    for listed in (names, outputs):
        if twice := {name for name in listed if listed.count(name) > 1}:
            raise TypeError(f"{where} declares {', '.join(sorted(twice))} twice")
    if "values" in outputs:
        raise TypeError(f'{where} has an output "values", which names what is not a tensor')
    if any(len(listed) > 32 for listed in (declared.inputs, declared.parameters, declared.outputs)):
        raise TypeError(f"{where} declares more than 32 inputs, parameters or outputs")
    taken = list(inspect.signature(function).parameters.values())[1:]
    if any(argument.kind is argument.VAR_KEYWORD for argument in taken):
        return
    takes = {argument.name for argument in taken}
    if missing := set(names) - takes:
        raise TypeError(f"{where} declares {', '.join(sorted(missing))}, which the function does not take")
    needs = {argument.name for argument in taken if argument.default is argument.empty and argument.kind is not argument.VAR_POSITIONAL}
    optional = {tensor.name for tensor in declared.inputs if tensor.optional}
    if unfilled := needs - (set(names) - optional):
        raise TypeError(f"{where} takes {', '.join(sorted(unfilled))}, for which a request may give nothing: declare it, or give it a default")


def _first_paragraph(documented: object) -> str:
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
