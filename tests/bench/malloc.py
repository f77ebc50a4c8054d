"""The bench "malloc": requests to the worker as it is linked, with jemalloc, against the same
worker linked without it, with glibc's malloc.

    malloc.py [--rounds N]        BULKHEAD_BUILD names the build folder

Links the other worker first. Each has a daemon of its own; rounds alternate, and each line names
its baseline. "pages" are those that the kernel made for the worker, by request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("BULKHEAD_BUILD", ROOT / "build"))
sys.path.insert(0, str(ROOT / "clients/python"))

import bulkhead  # noqa: E402
import numpy  # noqa: E402
import torch  # noqa: E402

PROGRAMS = ("bulkhead", "bulkheadd", "bulkhead-supervisor")
#: As the command line of the worker's link names it (worker/CMakeLists.txt).
JEMALLOC = re.compile(r"\S*--whole-archive\S*\s+\S*libjemalloc\S*\.a\s+\S*--pop-state\S*")


def other_worker(folder: Path) -> Path | None:
    """A folder of programs whose worker has glibc's malloc; None: the build has no jemalloc."""
    commands = subprocess.run(["ninja", "-C", str(BUILD), "-t", "commands", "-s", "bin/bulkhead-worker"],
                              check=True, capture_output=True, text=True)  # fmt: skip
    link, removed = JEMALLOC.subn("", commands.stdout.splitlines()[-1])
    link, moved = re.subn(r"-o bin/bulkhead-worker(?=\s)", f"-o {folder}/bulkhead-worker", link)
    if (removed, moved) != (1, 1):
        return None
    subprocess.run(link, shell=True, check=True, cwd=BUILD)
    for name in PROGRAMS:
        shutil.copy2(BUILD / "bin" / name, folder)
    return folder


def resnet18(file: Path) -> None:
    """With random weights."""
    from transformers import ResNetConfig, ResNetModel

    warnings.simplefilter("ignore")  # of checks that a trace leaves out
    config = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], return_dict=False)
    torch.manual_seed(0)
    network = ResNetModel(config).eval()
    torch.jit.trace(network, torch.rand(1, 3, 224, 224), strict=False).save(str(file))


@contextlib.contextmanager
def daemon(programs: Path, folder: Path, models: dict[str, Any]) -> Iterator[bulkhead.Client]:
    folder.mkdir(mode=0o700)
    socket = folder / "control.sock"
    fleet = folder / "fleet.json"
    fleet.write_text(json.dumps({"version": 1, "defaults": {"device": "cpu"}, "models": models}))
    program = [str(programs / "bulkhead"), "--socket", str(socket)]
    subprocess.run([*program, "up", str(fleet)], check=True, stdout=subprocess.DEVNULL)
    try:
        with bulkhead.connect(socket, name="bench") as client:
            yield client
    finally:
        subprocess.run([*program, "down"], check=True, stdout=subprocess.DEVNULL)


class Asked:
    """One model of one daemon, and what a request to it takes."""

    def __init__(self, client: bulkhead.Client, model: str, inputs: dict[str, Any], parameters: dict[str, Any], method: str, count: int) -> None:
        client.load(model)
        self._pid = next(row["pid"] for row in client.ps() if row["model"] == model)
        self._channel = client.open(model)
        self._inputs = {name: self._channel.place(value) for name, value in inputs.items()}
        self._prompt = inputs.get("tokens")
        self._parameters, self._method, self._count = parameters, method, count
        self.milliseconds: list[float] = []
        self.pages: list[float] = []
        self.round()
        self.milliseconds.clear()
        self.pages.clear()

    def round(self) -> None:
        before, begun = self._faults(), time.monotonic()
        for _ in range(self._count):
            if "tokens" in self._inputs:  # a prompt of its own, which shares no kept prefix
                self._prompt[0] += 1
                self._inputs["tokens"] = self._channel.place(self._prompt)
            self._channel.infer(self._inputs, method=self._method, parameters=self._parameters)
        self.milliseconds.append(1000 * (time.monotonic() - begun) / self._count)
        self.pages.append((self._faults() - before) / self._count)

    def _faults(self) -> int:
        return int(Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[7])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        resnet18(folder / "resnet18.pt")
        ids = {"input_ids": {"dtype": "int64", "shape": [1, "n=1..256"]}, "attention_mask": {"dtype": "int64", "shape": [1, "n=1..256"]}}
        floats: dict[str, Any] = {"x": {"dtype": "float32", "shape": ["0..16777216"]}}
        models: dict[str, Any] = {
            "echo": {"runtime": "torchscript", "file": f"{BUILD}/models/test/echo.pt", "inputs": floats},
            "clone": {"runtime": "torchscript", "file": f"{BUILD}/models/test/clone.pt", "inputs": floats,
                      "channel": {"input": "128MiB", "output": "128MiB"}},
            "minilm": {"runtime": "aoti", "package": f"{BUILD}/models/minilm.pt2", "inputs": ids},
            "resnet18": {"runtime": "torchscript", "file": f"{folder}/resnet18.pt", "inputs": {"pixel_values": {"dtype": "float32", "shape": [1, 3, 224, 224]}}},
            "smollm2": {"runtime": "generate", "package": f"{BUILD}/models/smollm2"},
        }  # fmt: skip
        prompt = (numpy.arange(512) * 97 % 40000 + 100).astype("int64")
        cases: list[tuple[str, str, dict[str, Any], dict[str, Any], str, int]] = [
            ("64 B to a model that returns them", "echo", {"x": numpy.ones(16, "float32")}, {}, "forward", 2000),
            ("64 MiB to a `clone`", "clone", {"x": numpy.ones(1 << 24, "float32")}, {}, "forward", 8),
            *((f"MiniLM, {n} tokens", "minilm", {key: numpy.ones((1, n), "int64") for key in ids}, {}, "forward", 20) for n in (16, 256)),
            ("ResNet-18, 224 x 224", "resnet18", {"pixel_values": numpy.ones((1, 3, 224, 224), "float32")}, {}, "forward", 10),
            ("SmolLM2, a prompt of 512", "smollm2", {"tokens": prompt}, {"max_new_tokens": 1}, "generate", 2),
        ]
        (folder / "bin").mkdir()
        programs = other_worker(folder / "bin")
        if programs is None:
            print("malloc is left out: the command that links bulkhead-worker names no jemalloc, as in builds with sanitizers")
            return
        with daemon(BUILD / "bin", folder / "jemalloc", models) as ours, daemon(programs, folder / "glibc", models) as other:
            print(f"{'medians of ' + str(options.rounds) + ' rounds, in turns':<36} jemalloc, ms   glibc, ms   glibc : jemalloc   pages")
            for what, model, inputs, parameters, method, count in cases:
                sides = [Asked(client, model, inputs, parameters, method, count) for client in (ours, other)]
                for _ in range(options.rounds):
                    for side in sides:
                        side.round()
                mine, theirs = (statistics.median(side.milliseconds) for side in sides)
                pages = " and ".join(f"{statistics.median(side.pages):.0f}" for side in sides)
                print(f"{what:<36} {mine:12.3f} {theirs:11.3f} {theirs / mine:18.2f}   {pages}")
                for client in (ours, other):
                    client.unload(model)


if __name__ == "__main__":
    main()
