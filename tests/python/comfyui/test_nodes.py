"""Nodes: what they are made from, and that bad input gives a clear message in the node, never a dead ComfyUI."""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import queue
import sys
import unittest
from typing import Any
from unittest import mock

import bulkhead
import stand_in_interface
import torch
from bulkhead import layout
from daemon import until
from fake_daemon import Connection, FakeDaemon
from fake_worker import FakeWorker
from pack import WithPack, until_queued
from stand_in_manager import Interrupted

MORE = 1  # the flag of a part
SPEAKER = {
    "speak": {
        "inputs": [{"name": "reference", "dtype": "float32", "shape": ["channels=1..2", "samples=1.."], "optional": True}],
        "parameters": [
            {"name": "text", "type": "string", "multiline": True},
            {"name": "temperature", "type": "number", "default": 1.0, "minimum": 0, "maximum": 2, "step": 0.05},
            {"name": "reference_rate", "type": "integer", "default": 24000},
            {"name": "voice", "type": "string", "default": "low", "choices": ["low", "high"]},
        ],
        "outputs": [{"name": "audio", "dtype": "float32", "shape": ["channels=1..2", "samples=0.."]}],
        "streams": True,
    }
}
ROW = {"model": "voice", "replica": 0, "state": "ready", "pid": 1, "device": "cpu", "host_bytes": 1 << 20, "gpu_bytes": None,
       "requests": 0, "errors": 0, "restarts": 0}  # fmt: skip
SEEING = {"answer": {"inputs": [], "parameters": [{"name": "prompt", "type": "string"}], "outputs": [], "streams": True}}


class OfFakes(WithPack):
    """A daemon and a worker in the test's hands."""

    def fake(self, serve: Any, methods: dict[str, Any] = SPEAKER, **handlers: Any) -> FakeDaemon:
        """``serve(worker)`` runs once the channel is open."""

        def introduce(connection: Connection, request: dict[str, Any]) -> None:
            worker = FakeWorker()
            daemon.introduce(worker, connection, request)
            worker.open(methods=methods, features=8)
            serve(worker)

        answers = {"fleet_status": {"models": [ROW]}, "gpu_status": {"nvml": False, "gpus": []}, "daemon_info": {"version": "9.9.9", "fleet": "/no"}}
        simple = {name: (lambda result: lambda connection, request: connection.answer(request, result))(result) for name, result in answers.items()}
        daemon = FakeDaemon(**{**simple, "channel_open": introduce, **handlers})
        self.addCleanup(daemon.close)
        self.serve(daemon.path)
        return daemon

    def speak(self, **inputs: Any) -> Any:
        return asyncio.run(self.pack("nodes_run").GenerateSpeech.execute(**inputs))


def send_sound(worker: FakeWorker, number: int, samples: list[float], *, channels: int = 1, rate: int | None = 8000, more: bool = False) -> None:
    """A part, or the whole, of an answer: `audio` [channels, samples], and its rate."""
    values = json.dumps({} if rate is None else {"sample_rate": rate}).encode()
    floats = samples * channels
    import struct

    struct.pack_into(f"<{len(floats)}f", worker.slabs[2], 0, *floats)
    lease = layout.LEASE.pack(slab_id=2, offset_bytes=0, size_bytes=4 * len(floats), generation=1)
    tensor = layout.TENSOR.pack(name="audio", dtype=9, rank=2, lease=lease, dims=[channels, len(samples)], strides=[len(samples), 1])
    worker.send("result", layout.RESULT.pack(tensor_count=1, queued_us=1, run_us=2, json_bytes=len(values)) + tensor + values, number,
                MORE if more else 0)  # fmt: skip


