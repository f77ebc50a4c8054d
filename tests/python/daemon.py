"""A daemon of the built programs, with the two real models, for the tests that need one."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

BUILD = Path(os.environ["BULKHEAD_BUILD"])

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


class Daemon:
    """Answers when this has been made: `bulkhead up` returns only then."""

    def __init__(self, fleet: str = FLEET) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="bh-")
        self.fleet = Path(self.folder.name, "fleet.yaml")
        self.fleet.write_text(fleet)
        self.socket = str(Path(self.folder.name, "run", "control.sock"))
        self._bulkhead("up", str(self.fleet))

    def stop(self) -> None:
        self._bulkhead("down")
        self.folder.cleanup()

    def _bulkhead(self, *arguments: str) -> None:
        environment = {**os.environ, "XDG_CACHE_HOME": str(BUILD / "test-cache")}
        done = subprocess.run([str(BUILD / "bin" / "bulkhead"), "--socket", self.socket, *arguments],
                              capture_output=True, text=True, env=environment, timeout=120)  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"bulkhead {arguments[0]}: {done.stderr}")
