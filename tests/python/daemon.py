"""A daemon of the built programs, with the two real models, for the tests that need one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bulkhead

BUILD = Path(os.environ["BULKHEAD_BUILD"])
MINIMAL = BUILD / "minimal" / "bin"


def row(client: bulkhead.Client, model: str) -> dict[str, Any]:
    return next(row for row in client.ps() if row["model"] == model)


def until(client: bulkhead.Client, model: str, reached: Callable[[dict[str, Any]], bool], seconds: float = 60.0) -> dict[str, Any]:
    """The model's row once the condition holds; read again at each of the model's events."""
    with client.events(model) as events:
        too_late = threading.Timer(seconds, events.close)
        too_late.start()
        try:
            while not reached(found := row(client, model)):
                assert next(events, None) is not None, f"after {seconds} s: {found}"
        finally:
            too_late.cancel()
    return found


def until_queued(client: bulkhead.Client, model: str, count: int) -> None:
    """Returns once so many requests wait in its worker, of which no event tells."""
    end = time.monotonic() + 60
    while (now := row(client, model))["queued"] < count:
        assert time.monotonic() < end, f"never {count} queued: {now}"


FLEET = f"""
version: 1
defaults: {{device: cpu, threads: 1}}
models:
  minilm:
    runtime: aoti
    package: {BUILD}/models/minilm.pt2
    inputs:
      input_ids: {{dtype: int64, shape: [1, n=1..256]}}
      attention_mask: {{dtype: int64, shape: [1, n=1..256]}}
    warmup: {{input_ids: [1, 16], attention_mask: [1, 16]}}
    outputs: {{embedding: {{dtype: float32, shape: [1, 384]}}}}
  silero-vad:
    runtime: torchscript
    file: {BUILD}/models/silero_vad.jit
    state: {{scope: channel, reset: reset_states}}
    inputs: {{x: {{dtype: float32, shape: [1, 512]}}}}
    parameters: {{sr: {{type: integer, default: 16000}}}}
    outputs: {{probability: {{dtype: float32, shape: [1, 1]}}}}
"""

GENERATING = f"""
version: 1
defaults: {{device: cpu, threads: 1}}
models:
  tiny: {{runtime: generate, package: {BUILD}/models/test/tiny_generate}}
"""


ECHO = """
version: 1
defaults: {{device: cpu, threads: 1}}
models:
  echo:
    runtime: torchscript
    file: {file}
    device: {device}
    environment: {environment}
    inputs: {{x: {{dtype: float32, shape: [0..16777216]}}}}
    outputs: {{y: {{dtype: float32, shape: [0..16777216]}}}}
"""


class Daemon:
    """Answers when this has been made: `bulkhead up` returns only then."""

    def __init__(self, fleet: str = FLEET, environment: dict[str, str] = {}) -> None:
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(BUILD / "test-cache"), **environment}
        self.folder = tempfile.TemporaryDirectory(prefix="bh-")
        self.fleet = Path(self.folder.name, "fleet.yaml")
        self.fleet.write_text(fleet)
        self.socket = str(Path(self.folder.name, "run", "control.sock"))
        self._bulkhead("up", str(self.fleet))

    def stop(self) -> None:
        self._bulkhead("down")
        self.folder.cleanup()

    def _bulkhead(self, *arguments: str) -> str:
        done = subprocess.run([str(BUILD / "bin" / "bulkhead"), "--socket", self.socket, *arguments],
                              capture_output=True, text=True, env=self.environment, timeout=120)  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"bulkhead {arguments[0]}: {done.stderr}")
        return done.stdout


class MinimalDaemon:
    """Of the programs with the minimal worker (tests/fakes/minimal_worker), whose models give
    their input back; or of other ``programs``."""

    programs = MINIMAL

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="bh-")
        here = Path(self.folder.name)
        self.fleet = here / "fleet.yaml"
        environment = {**os.environ, "XDG_CACHE_HOME": str(BUILD / "test-cache"), **self.prepare(here)}
        self.socket = str(here / "control.sock")
        with open(here / "daemon.out", "w") as out:
            self.keeper = subprocess.Popen([str(self.programs / "bulkheadd"), "--socket", self.socket, str(self.fleet)], env=environment,
                                           stdout=out, stderr=subprocess.STDOUT)  # fmt: skip
        while not self._listens():
            try:
                self.keeper.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError((here / "daemon.out").read_text())

    def _listens(self) -> bool:
        """The file of a socket is there before it can be connected to."""
        with socket.socket(socket.AF_UNIX) as one:
            return one.connect_ex(self.socket) == 0

    def prepare(self, here: Path) -> dict[str, str]:
        """Writes the fleet file; what the daemon's environment has besides."""
        raise NotImplementedError

    def stop(self) -> None:
        if self.keeper.poll() is None:  # else a test has ended it
            with bulkhead.connect(self.socket) as client:
                client.stop()
            self.keeper.wait(60)
        self.folder.cleanup()


class EchoDaemon(MinimalDaemon):
    """With one model, `echo`; on the GPU of this UUID where there is one. With $BULKHEAD_LIBCUDA
    that is the fake driver's, which the fake NVML knows."""

    def __init__(self, gpu: uuid.UUID | None = None) -> None:
        self._gpu = gpu
        super().__init__()

    def prepare(self, here: Path) -> dict[str, str]:
        gpu, environment, for_worker = self._gpu, {}, {}
        if gpu is not None:
            for_worker["MINIMAL_GPU_SLABS"] = "1"
        if gpu is not None and (library := os.environ.get("BULKHEAD_LIBCUDA")):
            for_worker["MINIMAL_ENV_BULKHEAD_LIBCUDA"] = library
            machine = here / "machine"
            machine.write_text(f"gpu GPU-{gpu} 80000000000 Fake\n")
            environment = fake_nvml(machine)
        self.fleet.write_text(ECHO.format(file=MINIMAL / "bulkhead-worker", device="cpu" if gpu is None else f"GPU-{gpu}",
                                          environment=json.dumps(for_worker)))  # fmt: skip
        return environment


def fake_nvml(machine: Path) -> dict[str, str]:
    """A daemon's environment in which GPUs are those of a text file."""
    return {"BULKHEAD_NVML": str(BUILD / "lib/libbulkhead_fake_nvml.so"), "BULKHEAD_FAKE_NVML": str(machine)}
