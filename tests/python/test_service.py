"""The example service, as uvicorn runs it, over a daemon with two engines in Python: the small
voice, and one that answers with what it was given."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import struct
import subprocess
import sys
import unittest
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bulkhead
import httpx
import numpy as np
from bulkhead import engines
from daemon import Daemon, row, until, until_queued
from PIL import Image

SOURCE = Path(__file__).resolve().parents[2]
# Beside other tests: OpenMP's threads sleep at once.
FLEET = """
version: 1
defaults: {{deadlines: {{request: 1h}}, environment: {{OMP_WAIT_POLICY: passive}}}}
models:
  speech: {{runtime: python, engine: "bulkhead.engines.small_voice:SmallVoice", interpreter: {python}, device: cpu}}
  vision: {{runtime: python, engine: "{here}/worker/engines/echo.py:Seeing", interpreter: {python}, device: cpu}}
"""
WAV_HEADER_BYTES = 44
LONG = "A sentence that takes a minute to say. " * 100


def wav(samples: np.ndarray, rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def pcm_of(sound: np.ndarray) -> bytes:
    return (sound.T.clip(-1, 1) * 32767).astype("<i2").tobytes()


class Service(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.daemon = Daemon(FLEET.format(python=sys.executable, here=Path(__file__).resolve().parent))
        cls.addClassCleanup(cls.daemon.stop)
        cls.client = cls.enterClassContext(bulkhead.connect(cls.daemon.socket))
        # Connections wait there until uvicorn takes them.
        with socket.create_server(("127.0.0.1", 0)) as listening:
            service = subprocess.Popen(
                [sys.executable, "-m", "uvicorn", "--log-level", "critical", "--fd", str(listening.fileno()), "service:app"],
                cwd=SOURCE / "clients/python/examples", pass_fds=[listening.fileno()],
                env={**os.environ, "BULKHEAD_SOCKET": cls.daemon.socket})  # fmt: skip
            cls.address = listening.getsockname()
            url = f"http://127.0.0.1:{cls.address[1]}"
        cls.addClassCleanup(service.wait, 60)
        cls.addClassCleanup(service.terminate)
        cls.http = cls.enterClassContext(httpx.Client(base_url=url, timeout=120))

    def spoken(self, **parameters: Any) -> np.ndarray:
        inputs = {"reference": parameters.pop("reference")} if "reference" in parameters else {}
        return np.array(self.client.infer("speech", inputs, method="speak", parameters=parameters)["audio"].numpy())

    @contextlib.contextmanager
    def long_speech(self) -> Iterator[Iterator[bytes]]:
        """Of which something has come."""
        with self.http.stream("POST", "/speech", json={"text": LONG}) as answer:
            pieces = answer.iter_raw()
            self.assertEqual(next(pieces)[:4], b"RIFF")
            yield pieces

    def test_speech_is_streamed_as_it_is_spoken(self) -> None:
        with self.http.stream("POST", "/speech", json={"text": "Two words.", "parameters": {"pitch": 200}}) as answer:
            self.assertEqual((answer.status_code, answer.headers["content-type"]), (200, "audio/wav"))
            pieces = list(answer.iter_raw())
        self.assertGreater(len(pieces), 2)
        whole = b"".join(pieces)
        self.assertEqual(struct.unpack_from("<4s8x4sIHHI", whole), (b"RIFF", b"fmt ", 16, 1, 1, 24000))
        self.assertEqual(whole[WAV_HEADER_BYTES:], pcm_of(self.spoken(text="Two words.", pitch=200.0)))

    def test_an_uploaded_voice_is_spoken_with(self) -> None:
        voice = np.sin(2 * np.pi * 210 / 16000 * np.arange(16000)).astype(np.float32)
        answer = self.http.put("/voices/high", content=wav(voice, 16000))
        self.assertEqual((answer.status_code, answer.json()), (201, {"seconds": 1.0}))
        heard = np.float32(np.trunc(voice * 32767)[None] / 32768)
        said = self.http.post("/speech", json={"text": "Hi.", "voice": "high"}).content
        self.assertEqual(said[WAV_HEADER_BYTES:], pcm_of(self.spoken(text="Hi.", reference=heard, reference_rate=16000)))
        self.assertNotEqual(said, self.http.post("/speech", json={"text": "Hi."}).content)

    def test_a_question_about_a_picture_is_answered(self) -> None:
        picture = np.arange(3 * 4 * 3, dtype=np.uint8).reshape(3, 4, 3)
        encoded = io.BytesIO()
        Image.fromarray(picture).save(encoded, "PNG")
        for content, given in ((encoded.getvalue(), [picture.tolist()]), (b"", None)):
            said = self.http.post("/questions", params={"prompt": "What is it?"}, content=content)
            self.assertEqual((said.status_code, said.text), (200, f"What is it? {given} "))
        declared = engines.declared("bulkhead.engines.qwen3_vl:Qwen3VL")["methods"]["answer"]
        self.assertIn("images", [one["name"] for one in declared["inputs"]])
        self.assertIn("prompt", [one["name"] for one in declared["parameters"]])

    def test_what_is_wrong_is_told(self) -> None:
        refused = self.http.post("/speech", json={"text": ""})
        self.assertEqual((refused.status_code, refused.json()["code"]), (422, "input_invalid"))
        for answer, status in ((self.http.post("/speech", json={"text": "Hi.", "voice": "nobody"}), 404),
                               (self.http.put("/voices/bad", content=b"no sound"), 422),
                               (self.http.post("/questions", params={"prompt": "?"}, content=b"no picture"), 422),
                               (self.http.put("/voices/big", content=bytes((32 << 20) + 1)), 413)):  # fmt: skip
            self.assertEqual(answer.status_code, status, answer.text)

    def test_a_listener_that_goes_away_cancels(self) -> None:
        """Its request ends with `cancelled`, which counts as an error: spoken to its end it would
        be none, and its deadline is far beyond that."""
        errors = row(self.client, "speech")["errors"]
        with self.long_speech():
            pass
        until(self.client, "speech", lambda now: now["state"] == "ready", seconds=240)
        self.assertEqual(row(self.client, "speech")["errors"], errors + 1)
        self.assertEqual(self.http.post("/speech", json={"text": "Hi."}).status_code, 200)

    def test_a_listener_that_goes_away_before_the_first_piece_cancels(self) -> None:
        """Its request waits behind another client's."""
        errors = row(self.client, "speech")["errors"]
        ahead = self.client.stream("speech", method="speak", parameters={"text": LONG})
        self.addCleanup(ahead.close)
        next(ahead)
        body = json.dumps({"text": "Hi."})
        with socket.create_connection(self.address) as listener:
            head = f"POST /speech HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            listener.sendall((head + body).encode())
            until_queued(self.client, "speech", 1)
        for part in ahead:
            now = row(self.client, "speech")
            if not now["queued"]:
                break
        self.assertTrue(part.more, "its request waited until its turn came")
        self.assertEqual((now["in_flight"], now["errors"]), (1, errors + 1))
        ahead.close()
        until(self.client, "speech", lambda now: now["state"] == "ready", seconds=240)

    def test_one_model_dies_and_the_other_answers(self) -> None:
        with self.long_speech() as pieces:
            os.kill(row(self.client, "speech")["pid"], 9)
            self.assertEqual(self.http.post("/questions", params={"prompt": "Still there?"}).status_code, 200)
            with self.assertRaises(httpx.RemoteProtocolError):
                for _ in pieces:
                    pass
        self.assertEqual(self.http.post("/speech", json={"text": "Hi."}).status_code, 200)

    def test_progress_is_told(self) -> None:
        self.client.unload("speech")
        with self.http.stream("GET", "/progress") as answer:
            self.client.load("speech")
            events = (line for line in answer.iter_lines() if line)
            self.assertTrue(any('"ready"' in event and '"speech"' in event for event in events))


if __name__ == "__main__":
    unittest.main()
