"""The four clients of a channel in the hands of a test: each does what a command says, and answers
in the same words.

    open A [MILLISECONDS]     the channel A, on the socket that comes with the command: its model
                              and generation
    new A X COUNT             the input X, of so many float32
    put A X NUMBER…           the input X, filled
    ask A R X [parts] [MS]    sends the request R, whose input is X, or the output of the answer X;
                              answers `ok` in any case
    get R                     waits for the answer, which is kept as R, or for its next part
                              (`more …`): its numbers
    read R                    the numbers again
    cancel R, leave R         cancels it; cancels it and drops the rest of its parts
    drop NAME, close A        an input or an answer; a channel
    reset                     drops all

An answer is `ok …`, `more …`, or an error's code, then its words.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import bulkhead
from bulkhead import aio
from bulkhead.channel import Channel

SECONDS = 20.0


class Cpp:
    """`channel_player`, which has one of the C++ clients."""

    def __init__(self, kind: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(SECONDS)
        self.process = subprocess.Popen([os.environ["BULKHEAD_CHANNEL_PLAYER"], kind], stdin=theirs)
        theirs.close()

    def close(self) -> None:
        self.socket.close()
        self.process.wait(SECONDS)

    def begin(self, command: str, sock: socket.socket | None = None) -> None:
        socket.send_fds(self.socket, [command.encode()], [sock.fileno()] if sock else [])
        if sock:
            sock.close()

    def end(self) -> str:
        return self.socket.recv(65536).decode()


class _Python:
    """What both Python clients have: names. A command runs on a thread of its own."""

    def __init__(self) -> None:
        self.reset()
        self.running: Future[str]

    def reset(self) -> None:
        self.channels: dict[str, Any] = {}
        self.held: dict[str, Any] = {}  #: inputs, and outputs of answers
        self.asked: dict[str, Any] = {}

    def end(self) -> str:
        try:
            return self.running.result(SECONDS)
        except bulkhead.Error as error:
            return f"{error.code} {error}"

    def drop(self, name: str) -> None:
        self.held.pop(name, None)
        self.asked.pop(name, None)
        gc.collect()

    def close_channel(self, name: str) -> None:
        self.channels.pop(name).close()

    def read(self, name: str) -> str:
        return " ".join(f"{value:g}" for value in self.held[name].tolist()) if name in self.held else ""

    def answered(self, name: str, reply: bulkhead.Reply) -> str:
        if "y" in reply:
            self.held[name] = reply["y"]
        return ("more " if reply.more else "ok ") + self.read(name)


class Blocking(_Python):
    def __init__(self) -> None:
        super().__init__()
        self.thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.reset()
        self.thread.shutdown()

    def begin(self, command: str, sock: socket.socket | None = None) -> None:
        self.running = self.thread.submit(self.play, command.split(), sock)

    def play(self, words: list[str], sock: socket.socket | None) -> str:
        verb, name, *rest = [*words, ""] if len(words) == 1 else words
        if verb == "open":
            assert sock is not None
            channel = self.channels[name] = Channel(sock, deadline=float(rest[0]) / 1000 if rest else 10.0)
            return f"ok {channel.model} {channel.generation}"
        if verb == "new":
            self.held[rest[0]] = self.channels[name].allocate((int(rest[1]),), "float32")
        elif verb == "put":
            self.held[rest[0]] = self.channels[name].place([float(word) for word in rest[1:]], "float32")
        elif verb == "ask":
            self.ask(self.channels[name], *rest)
        elif verb == "get":
            channel, request, parts = self.asked[name]
            if isinstance(request, bulkhead.Error):
                raise request
            return self.answered(name, next(parts) if parts else channel.wait(request))
        elif verb == "read":
            return f"ok {self.read(name)}"
        elif verb == "cancel":
            self.asked[name][0].cancel(self.asked[name][1])
        elif verb == "leave":
            self.asked[name][2].close()
        else:
            {"drop": self.drop, "close": self.close_channel, "reset": lambda _: self.reset()}[verb](name)
        return "ok"

    def ask(self, channel: Channel, name: str, tensor: str, *how: str) -> None:
        deadline = next((float(word) / 1000 for word in how if word != "parts"), None)
        try:
            request: Any = channel.submit(x=self.held[tensor], deadline=deadline)
        except bulkhead.Error as error:
            request = error
        self.asked[name] = channel, request, channel.stream(request) if "parts" in how and not isinstance(request, bulkhead.Error) else None


class Asyncio(_Python):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def close(self) -> None:
        self.begin("reset")
        self.end()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def begin(self, command: str, sock: socket.socket | None = None) -> None:
        self.running = asyncio.run_coroutine_threadsafe(self.play(command.split(), sock), self.loop)

    async def play(self, words: list[str], sock: socket.socket | None) -> str:
        verb, name, *rest = [*words, ""] if len(words) == 1 else words
        if verb == "open":
            assert sock is not None
            channel = self.channels[name] = await aio.Channel.open(sock, deadline=float(rest[0]) / 1000 if rest else 10.0)
            return f"ok {channel.model} {channel.generation}"
        if verb == "new":
            self.held[rest[0]] = await self.channels[name].allocate((int(rest[1]),), "float32")
        elif verb == "put":
            self.held[rest[0]] = await self.channels[name].place([float(word) for word in rest[1:]], "float32")
        elif verb == "ask":
            deadline = next((float(word) / 1000 for word in rest[2:] if word != "parts"), None)
            channel, x = self.channels[name], self.held[rest[1]]
            stream = channel.stream(x=x, deadline=deadline) if "parts" in rest[2:] else None
            self.asked[rest[0]] = [stream, asyncio.ensure_future(anext(stream) if stream else channel.infer(x=x, deadline=deadline))]
        elif verb == "get":
            stream, part = self.asked[name]
            try:
                reply = await part
            except asyncio.CancelledError:
                return "cancelled"
            if reply.more:
                self.asked[name][1] = asyncio.ensure_future(anext(stream))
            return self.answered(name, reply)
        elif verb == "read":
            return f"ok {self.read(name)}"
        elif verb in ("cancel", "leave"):
            self.asked[name][1].cancel()
        elif verb == "reset":
            for _, part in self.asked.values():
                part.cancel()
                await asyncio.gather(part, return_exceptions=True)
            for channel in self.channels.values():
                channel.close()
            self.reset()
        else:
            {"drop": self.drop, "close": self.close_channel}[verb](name)
        return "ok"
