"""What a node costs beside the model's own work: prints medians. Run it as the tests here are run, on a machine that is quiet."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bulkhead
import stand_in_interface
import torch
from daemon import Daemon
from stand_in_manager import Manager

FLEET = f"""
version: 1
defaults: {{device: cpu, threads: 1}}
models:
  voice: {{runtime: python, interpreter: {sys.executable}, engine: "bulkhead.engines.small_voice:SmallVoice"}}
  echo: {{runtime: python, interpreter: {sys.executable}, engine: "{Path(__file__).parent}/engines.py:Echo"}}
"""
RUNS = 30
INPUTS = {
    "a 1,024² IMAGE there and back": torch.rand(1, 1024, 1024, 3),
    "30 s of sound at 24 kHz there and back": torch.rand(1, 100, 7200, 1),
    "one number there and back": torch.rand(1, 1, 1, 1),
}


async def ignored(part: Any) -> None:
    pass


def milliseconds(run: Any) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1000


def main() -> None:
    from comfyui import answers

    with bulkhead.connect() as client:
        asyncio.run(answers.ask("echo", "repeat", {"x": INPUTS["one number there and back"]}, ignored))
        for name, tensor in INPUTS.items():
            took = [milliseconds(lambda: asyncio.run(answers.ask("echo", "repeat", {"x": tensor}, ignored))) for _ in range(RUNS)]
            print(f"{name}: {statistics.median(took):.1f} ms (median of {RUNS}; {min(took):.1f} to {max(took):.1f})")
        loads, unloads = [], []
        for _ in range(10):
            loads.append(client.load("voice")[0]["ms"])
            unloads.append(milliseconds(lambda: client.unload("voice")))
        print(f"load of the small voice: {statistics.median(loads):.0f} ms; unload to receipt: {statistics.median(unloads):.0f} ms (medians of 10)")


if __name__ == "__main__":
    user = tempfile.TemporaryDirectory(prefix="bh-")
    stand_in_interface.install(user.name)
    Manager().install()
    daemon = Daemon(FLEET)
    os.environ["BULKHEAD_SOCKET"] = daemon.socket
    try:
        main()
    finally:
        daemon.stop()
