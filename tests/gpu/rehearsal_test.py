"""The three commands for a borrowed machine, rehearsed to the end on the fake driver, with what
`pack` packs and nothing else."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ["BULKHEAD_BUILD"])
LINE = re.compile(r"^(passed|failed|skipped|timed out) +[\d.]+ s  (.*?)(?:: (.*))?$", re.M)
#: In namespaces of its own: Python lies elsewhere, the build is an empty folder.
HIDE = 'mount --bind "$1" "$2" && mount -t tmpfs none "$3" && shift 3 && exec "$@"'

CALL_S = 600  #: a call on a borrowed machine is cut off then
BENCHES = {"slabs": "gpu_slab_bench", "higgs": "engines/bench.py higgs", "t3_single": "generation/bench.py t3_single"}
Told = tuple[str, str, str]  #: what became of a test, its name, the reason

#: A test program, as GoogleTest makes them, of which one test fails, one hangs and leaves a process
#: behind, and one crashes.
FAULTY = """#!/usr/bin/env python3
import os, signal, subprocess, sys, time
tests = ["Fake.Passes", "Fake.Fails", "Fake.Hangs", "Fake.Crashes", "Fake.ComesLast"]
if "--gtest_list_tests" in sys.argv:
    print("Fake.", *("  " + test[5:] for test in tests), sep="\\n")
    sys.exit()
chosen = sys.argv[1].removeprefix("--gtest_filter=").split(":")
for test in tests:
    if test not in chosen:
        continue
    print("[ RUN      ]", test, flush=True)
    if test == "Fake.Hangs":
        subprocess.Popen(["sleep", "4242"], start_new_session=True)
        signal.pause()
    if test == "Fake.Crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if test == "Fake.Fails":
        print("here.cpp:7: Failure\\nExpected equality\\n[  FAILED  ]", test, "(0 ms)", flush=True)
    else:
        print("[       OK ]", test, "(0 ms)", flush=True)
