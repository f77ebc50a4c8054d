"""Parses a GGUF file once. transformers parses it four times, for configuration, weights and
tokenizer, each for seconds."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock


@contextmanager
def parsed_once() -> Iterator[None]:
    """While active, returns the earlier result when transformers asks `gguf` again."""
    with ExitStack() as changed:
        # Where it is missing, transformers says so.
        if importlib.util.find_spec("gguf") is not None:
            import gguf

            for name in ("GGUFReader", "get_tensor_name_map"):
                changed.enter_context(mock.patch.object(gguf, name, functools.cache(getattr(gguf, name))))
        yield