class Vision(OfFakes):
    def test_a_model_is_kept_or_unloaded_after_its_answer(self) -> None:
        def serve(worker: FakeWorker) -> None:
            head, _ = worker.expect("infer")
            text = b'{"text": "a cat"}'
            worker.send("result", layout.RESULT.pack(tensor_count=0, queued_us=1, run_us=2, json_bytes=len(text)) + text, head["request_id"])

        def unload(connection: Connection, request: dict[str, Any]) -> None:
            unloaded.append(request["params"])
            connection.answer(request, {"receipts": []})

        unloaded: list[Any] = []
        self.fake(serve, methods=SEEING, model_unload=unload)
        node = self.pack("nodes_run").VisionLanguage
        self.assertIn("keep_model_loaded", [one.id for one in node.define_schema().inputs])
        asked = {"model": {"model": "voice", "prompt": "what is it?"}}
        for given, told in (({}, []), ({"keep_model_loaded": True}, []), ({"keep_model_loaded": False}, [{"models": ["voice"]}])):
            self.assertEqual(asyncio.run(node.execute(**asked, **given)).args[0], "a cat")
            self.assertEqual(unloaded, told)

    def test_text_is_written_on_the_node_as_it_comes(self) -> None:
        def serve(worker: FakeWorker) -> None:
            number = worker.expect("infer")[0]["request_id"]
            for text, flags in (("a", MORE), (" c", MORE), ("at", MORE), ("a cat", 0)):
                values = json.dumps({"text": text}).encode()
                worker.send("result", layout.RESULT.pack(tensor_count=0, queued_us=1, run_us=2, json_bytes=len(values)) + values, number, flags)

        self.fake(serve, methods=SEEING)
        with mock.patch.object(self.pack("nodes_run"), "PREVIEW_SECONDS", 0):
            self.answer()
        self.assertEqual(stand_in_interface.written, [(text, "7", "page") for text in ("a", "a c", "a cat", "a cat")])
        self.assertEqual(stand_in_interface.progress, [(1, 2, False), (2, 4, False), (3, 6, False)])

    def answer(self, **given: Any) -> None:
        asyncio.run(self.pack("nodes_run").VisionLanguage.execute(model={"model": "voice", "prompt": "what is it?"}, **given))

    def test_a_model_that_is_not_to_be_kept_is_unloaded_after_a_request_that_failed_or_was_interrupted(self) -> None:
        def unload(connection: Connection, request: dict[str, Any]) -> None:
            unloaded.append(request["params"])
            connection.answer(request, {"receipts": []})

        def fail(worker: FakeWorker) -> None:
            worker.error(worker.expect("infer")[0]["request_id"], 1)

        def interrupt(worker: FakeWorker) -> None:
            worker.expect("infer")
            self.manager.interrupted = True

        for serve, raised in ((fail, None), (interrupt, Interrupted)):
            for given, told in (({}, []), ({"keep_model_loaded": False}, [{"models": ["voice"]}])):
                unloaded: list[Any] = []
                self.fake(serve, methods=SEEING, model_unload=unload)
                self.new_comfyui()
                with self.assertRaises(raised or self.pack("daemon").NodeError):
                    self.answer(**given)
                self.assertEqual(unloaded, told)

    def test_what_failed_first_is_told_where_the_unload_fails_too(self) -> None:
        def fail(worker: FakeWorker) -> None:
            worker.error(worker.expect("infer")[0]["request_id"], 1, "the picture is too strange")

        def refuse(connection: Connection, request: dict[str, Any]) -> None:
            data = {"code": "not_running", "attempt": "unloading", "remedy": ""}
            connection.send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32000, "message": "no", "data": data}})

        self.fake(fail, methods=SEEING, model_unload=refuse)
        with self.assertLogs(level="WARNING") as logged:
            self.refused(lambda: self.answer(keep_model_loaded=False), "the picture is too strange")
        self.assertIn("voice was not unloaded", logged.output[0])


