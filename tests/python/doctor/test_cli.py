"""`bulkhead doctor`: it becomes the Python doctor, in the interpreter of a model of the fleet, or
in one that is named."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).parent
WORKER = HERE.parent / "worker"
sys.path.append(str(HERE.parent))
import bulkhead  # noqa: E402
import forking_interpreter  # noqa: E402
from daemon import BUILD, Daemon  # noqa: E402

BULKHEAD = BUILD / "bin/bulkhead"
FLEET = """\
version: 1
models:
  voice: {{runtime: python, engine: "{here}/voice.py:Voice", interpreter: "{python}", device: cpu, options: {{scale: 0.5}}}}
  plain: {{runtime: python, engine: "{here}/voice.py:Plain", interpreter: "{python}", device: cpu}}
  uncaptured-1.5: {{runtime: python, engine: "{worker}/engines/uncaptured.py:Uncaptured", interpreter: "{python}", device: cpu}}
  crashes: {{runtime: python, engine: "{worker}/engines/uncaptured.py:Crashes", interpreter: "{python}", device: cpu}}
  many: {{runtime: python, engine: "{worker}/engines/uncaptured.py:Many", interpreter: "{python}", device: cpu,
          environment: {{SCALE: "2"}}}}
"""


@functools.cache
def doctor(*arguments: str, socket: str = "/nowhere/control.sock") -> subprocess.CompletedProcess[str]:
    # The package is found without it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([BULKHEAD.resolve(), "--socket", socket, "doctor", *arguments], capture_output=True, text=True,
                          timeout=240, cwd=HERE, env=environment)  # fmt: skip


class Doctor(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.fleet = f"{folder.name}/fleet.yaml"
        python, forking = forking_interpreter.start(Path(folder.name))
        cls.addClassCleanup(forking.kill)
        Path(cls.fleet).write_text(FLEET.format(here=HERE, worker=WORKER, python=python))
        cls.daemon = Daemon(Path(cls.fleet).read_text())
        cls.addClassCleanup(cls.daemon.stop)

    def test_a_function_with_an_interpreter_that_is_named(self) -> None:
        ended = doctor("steps.py:branches", "--inputs", "steps.py:inputs", "--python", sys.executable, "--json")
        self.assertEqual(ended.returncode, 1, ended.stderr)
        self.assertEqual({one["code"] for one in json.loads(ended.stdout)["findings"]}, {"host_read"})

    def test_a_model_of_the_fleet_is_loaded_by_its_interpreter_with_its_options(self) -> None:
        ended = doctor("voice", "--fleet", self.fleet, "--json")
        self.assertEqual(ended.returncode, 1, ended.stderr)
        (found,) = json.loads(ended.stdout)["findings"]
        self.assertEqual(
            (found["code"], found["function"], Path(found["file"])), ("host_read", "Voice.compute", HERE / "voice.py")
        )

    def test_the_module_asks_the_program_for_a_model_of_the_fleet(self) -> None:
        ended = subprocess.run([sys.executable, "-m", "bulkhead.doctor", "uncaptured-1.5", "--fleet", self.fleet, "--json"],
                               capture_output=True, text=True, timeout=240,
                               env={**os.environ, "PATH": f"{BULKHEAD.parent}:{os.environ['PATH']}"})  # fmt: skip
        self.assertEqual(
            (ended.returncode, ended.stdout), (1, doctor("uncaptured-1.5", "--fleet", self.fleet, "--json").stdout), ended.stderr
        )

    def test_the_fleet_of_a_model_is_asked_of_the_daemon(self) -> None:
        served, named = doctor("voice", "--json", socket=self.daemon.socket), doctor("voice", "--fleet", self.fleet, "--json")
        self.assertEqual((served.returncode, served.stderr), (1, ""))
        self.assertEqual(served.stdout, named.stdout)

    def why(self, model: str, *forms: tuple[str, ...]) -> list[str]:
        """Of a model that is loaded, and runs eagerly."""
        with bulkhead.connect(self.daemon.socket) as client:
            client.load(model)
            command = [BULKHEAD.resolve(), "--socket", self.daemon.socket, "why", model]
            ended = [subprocess.run([*command, *form], capture_output=True, text=True, timeout=240, cwd=HERE) for form in forms]
            client.unload(model)
        self.assertEqual([(one.returncode, one.stderr) for one in ended], [(0, "")] * len(forms))
        return [one.stdout for one in ended]

    def test_why_of_a_model_that_runs_eagerly_quotes_eight_findings_of_the_doctor(self) -> None:
        """Its engine takes a variable of the fleet."""
        why, document = self.why("many", (), ("--json",))
        quoted = json.loads(document)["doctor"]
        found = json.loads(doctor("many", "--fleet", self.fleet, "--json").stdout)["findings"]
        self.assertEqual((len(found), quoted["more"], quoted.get("error")), (10, 2, None))
        self.assertEqual(quoted["findings"], [{name: one[name] for name in quoted["findings"][0]} for one in found[:8]])
        first, refused = found[0], found[3]  # the reads before it are as many as warm-ups
        self.assertEqual((first["code"], first["severity"]), ("host_read", "prevents_capture"))
        self.assertIn("graphs: eager", why)
        self.assertRegex(why, rf"not captured \(host_read\): compute \[\[1,4\]\]: {refused['file']}:{refused['line']} in \S*compute: "
                              r"`x = x \* x\[0, 3\]\.item\(\)`")  # fmt: skip
        self.assertIn("    keep the value a tensor on the device, torch.where(condition, a, b) for a branch\n", why)
        self.assertIn(f"  `bulkhead doctor many`:\n    {first['file']}:{first['line']} host_read (prevents capture): {first['reason']}\n"
                      f"      remedy: {first['remedy']}\n", why)  # fmt: skip

    def test_why_of_a_model_whose_capture_has_ended_its_process_quotes_what_the_doctor_finds(self) -> None:
        (document,) = self.why("crashes", ("--json",))
        why = json.loads(document)
        self.assertEqual((why["graphs"]["mode"], why["graphs"]["degraded"]), ("off", "eager: capture crashed with SIGSEGV"))
        self.assertEqual(([one["code"] for one in why["doctor"]["findings"]], why["doctor"]["more"]), (["host_read"], 0))

    def test_why_of_a_model_whose_captures_did_not_fail_looks_at_no_code(self) -> None:
        (document,) = self.why("voice", ("--json",))
        self.assertNotIn("doctor", json.loads(document))

    def test_what_cannot_be_looked_at_is_told_with_a_remedy(self) -> None:
        for arguments, status, said in (
            (("plain", "--fleet", self.fleet), 2, "its load gives nothing to context.graph"),
            (("nobody", "--fleet", self.fleet), 1, "model_unknown"),
            (("voice",), 3, "name the fleet file with --fleet"),
            (("steps.py:clean", "--python", "/nowhere/python"), 1, "starting the doctor with /nowhere/python"),
        ):
            with self.subTest(arguments):
                ended = doctor(*arguments)
                self.assertEqual(ended.returncode, status, ended.stdout + ended.stderr)
                self.assertIn(said, ended.stdout + ended.stderr)
                self.assertNotIn("Traceback", ended.stdout + ended.stderr)


if __name__ == "__main__":
    unittest.main()
