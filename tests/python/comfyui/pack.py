"""The pack as ComfyUI has it, with a stand-in manager, and a daemon of the minimal worker."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import unittest
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any, Callable
from unittest import mock

import bulkhead
import stand_in_interface
import torch
from daemon import BUILD, MINIMAL, MinimalDaemon, fake_nvml
from stand_in_manager import Manager

CLIENTS = Path(__file__).resolve().parents[3] / "clients"
GIB = 1 << 30


class EchoFleet(MinimalDaemon):
    """Models that echo, by name; on GPUs of a fake machine where ``gpus`` gives UUIDs. ``size`` is
    what each takes there."""

    def __init__(self, models: dict[str, dict[str, Any]], gpus: tuple[uuid.UUID, ...] = ()) -> None:
        self._models, self._gpus = models, gpus
        super().__init__()

    def prepare(self, here: Path) -> dict[str, str]:
        for at in range(len(self._gpus)):
            (here / f"held{at}").mkdir()
        (here / "machine").write_text("".join(f"gpu GPU-{gpu} {8 * GIB} Fake\nheld_in {at} {here}/held{at}\n" for at, gpu in enumerate(self._gpus)))
        fleet = {"version": 1, "models": {name: self._model(here, **told) for name, told in self._models.items()}}
        self.fleet.write_text(json.dumps(fleet))
        return fake_nvml(here / "machine") if self._gpus else {}

    def _model(self, here: Path, *, gpu: int | None = None, size: int = 0, run_ms: int = 0, **more: Any) -> dict[str, Any]:
        environment = {"MINIMAL_RUN_MS": str(run_ms), "MINIMAL_BALLAST_BYTES": str(0 if gpu is not None else size)}
        if gpu is not None:
            environment |= {"MINIMAL_GPU_HELD_IN": str(here / f"held{gpu}"), "MINIMAL_GPU_BYTES": str(size)}
        return {
            "runtime": "torchscript",
            "file": str(MINIMAL / "bulkhead-worker"),
            "device": "cpu" if gpu is None else f"GPU-{self._gpus[gpu]}",
            "graphs": "off",
            "environment": environment,
            "deadlines": {"drain": "300ms", "kill": "300ms"},
            "inputs": {"x": {"dtype": "float32", "shape": ["0..16777216"]}},
            "outputs": {"y": {"dtype": "float32", "shape": ["0..16777216"]}},
        } | more


class EngineFleet(EchoFleet):
    """Models that are classes of engines.py, each with ``size`` of GPU 0."""

    programs = BUILD / "bin"

    def _model(self, here: Path, *, engine: str = "", size: int = 0, **more: Any) -> dict[str, Any]:
        return {
            "runtime": "python",
            "engine": f"{Path(__file__).with_name('engines.py')}:{engine}",
            "interpreter": sys.executable,
            "device": f"GPU-{self._gpus[0]}",
            "environment": {"HELD_IN": str(here / "held0"), "HELD_BYTES": str(size)},
            "deadlines": {"drain": "300ms", "kill": "300ms"},
        } | more


class WithPack(unittest.TestCase):
    """``self.manager`` is ComfyUI's; ``self.pack("answers")`` a module of the pack, in the state
    that it has in a new ComfyUI."""

    def setUp(self) -> None:
        self.user = tempfile.TemporaryDirectory(prefix="bh-")
        self.addCleanup(self.user.cleanup)
        stand_in_interface.install(self.user.name)
        stand_in_interface.progress.clear()
        stand_in_interface.written.clear()
        self.manage(Manager())
        self.new_comfyui()

    def manage(self, manager: Manager) -> None:
        self.manager = manager
        manager.install()

    def new_comfyui(self) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "comfyui"]:
            del sys.modules[name]

    def pack(self, module: str) -> ModuleType:
        return importlib.import_module(f"comfyui.{module}")

    def serve(self, socket: str) -> bulkhead.Client:
        """The pack's daemon from now on, and a client of it for the test."""
        self.enterContext(mock.patch.dict(os.environ, BULKHEAD_SOCKET=socket))
        client = bulkhead.connect(socket, name="test")
        self.addCleanup(client.close)
        return client

    def fleet(self, **models: dict[str, Any]) -> bulkhead.Client:
        return self.gpu_fleet((), **models)

    def gpu_fleet(self, gpus: tuple[uuid.UUID, ...], of: type[EchoFleet] = EchoFleet, **models: dict[str, Any]) -> bulkhead.Client:
        self.daemon = of(models, gpus)
        self.addCleanup(self.daemon.stop)
        return self.serve(self.daemon.socket)

    async def echo(self, model: str, count: int = 3, method: str | None = None) -> list[float]:
        """One run of a node."""
        answer = await self.pack("answers").ask(model, method, {"x": json.dumps([1.0] * count)}, _ignored)
        return answer.tensors["y"].tolist()

    def refused(self, run: Callable[[], Any], *words: str) -> str:
        """A clear message in the node: all of these words are in it."""
        with self.assertRaises(self.pack("daemon").NodeError) as caught:
            run()
        text = str(caught.exception)
        for word in words:
            self.assertIn(word, text)
        return text


async def _ignored(part: Any) -> None:
    pass


def cuda(index: int) -> torch.device:
    return torch.device("cuda", index)