class Progress(OfFakes):
    def test_the_progress_of_a_request_is_the_nodes(self) -> None:
        def serve(worker: FakeWorker) -> None:
            head, _ = worker.expect("infer")
            for done in (1, 3):
                values = json.dumps({"progress": {"done": done, "total": 4, "detail": "reading"}}).encode()
                worker.send("result", layout.RESULT.pack(tensor_count=0, queued_us=1, run_us=2, json_bytes=len(values)) + values, head["request_id"], MORE)
            send_sound(worker, head["request_id"], [0.5])

        self.fake(serve)
        self.speak(model={"model": "voice", "text": "hello"})
        self.assertEqual(stand_in_interface.progress, [(1, 4, False), (3, 4, False)])

    def test_the_progress_of_a_load_is_the_nodes(self) -> None:
        rows = [{"model": "voice", "replica": 0, "state": "stopped", "pid": None, "device": "cpu", "host_bytes": None, "gpu_bytes": None}]
        events: list[Connection] = []
        shown: queue.Queue[tuple[float, float]] = queue.Queue()
        told: list[tuple[float, float]] = []

        def subscribe(connection: Connection, request: dict[str, Any]) -> None:
            self.assertEqual(request["params"], {"models": ["voice"]})
            events.append(connection)
            connection.answer(request, {"subscribed": True})

        def load(connection: Connection, request: dict[str, Any]) -> None:
            for event in ({"event": "state", "to": "loading"}, {"event": "progress", "done": 1, "total": 3}, {"event": "progress", "done": 2, "total": 3}):
                events[0].notify("event", {"model": "voice", **event})
                if event["event"] == "progress":
                    told.append(shown.get(timeout=10))
            rows[0] |= {"state": "ready", "pid": 1, "host_bytes": 1 << 20}
            connection.answer(request, {"models": [{"model": "voice", "ms": 1}]})

        async def show(done: float, total: float, preview: Any = None) -> None:
            shown.put((done, total))

        self.fake(lambda worker: send_sound(worker, worker.expect("infer")[0]["request_id"], [0.5]), model_load=load, events_subscribe=subscribe,
                  fleet_status=lambda connection, request: connection.answer(request, {"models": rows}))  # fmt: skip
        with mock.patch.object(self.pack("running"), "show", show):
            self.speak(model={"model": "voice", "text": "hello"})
        self.assertEqual(told, [(1, 3), (2, 3)])


class Forms(OfFakes):
    def menus(self, engine: str) -> list[Any]:
        """Of Generate Speech, Vision Language and Run Any Model, for a model that never ran."""
        fleet = os.path.join(self.user.name, "fleet.yaml")
        with open(fleet, "w") as file:
            file.write(f"version: 1\nmodels:\n  voice: {{runtime: python, engine: '{engine}'}}\n")
        self.fake(lambda worker: None, daemon_info=lambda connection, request: connection.answer(request, {"version": "9.9.9", "fleet": fleet}))
        nodes = self.pack("nodes_run")
        return [getattr(nodes, node).define_schema().inputs[0].told["options"] for node in ("GenerateSpeech", "VisionLanguage", "RunAnyModel")]

    def test_fields_of_bulkheads_own_engines_are_known_before_the_first_run(self) -> None:
        speaking, answering, any_method = self.menus("bulkhead.engines.qwen3_vl:Qwen3VL")
        self.assertIn("no model has a method 'speak'", speaking[0].key)
        fields = {field.id: field for field in answering[0].inputs}
        self.assertEqual(list(fields), ["prompt", "system_prompt", "video_fps", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
                                        "max_new_tokens", "seed"])  # fmt: skip
        self.assertEqual([fields["top_k"].told[name] for name in ("default", "min", "max")], [50, 0, 200])
        self.assertEqual([field.id for field in any_method[0].inputs], ["images", "video", *fields])

    def test_an_engine_of_ones_own_has_its_fields_once_it_has_run(self) -> None:
        for options in self.menus("/opt/engines/mine.py:Mine"):
            self.assertEqual([option.key for option in options], ["voice"])
        self.assertEqual([field.id for field in options[0].inputs], [])


