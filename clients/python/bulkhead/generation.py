"""Tokens as they arrive from a model with ``runtime: generate``."""

from __future__ import annotations

from collections import deque
from typing import Any, AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping

from .channel import Parts
from .errors import Error
from .protocol import Reply

#: One step's token: a number, or a list with one per codebook.
Token = Any

#: The method that changes how a sequence draws.
ADJUST = "generate.adjust"


def arguments(methods: Mapping[str, Any], method: str, tokens: Any, inputs: Mapping[str, Any] | None,
              named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Splits arguments into tensors and parameters: a name that the model declares as an input is a
    tensor, any other a parameter, which the model may refuse."""
    declared = {one["name"] for one in methods.get(method, {}).get("inputs", ())}
    tensors = {**(inputs or {}), **{name: value for name, value in named.items() if name in declared}}
    if tokens is not None:
        tensors["tokens"] = tokens
    return tensors, {name: value for name, value in named.items() if name not in declared}


class Told:
    """What one generation has produced so far."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.tokens: list[Token] = []  #: all tokens returned, and those about to be
        #: After the end: ``finish``, ``prompt_tokens``, ``reused_tokens``, ``new_tokens``,
        #: ``first_token_ms``, ``tokens_per_second``
        self.statistics: dict[str, Any] = {}
        self._next: deque[Token] = deque()

    @property
    def finish(self) -> str | None:
        """Why it ended: ``"stop"``, ``"length"``, …; None before the end, or if it failed."""
        return self.statistics.get("finish")

    def _take(self, part: Reply) -> None:
        if part.more:
            new = part.values_json.get("tokens", [])
        else:
            # All tokens again, as a tensor; without streaming, for the first time.
            new = part["tokens"].tolist()[len(self.tokens) :] if "tokens" in part else []
            self.statistics = {name: value for name, value in part.values_json.items() if name not in ("tokens", "index")}
        self.tokens += new
        self._next += new

    def _lost(self, error: Error) -> Error:
        return error.during(f"generating with {self.model}, after {len(self.tokens)} tokens") if self.tokens else error.again()


class Generation(Told, Iterator[Token]):
    """An iterator of token ids, made by ``Client.generate``. Dropping it before its end, or
    ``close``, cancels the rest."""

    def __init__(self, model: str, parts: Parts) -> None:
        super().__init__(model)
        self._parts = parts

    def __next__(self) -> Token:
        while not self._next:
            try:
                self._take(next(self._parts))
            except Error as error:
                raise self._lost(error) from None
        return self._next.popleft()

    def adjust(self, **sampling: Any) -> None:
        """Changes the sampling from the next step on: ``temperature``, ``top_k``, ``top_p``, …, as
        listed in docs/channel.md; omitted ones stay. Tokens already drawn still arrive. Call it on
        the iterating thread.

        Errors: input_invalid if the request is not generating: it waits for its turn (no first
        token yet), or has ended.
        """
        self._parts.channel.infer(method=ADJUST, parameters={**sampling, "request": self._parts.request.number})

    def close(self) -> None:
        """Cancels the rest; the worker frees its slot within a step."""
        self._parts.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncGeneration(Told, AsyncIterator[Token]):
    """As ``Generation``, on an event loop; made by ``bulkhead.aio.Client.generate``."""

    def __init__(self, model: str, parts: AsyncGenerator[Reply, None], adjust: Callable[[Mapping[str, Any]], Awaitable[None]]) -> None:
        super().__init__(model)
        self._parts = parts
        self._adjust = adjust

    async def __anext__(self) -> Token:
        while not self._next:
            try:
                self._take(await anext(self._parts))
            except Error as error:
                raise self._lost(error) from None
        return self._next.popleft()

    async def adjust(self, **sampling: Any) -> None:
        """As ``Generation.adjust``; any task may call it."""
        await self._adjust(sampling)

    async def aclose(self) -> None:
        """Cancels the rest; the worker frees its slot within a step."""
        await self._parts.aclose()

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
