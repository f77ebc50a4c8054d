"""A daemon's end of the control socket, in the hands of a test: answers as it is told to."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
import unittest
from typing import Any, Callable

import bulkhead
from fake_worker import FakeWorker

Handler = Callable[["Connection", dict[str, Any]], None]


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def send(self, *messages: dict[str, Any], fds: list[int] = []) -> None:
        socket.send_fds(self.socket, ["".join(json.dumps(one) + "\n" for one in messages).encode()], fds)

    def answer(self, request: dict[str, Any], result: Any, fds: list[int] = []) -> None:
        self.send({"jsonrpc": "2.0", "id": request["id"], "result": result}, fds=fds)

    def notify(self, method: str, params: dict[str, Any]) -> None:
        self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def die(self) -> None:
        """As a supervisor does: the connection ends."""
        self.socket.shutdown(socket.SHUT_RDWR)


class FakeDaemon:
    """Serves each connection on a thread. Pings are answered; other methods as ``handlers`` say."""

    def __init__(self, **handlers: Handler) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bh-")
        self.path = os.path.join(self._folder.name, "control.sock")
        self.asked: list[dict[str, Any]] = []
        self.workers: list[FakeWorker] = []
        self.handlers: dict[str, Handler] = {"daemon.ping": lambda connection, request: connection.answer(request, {"supervisor_pid": 1})}
        self.handlers.update({name.replace("_", "."): handler for name, handler in handlers.items()})
        self.connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(self.path)
        self._listening.listen(16)
        self._start(self._accept)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # no further connection is accepted
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads[1:]:
            thread.join()
        for connection in [*self.connections, self._listening]:
            connection.close()
        for worker in self.workers:
            worker.close()
        self._folder.cleanup()

    def introduce(self, worker: FakeWorker, connection: Connection, request: dict[str, Any], *, stateful: bool = False) -> None:
        """Answers ``channel.open`` with this worker's channel."""
        self.workers.append(worker)
        connection.answer(request, {"fds": 1, "model": "fake", "stateful": stateful}, [worker.client_end.fileno()])
        worker.client_end.close()

    def _start(self, run: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=run, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            self.connections.append(sock)
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        connection = Connection(sock)
        with sock.makefile("rb") as lines:
            for line in lines:
                request = json.loads(line)
                if request["method"] != "daemon.ping":
                    self.asked.append(request)
                self.handlers[request["method"]](connection, request)


class WithFakeDaemon(unittest.TestCase):
    def daemon(self, **handlers: Any) -> FakeDaemon:
        daemon = FakeDaemon(**handlers)
        self.addCleanup(daemon.close)
        return daemon

    def connect(self, daemon: FakeDaemon) -> bulkhead.Client:
        client = bulkhead.connect(daemon.path, name="test")
        self.addCleanup(client.close)
        return client

    def refused(self, code: str, call: Any) -> bulkhead.Error:
        with self.assertRaises(bulkhead.Error) as caught:
            call()
        self.assertEqual(caught.exception.code, code, str(caught.exception))
        return caught.exception
