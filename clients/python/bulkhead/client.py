"""The daemon as one object: inference by model name, and the control verbs."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from typing import Any, Iterable, Iterator, Mapping, Sequence

from .channel import GRACE_SECONDS, OPEN_SECONDS, Channel
from .control import Control, Notifications, find_socket, verbs
from .errors import Error, checked_deadline
from .generation import Generation, arguments
from .protocol import Reply
from .shared_tensors import ARENA_BYTES_MAX, Arena, Input
from .tensors import dtype_name

#: Channels opened for one request that is sent again, if each worker dies before its welcome.
REOPEN_TRIES = 3


class Client:
    """Made by ``bulkhead.connect()``. Any thread may use it: each thread has its own channel to
    each model until the thread ends or the client is closed. A forked child may use it too, without
    the parent's channels and tensors."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, name: str = "bulkhead-py",
                 memory_bytes_max: int = ARENA_BYTES_MAX) -> None:  # fmt: skip
        self.name = name
        self._control = Control(find_socket(path))
        self._local = threading.local()
        self._lock = threading.Lock()
        self._all: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._arena = Arena(memory_bytes_max)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all channels. Outputs that are still referenced stay readable."""
        with self._lock:
            channels = list(self._all)
            self._all.clear()
        for channel in channels:
            channel.close()
        self._arena.close()
        self._control.close()

    # --- inference

    def open(self, model: str, *, deadline: float | None = None, gpu: int | None = None, stream: int = 0) -> Channel:
        """Opens a separate channel, for a stream through a stateful model or for several requests
        in flight. Loads the model if need be. ``deadline`` in seconds.

        ``gpu``: the model's GPU, by its number in this process, to share its memory. ``stream``:
        the CUstream, as a number, on which this program writes inputs and reads results there."""
        events = verbs.part_in_gpu(gpu, stream)
        params = verbs.with_deadline({"model": model, "client": self.name}, deadline)
        result, fds = self._control.call("channel.open", params, deadline=_and_grace(deadline))
        channel = Channel(socket.socket(fileno=verbs.one_descriptor(fds)), client=self.name, deadline=deadline or OPEN_SECONDS,
                          stateful=verbs.is_stateful(result), events=events)  # fmt: skip
        with self._lock:
            self._all.add(channel)
        return channel

    def infer(self, model: str, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward",
              parameters: Mapping[str, Any] | None = None, deadline: float | None = None, retry_safe: bool = False,
              **named: Any) -> Reply:  # fmt: skip
        """``b.infer("minilm", input_ids=x)["embedding"].numpy()``.

        Put inputs whose names are not Python names into the dictionary ``inputs``. ``deadline`` in
        seconds, including a load. ``retry_safe``: running it twice does no harm, so if its worker
        dies, the request is sent once more, to the next worker. Otherwise, or with a stateful
        model, it ends with ``worker_lost``.
        """
        until = None if deadline is None else time.monotonic() + checked_deadline(deadline)
        channel = self._channel(model, deadline)
        try:
            return channel.infer(inputs, method=method, parameters=parameters, deadline=left(until), retry_safe=retry_safe, **named)
        except Error as error:
            if not (retry_safe and error.code == "worker_lost" and channel.core.died and not channel.stateful):
                raise
        channel = self._channel(model, left(until))
        return channel.infer(inputs, method=method, parameters=parameters, deadline=left(until), retry_safe=True, **named)

    def stream(self, model: str, inputs: Mapping[str, Any] | None = None, /, *, method: str = "forward",
               parameters: Mapping[str, Any] | None = None, deadline: float | None = None, **named: Any) -> Iterator[Reply]:  # fmt: skip
        """Yields the parts of a streamed answer as they arrive:
        ``for part in b.stream("llm", tokens=x): …``. Sends the request at once; leaving the loop,
        or dropping the iterator, cancels the rest. Never sent again."""
        until = None if deadline is None else time.monotonic() + checked_deadline(deadline)
        channel = self._channel(model, deadline)
        return channel.stream(channel.submit(inputs, method=method, parameters=parameters, deadline=left(until), **named))

    def generate(self, model: str, tokens: Any = None, inputs: Mapping[str, Any] | None = None, /, *, method: str = "generate",
                 deadline: float | None = None, **named: Any) -> Generation:  # fmt: skip
        """``for token in b.generate("smollm2", prompt, temperature=0.7, max_new_tokens=64): …``
        yields token ids as they arrive, or lists with one per codebook.

        Keyword arguments are inputs if the model declares them (``embeddings=``), else parameters:
        ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``ras_repeats``,
        ``guidance``, ``do_sample``, ``seed``, ``max_new_tokens``, ``stop``, ``stop_also``,
        ``ignore_stop``, ``banned``, ``forced``; the model's package gives the defaults. Sent at
        once; leaving the loop cancels the rest. Never sent again: if the worker dies, it ends with
        ``worker_lost``, and ``Generation.tokens`` has the tokens so far.
        """
        until = None if deadline is None else time.monotonic() + checked_deadline(deadline)
        channel = self._channel(model, deadline)
        tensors, parameters = arguments(channel.methods, method, tokens, inputs, named)
        request = channel.submit(tensors, method=method, parameters=parameters, deadline=left(until))
        return Generation(model, channel.stream(request))

    def allocate(self, shape: Sequence[int], dtype: Any = "float32", *, model: str | None = None) -> Input:
        """Allocates an input to fill in place: ``with b.allocate((1, 512)) as a: a.numpy()[:] = …;
        b.infer("vad", x=a)``.

        It is memory of this process. Each worker that receives it maps it once; nothing is copied.
        With ``model`` it lies in the worker's own slab: a GPU reads that at full speed, but only
        that model reads it without a copy.
        """
        if model is not None:
            return self._channel(model, None).allocate(shape, dtype)
        return self._arena.allocate(shape, dtype_name(dtype))

    def settle(self) -> None:
        """Calls ``Channel.settle`` on all of this thread's channels."""
        for channel in self._mine().values():
            channel.settle()

    def _mine(self) -> dict[str, Channel]:
        mine: dict[str, Channel] = self._local.__dict__.setdefault("channels", {})
        return mine

    def _channel(self, model: str, deadline: float | None) -> Channel:
        channel = self._mine().get(model)
        if channel is not None and channel.is_open:
            return channel
        if channel is not None:
            self._forget(model)
            if channel.stateful and channel.core.died:
                raise Error("worker_lost", f"using {model} again: its state is lost, for its process has ended",
                            "begin the stream again: the next call opens a new channel")  # fmt: skip
        for tried in range(1, REOPEN_TRIES + 1):
            try:
                channel = self._mine()[model] = self.open(model, deadline=deadline)
                break
            except Error as error:
                # The daemon may notice a death later than the client, and so introduce it to
                # a dead worker.
                if error.code != "worker_lost" or tried == REOPEN_TRIES:
                    raise
        assert channel is not None
        return channel

    def _forget(self, model: str) -> None:
        channel = self._mine().pop(model, None)
        if channel is not None:
            channel.close()

    # --- control

    def load(self, *models: str, deadline: float | None = None) -> list[dict[str, Any]]:
        """Loads models; returns when all are ready:
        ``[{"model", "replica", "state", "pid", "ms"}]``. ``"*"``: the whole fleet."""
        params = verbs.with_deadline(verbs.models(models), deadline)
        return self.call("model.load", params, deadline=_and_grace(deadline))["models"]  # type: ignore[no-any-return]

    def unload(self, *models: str) -> list[dict[str, Any]]:
        """Unloads models; returns when their memory is free: one receipt per process, ``[{"model",
        "pid", "ended", "ms", "host_bytes", "gpu_bytes", "verified", "held_by", …}]``. First closes
        this thread's channels to them."""
        params = verbs.models(models)
        for model in list(self._mine()) if models == ("*",) else models:
            self._forget(model)
        self.settle()  # returns what was lent to others
        return self.call("model.unload", params)["receipts"]  # type: ignore[no-any-return]

    def restart(self, *models: str) -> dict[str, Any]:
        """Unloads and loads the models, and lifts a quarantine: ``{"models", "receipts"}``."""
        return self.call("model.restart", verbs.models(models))  # type: ignore[no-any-return]

    def ps(self) -> list[dict[str, Any]]:
        """One row per replica: ``model``, ``state``, ``pid``, ``host_bytes``, ``gpu_bytes``,
        ``requests``, …"""
        return self.call("fleet.status")["models"]  # type: ignore[no-any-return]

    def why(self, model: str) -> str:
        """The reason for the model's state, in a sentence."""
        return str(self.call("model.why", {"model": model})["sentence"])

    def crashes(self, model: str | None = None) -> list[dict[str, Any]]:
        """Reports of workers that died unexpectedly, newest first."""
        return self.call("crashes.list", {} if model is None else {"model": model})["crashes"]  # type: ignore[no-any-return]

    def info(self) -> dict[str, Any]:
        """Facts about the daemon: ``version``, ``keeper_pid``, ``supervisor_pid``, ``socket``,
        ``fleet``, ``uptime_s``, …"""
        return self.call("daemon.info")  # type: ignore[no-any-return]

    def gpus(self) -> dict[str, Any]:
        """``{"nvml", "gpus": [{"index", "uuid", "name", "state", "free_bytes", …}]}``"""
        return self.call("gpu.status")  # type: ignore[no-any-return]

    def reload(self) -> dict[str, Any]:
        """Reads the fleet file again: ``{"added", "removed", "changed", "unchanged"}``."""
        return self.call("fleet.reload")  # type: ignore[no-any-return]

    def stop(self) -> list[dict[str, Any]]:
        """Unloads everything and ends the daemon. Returns the receipts."""
        return self.call("daemon.stop")["receipts"]  # type: ignore[no-any-return]

    def events(self, *models: str) -> Notifications:
        """Events of these models, or of all, from now on: an endless iterator on a
        separate connection."""
        return Notifications(self._control, "events.subscribe", verbs.only_of(models))

    def logs(self, model: str, *, lines: int = 100, follow: bool = False) -> Iterable[dict[str, Any]]:
        """The model's last lines, ``{"time", "replica", "generation", "stream", "text"}``; with
        ``follow`` also new ones, without end (as ``Notifications``, which can be closed)."""
        params = {"model": model, "lines": lines}
        if follow:
            return Notifications(self._control, "logs.tail", {**params, "follow": True})
        return self.call("logs.tail", params)["lines"]  # type: ignore[no-any-return]

    def call(self, method: str, params: dict[str, Any] | None = None, *, deadline: float | None = None) -> Any:
        """Calls any method of the control socket (docs/control.md). Returns its result."""
        result, fds = self._control.call(method, params, deadline=deadline)
        for fd in fds:
            os.close(fd)
        return result


def left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.001)


def _and_grace(deadline: float | None) -> float | None:
    """Leaves time for the daemon's own error, which tells more than ours."""
    return None if deadline is None else deadline + GRACE_SECONDS


def connect(path: str | os.PathLike[str] | None = None, *, name: str = "bulkhead-py", memory_bytes_max: int = ARENA_BYTES_MAX) -> Client:
    """Connects to the daemon at ``path``, else where ``bulkhead`` looks. ``name`` appears in
    logs and receipts. ``allocate`` without a model takes at most ``memory_bytes_max`` of this
    process' memory."""
    return Client(path, name=name, memory_bytes_max=memory_bytes_max)
