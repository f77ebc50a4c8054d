"""A worker: the daemon's link, one engine, and its clients. Two threads: the event loop's, which
runs this and never computes, and the main thread, which runs the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from ..errors import Error
from ..layout import LIMITS
from . import declaration, link_messages, messages
from .host import Host, WorkerContext, device_name, torch_version
from .link import WorkerLink, printable
from .log import say, set_level
from .page import StatusPage
from .progress import LoadProgress
from .requests import Dispatcher, Request
from .session import AWAITING_HELLO, IN_FLIGHT_MAX, ChannelLimits, ChannelSession, Serving
from .slabs import Budget

TERMINATE_DRAIN_SECONDS = 2.0  #: after SIGTERM, for requests in flight
REFUSALS_PENDING_MAX = 64  #: channels beyond the model's bound that wait for their hello's error

STARTING, LOADING, READY, DRAINING, ENDED = "starting", "loading", "ready", "draining", "ended"


@dataclass(frozen=True)
class Identity:
    """Parsed from ``BULKHEAD_WORKER``: ``<daemon token>:<model>/<replica>#<generation>``."""

    token: str
    model: str
    replica: int
    generation: int

    @classmethod
    def parse(cls, text: str) -> Identity:
        token, _, rest = text.partition(":")
        place, _, generation = rest.rpartition("#")
        model, _, replica = place.rpartition("/")
        if not (model and replica.isdecimal() and generation.isdecimal()):
            raise Error("config_invalid", f'reading BULKHEAD_WORKER "{text}", which should be TOKEN:MODEL/REPLICA#GENERATION',
                        "let bulkheadd start the worker")  # fmt: skip
        return cls(token, model, int(replica), int(generation))

    @property
    def is_blank(self) -> bool:
        """Started before its model is known; ``configure`` names it."""
        return self.model == "_blank"

    def configured(self, model: dict[str, Any], replica: int | None, generation: int | None) -> Identity:
        return Identity(self.token, model.get("name", self.model), self.replica if replica is None else replica,
                        self.generation if generation is None else generation)  # fmt: skip


