"""The daemon, as nodes see it. Every failure is one sentence of what happened and one
of what to do."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from .limits import LOOK_AGE_SECONDS, LOOK_SECONDS

NAME = "ComfyUI"  #: in the daemon's logs and receipts
INSTALL = "install the wheel that ./scripts/wheel makes in a checkout of Bulkhead (docs/comfyui.md): "
INSTALL += f"{sys.executable} -m pip install build/wheel/bulkhead_gpu-*.whl"


class NodeError(RuntimeError):
    """Shown in the node."""


def library() -> Any:
    """Imports the Python client. Raises ``NodeError`` where that fails: the pack itself can be
    imported everywhere."""
    if sys.platform != "linux":
        raise NodeError(f"Bulkhead runs models on Linux, and this is {sys.platform}: start ComfyUI and the daemon on Linux, on Windows within WSL2")
    try:
        import bulkhead
    except ImportError as error:
        raise NodeError(f"Bulkhead's Python client is not installed ({error}): {INSTALL}") from None
    if not hasattr(bulkhead, "aio"):
        raise NodeError(f"{bulkhead.__file__} is another project's package: {sys.executable} -m pip uninstall bulkhead, then {INSTALL}")
    return bulkhead


@contextmanager
def reported() -> Iterator[None]:
    """Turns the client's errors into ComfyUI's. Out of memory becomes ComfyUI's own exception,
    after which it unloads models."""
    bulkhead = library()
    try:
        yield
    except bulkhead.Error as error:
        raise translated(error) from None


def translated(error: Any) -> Exception:
    from comfy import model_management

    if error.code == "out_of_memory":
        return model_management.OOM_EXCEPTION(str(error))  # type: ignore[no-any-return]
    text = str(error)
    if error.code in ("protocol_violation", "method_unknown", "internal"):
        text += f" (the client is {library().__version__}, the daemon {_version()}: they are of one release)"
    return NodeError(text)


@asynccontextmanager
async def connected() -> AsyncIterator[Any]:
    """A client for one run of a node. ComfyUI gives each prompt a new event loop, so no
    client is kept."""
    with reported():
        async with library().aio.connect(name=NAME) as client:
            yield client


_lock = threading.Lock()
_client: Any = None
_seen = -LOOK_AGE_SECONDS
_rows: list[dict[str, Any]] | Exception = []


def ask(method: str, params: dict[str, Any] | None = None, *, deadline: float | None = None) -> Any:
    """Calls one method, from any thread and without an event loop, for ComfyUI's model management.
    Raises the client's Error."""
    global _client
    bulkhead = library()
    with _lock:
        if _client is None:
            _client = bulkhead.connect(name=NAME)
        client = _client
    return client.call(method, params, deadline=LOOK_SECONDS if deadline is None else deadline)


def rows(*, age: float = 0.0) -> list[dict[str, Any]]:
    """Returns ``fleet.status``, or raises its error, at most ``age`` seconds old: many menus ask,
    also while the daemon hangs."""
    global _seen, _rows
    if age == 0.0 or time.monotonic() - _seen > age:
        try:
            _rows = ask("fleet.status")["models"]
        except Exception as error:
            _rows = error
        _seen = time.monotonic()
    if isinstance(_rows, Exception):
        raise _rows
    return _rows


def _version() -> str:
    try:
        return str(ask("daemon.info")["version"])
    except Exception as error:
        return f"unknown, {error}"
