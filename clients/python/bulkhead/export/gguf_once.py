"""A GGUF file is parsed once. transformers parses it for the configuration, the weights and the tokenizer, four times in all, each
for seconds."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock


@contextmanager
def parsed_once() -> Iterator[None]:
    """While it lasts, what transformers asks of `gguf` again is what it was given before."""
    with ExitStack() as changed:
        if importlib.util.find_spec("gguf") is not None:  # else transformers says what is missing
            import gguf

            for name in ("GGUFReader", "get_tensor_name_map"):
                changed.enter_context(mock.patch.object(gguf, name, functools.cache(getattr(gguf, name))))
        yield
