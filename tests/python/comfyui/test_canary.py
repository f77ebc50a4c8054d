"""The pack in a real ComfyUI: `COMFYUI_DIR` names its folder, `COMFYUI_PYTHON` the Python that runs
it (else this one).

`COMFYUI_CANARY_RECORD` names a file that the outcome of each test is appended to.
"""

from __future__ import annotations

import ast
import io
import json
import math
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import wave
from pathlib import Path
from typing import Any

import bulkhead
from bulkhead.__main__ import main as bulkhead_main
from comfyui_process import ComfyUI
from daemon import Daemon, row, until
from stand_in_manager import MEMBERS

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[2]
WORKFLOWS = SOURCE / "clients" / "comfyui" / "example_workflows"
CYCLES = 100

# What else is read under the same names: of the list's own entries, of guests with is_dynamic(),
# and of torch modules.
OF_ENTRIES = {"device", "real_model", "currently_used", "model_finalizer", "model_offloaded_memory", "model_use_more_vram", "__class__"}
OF_DYNAMIC = {"dynamic_pins", "loaded_ram_size", "partially_unload_ram", "unregister_inactive_pins"}
OF_MODULES = {"named_modules"}

FLEET = """
version: 1
defaults: {{device: cpu, threads: 1}}
models:
  voice: {{runtime: python, interpreter: {python}, engine: "bulkhead.engines.small_voice:SmallVoice", deadlines: {{request: 10m, drain: 2s}}}}
  vision: {{runtime: python, interpreter: {python}, engine: "bulkhead.engines.qwen3_vl:Qwen3VL", options: {{model: {vision}}}}}
  echo: {{runtime: python, interpreter: {python}, engine: "{here}/engines.py:Echo", deadlines: {{drain: 1s, kill: 1s}}, channel: {{max: 4GiB}}}}
  speaker: {{runtime: python, interpreter: {python}, engine: "{here}/engines.py:Speaker", options: {{language_model: words}}, environment: {held}}}
  words: {{runtime: python, interpreter: {python}, engine: "{here}/engines.py:Words", environment: {held}}}
"""

# Prints which of two models a real model_management unloads, told to keep the first.
KEPT = """
import comfy.options
comfy.options.enable_args_parsing()
import torch
from comfy import model_management
from comfyui.patcher import Patcher
unloaded, cpu = [], torch.device("cpu")
both = [Patcher(name, cpu, lambda: 1, lambda: 1, lambda name=name: unloaded.append(name)) for name in ("first", "second")]
model_management.load_models_gpu(both)
kept = [one for one in model_management.current_loaded_models if one.model is both[0]]
model_management.free_memory(1e30, cpu, keep_loaded=kept)
print(*unloaded)
"""


