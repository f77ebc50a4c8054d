"""Engines in Python behind the real daemon: good ones, and each of the ordinary
faults of bad ones."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import select
import signal
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any, Callable

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for daemon.py

import bulkhead
from daemon import Daemon, fake_nvml, row, until

ENGINES = Path(__file__).resolve().parent / "engines"
BAD = ENGINES / "bad.py"
PAGE = ENGINES.parents[3] / "docs/python-engines.md"
#: Seconds; 5 are what any other worker has for its answers, also to a new supervisor.
BEYOND_AN_ANSWER = 7


def fleet(example: Path) -> str:
    def model(name: str, engine: str, load: str = "", more: str = "", options: str = "") -> str:
        return (f"  {name}: {{runtime: python, engine: \"{ENGINES}/{engine}\", interpreter: {sys.executable}, "
                f"options: {{load: \"{load}\"{options}}}{more}}}\n")  # fmt: skip

    short = ", deadlines: {request: 1s, drain: 2s, kill: 500ms}"
    models = [
        model("good", "bad.py:Bad"), model("short", "bad.py:Bad", more=short), model("long", "bad.py:Bad", more=", deadlines: {request: 20s}"),
        model("slow-load", "bad.py:Bad", "hold", options=f", seconds: {BEYOND_AN_ANSWER}"),
        model("unload-raise", "bad.py:Bad", options=", unload: raise"), model("unload-hold", "bad.py:Bad", more=short, options=", unload: swallow"),
        f"  beeper: {{runtime: python, engine: \"{example}:Beeper\", interpreter: {sys.executable}, options: {{rate: 8000}}}}\n",
        model("unimportable", "unimportable.py:Engine"), model("broken", "broken.py:Engine"), model("undeclared", "bad.py:Undeclared"),
        model("unknown", "bad.py:Absent"), model("no-interpreter", "bad.py:Bad", more=", environment: {PATH: /nowhere}").replace(
            f" interpreter: {sys.executable},", ""),
        *(model(f"load-{what}", "bad.py:Bad", what, ", restart: never" + (", deadlines: {load: 3s, kill: 500ms}" if what == "hold" else ""))
          for what in ("raise", "import", "missing", "exit", "memory", "hold")),
    ]  # fmt: skip
    return "version: 1\ndefaults: {device: cpu}\nmodels:\n" + "".join(models)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(BAD.read_text().splitlines(), 1) if text in line)


class WithoutAKeeper(unittest.TestCase):
    def test_the_worker_ends_with_its_keeper_also_while_its_engine_holds_the_lock(self) -> None:
        own = Daemon(f"version: 1\nmodels:\n  bad: {{runtime: python, engine: \"{BAD}:Bad\", interpreter: {sys.executable}, device: cpu}}\n")
        self.addCleanup(own.folder.cleanup)
        with bulkhead.connect(own.socket) as client, client.open("bad") as channel:
            (row,) = client.ps()
            worker = os.pidfd_open(row["pid"])
            self.addCleanup(os.close, worker)
            request = channel.submit(method="act", what="hold", seconds=60)
            os.kill(client.info()["keeper_pid"], signal.SIGKILL)
            self.assertTrue(select.select([worker], [], [], 20)[0])
            with self.assertRaises(bulkhead.Error) as caught:
                channel.wait(request)
        self.assertEqual(caught.exception.code, "worker_lost")


class OnAFakeGpu(unittest.TestCase):
    def test_a_request_that_ran_out_of_memory_gets_its_model_more_room(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        machine, held = Path(folder.name, "machine"), Path(folder.name, "held")
        held.mkdir()
        machine.write_text(f"gpu GPU-0 {9 << 30} Fake\nheld_in 0 {held}\n")
        models = "".join(f"  {name}: {{runtime: python, engine: \"{BAD}:Bad\", interpreter: {sys.executable}, device: cuda:0, memory: 4GiB, "
                         f"min_resident: 1ms, options: {{held_in: {held}, takes: {4 << 30}}}}}\n" for name in ("idle", "greedy"))  # fmt: skip
        daemon = Daemon(f"version: 1\nlimits: {{'cuda:0': {{margin: 1GiB}}}}\nmodels:\n{models}", fake_nvml(machine))
        self.addCleanup(daemon.stop)
        with bulkhead.connect(daemon.socket) as client:
            client.infer("idle", method="act", what="")
            for what in ("memory of another model", "memory"):
                with self.assertRaises(bulkhead.Error) as caught:
                    client.infer("greedy", method="act", what=what)
                self.assertEqual(caught.exception.code, "out_of_memory")
            until(client, "idle", lambda now: now["state"] == "stopped")
            self.assertIn("a request of greedy/0 ran out of memory", client.why("idle"))
            self.assertIn("a request of greedy/0 ran out of memory with 4.0 GiB held; from now on it gets 5.0 GiB", client.why("greedy"))
            self.assertEqual(row(client, "greedy")["state"], "ready")


class Engines(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        example = Path(folder.name, "beeper.py")
        example.write_text(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])  # type: ignore[index]
        cls.daemon = Daemon(fleet(example))
        cls.addClassCleanup(cls.daemon.stop)

    def setUp(self) -> None:
        self.client = bulkhead.connect(self.daemon.socket, name="test")
        self.addCleanup(self.client.close)

    def row(self, model: str) -> dict[str, Any]:
        return next(row for row in self.client.ps() if row["model"] == model)

    def act(self, what: str, seconds: int = 0, model: str = "good") -> bulkhead.Reply:
        return self.client.infer(model, method="act", what=what, seconds=seconds)

    def refused(self, call: Any, *arguments: Any) -> bulkhead.Error:
        with self.assertRaises(bulkhead.Error) as caught:
            call(*arguments)
        return caught.exception

    def ends(self, model: str, what: str) -> None:
        self.assertIn(self.refused(self.act, what, 0, model).code, ("worker_lost", "deadline_exceeded"))

    def serves(self, model: str = "good") -> None:
        self.assertEqual(self.act("", model=model)["audio"].tolist(), [0.0])

    # --- what is asked of an engine

    def test_parts_come_as_they_are_made_and_the_answer_is_whole(self) -> None:
        replies = [(reply["audio"].tolist(), reply.values_json) for reply in self.client.stream("good", method="stream", parts=3)]
        self.assertEqual(replies, [([0.0, 0.0], {"part": 0}), ([1.0, 1.0], {"part": 1}), ([2.0, 2.0], {"part": 2}), ([0.0, 1.0, 2.0], {"parts": 3})])
        self.assertEqual(self.client.infer("good", method="stream", parts=2)["audio"].tolist(), [0.0, 1.0])

    def test_the_pages_example_beeps(self) -> None:
        *parts, whole = self.client.stream("beeper", method="speak", text="hi")
        self.assertEqual([part["audio"].shape for part in (*parts, whole)], [(1, 800), (1, 800), (1, 1600)])
        self.assertEqual(whole["audio"].tolist()[0], [sample for part in parts for sample in part["audio"].tolist()[0]])

    def test_a_client_that_reads_late_gets_every_part(self) -> None:
        """Also more of them than the worker's socket and its outbox hold, and of a worker that
        drains meanwhile."""
        for count in (300, 3000):
            with self.subTest(count), self.client.open("good") as channel:
                worker = self.row("good")["pid"]
                request = channel.submit(method="stream", parts=count)
                self.client.infer("good", method="ended")  # answered after the last part was made
                unloading = threading.Thread(target=self.client.unload, args=("good",))
                unloading.start()
                until(self.client, "good", lambda now: now["state"] not in ("ready", "busy"))
                *parts, whole = channel.stream(request)
                self.assertEqual([part.values_json["part"] for part in parts], list(range(count)))
                self.assertEqual(whole.values_json, {"parts": count})
                unloading.join(60)
            self.assertEqual([crash for crash in self.client.crashes("good") if crash["pid"] == worker], [])

    def test_progress_of_a_request_is_a_part(self) -> None:
        *parts, _ = (reply.values_json for reply in self.client.stream("good", method="stream", parts=2, ticks=5))
        told = [part["progress"] for part in parts if "progress" in part]
        self.assertEqual(told[0], {"done": 0, "total": 5, "detail": "ticking"})
        self.assertEqual([part for part in parts if "progress" not in part], [{"part": 0}, {"part": 1}])
        self.assertLess(parts.index({"progress": told[0]}), parts.index({"part": 0}))

    def test_a_stream_that_is_left_ends_in_the_engine_whatever_it_catches(self) -> None:
        for reply in self.client.stream("good", method="endless"):
            self.assertEqual(reply.values_json, {"on": True})
            break
        self.assertEqual(self.client.infer("good", method="ended").values_json, {"ended": 1})
        with self.client.open("good") as channel:
            next(channel.stream(channel.submit(method="endless")))
        self.assertEqual(self.client.infer("good", method="ended").values_json, {"ended": 2})

    def test_results_of_several_kinds(self) -> None:
        self.assertEqual(self.act("strided")["audio"].tolist(), [0.0, 2.0, 4.0, 6.0])
        self.assertEqual(self.act("list")["audio"].tolist(), [1.0, 2.0])

    def test_what_an_engine_writes_to_another_models_result_is_seen_by_that_request_alone(self) -> None:
        self.client.load("long")
        pid = self.row("long")["pid"]
        lent = self.client.infer("good", method="stream", parts=2000)["audio"]  # of several pages
        for _ in range(2):
            doubled = self.client.infer("long", method="double", x=lent)["audio"]
            self.assertEqual(doubled.tolist(), [2.0 * sample for sample in range(2000)])
            self.assertEqual(lent.tolist(), list(range(2000)))
        self.assertEqual(self.row("long")["pid"], pid)

    def test_the_declaration_is_told(self) -> None:
        with self.client.open("good") as channel:
            methods, act = channel.methods, channel.methods["act"]
        printed = self.daemon._bulkhead("info", "--model", "good", "--json")
        self.assertEqual(json.loads(printed), {"model": "good", "methods": methods})
        self.assertEqual(act["description"], "Does it.")
        self.assertEqual(act["parameters"], [{"name": "what", "type": "string"}, {"name": "seconds", "type": "integer", "default": 0}])

    def test_an_unload_ends_the_process_with_a_receipt(self) -> None:
        self.act("leak")
        self.act("spawn")
        pid = self.row("good")["pid"]
        gc.collect()
        (receipt,) = self.client.unload("good")
        self.assertEqual((receipt["ended"], receipt["verified"]), ("drained", True), receipt)
        self.assertFalse(Path(f"/proc/{pid}").exists())
        self.serves()

    def test_an_unload_that_fails_still_unloads(self) -> None:
        # The latter reaches its drain deadline.
        for model, ended in (("unload-raise", "drained"), ("unload-hold", "killed")):
            with self.subTest(model):
                self.serves(model)
                (receipt,) = self.client.unload(model)
                self.assertEqual((receipt["ended"], receipt["verified"]), (ended, True), receipt)
                self.assertEqual(self.client.crashes(model), [])
        self.assertTrue(any("RuntimeError: the engine's own words" in line["text"] for line in self.client.logs("unload-raise")))

    # --- faults of a load

    def test_loads_that_cannot_help_themselves_are_not_tried_again(self) -> None:
        for model, code, words in (
            ("unimportable", "config_invalid", f"No module named 'no_such_module' ({ENGINES}/unimportable.py:3)"),
            ("broken", "config_invalid", f"KeyError: 'b' ({ENGINES}/broken.py:4)"),
            ("undeclared", "config_invalid", "class Undeclared has no function with @bulkhead.engine.method"),
            ("unknown", "config_invalid", "has no class Absent"),
            ("no-interpreter", "config_invalid", "no python3 in /nowhere"),
            ("load-missing", "load_failed", "no folder /models/voice"),
            ("load-import", "load_failed", "No module named 'no_such_module'"),
        ):
            with self.subTest(model):
                with self.client.events(model) as events:
                    error = self.refused(self.client.load, model)
                    self.assertEqual(error.code, code)
                    self.assertIn(words, error.attempt)
                    states = (event["to"] for event in events if event["event"] == "state")
                    self.assertEqual(next(state for state in states if state in ("backoff", "quarantined", "stopped")), "quarantined")
                    self.assertIn(words, self.client.why(model))

    def test_what_a_load_raises_is_told_with_its_line(self) -> None:
        error = self.refused(self.client.load, "load-raise")
        self.assertEqual(error.code, "load_failed")
        self.assertIn(f"RuntimeError: the engine's own words ({BAD}:{line_of('own words')} in raise_an_error)", error.attempt)
        self.assertIn("SystemExit: 3", self.refused(self.client.load, "load-exit").attempt)
        self.assertEqual(self.refused(self.client.load, "load-memory").code, "out_of_memory")
        self.assertEqual(self.refused(self.client.load, "load-missing").remedy, "fetch org/voice, and put it into /models/voice")

    def test_a_load_that_holds_the_lock_ends_at_its_deadline_and_its_line_is_told(self) -> None:
        report = self.crash("load-hold", lambda: self.assertEqual(self.refused(self.client.load, "load-hold").code, "deadline_exceeded"))
        self.assertIn(f"bad.py:{line_of('# the blocking line')})", report["backtrace"][0])

    def test_a_load_may_hold_the_lock_for_as_long_as_it_may_take_also_under_a_new_supervisor(self) -> None:
        def load() -> None:
            with contextlib.suppress(bulkhead.Error), bulkhead.connect(self.daemon.socket) as other:
                other.load("slow-load")

        loading = threading.Thread(target=load)
        with self.client.logs("slow-load", follow=True) as lines:  # type: ignore[attr-defined]
            loading.start()
            next(line for line in lines if line["text"] == "the lock is held")
        pid, before = self.row("slow-load")["pid"], self.client.info()["supervisor_pid"]
        os.kill(before, signal.SIGKILL)
        self.client.load("slow-load")
        self.assertNotEqual(self.client.info()["supervisor_pid"], before)
        self.assertEqual(self.row("slow-load")["pid"], pid)
        loading.join(60)

    def crash(self, model: str, act: Callable[[], object]) -> dict[str, Any]:
        """The report of what ``act`` brings about."""
        with self.client.events(model) as events:
            act()
            return next(json.loads(Path(event["report"]).read_text()) for event in events if event["event"] == "crash")

    # --- faults of a request

    def test_what_a_request_raises_ends_that_request_alone(self) -> None:
        self.serves()
        pid = self.row("good")["pid"]
        for what, code, words in (
            ("raise", "inference_failed", f"RuntimeError: the engine's own words ({BAD}:{line_of('own words')} in raise_an_error)"),
            ("refuse", "input_invalid", "speaking: the text is empty"),
            ("exit", "inference_failed", "SystemExit: 3"),
            ("memory", "out_of_memory", "MemoryError: no room"),
            ("memory of torch", "out_of_memory", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
            ("nothing", "inference_failed", "act returned int"),
            ("other dtype", "inference_failed", "is float64, declared is float32"),
            ("other rank", "inference_failed", "declared is rank 1 ([samples=0..])"),
            ("no output", "inference_failed", 'returned no "audio"'),
            ("more", "inference_failed", "returned video"),
            ("no JSON", "inference_failed", "not JSON"),
        ):
            with self.subTest(what):
                error = self.refused(self.act, what)
                self.assertEqual(error.code, code)
                self.assertIn(words, error.attempt)
        self.serves()
        self.assertEqual(self.row("good")["pid"], pid)

    def test_a_stream_that_fails_gives_its_parts_first(self) -> None:
        got = []
        with self.assertRaises(bulkhead.Error) as caught:
            for reply in self.client.stream("good", method="stream", parts=3, fails_at=2):
                got.append(reply.values_json["part"])
        self.assertEqual((caught.exception.code, got), ("inference_failed", [0, 1]))

    def test_a_flood_of_words_and_closed_descriptors_harm_nobody(self) -> None:
        self.act("print")
        self.act("close")
        self.serves()

    def test_a_forked_child_that_returns_is_ended_and_answers_nothing(self) -> None:
        answer = self.act("fork")
        self.assertEqual((answer["audio"].tolist(), answer.values_json), ([0.0], {"status": 0}))
        self.serves()

    def test_a_program_that_it_starts_gets_none_of_the_workers_descriptors(self) -> None:
        with self.client.open("good") as channel:
            child = channel.infer(method="act", what="spawn").values_json["child"]
        held = []
        for entry in Path(f"/proc/{child}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                held.append(f"{entry.name} {os.readlink(entry)}")
        self.assertFalse([one for one in held if "socket:" in one or "memfd:" in one], held)
        self.client.unload("good")
        self.assertFalse(Path(f"/proc/{child}").exists())

    def test_a_request_may_hold_the_lock_for_as_long_as_it_may_run(self) -> None:
        self.client.load("long")
        pid = self.row("long")["pid"]
        reply = self.act("hold", BEYOND_AN_ANSWER, model="long")
        self.assertEqual(reply.values_json["pid"], pid)

    def test_one_that_holds_it_longer_is_ended_and_the_report_names_its_line(self) -> None:
        for what, line in (("hold", "# the blocking line"), ("spin", "# the spinning line"), ("segv", "ctypes.string_at(0)")):
            with self.subTest(what):
                self.client.load("short")
                crash = self.crash("short", lambda: self.ends("short", what))
                self.assertRegex(crash["backtrace"][0], r" \((bad|__init__)\.py:\d+\)$")
                self.assertIn(f"bad.py:{line_of(line)})", next(frame for frame in crash["backtrace"] if "bad.py:" in frame))
                self.assertEqual(crash["request"], "act()")
        self.assertEqual(crash["signal"], "SIGSEGV")
        self.assertRegex(crash["cause"], r"^SIGSEGV in \w+ \(\w+\.py:\d+\) while running act\(\)")
        self.serves("short")

    def test_the_crash_of_a_child_is_not_the_workers(self) -> None:
        self.assertEqual(self.act("forked segv", model="short").values_json, {"status": -signal.SIGSEGV})
        pid = self.row("short")["pid"]
        self.serves("short")
        self.assertEqual(self.row("short")["pid"], pid)
        crash = self.crash("short", lambda: os.kill(pid, signal.SIGKILL))
        self.assertTrue(any("Fatal Python error" in line for line in crash["log"]), "the child's words are in the log")
        self.assertEqual((crash["backtrace"], crash["signal"]), ([], None))

    def test_one_that_swallows_signals_is_killed(self) -> None:
        self.client.load("short")
        crash = self.crash("short", lambda: self.ends("short", "swallow"))
        self.assertEqual(crash["exit"]["signal"], "SIGKILL")
        self.serves("short")

    # --- the daemon

    def test_a_new_supervisor_adopts_a_worker_in_the_middle_of_a_request(self) -> None:
        self.client.load("long")
        pid, before = self.row("long")["pid"], self.client.info()["supervisor_pid"]
        with self.client.open("long") as channel:
            request = channel.submit(method="act", what="hold", seconds=BEYOND_AN_ANSWER)
            os.kill(before, signal.SIGKILL)
            self.assertEqual(channel.wait(request).values_json["pid"], pid)
            self.assertEqual(channel.infer(method="act", what="").values_json["pid"], pid)
        self.assertNotEqual(self.client.info()["supervisor_pid"], before)
        self.assertEqual(self.row("long")["pid"], pid)
        (receipt,) = self.client.unload("long")
        self.assertEqual((receipt["ended"], receipt["verified"]), ("drained", True), receipt)


if __name__ == "__main__":
    unittest.main()