class Speech(OfFakes):
    def test_sound_comes_in_comfyuis_layout_and_its_parts_are_previewed(self) -> None:
        def serve(worker: FakeWorker) -> None:
            head, body = worker.expect("infer")
            told.append(json.loads(body[body.index(b"{") :]))
            send_sound(worker, head["request_id"], [0.5, -0.5], more=True)
            send_sound(worker, head["request_id"], [0.5, -0.5, 0.25])

        told: list[dict[str, Any]] = []
        self.fake(serve)
        # As ComfyUI gives a form that it knows, and fields of a workflow that it does not know.
        output = self.speak(**{"model": {"model": "voice", "text": "hello"}, "model.temperature": 0.5})
        sound = output.args[0]
        self.assertEqual((sound["waveform"].tolist(), sound["sample_rate"]), ([[[0.5, -0.5, 0.25]]], 8000))
        self.assertEqual(told, [{"text": "hello", "temperature": 0.5}])
        self.assertIn((1, 2, True), stand_in_interface.progress)

    def test_a_reference_brings_its_rate(self) -> None:
        def serve(worker: FakeWorker) -> None:
            head, body = worker.expect("infer")
            (tensor,) = worker.tensors(body)
            told.append((tensor["name"], list(tensor["dims"][:2]), json.loads(body[body.index(b"{") :])))
            send_sound(worker, head["request_id"], [0.0])

        told: list[Any] = []
        self.fake(serve)
        self.speak(model={"model": "voice", "text": "hello"}, reference={"waveform": torch.zeros(1, 2, 100), "sample_rate": 22050})
        self.assertEqual(told, [("reference", [2, 100], {"text": "hello", "reference_rate": 22050})])

    def test_bad_input(self) -> None:
        self.fake(lambda worker: None)
        two = {"waveform": torch.zeros(2, 1, 100), "sample_rate": 22050}
        for inputs, words in (
            ({"model": {"model": "voice", "text": " \n"}}, ["the text is empty"]),
            ({"model": {"model": "voice"}}, ["the text is empty"]),
            ({}, ["no model is chosen"]),
            ({"model": {"model": "voice", "text": "hi"}, "reference": two}, ["reference", "batch of 2", "one at a time"]),
            ({"model": {"model": "voice", "text": "hi"}, "model.pitch": 3}, ["voice.speak has no field 'pitch'", "temperature", "Press R"]),
            ({"model": "gone", "model.text": "hi"}, ["no model 'gone'", "it has voice", "bulkhead reload"]),
            ({"model": {"model": "voice", "text": "word " * 40_000}}, ["200", "at most"]),
        ):
            with self.subTest(str(inputs)[:80]):
                self.refused(lambda inputs=inputs: self.speak(**inputs), *words)

    def test_sound_that_comfyui_would_spoil_is_refused(self) -> None:
        for how, words in (
            ({"channels": 6}, ["6 channels", "keeps 2"]),
            ({"rate": None}, ["no sample rate"]),
            ({"samples": []}, ["no sound"]),
        ):
            with self.subTest(str(how)):

                def serve(worker: FakeWorker, how: Any = how) -> None:
                    head, _ = worker.expect("infer")
                    send_sound(worker, head["request_id"], **{"samples": [0.5], **how})

                self.fake(serve)
                self.new_comfyui()
                self.refused(lambda: self.speak(model={"model": "voice", "text": "hi"}), *words)

    def test_a_worker_that_dies_is_told_and_the_next_prompt_has_the_next_one(self) -> None:
        died: list[bool] = []

        def serve(worker: FakeWorker) -> None:
            head, _ = worker.expect("infer")
            if not died:
                died.append(True)
                send_sound(worker, head["request_id"], [0.5], more=True)
                return worker.close()
            send_sound(worker, head["request_id"], [0.25])

        self.fake(serve)
        self.refused(lambda: self.speak(model={"model": "voice", "text": "hi"}), "worker_lost", "bulkhead why")
        self.assertEqual(self.speak(model={"model": "voice", "text": "hi"}).args[0]["waveform"].tolist(), [[[0.25]]])

    def test_an_interrupt_in_mid_sentence_cancels(self) -> None:
        cancelled: queue.Queue[int] = queue.Queue()

        def serve(worker: FakeWorker) -> None:
            head, _ = worker.expect("infer")
            send_sound(worker, head["request_id"], [0.5], more=True)
            self.manager.interrupted = True
            cancelled.put(worker.expect("cancel")[0]["request_id"] - head["request_id"])

        self.fake(serve)
        with self.assertRaises(Interrupted):
            self.speak(model={"model": "voice", "text": "hi"})
        self.assertEqual(cancelled.get(timeout=10), 0, "that very request")

    def test_an_interrupt_while_a_model_loads_is_heard(self) -> None:
        def load(connection: Connection, request: dict[str, Any]) -> None:
            self.manager.interrupted = True  # and no answer

        row = {"model": "voice", "replica": 0, "state": "stopped", "pid": None, "device": "cpu", "host_bytes": None, "gpu_bytes": None}
        self.fake(lambda worker: None, model_load=load,
                  fleet_status=lambda connection, request: connection.answer(request, {"models": [row]}),
                  events_subscribe=lambda connection, request: connection.answer(request, {"subscribed": True}))  # fmt: skip
        with self.assertRaises(Interrupted):
            self.speak(model={"model": "voice", "text": "hi"})