def recording(channels: int = 1, rate: int = 16000, seconds: float = 1.0) -> bytes:
    """A WAV file with a tone of 220 Hz."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        for at in range(int(rate * seconds)):
            file.writeframes(struct.pack("<h", int(8000 * math.sin(2 * math.pi * 220 * at / rate))) * channels)
    return out.getvalue()


@unittest.skipUnless(os.environ.get("COMFYUI_DIR"), "COMFYUI_DIR names no ComfyUI: see docs/comfyui.md")
class Canary(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        sys.path.append(str(HERE.parent / "engines"))
        sys.path.append(str(HERE.parent / "export"))
        import small_models

        cls.folder = Path(os.environ["COMFYUI_DIR"])
        cls.python = os.environ.get("COMFYUI_PYTHON", sys.executable)
        temporary = tempfile.TemporaryDirectory(prefix="bh-comfyui-")
        cls.addClassCleanup(temporary.cleanup)
        cls.base = Path(temporary.name)
        for name in ("custom_nodes", "input", "output"):
            (cls.base / name).mkdir()
        (cls.base / "main.py").symlink_to(cls.folder / "main.py")
        assert bulkhead_main(["comfyui", "install", str(cls.base)]) == 0
        vision = small_models.qwen3_vl(cls.base / "vision")
        cls.fleet = FLEET.format(python=sys.executable, vision=vision, here=HERE, held=json.dumps({"HELD_IN": str(cls.base), "HELD_BYTES": "0"}))
        cls.daemon = Daemon(cls.fleet)
        cls.addClassCleanup(lambda: cls.daemon.stop())
        cls.start()
        cls.addClassCleanup(lambda: cls.comfyui.stop())
        cls.note(f"ComfyUI {cls.comfyui.version}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}")

    @classmethod
    def start(cls) -> None:
        cls.comfyui = ComfyUI(cls.folder, cls.python, cls.base, cls.daemon.socket)

    @classmethod
    def note(cls, text: str) -> None:
        text = text.replace(f"{HERE}/", "").replace(cls.daemon.folder.name, "…").replace(str(cls.base), "…")
        print(f"  {text}", flush=True)
        if record := os.environ.get("COMFYUI_CANARY_RECORD"):
            with open(record, "a") as file:
                file.write(f"- {text}\n")

    def setUp(self) -> None:
        self.client = bulkhead.connect(self.daemon.socket, name="canary")
        self.addCleanup(self.client.close)

    def tearDown(self) -> None:
        self.assertIsNone(self.comfyui.process.poll(), self.comfyui.log.read_text()[-4000:])

    # --- what tests are made of

    def workflow(self, name: str, **changes: Any) -> dict[str, Any]:
        """A file of the pack's; ``changes`` are `2_text=…`: an input of a node, with `model.` in
        front where that is so."""
        prompt = prompt_of(json.loads((WORKFLOWS / f"{name}.json").read_text()))
        for key, value in changes.items():
            node, _, field = key.partition("_")
            inputs = prompt[node[1:]]["inputs"]
            inputs[f"model.{field}" if f"model.{field}" in inputs else field] = value
        return prompt

    def speech(self, text: str) -> dict[str, Any]:
        return self.workflow("speech", n1_text=text)

    def any_model(self, model: str, **fields: Any) -> dict[str, Any]:
        run = {"class_type": "BulkheadRun", "inputs": {"model": model, **{f"model.{name}": value for name, value in fields.items()}}}
        return {"1": run, "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}}

    def row(self, model: str) -> dict[str, Any]:
        return row(self.client, model)

    def until(self, model: str, *states: str) -> None:
        until(self.client, model, lambda now: now["state"] in states)

    def free(self, model: str, **flags: bool) -> None:
        """Pressed until it is done: ComfyUI sleeps through what is pressed while it cleans up
        after a prompt."""
        done = threading.Event()

        def press() -> None:
            while not done.is_set():
                self.comfyui.post("/free", flags or {"unload_models": True})
                done.wait(2)

        pressing = threading.Thread(target=press)
        pressing.start()
        try:
            self.until(model, "stopped")
        finally:
            done.set()
            pressing.join()
        self.assertIsNone(self.comfyui.process.poll())

    def succeeds(self, prompt: dict[str, Any]) -> Any:
        done = self.comfyui.run(prompt)
        self.assertEqual((done.ended, done.error), ("execution_success", ""))
        return done

    def fails(self, prompt: dict[str, Any], *words: str) -> Any:
        """The node says so, and the next prompt works."""
        done = self.comfyui.run(prompt)
        self.assertIn(done.ended, ("execution_error", "refused"))
        for word in words:
            self.assertIn(word, done.error)
        self.note(f"the node says: {done.error.splitlines()[0][:300]}")
        return done

    def sound(self, done: Any, node: str = "2") -> Path:
        (saved,) = done.outputs[node]["audio"]
        return self.base / "output" / saved["subfolder"] / saved["filename"]

    # --- tests

    def test_01_all_that_model_management_reads_is_known(self) -> None:
        source = (self.folder / "comfy" / "model_management.py").read_text()
        read = members_read(source)
        self.assertEqual(MEMBERS - read, set(), "these are not found: does it call patchers otherwise than members_read knows?")
        self.assertEqual(read - MEMBERS, set(), "the pack's patcher does not have these: see clients/comfyui/patcher.py")
        self.note(f"model_management.py reads {len(read)} members of a guest, and all are known")
        done = subprocess.run([self.python, "-c", KEPT, "--cpu"], cwd=self.folder, capture_output=True, text=True, timeout=300)
        self.assertEqual((done.returncode, done.stdout.split()), (0, ["second"]), f"manager.make_room keeps models so: {done.stderr[-4000:]}")
        self.note("its free_memory keeps what keep_loaded has of current_loaded_models, and unloads the other model")

    def test_02_text_to_speech_and_a_file(self) -> None:
        listed = self.comfyui.get("/workflow_templates")["bulkhead"]
        self.assertEqual(sorted(listed), sorted(path.stem for path in WORKFLOWS.iterdir()))
        for name in listed:
            self.assertEqual(self.comfyui.get(f"/api/workflow_templates/bulkhead/{name}.json"), json.loads((WORKFLOWS / f"{name}.json").read_text()))
        self.note(f"Templates lists {', '.join(sorted(listed))}")
        done = self.succeeds(self.workflow("speech"))
        path = self.sound(done)
        self.assertGreater(path.stat().st_size, 1000)
        self.note(f"speech.json: {path.name}, {path.stat().st_size} bytes, {done.previews} previews")
        prompt = self.speech("A longer text shows how the sound comes bit by bit. " * 4)
        prompt["2"] = {"class_type": "SaveAudio", "inputs": {"audio": ["1", 0], "filename_prefix": "audio/long"}}
        done = self.succeeds(prompt)
        self.assertGreater(done.previews, 0)
        self.note(f"a longer text: {done.previews} previews while it was spoken")

    def test_03_a_recording_is_uploaded_and_the_receipt_is_a_picture(self) -> None:
        self.comfyui.upload("recording.wav", recording(channels=2, rate=22050))
        done = self.succeeds(self.workflow("speech_like_a_recording"))
        self.assertIn("verified", done.outputs["4"]["text"][0])
        self.assertEqual(self.row("voice")["state"], "stopped")
        picture = self.base / "output" / done.outputs["5"]["images"][0]["filename"]
        self.assertGreater(picture.stat().st_size, 1000)
        self.note(f"speech_like_a_recording.json: {done.outputs['4']['text'][0]}")

    def test_04_image_to_text(self) -> None:
        self.comfyui.upload("example.png", (self.folder / "input" / "example.png").read_bytes())
        done = self.succeeds(self.workflow("image_to_text"))
        text = done.outputs["3"]["text"][0]
        self.assertGreater(len(text), 0)
        self.note(f"image_to_text.json: {len(text)} characters of a Qwen3-VL with random weights")
        prompt = self.workflow("image_to_text")
        del prompt["2"]["inputs"]["images"], prompt["1"]
        self.succeeds(prompt)
        self.note("the same without an image")
        prompt["2"]["inputs"] |= {"keep_model_loaded": False, "model.seed": 5}
        self.succeeds(prompt)
        self.assertEqual(self.row("vision")["state"], "stopped")
        self.note("the same with keep_model_loaded off: its process has ended")

    def test_05_free_ends_the_process_and_the_next_prompt_works(self) -> None:
        self.succeeds(self.speech("one"))
        self.assertIn(self.row("voice")["state"], ("ready", "busy"))
        for flags in ({"unload_models": True}, {"unload_models": True, "free_memory": True}):
            self.free("voice", **flags)
            self.succeeds(self.speech(f"again, after {flags}"))
        self.note("/free with unload_models, and with free_memory: the process ended, the next prompt worked")

    def test_06_an_interrupt_while_it_speaks(self) -> None:
        prompt = self.comfyui.queue(self.speech("Nobody hears the end of this. " * 100))
        prompt.progressed()
        asked = time.monotonic()
        self.comfyui.post("/interrupt", {})
        prompt.finish()
        took = time.monotonic() - asked
        self.assertEqual(prompt.ended, "execution_interrupted")
        self.until("voice", "ready")
        (receipt,) = self.client.unload("voice")
        self.assertEqual((receipt["ended"], receipt["held_by"]), ("drained", []))
        self.succeeds(self.speech("and on"))
        self.note(f"an interrupt in mid-sentence: the prompt ended after {took * 1000:.0f} ms; ComfyUI held no memory of the worker; the next one worked")

    def test_07_an_interrupt_while_it_loads(self) -> None:
        self.client.unload("voice")
        prompt = self.comfyui.queue(self.speech("to be interrupted"))
        self.until("voice", "spawning", "loading", "ready")
        self.comfyui.post("/interrupt", {})
        prompt.finish()
        self.assertEqual(prompt.ended, "execution_interrupted")
        self.free("voice")
        self.succeeds(self.speech("and on again"))
        self.note("an interrupt while the model loads: the prompt ended, /free reached the load that went on, the next prompt worked")

    def test_08_a_worker_that_is_killed_in_mid_sentence(self) -> None:
        prompt = self.comfyui.queue(self.speech("It dies in the middle of this. " * 100))
        prompt.progressed()
        os.kill(self.row("voice")["pid"], signal.SIGKILL)
        prompt.finish()
        self.assertEqual(prompt.ended, "execution_error")
        self.assertIn("worker_lost", prompt.error)
        self.note(f"a worker killed in mid-sentence: {prompt.error.splitlines()[0]}")
        self.succeeds(self.speech("and it is back"))
        self.free("voice")
        self.note("the next prompt had a new process, and /free reached it")

    def test_09_cycles(self) -> None:
        self.succeeds(self.any_model("echo/repeat", x=json.dumps([[[[0.0]]]])))
        before = self.rss()
        took = []
        for cycle in range(CYCLES):
            self.succeeds(self.any_model("echo/repeat", x=json.dumps([[[[float(cycle + 1)]]]])))
            asked = time.monotonic()
            self.free("echo")
            took.append(time.monotonic() - asked)
        self.note(f"{CYCLES} cycles of a prompt and /free: from /free to stopped {statistics.median(took):.2f} s (median), {max(took):.2f} s (most); "
                  f"ComfyUI's memory {before >> 20} MiB before, {self.rss() >> 20} MiB after")  # fmt: skip
        self.assertLess(self.rss() - before, 200 << 20)

    def rss(self) -> int:
        status = Path(f"/proc/{self.comfyui.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) << 10  # type: ignore[index]

    def test_10_out_of_memory_is_comfyuis_own(self) -> None:
        self.succeeds(self.speech("listed"))
        done = self.fails(self.any_model("echo/repeat", x="[[[[1.0]]]]", fail="memory"), "ran out of memory")
        self.assertIn("OutOfMemory", done.error_type)
        self.until("voice", "stopped")
        self.until("echo", "stopped")
        self.note("after it, ComfyUI had unloaded all models")

    def test_11_bad_input(self) -> None:
        from PIL import Image

        def image(name: str, size: tuple[int, int]) -> None:
            out = io.BytesIO()
            Image.new("RGB", size, (40, 90, 200)).save(out, "PNG")
            self.comfyui.upload(name, out.getvalue())

        self.fails(self.workflow("speech", n1_model="nobody"), "no model 'nobody'")
        self.fails(self.speech("   "), "the text is empty")
        self.fails(self.speech("It goes on and on. " * 1500), "of 28499 bytes")  # half an hour
        self.fails(self.speech("It goes on and on. " * 6000), "at most")
        self.comfyui.upload("six.wav", recording(channels=6))
        self.fails(self.workflow("speech_like_a_recording", n1_audio="six.wav"), "reference")
        self.comfyui.upload("slow.wav", recording(rate=4000))
        self.fails(self.workflow("speech_like_a_recording", n1_audio="slow.wav"), "reference_rate")
        self.fails(self.any_model("echo/repeat", x="[[[[1.0]]]]", fail="input"), "give another one")
        self.fails(self.any_model("echo/repeat", x="[[[[1.0]]]]", fail="an engine's fault"), "an engine's fault")
        self.fails(self.any_model("echo/repeat"), "also needs x")
        for name, size in (("pixel.png", (1, 1)), ("8k.png", (7680, 4320))):
            image(name, size)
            done = self.succeeds(self.workflow("image_to_text", n1_image=name, n2_max_new_tokens=4))
            self.assertGreater(len(done.outputs["3"]["text"][0]), 0)
            self.note(f"{name} to the vision model: it answered")
            loaded = {"1": {"class_type": "LoadImage", "inputs": {"image": name}}}
            self.succeeds({**loaded, "2": {"class_type": "BulkheadRun", "inputs": {"model": "echo/repeat", "model.x": ["1", 0]}},
                           "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 1], "filename_prefix": "echo"}}})  # fmt: skip
            self.note(f"{name} to another model and back")
        batch = {"1": {"class_type": "EmptyImage", "inputs": {"width": 256, "height": 256, "batch_size": 64, "color": 255}},
                 "2": {"class_type": "BulkheadRun", "inputs": {"model": "echo/repeat", "model.x": ["1", 0]}},
                 "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 1], "filename_prefix": "batch"}}}  # fmt: skip
        done = self.succeeds(batch)
        self.assertEqual(len(done.outputs["3"]["images"]), 64)
        self.note("a batch of 64 images to a model and back")
        self.succeeds(self.speech("and it lives"))

    def test_12_a_model_that_is_renamed_while_a_workflow_runs(self) -> None:
        prompt = self.comfyui.queue(self.any_model("echo/wait", prompt="for ever"))
        prompt.progressed()
        self.until("echo", "busy")
        fleet = self.daemon.fleet.read_text()
        self.daemon.fleet.write_text(fleet.replace("  echo:", "  echoes:"))
        self.client.reload()
        prompt.finish()
        self.assertEqual(prompt.ended, "execution_error")
        self.assertIn("worker_draining", prompt.error)
        self.note(f"a model that was renamed while it ran: {prompt.error.splitlines()[0]}")
        self.fails(self.any_model("echo/repeat", x="[[[[1.0]]]]"), "no model 'echo'", "echoes")
        self.succeeds(self.any_model("echoes/repeat", x="[[[[1.0]]]]"))
        self.daemon.fleet.write_text(fleet)
        self.client.reload()
        self.succeeds(self.any_model("echo/repeat", x="[[[[2.0]]]]"))

    def test_13_another_client_uses_the_same_model(self) -> None:
        prompts = [self.comfyui.queue(self.speech(f"While {which} is spoken, others ask. " * 3)) for which in ("this", "that")]
        spoken = self.client.infer("voice", method="speak", text="me too")["audio"].shape
        for prompt in prompts:
            prompt.finish()
            self.assertEqual(prompt.ended, "execution_success")
        self.assertGreater(spoken[1], 0)
        self.free("voice")
        self.assertGreater(self.client.infer("voice", method="speak", text="me again")["audio"].shape[1], 0)
        self.note("a server used the model beside two workflows, and again after ComfyUI's /free")

    def test_14_no_daemon(self) -> None:
        self.succeeds(self.speech("there is one"))
        self.client.stop()
        self.fails(self.speech("there is none"), "not_running", "bulkhead up")
        self.comfyui.post("/free", {"unload_models": True})
        until = time.monotonic() + 60
        while "bulkhead up" not in (menu := self.comfyui.get("/object_info/BulkheadLoad")["BulkheadLoad"]["input"]["required"]["model"][1]["options"][0]):
            self.assertLess(time.monotonic(), until, menu)
        type(self).daemon._bulkhead("up", str(self.daemon.fleet))
        self.succeeds(self.speech("there is one again"))
        self.note("the daemon was stopped and started: ComfyUI lived, and the next prompt worked")

    def test_15_a_comfyui_that_is_killed(self) -> None:
        prompt = self.comfyui.queue(self.any_model("echo/wait", prompt="for ever"))
        prompt.progressed()
        self.until("echo", "busy")
        self.comfyui.stop()
        prompt.close()
        self.until("echo", "ready")
        self.note("ComfyUI was killed in mid-request: the daemon ended the request, and the model was ready")
        (receipt,) = self.client.unload("echo")
        self.assertEqual((receipt["verified"], receipt["held_by"]), (True, []))
        self.client.load("echo")
        self.start()
        self.free("echo")
        self.succeeds(self.any_model("echo/repeat", x="[[[[3.0]]]]"))
        self.note(f"it was started again: /free reached the model that it had used before, whose next prompt worked; unloaded between: {receipt['ended']}, "
                  "verified, held by nobody")  # fmt: skip

    def test_16_a_language_model_in_a_process_of_its_own(self) -> None:
        self.succeeds(self.any_model("speaker/forward", x="[1.0]"))
        kept = json.loads((self.base / "user" / "bulkhead.json").read_text())["models"]
        self.assertGreater(min(kept[model]["bytes"] for model in ("speaker", "words")), 0)
        done = self.succeeds({"1": {"class_type": "BulkheadUnload", "inputs": {"model": "speaker"}}})
        lines = done.outputs["1"]["text"][0].splitlines()
        self.assertEqual([line.split()[0] for line in lines], ["speaker", "words"])
        self.succeeds(self.any_model("speaker/forward", x="[2.0]"))
        self.free("speaker")
        self.until("words", "stopped")
        self.succeeds(self.any_model("speaker/forward", x="[3.0]"))
        self.note(f"a model and its language model: Unload Model and /free ended both, the next prompt worked; {'; '.join(lines)}")


def prompt_of(saved: dict[str, Any]) -> dict[str, Any]:
    """What ComfyUI's page makes of a saved workflow when it is run."""
    sources = {number: [str(source), output] for number, source, output, *_ in saved["links"]}
    prompt = {}
    for node in saved["nodes"]:
        inputs = dict(zip((one["name"] for one in node["inputs"] if "widget" in one), node.get("widgets_values", [])))
        inputs |= {one["name"]: sources[one["link"]] for one in node["inputs"] if one["link"]}
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def members_read(source: str) -> set[str]:
    """What model_management.py reads of patchers, also by getattr and hasattr: of `….model` and of
    the names that it gives them."""
    patchers = {"model", "x", "m", "add_model"}
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=of, attr=name) | ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[of, ast.Constant(value=name), *_]):
                if isinstance(of, ast.Attribute) and of.attr == "model" or isinstance(of, ast.Name) and of.id in patchers:
                    found.add(name)
    return found - OF_ENTRIES - OF_DYNAMIC - OF_MODULES


if __name__ == "__main__":
    unittest.main()
