"""What a borrowed machine lacks is found at the start, and is worked around or named: on machines
that are made up here."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import machine  # noqa: E402
from machine import Machine  # noqa: E402

TOOLS = ("nvcc", "ctest", "g++", "openssl")


class FoundAtTheStart(unittest.TestCase):
    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory(prefix="bh-machine-test-")
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        for name in ("build/bin", "build/minimal/bin", "tools", "site/torch", "toolkit/include", "toolkit/lib64/stubs"):
            (self.folder / name).mkdir(parents=True)
        for file in ("toolkit/include/cuda.h", "toolkit/lib64/stubs/libcuda.so"):
            (self.folder / file).touch()
        for tool in TOOLS:
            self.tool(tool)
        self.torch = {"version": "2.11.0", "cuda": "13.0", "folder": str(self.folder / "site/torch"), "toolkit": str(self.folder / "toolkit"), "gpu": "H, sm_90"}
        self.carried = {"commit": "abc", "torch": "2.11.0+cu130", "glibc": "2.34", "libstdc++": "3.4.30"}
        self.driver = "cuInit 0 GPUs 1"

    def tool(self, name: str) -> None:
        (self.folder / "tools" / name).touch(0o755)

    def asked(self, command: list[str], *unused: Any) -> tuple[int, str]:
        if command[0] == "nvidia-smi":
            return 127, "no nvidia-smi"
        if command[-1] == machine.ASK_TORCH:
            return (0, json.dumps(self.torch)) if self.torch else (1, "ModuleNotFoundError: No module named 'torch'")
        return 0, "/usr/lib/libcuda.so.1" if "maps" in command[-1] else self.driver

    def found(self) -> Machine:
        (self.folder / "pack.json").write_text(json.dumps(self.carried))
        with (mock.patch.object(machine, "ROOT", self.folder), mock.patch.object(machine, "asked", self.asked),
              mock.patch.object(machine, "libstdcxx_version", lambda: "3.4.30"),
              mock.patch.dict(os.environ, PATH=str(self.folder / "tools"), LIBRARY_PATH="")):  # fmt: skip
            found = Machine(self.folder / "build", False)
        self.addCleanup(found.scratch.cleanup)
        return found

    def said_of(self, found: Machine, what: str) -> str:
        return next((line[len(what) :].strip() for line in found.lines if line.startswith(what)), "")

    def test_a_machine_that_has_all_lacks_nothing(self) -> None:
        found = self.found()
        self.assertEqual((found.no_programs, found.no_libtorch, found.no_gpu, found.no_export), ("", "", "", ""))
        self.assertEqual(self.said_of(found, "GPU"), "yes")
        for tool in TOOLS:
            self.assertEqual(self.said_of(found, tool), "")

    def test_tools_that_are_missing_are_named_and_stop_no_more_than_they_must(self) -> None:
        for tool, stops in [("openssl", ""), ("ctest", ""), ("nvcc", ""), ("g++", "no g++")]:
            with self.subTest(tool):
                (self.folder / "tools" / tool).unlink()
                found = self.found()
                self.assertRegex(self.said_of(found, tool), "^none: ")
                self.assertEqual((found.no_programs, found.no_libtorch, found.no_gpu, found.no_export), ("", "", "", stops))
                self.tool(tool)

    def test_a_toolkit_from_pip_is_given_a_stub_of_libcuda_and_a_libcudart_to_link(self) -> None:
        self.torch["toolkit"] = ""
        pip = self.folder / "site/nvidia/cu13"
        for name in ("include/cuda.h", "lib/libcudart.so.13"):
            (pip / name).parent.mkdir(parents=True)
            (pip / name).touch()
        found = self.found()
        self.assertEqual((self.said_of(found, "toolkit"), found.no_export), (str(pip), ""))
        self.assertEqual(found.environment["CUDA_HOME"], str(pip))
        linked = {file.name: os.readlink(file) for folder in found.environment["LIBRARY_PATH"].split(os.pathsep) for file in Path(folder).iterdir()}
        self.assertEqual(linked, {"libcuda.so": "/usr/lib/libcuda.so.1", "libcudart.so": str(pip / "lib/libcudart.so.13")})

    def test_an_older_glibc_stops_all_programs(self) -> None:
        self.carried["glibc"] = "9.99"
        self.assertIn("the programs need 9.99", self.found().no_programs)

    def test_an_older_libstdcxx_is_replaced_by_the_carried_one(self) -> None:
        self.carried["libstdc++"] = "3.4.99"
        found = self.found()
        self.assertEqual(found.no_programs, "")
        self.assertIn(str(self.folder / "build/lib/newer"), found.environment["LD_LIBRARY_PATH"].split(os.pathsep))

    def test_another_torch_or_none_stops_what_loads_it(self) -> None:
        self.torch["version"] = "2.12.0"
        found = self.found()
        self.assertEqual(found.no_programs, "")
        self.assertIn("torch 2.12.0 here", found.no_libtorch)
        self.assertEqual(found.no_export, found.no_libtorch)
        self.torch = {}
        self.assertIn("No module named 'torch'", self.found().no_libtorch)

    def test_a_driver_that_is_missing_is_the_reason_for_what_is_skipped(self) -> None:
        self.driver = "OSError: libcuda.so.1: cannot open shared object file"
        found = self.found()
        self.assertEqual(found.no_gpu, "libcuda.so.1: cannot open shared object file")
        self.assertIn(found.no_gpu, found.no_export)

    def test_a_sandbox_and_a_machine_without_cgroups_are_named(self) -> None:
        uname = mock.Mock(release="4.4.0")
        with mock.patch.object(os, "uname", lambda: uname), mock.patch.object(os, "access", lambda *unused: False), mock.patch.object(Path, "chmod"):
            found = self.found()
        self.assertRegex(self.said_of(found, "sandbox"), "^gVisor")
        self.assertRegex(self.said_of(found, "cgroup"), "^none")


if __name__ == "__main__":
    unittest.main()
