"""Compiled decodes for a GPU (decodes.py), as far as a machine without one can tell: their
libraries load, and what they call.

What stands between kernels is in test_generated.py, by the same code in Python; here it is the
C++ that runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import unittest
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "clients" / "python")]

import decodes  # noqa: E402
import requirements  # noqa: E402

if reason := requirements.missing():
    print(f"Skipped\n{reason}")
    sys.exit(requirements.SKIPPED)

BUILD = Path(os.environ["BULKHEAD_BUILD"])

#: All of LibTorch and CUDA that a decode may name: buffers from the caching allocator, which a
#: capture's pool serves, what a tensor says of itself, and loading and launching its kernels. None
#: computes besides kernels, copies, allocates by itself, waits or reads on the host.
ALLOWED = {"aoti_torch_empty_strided", "aoti_torch_get_device_type", "aoti_torch_get_dtype", "aoti_torch_dtype_float32", "aoti_torch_dtype_int64",
           "aoti_torch_grad_mode_is_enabled", "aoti_torch_grad_mode_set_enabled",
           "cudaStream_t", "cuModuleLoad", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel", "cuGetErrorString"}  # fmt: skip
#: Of an input that is not aligned a copy is made, in which what is written is lost: the worker
#: aligns its slots.
UNALIGNED = "aoti_torch_clone_preserve_strides"


class CompiledDecodes(unittest.TestCase):
    def test_each_finds_all_that_it_asks_of_libtorch_and_the_driver(self) -> None:
        files = [str(decodes.file(BUILD, family)) for family in decodes.FAMILIES]
        wrappers = Path(__file__).with_name("wrappers.py")
        done = subprocess.run([sys.executable, "-W", "ignore", str(wrappers), *files], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_each_calls_nothing_but_kernels(self) -> None:
        for family in decodes.FAMILIES:
            with self.subTest(family):
                code = self.member(family, ".wrapper.cpp").decode()
                called = set(re.findall(r"\b(?:aoti_torch_|cu(?:da)?[A-Z])\w+", code))
                self.assertEqual(called - {UNALIGNED} - ALLOWED, set())
                self.assertLessEqual({"aoti_torch_empty_strided", "cuLaunchKernel"}, called)
                inputs = len(re.findall(r"= std::move\(inputs\[\d+\]\);", code))
                self.assertGreater(inputs, 0)
                self.assertEqual(len(re.findall(rf"\b{UNALIGNED}\(", code)), inputs, "one for each input, and none between kernels")

    def test_each_carries_the_kernels_that_it_loads(self) -> None:
        for family in decodes.FAMILIES:
            with self.subTest(family):
                with zipfile.ZipFile(decodes.file(BUILD, family)) as package:
                    carried = {Path(name).name: package.read(name) for name in package.namelist() if name.endswith(".cubin")}
                code = self.member(family, ".wrapper.cpp").decode()
                loaded = {Path(name).name for name in re.findall(r'"([^"]+\.cubin)"', code)}
                self.assertTrue(loaded)
                self.assertEqual(set(carried), loaded)
                for name, cubin in carried.items():
                    self.assertEqual((cubin[:4], cubin[18:20]), (b"\x7fELF", (190).to_bytes(2, "little")), f"{name} is of a GPU (EM_CUDA)")

    def member(self, family: str, end: str) -> bytes:
        with zipfile.ZipFile(decodes.file(BUILD, family)) as package:
            (name,) = [name for name in package.namelist() if name.endswith(end)]
            return package.read(name)


if __name__ == "__main__":
    unittest.main()
