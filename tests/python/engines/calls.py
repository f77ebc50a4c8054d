"""Calling an engine's methods without a daemon."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from bulkhead.engine import LocalContext, Result, methods_of


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


def loaded(kind: type, options: dict[str, Any] | None = None, graphs: str = "preferred") -> Any:
    engine = kind()
    engine.load(LocalContext(options, graphs=graphs))
    return engine


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


def counted(engine: Any) -> dict[str, int]:
    """Calls of captured functions that were no replay, by their reason."""
    eager: dict[str, int] = engine.context._graphs.report()["eager"]
    return eager
