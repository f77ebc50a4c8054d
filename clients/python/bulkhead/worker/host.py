"""Runs the engine on the main thread: its load, its requests, and its context."""

from __future__ import annotations

import os
import queue
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Generator, Mapping, Sequence

from ..engine import Cancelled
from ..errors import Error
from ..tensors import TensorView
from . import results
from .graphs import Graphed, Graphs
from .loading import Engine, import_engine, ran_out_of_memory, status_of
from .log import say
from .messages import json_text
from .page import StatusPage
from .requests import Request

_PROGRESS_SECONDS = 0.1  #: between two progress parts

Progress = Callable[[str, int, int, str], None]


class WorkerContext:
    """``bulkhead.engine.Context`` in a worker. Used on the main thread."""

    def __init__(self, *, options: Mapping[str, Any], device: str, graphs: str, model: str, cache: Path, load_progress: Progress) -> None:
        self.options, self.device, self.graphs, self.model, self.cache = dict(options), device, graphs, model, cache
        self.request: Request | None = None
        self._load_progress, self._told = load_progress, 0.0
        self._graphs = Graphs(device, graphs, progress=lambda done, total, detail: load_progress("capturing", done, total, detail))

    def progress(self, done: int, total: int, detail: str = "") -> None:
        self.check()
        if self.request is None:
            return self._load_progress("loading", done, total, detail)
        now = time.monotonic()
        if self.request.streams and (done == total or now - self._told >= _PROGRESS_SECONDS):
            self._told = now
            told = {"progress": {"done": done, "total": total, "detail": detail}}
            self.request.session.post_part(self.request, [], json_text(told))

    def check(self) -> None:
        if self.request is not None and self.request.answered:
            raise Cancelled(f"request {self.request.number} is no longer wanted")

    def graph(self, fn: Callable[..., Any], buckets: Sequence[Mapping[str, Any]], *, padding: Mapping[str, float] | None = None,
              name: str = "") -> Graphed:  # fmt: skip
        if self.request is not None:
            raise Error("inference_failed", "context.graph in a request", "call it in load: a capture takes memory and time")
        return self._graphs.add(fn, buckets, padding=padding or {}, name=name)

    def report(self) -> dict[str, Any]:
        """``graphs`` for the worker link. Any thread."""
        return self._graphs.report()


class Host:
    """Runs jobs on the main thread, one at a time; ``post`` is for any thread."""

    def __init__(self, page: StatusPage | None) -> None:
        self._page = page
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pid = os.getpid()
        self.engine: Engine | None = None
        self._object: Any = None
        self.context: WorkerContext | None = None

    def post(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def run_forever(self) -> None:
        """Runs the main thread until the process ends."""
        while True:
            self._jobs.get()()

    def load(self, text: str, context: WorkerContext, wait_for_grant: Callable[[], None]) -> tuple[Error | None, int]:
        """Loads the engine. Returns the error, if any, and the exit status."""
        self.context = context
        self._begin("loading")
        attempt = f"loading engine {text}"
        try:
            self.engine = import_engine(text)
            if context.device != "cpu":
                wait_for_grant()  # before the first allocation; importing allocates nothing
            self._object = self._by_worker(self.engine.type)
            self._by_worker(lambda: self._object.load(context))
            return None, 0
        except BaseException as error:  # noqa: BLE001  an engine's sys.exit() is caught too
            self._print(error)
            told = self.engine.error(error, attempt, "load_failed") if self.engine is not None else error
            return told if isinstance(told, Error) else Error("load_failed", f"{attempt}: {error!r}"), status_of(error)
        finally:
            self._end()

    def run(self, request: Request) -> None:
        """Runs a request and stores its answer in it."""
        assert self.engine is not None and self.context is not None
        self._begin(str(request))
        self.context.request = request
        try:
            returned = self._call(request)
            request.outputs, request.text = results.write(request, returned, whole=True)
        except Cancelled as cancelled:
            request.error = Error("cancelled", str(cancelled))
        except BaseException as error:  # noqa: BLE001  the request ends, and not the process
            self._print(error)
            request.error = self.engine.error(error, f"running method \"{request.method.name}\"", "inference_failed")
            request.ran_out_of_memory = ran_out_of_memory(error)
        finally:
            self.context.request = None
            request.session.slabs.drop_writes(request.tensors)
            request.ended = time.monotonic()
            self._end()

    def unload(self) -> None:
        """Calls the engine's ``unload``, if it has one, before the process ends."""
        unload = getattr(self._object, "unload", None)
        if callable(unload):
            self._begin("unloading")
            try:
                self._by_worker(unload)
            except BaseException as error:  # noqa: BLE001  the process ends in any case
                self._print(error)
            finally:
                self._end()

    def _call(self, request: Request) -> object:
        arguments = {name: self._argument(request, name, value) for name, value in request.arguments.items()}
        returned = self._by_worker(lambda: getattr(self._object, request.method.name)(**arguments))
        return self._stream(request, returned) if request.method.streams else returned

    @staticmethod
    def _argument(request: Request, name: str, value: Any) -> Any:
        tensor = next((one for one in request.tensors if one.name == name), None)
        return value if tensor is None else TensorView(tensor.dtype, tensor.shape, value).numpy()

    def _stream(self, request: Request, parts: Generator[Any, None, Any]) -> object:
        """Sends what the generator yields, and returns what it returns."""
        assert self.context is not None
        try:
            while True:
                try:
                    part = self._by_worker(lambda: next(parts))
                except StopIteration as end:
                    return end.value
                self.context.check()
                if self._page is not None:
                    self._page.step()
                if request.streams:
                    request.session.post_part(request, *results.write(request, part, whole=False))
        finally:
            parts.close()

    def _by_worker(self, call: Callable[[], Any]) -> Any:
        """Returns what the engine's code returns. If a child that it forked returns here, ends the
        child: an answer goes to memory that is mapped only in the worker, its parent."""
        try:
            return call()
        finally:
            if os.getpid() != self._pid:
                os._exit(0)

    def _begin(self, text: str) -> None:
        if self._page is not None:
            self._page.begin(text)

    def _end(self) -> None:
        if self._page is not None:
            self._page.end()

    @staticmethod
    def _print(error: BaseException) -> None:
        if isinstance(error, Error):
            return
        say("error", "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip())


def torch_version() -> str:
    torch = sys.modules.get("torch")
    return str(getattr(torch, "__version__", "")) if torch is not None else ""


def device_name(device: str) -> str:
    torch = sys.modules.get("torch")
    # An engine may use the GPU in other ways.
    if device == "cpu" or torch is None or not torch.cuda.is_initialized():
        return device
    return str(torch.cuda.get_device_name(0))