sys.exit(1 if "Fake.Fails" in chosen else 0)
"""


class Pack(unittest.TestCase):
    def test_a_folder_that_is_too_large_is_refused_by_its_largest_parts(self) -> None:
        pack = runpy.run_path(str(ROOT / "tests/gpu/pack"))
        with tempfile.TemporaryDirectory(prefix="bh-pack-") as folder:
            for name, mib in {"build/bin/gpu_tests": 30, "build/gpu-models/mlp.pt2": 21, "build/lib/libfmt.so": 20, "tests/gpu/first": 1}.items():
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as opened:
                    opened.truncate(mib << 20)  # without a block on the disk
            said, printed = io.StringIO(), io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
                status = pack["table"](Path(folder))
        self.assertEqual(status, 1)
        self.assertRegex(said.getvalue(), r"^pack: too large by \d+\.\d\d MiB; the largest parts are "
                         r"build/bin/gpu_tests \(30\.00 MiB\), build/gpu-models/mlp\.pt2 \(21\.00 MiB\), build/lib/libfmt\.so \(20\.00 MiB\)\n$")  # fmt: skip
        self.assertIn("72.00 MiB  in all", printed.getvalue())


class Rehearsal(unittest.TestCase):
    folder: tempfile.TemporaryDirectory[str]
    pack: Path
    elsewhere: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory(prefix="bh-rehearsal-")
        cls.addClassCleanup(cls.folder.cleanup)
        cls.pack = Path(cls.folder.name, "pack")
        cls.elsewhere = Path(cls.folder.name, "elsewhere")
        (cls.elsewhere / "python").mkdir(parents=True)
        start = time.monotonic()
        subprocess.run([sys.executable, str(ROOT / "tests/gpu/pack"), "--no-packages", "--build", str(BUILD), str(cls.pack)], check=True, stdout=sys.stderr)
        print(f"packing: {time.monotonic() - start:.1f} s", file=sys.stderr)

    def command(self, name: str, *options: str, pack: Path | None = None, status: int = 0) -> list[Told]:
        """What it says of each test."""
        out = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.elsewhere))
        python = Path(sys.prefix)
        command = [str((pack or self.pack) / "tests/gpu" / name), *options]
        hidden = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0 and python.is_relative_to(BUILD)
        if hidden:
            command = ["unshare", "-rm", "sh", "-c", HIDE, "sh", str(python.resolve()), str(self.elsewhere / "python"), str(BUILD), *command]
            python = self.elsewhere / "python"
        start = time.monotonic()
        done = subprocess.run(command, cwd=self.elsewhere, capture_output=True, text=True,
                              env={"PATH": f"{python / 'bin'}:/usr/local/bin:/usr/bin:/bin", "HOME": str(self.elsewhere), "OUT": str(out)})  # fmt: skip
        print(f"{name} {' '.join(options)}: {time.monotonic() - start:.1f} s{'' if hidden else ', the build in sight'}", file=sys.stderr)
        whole = "-".join([name, *(one for one in options if one in BENCHES)])
        report = out / f"{whole}.txt"
        said = report.read_text() if report.exists() else ""
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertEqual(said, done.stdout, "the report is what was printed")
        self.assertRegex(said, r"\n\d+ passed, \d+ failed, \d+ timed out, \d+ skipped, \d+ s\n\Z")
        self.assertLess(int(said.split()[-2]), CALL_S, "its own summary")
        self.assertEqual(sorted(os.listdir(out)), [f"{whole}.tgz", f"{whole}.txt"])
        with tarfile.open(out / f"{whole}.tgz") as archive:
            files = {one.name.removeprefix(f"{whole}/"): archive.extractfile(one) for one in archive}
            kept = {name: file.read().decode() for name, file in files.items() if file}
        self.assertEqual(kept["report.txt"], said)
        self.kept = kept
        return [(what, of, reason) for what, of, reason in LINE.findall(said)]

    def names_in(self, program: str) -> set[str]:
        listed = subprocess.run([str(BUILD / "bin" / program), "--gtest_list_tests"], check=True, capture_output=True, text=True).stdout
        names, of = set(), ""
        for line in listed.splitlines():
            if line.startswith("  "):
                names.add(of + line.split("#")[0].strip())
            elif "." in line:
                of = line.split("#")[0].strip()
        return names

    def test_every_test_is_run_once_and_says_what_became_of_it(self) -> None:
        first = self.command("first", "--rehearse")
        self.assertLessEqual({"graphs.log", "slabs.log", "doctor.log", "engines.log"}, set(self.kept))
        self.assertIn("GpuSlabs.", self.kept["slabs.log"])
        second = self.command("second", "--rehearse")
        told = [name for _, name, _ in first + second]
        self.assertEqual(len(told), len(set(told)))
        ours = {name for program in ("gpu_sampler_tests", "gpu_tests", "gpu_slab_tests") for name in self.names_in(program)}
        self.assertEqual(set(told) - ours, {"export of mlp.pt2 and tiny_generate on this GPU", "export of tiny_t3 on this GPU",
                                            "making what is too large to be carried", "Python.gpu", "Python.worker_captures",
                                            "Python.doctor_gpu", "engines_test.py"})  # fmt: skip
        self.assertEqual(ours - set(told), set())

        on_the_fake = self.names_in("gpu_slab_tests") | {"Python.gpu", "CudaModule.LoadsWithoutAGpuAndSaysWhatIsMissing"}
        for what, name, reason in first + second:
            with self.subTest(name):
                if name not in on_the_fake:
                    self.assertEqual(what, "skipped")
                    self.assertRegex(reason, "GPU|NVIDIA|rehearsal")
                elif what == "skipped":
                    self.assertNotEqual(reason, "")
                else:
                    self.assertEqual(what, "passed", reason)

    def test_benches_run_to_their_end(self) -> None:
        """Side by side: each leaves a CPU idle."""
        calls = (("slabs", "higgs"), ("t3_single",))
        with ThreadPoolExecutor() as pool:
            said = list(pool.map(lambda names: self.command("third", "--rehearse", *names, "--limit", str(CALL_S - 60)), calls))
        self.assertEqual(said, [[("passed", BENCHES[name], "") for name in names] for names in calls])

    def test_what_fails_hangs_or_does_not_start_is_told_and_stops_nothing(self) -> None:
        faulty = Path(self.folder.name, "faulty")
        shutil.copytree(self.pack, faulty, symlinks=True)
        absent = "#!/bin/sh\necho no such library >&2\nexit 127\n"
        for program, text in [("gpu_sampler_tests", FAULTY), ("gpu_tests", absent), ("gpu_slab_tests", absent)]:
            (faulty / "build/bin" / program).write_text(text)
        # These import PyTorch.
        for module in ("test_gpu.py", "doctor/test_gpu.py", "worker/test_captures.py"):
            (faulty / "tests/python" / module).write_text("")

        said = self.command("first", "--rehearse", "--bound", "5", pack=faulty, status=1)

        by_name = {name: (what, reason) for what, name, reason in said}
        self.assertEqual(by_name["Fake.Passes"], ("passed", ""))
        self.assertEqual(by_name["Fake.Fails"], ("failed", "Expected equality"))
        self.assertEqual(by_name["Fake.Hangs"], ("timed out", "no end within 5 s"))
        self.assertEqual(by_name["Fake.Crashes"][0], "failed")
        self.assertIn("SIGSEGV", by_name["Fake.Crashes"][1])
        self.assertEqual(by_name["Fake.ComesLast"], ("passed", ""))
        tried = [what for what, _, reason in said if "no such library" in reason]
        self.assertEqual(tried, ["failed"] * 5, "slabs twice, graphs, generation and families")
        self.assertIn("Expected equality", self.kept["failures.txt"])
        left = [pid for pid in os.listdir("/proc") if pid.isdigit() and command_line(pid) == ["sleep", "4242"]]
        self.assertEqual(left, [], "what a hanging test left behind goes with it")

    def test_what_has_not_begun_in_time_is_skipped_and_the_exit_status_says_so(self) -> None:
        said = self.command("second", "--rehearse", "--limit", "0", status=1)
        self.assertEqual({(what, reason) for what, _, reason in said}, {("skipped", "the command's 0 s are over")})

    @unittest.skipIf(shutil.which("nvidia-smi"), "there may be a GPU here")
    def test_without_a_gpu_the_exit_status_says_so(self) -> None:
        said = self.command("second", status=77)
        self.assertEqual({what for what, _, _ in said}, {"skipped"})


def command_line(pid: str) -> list[str]:
    try:
        return Path("/proc", pid, "cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


if __name__ == "__main__":
    unittest.main()
