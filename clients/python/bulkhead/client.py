"""The daemon as one object: inference by model name, and the control verbs."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any, Iterator, Mapping, Sequence

from .channel import OPEN_SECONDS, Channel
from .control import Control, find_socket
from .errors import Error
from .protocol import Input, Reply

_WAIT_FOR_LOAD = 3600.0


class Client:
    """``bulkhead.connect()`` makes one. Any thread may use it: each thread has a channel of its own to each model."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, name: str = "bulkhead-py") -> None:
        self.name = name
        self._path = find_socket(path)
        self._control = Control(self._path)
        self._local = threading.local()
        self._all: list[Channel] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._all:
            channel.close()
        self._all.clear()
        self._control.close()

    # --- inference

    def open(self, model: str, *, deadline: float | None = None) -> Channel:
        """A channel of one's own: for a stream through a model that keeps state. Loads the model if need be."""
        params: dict[str, Any] = {"model": model, "client": self.name}
        if deadline is not None:
            params["deadline_ms"] = max(1, int(deadline * 1000))
        _, fds = self._control.call("channel.open", params)
        if len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise Error("protocol_violation", f"channel.open answered with {len(fds)} descriptors")
        return Channel(socket.socket(fileno=fds[0]), client=self.name, deadline=deadline or OPEN_SECONDS)

    def infer(self, model: str, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward",
              parameters: Mapping[str, Any] | None = None, deadline: float | None = None, retry_safe: bool = False,
              **named: Any) -> Reply:  # fmt: skip
        """``b.infer("minilm", input_ids=x)["embedding"].numpy()``.

        ``retry_safe``: running it twice does no harm, so a request that its worker took down is sent once more, to the
        next one. Without it such a request ends with ``worker_lost``.
        """
        until = None if deadline is None else time.monotonic() + deadline
        channel = self._channel(model, deadline)
        try:
            return channel.infer(inputs, method=method, parameters=parameters, deadline=deadline, **named)
        except Error as error:
            if error.code != "worker_lost" or channel.core.ended is None:
                raise
            self._forget(model)
            if not retry_safe:
                raise
        left = None if until is None else max(until - time.monotonic(), 0.001)
        channel = self._channel(model, left)
        return channel.infer(inputs, method=method, parameters=parameters, deadline=left, **named)

    def allocate(self, model: str, shape: Sequence[int], dtype: Any = "float32") -> Input:
        """Room in the memory shared with the model's worker, for this thread's next ``infer`` of it."""
        return self._channel(model, None).allocate(shape, dtype)

    def _channel(self, model: str, deadline: float | None) -> Channel:
        mine: dict[str, Channel] = self._local.__dict__.setdefault("channels", {})
        channel = mine.get(model)
        if channel is None or channel.core.ended is not None:
            if channel is not None:
                self._forget(model)
            channel = mine[model] = self.open(model, deadline=deadline)
            self._all.append(channel)
        return channel

    def _forget(self, model: str) -> None:
        channel: Channel | None = self._local.__dict__.get("channels", {}).pop(model, None)
        if channel is not None:
            channel.close()
            if channel in self._all:
                self._all.remove(channel)

    # --- control

    def load(self, *models: str, deadline: float | None = None) -> list[dict[str, Any]]:
        """Returns when all are ready: ``[{"model", "replica", "state", "pid", "ms"}]``."""
        params: dict[str, Any] = {"models": list(models)}
        if deadline is not None:
            params["deadline_ms"] = max(1, int(deadline * 1000))
        return self._result("model.load", params, again=True)["models"]  # type: ignore[no-any-return]

    def unload(self, *models: str) -> list[dict[str, Any]]:
        """Returns when the memory is back: one receipt a process."""
        for model in models:
            self._forget(model)
        return self._result("model.unload", {"models": list(models)}, again=True)["receipts"]  # type: ignore[no-any-return]

    def restart(self, *models: str) -> dict[str, Any]:
        return self._result("model.restart", {"models": list(models)})

    def ps(self) -> list[dict[str, Any]]:
        return self._result("fleet.status")["models"]  # type: ignore[no-any-return]

    def why(self, model: str) -> str:
        """The reason for its state, in a sentence."""
        return str(self._result("model.why", {"model": model})["sentence"])

    def crashes(self, model: str | None = None) -> list[dict[str, Any]]:
        """Reports of what died unasked, newest first."""
        return self._result("crashes.list", {} if model is None else {"model": model})["crashes"]  # type: ignore[no-any-return]

    def info(self) -> dict[str, Any]:
        return self._result("daemon.info")

    def gpus(self) -> dict[str, Any]:
        return self._result("gpu.status")

    def events(self, *models: str) -> Iterator[dict[str, Any]]:
        """What happens from now on, on a connection of its own, without end."""
        control = Control(self._path)
        try:
            for _, params in control.notifications("events.subscribe", {"models": list(models)} if models else {}):
                yield params
        finally:
            control.close()

    def logs(self, model: str, *, lines: int = 100, follow: bool = False) -> Iterator[dict[str, Any]]:
        if not follow:
            yield from self._result("logs.tail", {"model": model, "lines": lines})["lines"]
            return
        yield from self._result("logs.tail", {"model": model, "lines": lines})["lines"]
        control = Control(self._path)
        try:
            for _, params in control.notifications("logs.tail", {"model": model, "lines": 0, "follow": True}):
                yield params
        finally:
            control.close()

    def _result(self, method: str, params: dict[str, Any] | None = None, *, again: bool = False) -> dict[str, Any]:
        result, _ = self._control.call(method, params, again=again)
        return result  # type: ignore[no-any-return]


def connect(path: str | os.PathLike[str] | None = None, *, name: str = "bulkhead-py") -> Client:
    """To the daemon at ``path``, else where ``bulkhead`` would look. ``name`` appears in logs and receipts."""
    return Client(path, name=name)
