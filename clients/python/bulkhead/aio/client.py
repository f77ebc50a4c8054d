"""The daemon as one object, on an event loop."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any, AsyncGenerator, AsyncIterator, Mapping, Sequence

from ..channel import OPEN_SECONDS
from ..client import REOPEN_TRIES, left
from ..control import find_socket, verbs
from ..errors import Error, checked_deadline
from ..generation import ADJUST, AsyncGeneration, arguments
from ..protocol import Reply, Request
from ..shared_tensors import ARENA_BYTES_MAX, Arena, Input
from ..tensors import dtype_name
from .channel import Channel
from .control import Control, Notifications


class Client:
    """Made by ``async with bulkhead.aio.connect() as b``; any number of tasks may use it."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, name: str = "bulkhead-py",
                 memory_bytes_max: int = ARENA_BYTES_MAX) -> None:  # fmt: skip
        self.name = name
        self._path = find_socket(path)
        self._control = Control(self._path)
        self._channels: dict[str, asyncio.Task[Channel]] = {}
        self._arena = Arena(memory_bytes_max)

    async def __aenter__(self) -> Client:
        await self._control.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes all channels. Outputs that are still referenced stay readable."""
        for model in list(self._channels):
            await self._forget(model)
        self._arena.close()
        self._control.close()

    # --- inference

    async def open(self, model: str, *, deadline: float | None = None, gpu: int | None = None, stream: int = 0) -> Channel:
        """As ``bulkhead.Client.open``."""
        events = verbs.part_in_gpu(gpu, stream)
        params = verbs.with_deadline({"model": model, "client": self.name}, deadline)
        result, fds = await self._control.call("channel.open", params)
        sock = socket.socket(fileno=verbs.one_descriptor(fds))
        return await Channel.open(sock, client=self.name, deadline=deadline or OPEN_SECONDS, stateful=verbs.is_stateful(result), events=events)

    async def infer(self, model: str, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward",
                    parameters: Mapping[str, Any] | None = None, deadline: float | None = None, retry_safe: bool = False,
                    **named: Any) -> Reply:  # fmt: skip
        """As ``bulkhead.Client.infer``. Cancelling the task cancels the request."""
        until = None if deadline is None else time.monotonic() + checked_deadline(deadline)
        channel = await self._channel(model, deadline)
        try:
            return await channel.infer(inputs, method=method, parameters=parameters, deadline=left(until), retry_safe=retry_safe, **named)
        except Error as error:
            if not (retry_safe and error.code == "worker_lost" and channel.core.died and not channel.stateful):
                raise
        channel = await self._channel(model, left(until))
        return await channel.infer(inputs, method=method, parameters=parameters, deadline=left(until), retry_safe=True, **named)

    async def stream(self, model: str, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward",
                     parameters: Mapping[str, Any] | None = None, deadline: float | None = None, **named: Any) -> AsyncIterator[Reply]:  # fmt: skip
        """Yields the parts of a streamed answer as they arrive. Leaving the loop, or cancelling the
        task, cancels the rest."""
        channel = await self._channel(model, deadline)
        async for part in channel.stream(inputs, method=method, parameters=parameters, deadline=deadline, **named):
            yield part

    def generate(self, model: str, tokens: Any = None, inputs: Mapping[str, Any] | None = None, /, *, method: str = "generate",
                 deadline: float | None = None, **named: Any) -> AsyncGeneration:  # fmt: skip
        """``async for token in b.generate("smollm2", prompt, temperature=0.7): …``, as
        ``bulkhead.Client.generate``. Sends the request when the first token is asked for. To stop
        early, call ``aclose`` or cancel the task."""
        running: list[tuple[Channel, Request]] = []  # empty until it is sent, then one entry

        async def parts() -> AsyncGenerator[Reply, None]:
            channel = await self._channel(model, deadline)
            tensors, parameters = arguments(channel.methods, method, tokens, inputs, named)
            stream = channel._stream(tensors, method, parameters, deadline, False, {}, lambda request: running.append((channel, request)))
            try:
                async for part in stream:
                    yield part
            finally:
                await stream.aclose()

        async def adjust(sampling: Mapping[str, Any]) -> None:
            if not running:
                raise Error("input_invalid", f"adjusting a generation of {model} that was not sent yet", "ask it for its first token before")
            channel, request = running[0]
            await channel.infer(method=ADJUST, parameters={**sampling, "request": request.number})

        return AsyncGeneration(model, parts(), adjust)

    async def allocate(self, shape: Sequence[int], dtype: Any = "float32", *, model: str | None = None) -> Input:
        """As ``bulkhead.Client.allocate``: ``with await b.allocate(shape, dtype) as a:``."""
        if model is not None:
            return await (await self._channel(model, None)).allocate(shape, dtype)
        return self._arena.allocate(shape, dtype_name(dtype))

    async def _channel(self, model: str, deadline: float | None) -> Channel:
        patience = None if deadline is None else checked_deadline(deadline)
        task = self._channels.get(model)
        if task is not None and task.done():
            if task.cancelled() or task.exception() is not None:
                task = None
            elif not (channel := task.result()).is_open:
                await self._forget(model)
                if channel.stateful and channel.core.died:
                    raise Error("worker_lost", f"using {model} again: its state is lost, for its process has ended",
                                "begin the stream again: the next call opens a new channel")  # fmt: skip
                task = None
        if task is None:
            task = self._channels[model] = asyncio.ensure_future(self._reopen(model))
        try:
            return await asyncio.wait_for(asyncio.shield(task), patience)
        except asyncio.TimeoutError:
            raise Error("deadline_exceeded", f"opening a channel to {model}", "allow more time, or load it beforehand") from None

    async def _reopen(self, model: str) -> Channel:
        for _ in range(REOPEN_TRIES - 1):
            try:
                return await self.open(model)
            except Error as error:
                # The daemon may notice a death later than the client, and so introduce it to
                # a dead worker.
                if error.code != "worker_lost":
                    raise
        return await self.open(model)

    async def _forget(self, model: str) -> None:
        task = self._channels.pop(model, None)
        if task is None:
            return
        task.cancel()
        try:
            (await task).close()
        except (Error, asyncio.CancelledError):
            if not task.done():  # this task itself is being cancelled
                raise

    # --- control

    async def load(self, *models: str, deadline: float | None = None) -> list[dict[str, Any]]:
        """As ``bulkhead.Client.load``."""
        return (await self.call("model.load", verbs.with_deadline(verbs.models(models), deadline)))["models"]  # type: ignore[no-any-return]

    async def unload(self, *models: str) -> list[dict[str, Any]]:
        """As ``bulkhead.Client.unload``, but first closes this client's channels to them."""
        params = verbs.models(models)
        for model in list(self._channels) if models == ("*",) else models:
            await self._forget(model)
        return (await self.call("model.unload", params))["receipts"]  # type: ignore[no-any-return]

    async def restart(self, *models: str) -> dict[str, Any]:
        """Unloads and loads the models, and lifts a quarantine: ``{"models", "receipts"}``."""
        return await self.call("model.restart", verbs.models(models))  # type: ignore[no-any-return]

    async def ps(self) -> list[dict[str, Any]]:
        """As ``bulkhead.Client.ps``."""
        return (await self.call("fleet.status"))["models"]  # type: ignore[no-any-return]

    async def why(self, model: str) -> str:
        """The reason for the model's state, in a sentence."""
        return str((await self.call("model.why", {"model": model}))["sentence"])

    async def crashes(self, model: str | None = None) -> list[dict[str, Any]]:
        """Reports of workers that died unexpectedly, newest first."""
        return (await self.call("crashes.list", {} if model is None else {"model": model}))["crashes"]  # type: ignore[no-any-return]

    async def info(self) -> dict[str, Any]:
        """As ``bulkhead.Client.info``."""
        return await self.call("daemon.info")  # type: ignore[no-any-return]

    async def gpus(self) -> dict[str, Any]:
        """``{"nvml", "gpus": [{"index", "uuid", "name", "state", "free_bytes", …}]}``"""
        return await self.call("gpu.status")  # type: ignore[no-any-return]

    async def reload(self) -> dict[str, Any]:
        """Reads the fleet file again: ``{"added", "removed", "changed", "unchanged"}``."""
        return await self.call("fleet.reload")  # type: ignore[no-any-return]

    async def stop(self) -> list[dict[str, Any]]:
        """Unloads everything and ends the daemon. Returns the receipts."""
        return (await self.call("daemon.stop"))["receipts"]  # type: ignore[no-any-return]

    async def events(self, *models: str) -> Notifications:
        """``async for event in await b.events(): …``: events from now on, without end, on a
        separate connection."""
        return await Notifications.open(self._path, "events.subscribe", verbs.only_of(models))

    async def logs(self, model: str, *, lines: int = 100) -> list[dict[str, Any]]:
        """The model's last lines, ``{"time", "replica", "generation", "stream", "text"}``."""
        return (await self.call("logs.tail", {"model": model, "lines": lines}))["lines"]  # type: ignore[no-any-return]

    async def follow_logs(self, model: str, *, lines: int = 100) -> Notifications:
        """The model's last lines, then new ones, without end."""
        return await Notifications.open(self._path, "logs.tail", {"model": model, "lines": lines, "follow": True})

    async def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """Calls any method of the control socket (docs/control.md). Returns its result."""
        result, fds = await self._control.call(method, params)
        for fd in fds:
            os.close(fd)
        return result


def connect(path: str | os.PathLike[str] | None = None, *, name: str = "bulkhead-py", memory_bytes_max: int = ARENA_BYTES_MAX) -> Client:
    """As ``bulkhead.connect``."""
    return Client(path, name=name, memory_bytes_max=memory_bytes_max)