class Server:
    """Used on the loop's thread. ``leave`` ends the process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, link: socket.socket, identity: Identity, cache: Path, host: Host, page: StatusPage | None,
                 fault: int) -> None:  # fmt: skip
        """``fault``: the end of the pipe where the daemon reads ``faulthandler``'s output."""
        self._loop, self._identity, self._cache, self._host, self._page, self._fault = loop, identity, cache, host, page, fault
        self._phase = STARTING
        self._capturing = False
        self._grant, self._granted = "none", threading.Event()
        self._nonce: int | None = None
        self._statistics_owed = False
        self._ready: dict[str, Any] | None = None
        self._sessions: dict[int, ChannelSession] = {}
        self._ignored_frames_past = 0
        self._serving: Serving | None = None
        self._channels_max = 0
        self._drain_until = float("inf")
        self._drain_timer: asyncio.TimerHandle | None = None
        self._unload = "none"  # none, runs, done
        self._progress = LoadProgress(loop, lambda told: self._link.send("progress", **told))
        self._dispatcher = Dispatcher(loop, run=self._run, activity=self._say_activity, settled=self._finish_drain_if_done,
                                      ran_out=self._say_statistics, overrun=self._say_overrun)  # fmt: skip
        self._link = WorkerLink(loop, link, on_message=self._on_message, on_lost=lambda: self.leave(1), hello=self._hello, caught_up=self._caught_up)

    def start(self) -> None:
        self._link.say_hello()

    def descriptors(self) -> list[int]:
        """Descriptors of open channels; any thread."""
        return [session.descriptor for session in list(self._sessions.values()) if not session.is_closed]

    # --- the link

    def _on_message(self, kind: str, members: dict[str, Any], fds: list[int]) -> None:
        if kind == "configure":
            self._on_configure(members)
        elif kind == "grant":
            self._grant = "given"
            self._granted.set()
        elif kind == "channel":
            self._on_channel(members, fds)
        elif kind == "drain":
            self.drain(members["deadline_ms"] / 1000)
        elif kind == "statistics_asked":
            self._say_statistics()
        elif kind == "hello_asked":
            self._nonce = members["nonce"]
            self._link.say_hello()

    def _hello(self, with_descriptors: bool) -> tuple[dict[str, Any], list[int]]:
        page = self._page if with_descriptors else None
        fds = ([] if page is None else [page.fd]) + ([self._fault] if with_descriptors else [])
        open_ones = [session for session in self._sessions.values() if not session.is_closed]
        if with_descriptors:
            fds += [session.descriptor for session in open_ones][: link_messages.PACKET_FDS_MAX - len(fds)]
        phase = "capturing" if self._capturing and self._phase == LOADING else "draining" if self._phase == ENDED else self._phase
        members: dict[str, Any] = {
            "protocol": [link_messages.VERSION, link_messages.VERSION], "model": self._identity.model, "replica": self._identity.replica,
            "generation": self._identity.generation, "pid": os.getpid(), "channels": [session.number for session in open_ones],
            "state": {"configured": self._phase != STARTING, "phase": phase, "in_flight": self._dispatcher.in_flight, "grant": self._grant},
            "page": True if page is not None else None, "fault": True if with_descriptors else None, "nonce": self._nonce, "loaded": self._ready,
        }  # fmt: skip
        if len(link_messages.encode("hello", **members)) > link_messages.PACKET_BYTES_MAX and self._ready is not None:
            members["loaded"] = _without_counters(self._ready)
        return members, fds

    def _caught_up(self) -> None:
        self._say_activity()
        if self._statistics_owed:
            self._say_statistics()

    def _say_activity(self) -> None:
        self._link.send("busy" if self._dispatcher.busy else "idle", in_flight=self._dispatcher.in_flight)

    def _say_overrun(self, method: str, seconds: float) -> None:
        running, budget = round(seconds * 1000), round(self._dispatcher.budget * 1000)
        say("error", f'method "{method}" runs for {running} ms, its budget is {budget} ms')
        self._link.send("overrun", method=method, running_ms=running, budget_ms=budget)

    def _graphs(self) -> dict[str, Any]:
        return self._host.context.report() if self._host.context is not None else {}

    def _say_statistics(self) -> None:
        self._statistics_owed = not self._link.send(
            "statistics", requests=self._dispatcher.requests, errors=self._dispatcher.errors, out_of_memory=self._dispatcher.out_of_memory,
            in_flight=self._dispatcher.in_flight, queued=self._dispatcher.queued, channels=len(self._sessions), graphs=self._graphs(), importers=[],
            ignored_frames=self._ignored_frames_past + sum(session.ignored_frames for session in self._sessions.values()),
            slabs={"bytes": sum(session.slabs.bytes for session in self._sessions.values())}, request_ms=self._dispatcher.durations())  # fmt: skip

    # --- loading

    def _on_configure(self, members: dict[str, Any]) -> None:
        if self._phase != STARTING:
            return say("warn", "ignored: a second configure")
        model, device = members["model"], members["device"]
        try:
            if members["protocol"] not in (None, link_messages.VERSION):
                raise Error("protocol_violation", f"the daemon chose protocol {members['protocol']}, this worker speaks {link_messages.VERSION}")
            if device not in ("cpu", "cuda") or model.get("runtime") != "python" or not isinstance(model.get("engine"), str):
                raise Error("protocol_violation", "a configure without an engine and a device, cpu or cuda")
        except Error as error:
            return self._fail_load(error, 1)
        self._identity = self._identity.configured(model, members["replica"], members["generation"])
        set_level(model.get("log_level", "info"))
        if model["channel"].get("huge_pages"):
            say("warn", "slabs lie on plain pages: `channel.huge_pages` is for the other runtimes")
        self._phase = LOADING
        begun = time.monotonic()
        context = WorkerContext(options=model.get("options", {}), device=device, graphs=model["graphs"], model=self._identity.model,
                                cache=self._cache, load_progress=self._load_progress)  # fmt: skip

        def load() -> None:
            error, status = self._host.load(model["engine"], context, self._wait_for_grant)
            self._loop.call_soon_threadsafe(self._loaded, model, error, status, begun)

        self._host.post(load)

    def _load_progress(self, phase: str, done: int, total: int, detail: str) -> None:
        """Main thread."""
        self._capturing = phase == "capturing"
        if self._page is not None:
            self._page.step(f"{phase} {detail}")
        self._progress.update(phase, done, total, detail)

    def _wait_for_grant(self) -> None:
        """Main thread. The daemon's load deadline bounds the wait."""
        self._grant = "asked"
        self._loop.call_soon_threadsafe(lambda: self._link.send("grant_asked", device_bytes=0))
        self._granted.wait()

    def _loaded(self, model: dict[str, Any], error: Error | None, status: int, begun: float) -> None:
        if self._phase != LOADING:
            return
        self._progress.finish()
        if error is not None:
            return self._fail_load(error, status)
        assert self._host.engine is not None and self._host.context is not None
        methods = self._host.engine.methods
        described = declaration.describe(methods)
        text = json.dumps(described, separators=(",", ":")).encode()
        if len(text) > LIMITS["json_bytes_max"]:
            return self._fail_load(Error("config_invalid", f"describing the methods takes {len(text)} bytes",
                                         f"declare fewer methods or shorter descriptions: at most {LIMITS['json_bytes_max']} bytes"), 78)  # fmt: skip
        own, channel, queue = self._identity, model["channel"], model["queue"]
        self._dispatcher.bound, self._dispatcher.budget = queue, _seconds(model["deadlines"]["request"])
        self._channels_max = channel["count"]
        self._serving = Serving(
            loop=self._loop, dispatcher=self._dispatcher, methods=methods, description=text, model=own.model, replica=own.replica,
            generation=own.generation, label=f"bulkhead:{own.token}:{own.model}/{own.replica}#{own.generation}:",
            in_flight_max=min(IN_FLIGHT_MAX, queue if self._channels_max == 1 else (queue + 1) // 2),
            request_seconds=self._dispatcher.budget, budget=Budget(channel["worker_max"]),
            limits=ChannelLimits(channel["input"], channel["output"], channel["max"], _seconds(channel["idle"])),
            admit=self._admit, opened=self._opened, refused=self._refused, ended=self._channel_ended, flushed=self._finish_drain_if_done)  # fmt: skip
        self._phase = READY
        self._ready = {"load_ms": round((time.monotonic() - begun) * 1000), "methods": described, "torch": torch_version(),
                       "device": device_name(self._host.context.device), "graphs": self._graphs()}  # fmt: skip
        say("info", f"ready after {self._ready['load_ms']} ms on {self._ready['device']}")
        fits = len(link_messages.encode("ready", **self._ready)) <= link_messages.PACKET_BYTES_MAX
        self._link.send("ready", **(self._ready if fits else _without_counters(self._ready)))

    def _fail_load(self, error: Error, status: int) -> None:
        say("error", str(error))
        self._link.send("failed", code=error.code, attempt=printable(error.attempt), remedy=printable(error.remedy))
        self.leave(status)

    # --- channels

    def _on_channel(self, members: dict[str, Any], fds: list[int]) -> None:
        number = members["channel"]
        why = None
        if not fds:
            why = Error("resources_exhausted", "opening a channel: the worker has no free descriptor",
                        "close channels, or raise the limit on open files (ulimit -n) of the daemon")  # fmt: skip
        elif self._serving is None:
            why = Error("model_loading", "opening a channel to a worker that is not ready", "open the channel again when the model is ready")
        elif number in self._sessions:
            why = Error("protocol_violation", f"channel number {number} is in use")
        elif len(self._sessions) >= self._channels_max + REFUSALS_PENDING_MAX:
            why = Error("resources_exhausted", "opening a channel while very many others are being opened", "open the channel again later")
        sock = socket.socket(fileno=fds[0]) if fds else None
        if why is None and sock is not None and self._serving is not None:
            # Its hello decides the rest: the client could miss an earlier answer.
            self._sessions[number] = ChannelSession(self._serving, sock, number, members["client_pid"])
            return
        assert why is not None
        if sock is not None:
            sock.setblocking(False)
            with contextlib.suppress(OSError):  # the daemon tells the client too
                sock.send(messages.error(0, why), socket.MSG_NOSIGNAL)
            sock.close()
        self._say_refused(number, why)

    def _admit(self, session: ChannelSession) -> None:
        if self._phase != READY:
            raise Error("worker_draining", "opening a channel to a worker that is draining", "open the channel again: it leads to the model's next worker")
        in_use = sum(other.is_open for other in self._sessions.values())
        if in_use >= self._channels_max:
            raise Error("resources_exhausted", f"opening a channel, and {in_use} are open", "close one, or raise `channel.count` of the model")

    def _opened(self, session: ChannelSession) -> None:
        self._link.send("channel_opened", channel=session.number)

    def _refused(self, session: ChannelSession, error: Error) -> None:
        say("info", f"channel {session.number} refused: {error}")
        self._say_refused(session.number, error)

    def _say_refused(self, number: int, error: Error) -> None:
        self._link.send("channel_refused", code=error.code, attempt=printable(error.attempt), remedy=printable(error.remedy), channel=number)

    def _channel_ended(self, session: ChannelSession) -> None:
        self._ignored_frames_past += session.ignored_frames
        self._sessions.pop(session.number, None)
        if session.state != "refused":
            self._link.send("channel_closed", channel=session.number)
        self._finish_drain_if_done()

    def _run(self, request: Request, done: Callable[[], None]) -> None:
        def job() -> None:
            self._host.run(request)
            self._loop.call_soon_threadsafe(done)

        self._host.post(job)

    # --- the end

    def drain(self, seconds: float) -> None:
        """Accepts nothing new, finishes requests in flight, sends `drained` and ends. Of two calls,
        the earlier deadline counts."""
        if self._phase == ENDED:
            return
        if self._phase != DRAINING:
            say("info", f"draining within {round(seconds * 1000)} ms, {self._dispatcher.in_flight} requests in flight")
            if self._phase in (STARTING, LOADING):
                self._unload = "done"  # no engine to unload yet, and no wait for its load
            self._phase = DRAINING
            for session in list(self._sessions.values()):
                session.drain(seconds)
        self._drain_until = min(self._drain_until, time.monotonic() + seconds)
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._drain_timer = self._loop.call_at(self._drain_until, self._drain_deadline_passed)
        self._finish_drain_if_done()

    def _drain_deadline_passed(self) -> None:
        say("warn", f"the drain deadline passed with {self._dispatcher.in_flight} requests in flight")
        self._dispatcher.fail_all(Error("worker_draining", "the worker ended before the request did", "send the request again: it goes to the model's next worker"))
        self.leave(1)

    def _finish_drain_if_done(self) -> None:
        if self._phase != DRAINING or self._dispatcher.in_flight or not all(session.is_flushed for session in self._sessions.values()):
            return
        if self._unload == "none":
            self._unload = "runs"
            return self._host.post(self._unload_engine)
        if self._unload == "done":
            self._say_statistics()
            self._link.send("drained")
            self.leave(0)

    def _unload_engine(self) -> None:
        """Main thread."""
        self._host.unload()

        def done() -> None:
            self._unload = "done"
            self._finish_drain_if_done()

        self._loop.call_soon_threadsafe(done)

    def leave(self, status: int) -> None:
        """Without destructors: the driver's teardown returns all device memory, captured or not."""
        if self._phase == ENDED:
            return
        self._phase = ENDED
        for session in list(self._sessions.values()):
            if session.state == AWAITING_HELLO:
                session.refuse(Error("worker_draining", "opening a channel to a worker that is draining", "open the channel again: it leads to the model's next worker"))
            else:
                session.close("the worker ends")
        self._link.flush()
        os._exit(status)


def _seconds(duration: str) -> float:
    """Parses the declaration's "30000ms"."""
    return int(duration.removesuffix("ms")) / 1000


def _without_counters(ready: dict[str, Any]) -> dict[str, Any]:
    """Makes the message fit a packet despite a great many buckets; their counters can be
    asked for later."""
    return {**ready, "graphs": {}}
