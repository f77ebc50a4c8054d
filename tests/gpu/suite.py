"""Runs the GPU tests, in lanes side by side or one after another, each within a bound, and writes
each result as soon as it is known.

The report, FOLDER/NAME.txt, has a line a test: what became of it (passed, failed, skipped, timed
out), its seconds, its name and the reason. FOLDER is $OUT, or tests/gpu/results. FOLDER/NAME/ has
failures.txt, the end of what failed tests printed, and a log of each lane, what all printed, up to
a limit. At the end that folder becomes FOLDER/NAME.tgz, with the report. A test that fails, hangs
or crashes stops no other. Exit status: 0; 1 where a test failed, timed out or was not begun in
time; 77 where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import fnmatch
import glob
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from machine import ROOT, Machine, last_line

NOTHING_RAN = 77
LOG_BYTES_MAX = 12 << 20
TAIL_LINES = 80
LIST_S = 60  # a program says which tests it has; LibTorch is loaded meanwhile
LIMIT_S = 240  # three commands and three starts of 30 s are within 15 minutes
PR_SET_CHILD_SUBREAPER = 36
FORK = multiprocessing.get_context("fork")


class Process:
    """A command in a process group of its own, whose lines are read with a time limit."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
                                        cwd=folder, start_new_session=True)  # fmt: skip
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.decode(errors="replace").rstrip("\n"))
        self.lines.put(None)

    def line(self, until: float) -> str | None:
        """The next one, None at the end. Raises TimeoutError once the clock shows `until`, and ends
        at a process that is gone although another, which it started, holds its output open."""
        while True:
            try:
                return self.lines.get(timeout=max(0.01, min(0.5, until - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= until:
                    raise TimeoutError from None
                if self.process.poll() is not None and self.lines.empty():
                    return None

    def end(self) -> int:
        """Exit status, negative by the signal; of what is still running, SIGKILL."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL if self.process.poll() is None else 0)
        except ProcessLookupError:
            pass
        return self.process.wait()

    def finished(self) -> int:
        """The same of a process whose output has ended, and which is therefore let to
        end by itself."""
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            return self.end()


class Suite:
    def __init__(self, name: str, names: str = "") -> None:
        """`names` says which the command takes; without it, none."""
        parser = argparse.ArgumentParser(prog=name)
        parser.add_argument("--rehearse", action="store_true", help="on the fake driver, where there is no GPU")
        parser.add_argument("--bound", type=float, default=3600, metavar="S", help="no test may take longer than this")
        parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S",
                            help="what has not begun by then is skipped (default %(default)s)")  # fmt: skip
        if names:
            parser.add_argument("names", nargs="+", metavar="NAME", help=names)
        self.options = parser.parse_args()
        self.until: float = time.monotonic() + self.options.limit
        self.folder = Path(os.environ.get("OUT") or ROOT / "tests" / "gpu" / "results").resolve()
        # Calls of `third` leave a report each.
        name = self.name = "-".join([name, *(self.options.names if names else [])])
        self.kept = self.folder / name
        shutil.rmtree(self.kept, ignore_errors=True)
        self.kept.mkdir(parents=True)
        self.report = open(self.folder / f"{name}.txt", "w")
        self.open_log(name)
        self.writing = FORK.Lock()
        self.out_of_time = FORK.Event()
        self.background: dict[str, tuple[Process, float]] = {}
        adopt_orphans()
        self.build = Path(os.environ.get("BULKHEAD_BUILD") or ROOT / "build").resolve()
        self.tell(f"{name}{', a rehearsal' if self.options.rehearse else ''}: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}")
        self.machine = Machine(self.build, self.options.rehearse)
        for line in self.machine.lines:
            self.tell(line)
        self.tell("")

    # --- what is written

    def tell(self, line: str) -> None:
        with self.writing:
            print(line, flush=True)
            self.report.write(line + "\n")
            self.report.flush()

    def result(self, what: str, seconds: float, name: str, reason: str = "") -> None:
        self.tell(f"{what:<9} {seconds:7.1f} s  {name}{': ' if reason else ''}{reason}")

    def open_log(self, name: str) -> None:
        self.log = open(self.kept / f"{name}.log", "wb", buffering=0)
        self.logged = 0

    def keep(self, line: str) -> None:
        data = line.encode() + b"\n"
        if self.logged + len(data) <= LOG_BYTES_MAX:
            self.log.write(data)
            self.logged += len(data)

    def keep_failure(self, name: str, printed: Sequence[str]) -> None:
        with self.writing, open(self.kept / "failures.txt", "a") as failures:
            failures.write(f"---- {name}\n" + "\n".join(printed) + "\n\n")

    def end(self) -> int:
        self.end_background()
        counts = Counter(re.findall(r"^(passed|failed|timed out|skipped) +[\d.]+ s  ", Path(self.report.name).read_text(), re.M))
        self.tell("")
        self.tell(", ".join(f"{counts[what]} {what}" for what in ("passed", "failed", "timed out", "skipped"))
                  + f", {self.options.limit - self.left():.0f} s")  # fmt: skip
        with tarfile.open(f"{self.kept}.tgz", "w:gz") as archive:
            archive.add(self.kept, self.name)
            archive.add(self.report.name, f"{self.name}/report.txt")
        shutil.rmtree(self.kept)
        if self.out_of_time.is_set() or counts["failed"] or counts["timed out"]:
            return 1
        return NOTHING_RAN if self.machine.no_gpu and not self.options.rehearse else 0

    # --- what is run

    def left(self) -> float:
        return self.until - time.monotonic()

    def bound(self, seconds: float) -> float:
        most: float = self.options.bound
        return min(seconds, most, self.left())

    def why_not(self, libtorch: bool) -> str:
        if self.left() <= 1:
            self.out_of_time.set()
            return f"the command's {self.options.limit:.0f} s are over"
        return self.machine.no_programs or (self.machine.no_libtorch if libtorch else "")

    def side_by_side(self, *lanes: Callable[[], object]) -> None:
        """Each lane in a process of its own, which waits for its own children alone and kills them,
        with a log of its own."""

        def run(lane: Callable[[], object]) -> None:
            begun = time.monotonic()
            adopt_orphans()
            self.open_log(lane.__name__)
            try:
                lane()
            finally:
                self.end_background()
            self.tell(f"{'':<9} {time.monotonic() - begun:7.1f} s  all of lane {lane.__name__}")

        processes = [FORK.Process(target=run, args=(lane,), name=lane.__name__) for lane in lanes]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode != 0:
                self.result("failed", 0, f"lane {process.name}", f"{how(process.exitcode)}; standard error says why")

    def program(self, name: str) -> str:
        return str(self.build / "bin" / name)

    def step(self, name: str, command: Sequence[str], bound_s: float, libtorch: bool = False, environment: dict[str, str] | None = None,
             tells: bool = False, skipped_by: str = "") -> bool:  # fmt: skip
        """One command is one test: 0 is passed, 77 skipped, with the last line as the reason; so is
        0 with a line that has `skipped_by`. True where it passed. What it prints goes into the
        report too where it `tells` something, as a bench does."""
        if reason := self.why_not(libtorch):
            self.result("skipped", 0, name, reason)
            return False
        begun = time.monotonic()
        printed: deque[str] = deque(maxlen=TAIL_LINES)
        bound = self.bound(bound_s)
        status: int | None
        self.keep(f"==== {name}")
        try:
            process = Process(command, {**self.machine.environment, **(environment or {})}, ROOT)
        except OSError as wrong:
            self.result("failed", 0, name, str(wrong))
            return False
        try:
            while (line := process.line(begun + bound)) is not None:
                printed.append(line)
                self.keep(line)
                if tells:
                    self.tell(f"    {line}")
            status = process.finished()
        except TimeoutError:
            process.end()
            status = None
        self.kill_leftovers()
        if status == 0 and skipped_by and (said := [line for line in printed if skipped_by in line]):
            status = NOTHING_RAN
            printed.append(said[0])
        return self.judge(name, time.monotonic() - begun, status, printed, bound)

    def judge(self, name: str, seconds: float, status: int | None, printed: Sequence[str], bound: float) -> bool:
        said = last_line("\n".join(printed))
        if status is None:
            self.result("timed out", seconds, name, f"no end within {bound:.0f} s")
        elif status == 0:
            self.result("passed", seconds, name)
        elif status == NOTHING_RAN:
            self.result("skipped", seconds, name, said)
        else:
            self.result("failed", seconds, name, f"{how(status)}; {said}")
        if status not in (0, NOTHING_RAN):
            self.keep_failure(name, printed)
        return status == 0

    def start(self, name: str, command: Sequence[str], skip: str = "", environment: dict[str, str] | None = None) -> None:
        """In the background, until `join` or the lane's end. `skip` is a reason not to."""
        if reason := self.why_not(libtorch=True) or skip:
            self.result("skipped", 0, name, reason)
            return
        self.background[name] = (Process(command, {**self.machine.environment, **(environment or {})}, ROOT), time.monotonic())

    def join(self, name: str, bound_s: float) -> bool:
        if name not in self.background:
            return False
        process, begun = self.background.pop(name)
        printed: deque[str] = deque(maxlen=TAIL_LINES)
        bound = self.bound(bound_s)
        until = time.monotonic() + bound
        status: int | None
        self.keep(f"==== {name}")
        try:
            while (line := process.line(until)) is not None:
                printed.append(line)
                self.keep(line)
            status = process.finished()
        except TimeoutError:
            process.end()
            status = None
        return self.judge(name, time.monotonic() - begun, status, printed, bound)

    def tests_of(self, program: str, environment: dict[str, str] | None = None) -> list[str]:
        """All that this program has; one failed line where it cannot say so."""
        try:
            done = subprocess.run([self.program(program), "--gtest_list_tests"], capture_output=True, text=True, errors="replace", timeout=self.bound(LIST_S),
                                  env={**self.machine.environment, **(environment or {})}, stdin=subprocess.DEVNULL)  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as wrong:
            self.result("failed", 0, program, f"it cannot list its tests: {wrong}")
            return []
        if done.returncode != 0:
            self.result("failed", 0, program, f"it does not start: {how(done.returncode)}; {last_line(done.stdout + done.stderr)}")
            return []
        tests, of = [], ""
        for line in done.stdout.splitlines():
            word = line.split("#")[0].strip()
            if line.startswith(" ") and of:
                tests.append(of + word)
            elif word.endswith("."):
                of = word
        return tests

    def gtests(self, program: str, patterns: Sequence[str], bound_s: float, without: Sequence[str] = (), libtorch: bool = False, suffix: str = "",
               models: dict[str, str] | None = None, environment: dict[str, str] | None = None) -> None:  # fmt: skip
        """The tests that match, one process for all of them, and another for those behind one that
        hangs or crashes. `bound_s` is for each. `models` names the file in gpu-models that tests of
        a pattern need; `suffix` tells a second run's lines apart."""
        if reason := self.why_not(libtorch):
            self.result("skipped", 0, f"{program} {':'.join(patterns)}{suffix}", reason)
            return
        tests = self.tests_of(program, environment)
        for pattern in patterns if tests else ():
            if not any(matches(test, [pattern]) for test in tests):
                self.result("failed", 0, f"{program} {pattern}{suffix}", "no test has such a name")
        named = [test for test in tests if matches(test, patterns) and not matches(test, without)]
        pending = []
        for test in named:
            lacks = next((file for pattern, file in (models or {}).items() if matches(test, [pattern]) and not (self.build / "gpu-models" / file).exists()), None)
            if lacks and not self.machine.no_gpu:
                self.result("skipped", 0, test + suffix, f"no {lacks}: it was not carried and not exported here")
            else:
                pending.append(test)
        while pending:
            if reason := self.why_not(libtorch):
                for test in pending:
                    self.result("skipped", 0, test + suffix, reason)
                return
            done = self.one_process(program, pending, bound_s, suffix, environment)
            pending = [test for test in pending if test not in done]

    def one_process(self, program: str, tests: list[str], bound_s: float, suffix: str, environment: dict[str, str] | None) -> set[str]:
        """Runs them until one hangs or the process ends. Those that have a line in the report
        now, at least one."""
        self.keep(f"==== {program}")
        process = Process([self.program(program), f"--gtest_filter={':'.join(tests)}", "--gtest_color=no"],
                          {**self.machine.environment, **(environment or {})}, ROOT)  # fmt: skip
        done: set[str] = set()
        current, begun = "", time.monotonic()
        bound = self.bound(max(bound_s, LIST_S))
        printed: deque[str] = deque(maxlen=TAIL_LINES)
        try:
            while (line := process.line(begun + bound)) is not None:
                self.keep(line)
                printed.append(line)
                if started := re.match(r"\[ RUN      \] (\S+)$", line):
                    current, begun, bound = started[1], time.monotonic(), self.bound(bound_s)
                    printed.clear()
                elif current and (ended := re.search(rf"\[(       OK |  FAILED  |  SKIPPED )\] {re.escape(current)}(, where .*)? \(\d+ ms\)$", line)):
                    seconds, what = time.monotonic() - begun, ended[1].strip()
                    if what == "OK":
                        self.result("passed", seconds, current + suffix)
                    elif what == "SKIPPED":
                        self.result("skipped", seconds, current + suffix, why_skipped(printed))
                    else:
                        self.result("failed", seconds, current + suffix, first_failure(printed))
                        self.keep_failure(current + suffix, printed)
                    done.add(current)
                    current, begun, bound = "", time.monotonic(), self.bound(bound_s)
            status: int | None = process.finished()
        except TimeoutError:
            status = None
            process.end()
        self.kill_leftovers()
        seconds = time.monotonic() - begun
        if current:
            if status is None:
                self.result("timed out", seconds, current + suffix, f"no end within {bound:.0f} s")
                printed.extend(daemons_logs(seconds))
            else:
                self.result("failed", seconds, current + suffix, f"its process ended: {how(status)}; {last_line(chr(10).join(printed))}")
            self.keep_failure(current + suffix, printed)
            done.add(current)
        elif set(tests) - done and (not done or status is None):
            # It does not even begin, or does not go on.
            rest = next(test for test in tests if test not in done)
            self.result("failed", seconds, rest + suffix, f"{program} did not come to it: {how(status)}; {last_line(chr(10).join(printed))}")
            self.keep_failure(rest + suffix, printed)
            done.add(rest)
        elif not set(tests) - done and (status is None or status < 0):
            # Such as a driver that hangs or crashes at exit.
            self.result("timed out" if status is None else "failed", seconds, f"{program}'s own end{suffix}", how(status))
            self.keep_failure(program, printed)
        return done

    def end_background(self) -> None:
        for name in list(self.background):
            process, begun = self.background.pop(name)
            process.end()
            self.result("timed out", time.monotonic() - begun, name, "the command's time is over")
        self.kill_leftovers()

    def kill_leftovers(self) -> None:
        """Processes that a test left behind; not those in the background, nor their own."""
        keep = {process.process.pid for process, _ in self.background.values()}
        for _ in range(100):  # the children of those that were killed become ours
            left = children() - keep
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    pass
            if not left:
                return


def adopt_orphans() -> None:
    """What a killed test leaves behind becomes a child of this process, and is killed too: it would
    go on using the GPU."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """By their status files: not every kernel lists a process's children."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"\nPPid:\t{os.getpid()}\n" in status.read_text():
                found.add(int(status.parent.name))
        except OSError:  # it has ended meanwhile
            pass
    return found


def daemons_logs(seconds: float) -> list[str]:
    """The ends of what the daemons of tests have logged in the last so many seconds."""
    lines = []
    for file in map(Path, glob.glob(f"{tempfile.gettempdir()}/bh-*/**/*.log", recursive=True)):
        with contextlib.suppress(OSError):  # a test of another lane removes it meanwhile
            if file.stat().st_mtime >= time.time() - seconds:
                lines += [f"---- {file.name}", *file.read_text(errors="replace").splitlines()[-TAIL_LINES // 4 :]]
    return lines


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def how(status: int | None) -> str:
    if status is None:
        return "killed"
    if status < 0:
        return signal.Signals(-status).name
    return f"exit status {status}"


def why_skipped(printed: Sequence[str]) -> str:
    lines = list(printed)
    for i, line in enumerate(lines[:-1]):
        if line.endswith(": Skipped"):
            return lines[i + 1].strip()
    return "it does not say why"


def first_failure(printed: Sequence[str]) -> str:
    """What GoogleTest says below the place of the first failure, in one line."""
    lines = list(printed)
    for i, line in enumerate(lines):
        if line.endswith(": Failure") or line.startswith("unknown file: Failure"):
            return " ".join(part.strip() for part in lines[i + 1 : i + 4] if not part.startswith("["))[:200]
    return last_line("\n".join(lines[:-1]))