class Daemons(OfFakes):
    def test_no_daemon(self) -> None:
        self.serve_nowhere()
        self.refused(lambda: self.speak(model={"model": "voice", "text": "hi"}), "not_running", "bulkhead up FLEET")
        for node in ("LoadModel", "UnloadModel", "FleetStatus"):
            made = getattr(self.pack("nodes_fleet"), node)
            inputs = {} if node == "FleetStatus" else {"model": "voice"}
            self.refused(lambda made=made, inputs=inputs: asyncio.run(made.execute(**inputs)), "bulkhead up FLEET")
        self.assertIn("bulkhead up FLEET", self.pack("menus").models()[0])

    def serve_nowhere(self) -> None:
        before = os.environ.get("BULKHEAD_SOCKET")
        os.environ["BULKHEAD_SOCKET"] = os.path.join(self.user.name, "nobody.sock")
        self.addCleanup(lambda: os.environ.pop("BULKHEAD_SOCKET") if before is None else os.environ.update(BULKHEAD_SOCKET=before))

    def test_a_daemon_of_another_release(self) -> None:
        def unknown(connection: Connection, request: dict[str, Any]) -> None:
            connection.send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "no", "data": {
                "code": "method_unknown", "attempt": "fleet.status", "remedy": ""}}})  # fmt: skip

        self.fake(lambda worker: None, fleet_status=unknown)
        self.refused(lambda: self.speak(model={"model": "voice", "text": "hi"}), "method_unknown", bulkhead.__version__, "9.9.9", "of one release")

    def test_a_daemon_that_hangs_is_asked_once_for_all_menus(self) -> None:
        asked = self.fake(lambda worker: None, fleet_status=lambda connection, request: None).asked
        self.pack("daemon").LOOK_SECONDS = 0.1
        for _ in range(5):
            self.assertIn("deadline_exceeded", self.pack("menus").models()[0])
        self.assertEqual(len(asked), 1)
        with mock.patch.object(bulkhead.Client, "call") as called:
            self.pack("daemon").ask("fleet.status")
        self.assertEqual(called.call_args.kwargs, {"deadline": 0.1})

    def test_a_daemon_that_answers_model_management_late_fails_no_prompt(self) -> None:
        """Nodes ask by a connection of their own; what model management asks is not answered within its bound."""
        asking: list[Connection] = []

        def status(connection: Connection, request: dict[str, Any]) -> None:
            asking.append(connection)
            if connection is asking[0]:
                connection.answer(request, {"models": [ROW]})

        daemon = self.fake(lambda worker: send_sound(worker, worker.expect("infer")[0]["request_id"], [0.5]), fleet_status=status)
        self.pack("daemon").LOOK_SECONDS = 0.1
        with self.assertLogs(level="WARNING") as logged:
            self.assertEqual(self.speak(model={"model": "voice", "text": "hi"}).args[0]["waveform"].tolist(), [[[0.5]]])
            (listed,) = self.manager.listed
            self.assertEqual((listed.guest._guest().name, listed.guest.loaded_size()), ("voice", ROW["host_bytes"]))
        self.assertIn("voice is listed with the size that was told before: deadline_exceeded", logged.output[0])
        daemon.handlers["fleet.status"] = lambda connection, request: connection.answer(request, {"models": [{**ROW, "host_bytes": 3 << 20}]})
        self.pack("daemon").LOOK_SECONDS = 60
        self.pack("daemon").rows()
        self.assertEqual(listed.guest.loaded_size(), 3 << 20)

    def test_a_daemon_that_tells_its_gpus_late_is_not_waited_for(self) -> None:
        gpu = {"index": 1, "uuid": "GPU-00000000-0000-0000-0000-000000000002"}
        daemon = self.fake(lambda worker: None, gpu_status=lambda connection, request: connection.answer(request, {"gpus": [gpu]}))
        uuid = self.pack("devices").gpu_uuid
        self.assertEqual(uuid("cuda:1"), gpu["uuid"].removeprefix("GPU-"))
        daemon.handlers["gpu.status"] = lambda connection, request: None
        self.pack("daemon").LOOK_SECONDS = 0.1
        with self.assertLogs(level="WARNING"):
            self.assertEqual((uuid("cuda:1"), uuid("cuda:0")), (gpu["uuid"].removeprefix("GPU-"), None))

    def test_other_systems_import_the_pack_and_are_told_what_is_needed(self) -> None:
        for system in ("win32", "darwin"):
            self.new_comfyui()
            with mock.patch.object(sys, "platform", system), without("bulkhead"):
                self.assertEqual(len(asyncio.run(self.nodes())), 6)
                self.refused(lambda: self.speak(model={"model": "voice", "text": "hi"}), "Linux", "WSL2", system)

    def test_without_the_client_or_with_its_namesake(self) -> None:
        with without("bulkhead"):
            self.assertEqual(len(asyncio.run(self.nodes())), 6)
            self.refused(lambda: self.speak(model={"model": "voice", "text": "hi"}), "pip install bulkhead-gpu")
        with mock.patch.dict(sys.modules, bulkhead=mock.Mock(spec=["__file__"], __file__="/x/bulkhead.py")):
            self.refused(lambda: self.speak(model={"model": "voice", "text": "hi"}), "another project", "bulkhead-gpu")

    async def nodes(self) -> list[Any]:
        extension = await self.pack("__init__").comfy_entrypoint()
        found = await extension.get_node_list()
        for node in found:
            node.define_schema()
        return list(found)


