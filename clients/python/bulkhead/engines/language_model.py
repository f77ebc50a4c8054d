"""Uses a language model in another process: a model of the same fleet with
`runtime: generate`, named by an engine's `options.language_model`. Its package is exported
from the model that the engine loads."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..client import connect
from ..engine import Context, InvalidInput
from ..errors import Error
from ..generation import Generation

CLIENT_NAME_MAX = 47  #: bytes, docs/control.md


class LanguageModel:
    """Draws tokens for an engine. Used on the main thread.

    The daemon loads the model for the first request, not during the engine's load: two loads on one
    GPU wait for each other. Each request has its own channel, so that between requests this process
    maps none of that worker's memory."""

    def __init__(self, context: Context) -> None:
        """Errors: config_invalid if the fleet has no such model."""
        self.name = str(context.options["language_model"])
        self._client = connect(name=context.model[:CLIENT_NAME_MAX])
        models = sorted({row["model"] for row in self._client.ps()})
        if self.name not in models:
            raise Error("config_invalid", f"loading {context.model}: the fleet has no model {self.name!r}",
                        f"options.language_model names one with `runtime: generate`; the fleet has {', '.join(models)}")  # fmt: skip

    def tokens(self, inputs: Mapping[str, Tensor], *, length: int, max_new_tokens: int, **parameters: Any) -> Generator[int, None, None]:
        """Yields token ids as they are drawn, including the stop token. Closing it early
        cancels the rest.

        inputs: the prompt, as the package's family takes it (docs/generation.md), on any device;
        converted to the package's dtypes. length: its positions. parameters: as in
        `Client.generate`. Errors: config_invalid if the model does not generate from such inputs;
        input_invalid if prompt and max_new_tokens exceed its sequence length; worker_lost and
        others of `Client.generate`, naming the model."""
        try:
            opened = self._client.open(self.name)
        except Error as error:
            raise error.during(f"opening the language model {self.name}") from None
        with opened as channel:
            method = channel.methods.get("generate")
            dtypes = {} if method is None else {one["name"]: one["dtype"] for one in method["inputs"]}
            if method is None or inputs.keys() - dtypes:
                raise Error("config_invalid", f"generating with {self.name}, which does not take {', '.join(inputs)}",
                            "options.language_model names a model with `runtime: generate`, whose package was exported from this engine's model")  # fmt: skip
            if length + max_new_tokens > method["length"]:
                raise InvalidInput(
                    f"generating with {self.name} from {length} positions up to {max_new_tokens} tokens",
                    f"its sequences have {method['length']} positions: give less, or a smaller max_new_tokens, or raise its `generate.length`",
                )
            given = {name: tensor.to("cpu", getattr(torch, dtypes[name])).contiguous() for name, tensor in inputs.items()}
            request = channel.submit(given, method="generate", parameters={"max_new_tokens": max_new_tokens, **parameters})
            with Generation(self.name, channel.stream(request)) as generation:
                yield from generation
