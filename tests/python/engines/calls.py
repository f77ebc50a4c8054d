"""Calling an engine's methods without a daemon."""

from __future__ import annotations

import tempfile
import unittest
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import transformers
from bulkhead.engine import InvalidInput, LocalContext, Result, methods_of
from torch._subclasses.fake_tensor import FakeTensorMode


class SmallModelTest(unittest.TestCase):
    """With `folder`, where a small model lies."""

    make: ClassVar[Callable[[Path], Path]]
    folder: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        kept = tempfile.TemporaryDirectory()
        cls.addClassCleanup(kept.cleanup)
        cls.folder = cls.make(Path(kept.name))


class StreamingCalls:
    """What every engine's streaming method promises. Of a SmallModelTest with `fresh(graphs=…)` and
    `equals`, whose `engine` was captured as on a GPU; `first` is what it said first."""

    method: ClassVar[str]
    usual: ClassVar[dict[str, Any]]  #: what a request says
    before: ClassVar[dict[str, Any]]  #: of a request that must leave nothing for the next
    cancelled: ClassVar[dict[str, Any]]  #: of one that is left after its first part
    bad: ClassVar[Sequence[dict[str, Any]]]
    engine: ClassVar[Any]
    first: ClassVar[Any]

    @classmethod
    def begin(cls: Any) -> None:
        cls.engine = cls.fresh(context=Capturing)
        cls.first = cls.said()

    @staticmethod
    def taken(whole: Result) -> Any:
        """What is compared of an answer."""
        return whole.tensors["audio"]

    @classmethod
    def said(cls, engine: Any = None, **given: Any) -> Any:
        return cls.taken(answered(engine or cls.engine, cls.method, **{**cls.usual, **given})[1])

    def test_requests_leave_nothing_for_the_next_also_without_graphs_and_their_static_caches(self: Any) -> None:
        eager = self.fresh(graphs="off")
        for engine in (self.engine, eager):
            self.said(engine, **self.before)
            self.equals(self.said(engine), self.first)
            cancelled = started(engine, self.method, **{**self.usual, **self.cancelled})
            next(cancelled)
            cancelled.close()
            self.equals(self.said(engine), self.first)
        self.assertFalse(getattr(eager.caches, "static", eager.caches))
        self.assertEqual(set(eager.context._graphs.report()["eager"]), {"graphs_off"})

    def test_bad_input_is_refused(self: Any) -> None:
        for given in self.bad:
            with self.subTest(given=sorted(given)), self.assertRaises(InvalidInput) as refused:
                self.said(**given)
            self.assertTrue(refused.exception.remedy)


class Capturing(LocalContext):
    """Runs each function in `load` as often as capturing it on a GPU does, which is never
    done on a CPU."""

    def graph(self, fn: Callable[..., Any], buckets: Sequence[Mapping[str, Any]], **given: Any) -> Callable[..., Any]:
        for bucket in buckets:
            for _ in range(4):
                fn(**bucket)
        return super().graph(fn, buckets, **given)


def loaded(kind: type, options: dict[str, Any] | None = None, graphs: str = "preferred", context: type[LocalContext] = LocalContext) -> Any:
    engine = kind()
    engine.load(context(options, graphs=graphs))
    return engine


def waits_for_nothing(function: Callable[..., Any], **inputs: Any) -> None:
    """Raises where the function reads a value on the host, with which it could not be captured:
    these tensors have none."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        function(**inputs)


def started(engine: Any, name: str, **given: Any) -> Generator[Result, None, Result]:
    """A request of a streaming method, with the declared defaults of what is not given."""
    declared = methods_of(type(engine))[name]
    defaults = {parameter.name: parameter.default for parameter in declared.parameters if parameter.default is not None}
    stream: Generator[Result, None, Result] = getattr(engine, name)(**{**defaults, **given})
    return stream


def answered(engine: Any, name: str, **given: Any) -> tuple[list[Result], Result]:
    """The parts of a streaming method's answer, and the whole."""
    stream = started(engine, name, **given)
    parts = []
    while True:
        try:
            parts.append(next(stream))
        except StopIteration as end:
            return parts, end.value


@contextmanager
def steps_by_cache(engine: Any) -> Iterator[list[int]]:
    """How many positions are decoded meanwhile in each of the engine's static caches."""
    inner, places = engine.decode, {id(cache): index for index, cache in enumerate(engine.caches.static)}
    steps = [0] * len(places)

    def decode(*, cache: Any, **inputs: Any) -> Any:
        steps[places[id(cache)]] += 1
        return inner(cache=cache, **inputs)

    with mock.patch.object(engine, "decode", decode):
        yield steps


@contextmanager
def counted(engine: Any) -> Iterator[Counter[str]]:
    """Counts calls of captured functions that run meanwhile without a replay, by the reason."""
    calls: Counter[str] = Counter()
    before = Counter(engine.context._graphs.report()["eager"])
    yield calls
    calls.update(Counter(engine.context._graphs.report()["eager"]) - before)
