"""The worker process: what is set up before the engine's first line runs."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from ..errors import Error
from .host import Host
from .log import say
from .page import StatusPage
from .server import TERMINATE_DRAIN_SECONDS, Identity, Server

_LINK_FD = 3
_USAGE = 2


def main() -> None:
    """Does not return."""
    try:
        link = socket.socket(fileno=_LINK_FD)
        if link.type != socket.SOCK_SEQPACKET:
            raise OSError("another kind of socket")
    except OSError as error:
        _wrong_usage(f"descriptor {_LINK_FD} is not a daemon's link: {error}")
    try:
        identity = Identity.parse(os.environ.get("BULKHEAD_WORKER", ""))
    except Error as error:
        _wrong_usage(str(error))
    link.set_inheritable(False)  # a child of the engine must not keep it open
    fault, crashing = os.pipe()  # the daemon reads a crash's traceback there
    os.set_blocking(crashing, False)
    faulthandler.enable(file=crashing, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt within an engine
    try:
        # On the main thread, which lives as long as the process.
        page: StatusPage | None = StatusPage()
    except OSError as error:
        page = None
        say("warn", f"no page: {error}; a death of this worker is noticed later")
    host = Host(page)
    loop = asyncio.SelectorEventLoop()
    server = Server(loop, link, identity, Path(os.environ.get("BULKHEAD_CACHE", ".")), host, page, fault)
    _close_in_children(server, [_LINK_FD, fault, crashing])
    bell = _drain_on_sigterm(loop, server)
    # Made before the hello, which tells the daemon about the context.
    if identity.is_blank and os.environ.get("CUDA_VISIBLE_DEVICES"):
        with contextlib.suppress(Exception):  # as below: then there is no context
            import torch

            torch.cuda.synchronize()
    threading.Thread(target=_run_loop, args=(loop, server), name="bulkhead", daemon=True).start()
    if identity.is_blank:
        # If torch is missing or broken, the engine's own import reports it.
        with contextlib.suppress(Exception):
            import torch  # noqa: F401  # most engines import it; no request waits yet
    host.run_forever()
    bell.close()  # not reached: the server ends the process


def _wrong_usage(why: str) -> Any:
    print(f"bulkhead.worker: {why}\nIt is started by bulkheadd, one process per model; what people start is `bulkhead up FLEET`.", file=sys.stderr)
    sys.exit(_USAGE)


def _run_loop(loop: asyncio.AbstractEventLoop, server: Server) -> None:
    # Signals go to the main thread: it runs the engine, so a report should show its line.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def failed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        import traceback

        error = context.get("exception")
        say("error", "".join(traceback.format_exception(error)) if error is not None else str(context["message"]))
        os._exit(1)  # a worker with inconsistent state ends as if it crashed

    loop.set_exception_handler(failed)
    loop.call_soon(server.start)
    loop.run_forever()


def _drain_on_sigterm(loop: asyncio.AbstractEventLoop, server: Server) -> socket.socket:
    """Starts a drain on SIGTERM through the wake-up descriptor, which the C handler writes even
    while the main thread runs C code. The Python handler is for engines whose own loop took
    that descriptor."""

    def drain() -> None:
        server.drain(TERMINATE_DRAIN_SECONDS)

    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)

    def wake() -> None:
        if signal.SIGTERM in reading.recv(4096):
            drain()

    def handle(*_: object) -> None:
        loop.call_soon_threadsafe(drain)

    loop.add_reader(reading.fileno(), wake)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, handle)
    return reading


def _close_in_children(server: Server, own: list[int]) -> None:
    """Closes descriptors in a child that an engine forks. It would keep link and channels open and
    hide their end, and its crash is not the worker's."""

    def close() -> None:
        faulthandler.enable(file=2, all_threads=True)
        for descriptor in (*own, *server.descriptors()):
            os.close(descriptor)

    os.register_at_fork(after_in_child=close)