class Nodes(WithPack):
    """Against a real daemon."""

    def setUp(self) -> None:
        super().setUp()
        self.client = self.fleet(echo={"size": 8 << 20})

    def test_the_form_is_made_from_the_declaration(self) -> None:
        self.pack("learnt").learn("echo", SPEAKER)
        options = {one.key: {field.id: field for field in one.inputs} for one in self.menu("speaking", ("reference",))}
        form = options["echo"]
        self.assertEqual(list(form), ["text", "temperature", "voice"])
        self.assertEqual((form["text"].kind, form["text"].told["multiline"], form["text"].told["optional"]), ("String", True, False))
        self.assertEqual({name: form["temperature"].told[name] for name in ("default", "min", "max", "step")}, {"default": 1.0, "min": 0, "max": 2, "step": 0.05})
        self.assertEqual((form["voice"].kind, form["voice"].told["options"]), ("Combo", ["low", "high"]))

    def menu(self, name: str, *arguments: Any) -> Any:
        return getattr(self.pack("menus"), name)(*arguments).told["options"]

    def test_a_model_without_the_method_is_not_in_the_menu_and_one_that_never_ran_is(self) -> None:
        self.assertEqual([one.key for one in self.menu("answering", ())], ["echo"])
        self.pack("learnt").learn("echo", SPEAKER)
        self.assertIn("no model has a method 'answer'", self.menu("answering", ())[0].key)

    def test_any_model_runs_and_gives_each_layout_that_fits(self) -> None:
        output = asyncio.run(self.pack("nodes_run").RunAnyModel.execute(**{"model": "echo", "model.x": "[1, 2, 3]"}))
        values, image, *_ = output.args
        self.assertEqual(json.loads(values), {"y": [1.0, 2.0, 3.0]})
        self.assertIn("no IMAGE", image.message)
        self.assertEqual([one.id for one in self.menu("any_method")[0].inputs], ["x"], "learnt by running")

    def test_bad_input(self) -> None:
        run = self.pack("nodes_run").RunAnyModel.execute
        for inputs, words in (
            ({"model": "echo", "model.x": "[1, 2"}, ["input x", "no JSON"]),
            ({"model": "echo"}, ["echo.forward also needs x"]),
            ({"model": "echo/backward", "model.x": "[1]"}, ["no method 'backward'", "it has forward"]),
            ({"model": "echo", "model.x": torch.zeros(64, 2, 2, 3)}, ["batch of 64"]),
            ({"model": "echo", "model.x": object()}, ["connect AUDIO"]),
        ):
            with self.subTest(str(inputs)[:60]):
                self.refused(lambda inputs=inputs: asyncio.run(run(**inputs)), *words)

    def test_load_unload_and_status(self) -> None:
        fleet = self.pack("nodes_fleet")
        self.assertIn("echo is ready on cpu", asyncio.run(fleet.LoadModel.execute("echo")).args[0])
        self.assertIn("echo/0: ready on cpu", asyncio.run(fleet.FleetStatus.execute()).args[0])
        receipts, picture = asyncio.run(fleet.UnloadModel.execute("echo")).args
        (receipt,) = json.loads(receipts)
        self.assertEqual((receipt["model"], receipt["ended"], receipt["verified"]), ("echo", "drained", True))
        self.assertEqual((picture.shape[0], picture.shape[3], picture.dtype), (1, 3, torch.float32))
        bar = fleet.pictures.MODEL
        shown = (picture[0] * 255).round().to(torch.uint8)
        orange = (shown == torch.tensor(bar, dtype=torch.uint8)).all(dim=-1).any(dim=1)
        half = shown.shape[0] // 2
        self.assertTrue(orange[:half].any() and not orange[half:].any(), "the model's part is there before, and not after")
        self.assertEqual(json.loads(asyncio.run(fleet.UnloadModel.execute("echo")).args[0]), [])

    def test_a_model_that_is_removed_while_a_workflow_runs(self) -> None:
        asyncio.run(self.echo("echo"))
        fleet = json.loads(self.daemon.fleet.read_text())
        fleet["models"]["renamed"] = fleet["models"].pop("echo")
        self.daemon.fleet.write_text(json.dumps(fleet))
        self.client.reload()
        self.refused(lambda: asyncio.run(self.echo("echo")), "no model 'echo'", "it has renamed")
        self.manager.press_free()
        self.assertTrue(self.manager.thread_lives)

    def test_two_workflows_and_a_server_use_one_model(self) -> None:
        """At once: the worker has the server's request, and then all that the workflows ask, before it answers any."""
        slow = self.fleet(echo={"run_ms": 2000, "deadlines": {"drain": "30s"}})
        with slow.open("echo") as channel:
            request = channel.submit(x=[2.0])
            until(slow, "echo", lambda now: now["state"] == "busy")

            async def prompts() -> list[Any]:
                asking = asyncio.gather(*(self.echo("echo", count) for count in range(1, 3)))
                await asyncio.to_thread(until_queued, slow, "echo", 2)
                return list(await asking)

            self.assertEqual([len(one) for one in asyncio.run(prompts())], [1, 2])
            self.assertEqual(channel.wait(request)["y"].tolist(), [2.0])
        self.manager.press_free()
        self.assertEqual(slow.infer("echo", x=[2.0])["y"].tolist(), [2.0], "and it may ask again")

    def test_what_acts_or_shows_is_never_taken_from_comfyuis_cache(self) -> None:
        for node in ("LoadModel", "UnloadModel", "FleetStatus"):
            made = getattr(self.pack("nodes_fleet"), node)
            self.assertNotEqual(made.fingerprint_inputs(model="echo"), made.fingerprint_inputs(model="echo"))


class without:
    """That module cannot be imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._modules = mock.patch.dict(sys.modules)
        self._modules.__enter__()
        for name in [name for name in sys.modules if name.split(".")[0] == self._name]:
            del sys.modules[name]
        real = builtins.__import__

        def refuse(name: str, *rest: Any, **more: Any) -> Any:
            if name.split(".")[0] == self._name:
                raise ImportError(f"No module named {name!r}")
            return real(name, *rest, **more)

        self._import = mock.patch.object(builtins, "__import__", refuse)
        self._import.__enter__()

    def __exit__(self, *_: Any) -> None:
        self._import.__exit__(None, None, None)
        self._modules.__exit__(None, None, None)


if __name__ == "__main__":
    unittest.main()
