"""A real ComfyUI in a process of its own, over HTTP and websocket."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any, Iterator

START_SECONDS = 180
EVENT_SECONDS = 120


class ComfyUI:
    """``main.py --cpu`` of a folder, whose custom nodes, inputs and outputs are in ``base``."""

    def __init__(self, folder: Path, python: str, base: Path, daemon_socket: str) -> None:
        self.base = base
        self.port = _free_port()
        self.log = base / "comfyui.log"
        environment = {**os.environ, "BULKHEAD_SOCKET": daemon_socket, "PYTHONUNBUFFERED": "1"}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [python, "main.py", "--cpu", "--port", str(self.port), "--base-directory", str(base), "--disable-api-nodes"],
                cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        until = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"ComfyUI has not started:\n{self.log.read_text()[-4000:]}")

    def _answers(self) -> bool:
        try:
            self.get("/system_stats")
            return True
        except OSError:
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                pass
            return False

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def version(self) -> str:
        return str(self.get("/system_stats")["system"]["comfyui_version"])

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def upload(self, name: str, content: bytes) -> str:
        """As the page's upload buttons do, of sound too. The name to be loaded."""
        line = uuid.uuid4().hex
        body = (f'--{line}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n\r\n').encode() + content + f"\r\n--{line}--\r\n".encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/upload/image", body, {"Content-Type": f"multipart/form-data; boundary={line}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(json.load(answer)["name"])

    def queue(self, prompt: dict[str, Any]) -> Prompt:
        return Prompt(self, prompt)

    def run(self, prompt: dict[str, Any]) -> Prompt:
        """To its end."""
        queued = self.queue(prompt)
        queued.finish()
        return queued


class Prompt:
    """One prompt, and what the websocket reports about it."""

    def __init__(self, comfyui: ComfyUI, prompt: dict[str, Any]) -> None:
        self._comfyui = comfyui
        client = uuid.uuid4().hex
        self._events = _Websocket(comfyui.port, f"/ws?clientId={client}")
        self.previews = 0
        self.outputs: dict[str, Any] = {}
        #: "execution_success", "execution_error", "execution_interrupted", "refused".
        self.ended = ""
        self.error = ""
        self.error_type = ""
        try:
            self.id = comfyui.post("/prompt", {"prompt": prompt, "client_id": client})["prompt_id"]
        except urllib.error.HTTPError as error:
            self.ended, self.error = "refused", error.read().decode()

    def events(self) -> Iterator[dict[str, Any]]:
        """Until its end."""
        while not self.ended:
            message = self._events.receive()
            if isinstance(message, bytes):
                # An image, with metadata or without.
                self.previews += message[:4] in (b"\0\0\0\1", b"\0\0\0\4")
                continue
            event = json.loads(message)
            data = event["data"]
            if data.get("prompt_id") != self.id:
                continue
            if event["type"] == "executed":
                self.outputs[data["node"]] = data["output"]
            elif event["type"] in ("execution_success", "execution_error", "execution_interrupted"):
                self.ended = event["type"]
                self.error, self.error_type = data.get("exception_message", ""), data.get("exception_type", "")
            yield event
        self.close()

    def close(self) -> None:
        """Listens no more."""
        self._events.close()

    def reach(self, kind: str) -> dict[str, Any]:
        """The next event of a kind."""
        for event in self.events():
            if event["type"] == kind:
                return event
        raise AssertionError(f"the prompt ended ({self.ended}: {self.error}) before {kind}")

    def progressed(self) -> None:
        """Until its node has reported progress."""
        for event in self.events():
            if event["type"] == "progress_state" and any(node["value"] > 0 for node in event["data"]["nodes"].values()):
                return
        raise AssertionError(f"the prompt ended without progress ({self.ended}: {self.error})")

    def finish(self) -> None:
        for _ in self.events():
            pass


class _Websocket:
    """As much of RFC 6455 as a client needs that says one thing and then listens."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), EVENT_SECONDS)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                             f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())  # fmt: skip
        self._stream = self._socket.makefile("rb")
        status = self._stream.readline()
        assert b" 101 " in status, status
        while self._stream.readline().strip():
            pass
        # As ComfyUI's page does.
        self._send({"type": "feature_flags", "data": {"supports_preview_metadata": True}})

    def _send(self, message: dict[str, Any]) -> None:
        """A short one; a mask of zeros leaves it as it is."""
        text = json.dumps(message).encode()
        assert len(text) < 126
        self._socket.sendall(bytes([0x81, 0x80 | len(text)]) + bytes(4) + text)

    def receive(self) -> str | bytes:
        """One message: text, or bytes."""
        while True:
            kind, body = self._frame()
            if kind == 1:
                return body.decode()
            if kind == 2:
                return body
            assert kind != 8, "ComfyUI has closed the websocket"

    def _frame(self) -> tuple[int, bytes]:
        body = b""
        kind = 0
        while True:
            head = self._read(2)
            kind = kind or head[0] & 0x0F
            size = head[1] & 0x7F
            if size == 126:
                (size,) = struct.unpack(">H", self._read(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self._read(8))
            body += self._read(size)
            if head[0] & 0x80:
                return kind, body

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) < size:
            raise ConnectionError("the websocket has ended")
        return data

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
