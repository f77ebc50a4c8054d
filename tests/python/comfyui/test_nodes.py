"""Nodes: what they are made from, and that bad input gives a clear message in the node, never
a dead ComfyUI."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import unittest
from typing import Any
from unittest import mock

import stand_in_interface
import torch
from daemon import until, until_queued
from fake_daemon import Connection
from fake_worker import FakeWorker
from fakes import HELLO, SPEAKER, STOPPED, OfFakes, answering, request, send, send_sound
from pack import WithPack
from stand_in_manager import Interrupted

SEEING = {"answer": {"inputs": [], "parameters": [{"name": "prompt", "type": "string"}], "outputs": [], "streams": True}}


def unloads(asked: list[dict[str, Any]]) -> list[Any]:
    return [one["params"] for one in asked if one["method"] == "model.unload"]


class Vision(OfFakes):
    def test_a_model_is_kept_or_unloaded_after_its_answer(self) -> None:
        def serve(worker: FakeWorker) -> None:
            send(worker, request(worker), {"text": "a cat"})

        asked = self.fake(serve, methods=SEEING, model_unload=answering({"receipts": []})).asked
        self.assertIn("keep_model_loaded", [one.id for one in self.pack("nodes_run").VisionLanguage.define_schema().inputs])
        for given, told in (({}, []), ({"keep_model_loaded": True}, []), ({"keep_model_loaded": False}, [{"models": ["voice"]}])):
            self.assertEqual(self.answer(**given).args[0], "a cat")
            self.assertEqual(unloads(asked), told)

    def test_text_is_written_on_the_node_as_it_comes(self) -> None:
        def serve(worker: FakeWorker) -> None:
            number = request(worker)
            for text in ("a", " c", "at"):
                send(worker, number, {"text": text}, more=True)
            send(worker, number, {"text": "a cat"})

        self.fake(serve, methods=SEEING)
        with mock.patch.object(self.pack("nodes_run"), "PREVIEW_SECONDS", 0):
            self.answer()
        self.assertEqual(stand_in_interface.written, [(text, "7", "page") for text in ("a", "a c", "a cat", "a cat")])
        self.assertEqual(stand_in_interface.progress, [(1, 2, False), (2, 4, False), (3, 6, False)])

    def answer(self, **given: Any) -> Any:
        asked = {"model": {"model": "voice", "prompt": "what is it?"}}
        return asyncio.run(self.pack("nodes_run").VisionLanguage.execute(**asked, **given))

    def test_a_model_that_is_not_to_be_kept_is_unloaded_after_a_request_that_failed_or_was_interrupted(self) -> None:
        def fail(worker: FakeWorker) -> None:
            worker.error(request(worker), 1)

        def interrupt(worker: FakeWorker) -> None:
            worker.expect("infer")
            self.manager.interrupted = True

        for serve, raised in ((fail, None), (interrupt, Interrupted)):
            for given, told in (({}, []), ({"keep_model_loaded": False}, [{"models": ["voice"]}])):
                asked = self.fake(serve, methods=SEEING, model_unload=answering({"receipts": []})).asked
                self.new_comfyui()
                with self.assertRaises(raised or self.pack("daemon").NodeError):
                    self.answer(**given)
                self.assertEqual(unloads(asked), told)

    def test_what_failed_first_is_told_where_the_unload_fails_too(self) -> None:
        def fail(worker: FakeWorker) -> None:
            worker.error(request(worker), 1, "the picture is too strange")

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
            number = request(worker)
            for done in (1, 3):
                send(worker, number, {"progress": {"done": done, "total": 4, "detail": "reading"}}, more=True)
            send_sound(worker, number, [0.5])

        self.fake(serve)
        self.speak(**HELLO)
        self.assertEqual(stand_in_interface.progress, [(1, 4, False), (3, 4, False)])

    def test_the_progress_of_a_load_is_the_nodes(self) -> None:
        rows = [dict(STOPPED)]
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

        self.fake(lambda worker: send_sound(worker, request(worker), [0.5]), model_load=load, events_subscribe=subscribe,
                  fleet_status=lambda connection, request: connection.answer(request, {"models": rows}))  # fmt: skip
        with mock.patch.object(self.pack("running"), "show", show):
            self.speak(**HELLO)
        self.assertEqual(told, [(1, 3), (2, 3)])


class Forms(OfFakes):
    def menus(self, engine: str) -> list[Any]:
        """Of Generate Speech, Vision Language and Run Any Model, for a model that never ran."""
        fleet = os.path.join(self.user.name, "fleet.yaml")
        with open(fleet, "w") as file:
            file.write(f"version: 1\nmodels:\n  voice: {{runtime: python, engine: '{engine}'}}\n")
        self.fake(lambda worker: None, daemon_info=answering({"version": "9.9.9", "fleet": fleet}))
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
            for samples, more in (([0.5, -0.5], True), ([0.5, -0.5, 0.25], False)):
                send_sound(worker, head["request_id"], samples, more=more)

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
                    send_sound(worker, request(worker), **{"samples": [0.5], **how})

                self.fake(serve)
                self.new_comfyui()
                self.refused(lambda: self.speak(**HELLO), *words)

    def test_a_worker_that_dies_is_told_and_the_next_prompt_has_the_next_one(self) -> None:
        died: list[bool] = []

        def serve(worker: FakeWorker) -> None:
            number = request(worker)
            if not died:
                died.append(True)
                send_sound(worker, number, [0.5], more=True)
                return worker.close()
            send_sound(worker, number, [0.25])

        self.fake(serve)
        self.refused(lambda: self.speak(**HELLO), "worker_lost", "bulkhead why")
        self.assertEqual(self.speak(**HELLO).args[0]["waveform"].tolist(), [[[0.25]]])

    def test_an_interrupt_in_mid_sentence_cancels(self) -> None:
        cancelled: queue.Queue[int] = queue.Queue()

        def serve(worker: FakeWorker) -> None:
            number = request(worker)
            send_sound(worker, number, [0.5], more=True)
            self.manager.interrupted = True
            cancelled.put(worker.expect("cancel")[0]["request_id"] - number)

        self.fake(serve)
        with self.assertRaises(Interrupted):
            self.speak(**HELLO)
        self.assertEqual(cancelled.get(timeout=10), 0, "that very request")

    def test_an_interrupt_while_a_model_loads_is_heard(self) -> None:
        def load(connection: Connection, request: dict[str, Any]) -> None:
            self.manager.interrupted = True  # and no answer

        self.fake(lambda worker: None, model_load=load,
                  fleet_status=answering({"models": [STOPPED]}), events_subscribe=answering({"subscribed": True}))  # fmt: skip
        with self.assertRaises(Interrupted):
            self.speak(**HELLO)


class Nodes(WithPack):
    """Against a real daemon."""

    def setUp(self) -> None:
        super().setUp()
        self.client = self.fleet(echo={"size": 8 << 20})

    def test_the_form_is_made_from_the_declaration(self) -> None:
        self.pack("learnt").learn("echo", SPEAKER)
        options = {one.key: {field.id: field for field in one.inputs} for one in self.menu("of_method", "speak", "text", ("reference",))}
        form = options["echo"]
        self.assertEqual(list(form), ["text", "temperature", "voice"])
        self.assertEqual((form["text"].kind, form["text"].told["multiline"], form["text"].told["optional"]), ("String", True, False))
        self.assertEqual({name: form["temperature"].told[name] for name in ("default", "min", "max", "step")}, {"default": 1.0, "min": 0, "max": 2, "step": 0.05})
        self.assertEqual((form["voice"].kind, form["voice"].told["options"]), ("Combo", ["low", "high"]))

    def menu(self, name: str, *arguments: Any) -> Any:
        return getattr(self.pack("menus"), name)(*arguments).told["options"]

    def test_a_model_without_the_method_is_not_in_the_menu_and_one_that_never_ran_is(self) -> None:
        self.assertEqual([one.key for one in self.menu("of_method", "answer", "prompt", ())], ["echo"])
        self.pack("learnt").learn("echo", SPEAKER)
        self.assertIn("no model has a method 'answer'", self.menu("of_method", "answer", "prompt", ())[0].key)

    def test_any_model_runs_and_gives_each_layout_that_fits(self) -> None:
        output = asyncio.run(self.pack("nodes_run").RunAnyModel.execute(**{"model": "echo", "model.x": "[1, 2, 3]"}))
        values, image, *_ = output.args
        self.assertEqual(json.loads(values), {"y": [1.0, 2.0, 3.0]})
        self.assertIn("not an IMAGE", image.message)
        self.assertEqual([one.id for one in self.menu("any_method")[0].inputs], ["x"], "learnt by running")

    def test_bad_input(self) -> None:
        run = self.pack("nodes_run").RunAnyModel.execute
        for inputs, words in (
            ({"model": "echo", "model.x": "[1, 2"}, ["input x", "not JSON"]),
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
        """At once: the worker has the server's request, and then all that the workflows ask, before
        it answers any."""
        gate = os.path.join(self.user.name, "gate")
        os.mkfifo(gate)
        held = self.fleet(echo={"environment": {"MINIMAL_RUN_GATE": gate}, "deadlines": {"drain": "30s"}})
        with held.open("echo") as channel:
            request = channel.submit(x=[2.0])
            until(held, "echo", lambda now: now["state"] == "busy")

            async def prompts() -> list[Any]:
                asking = asyncio.gather(*(self.echo("echo", count) for count in range(1, 3)))
                await asyncio.to_thread(until_queued, held, "echo", 2)
                self.addCleanup(os.close, os.open(gate, os.O_WRONLY))
                return list(await asking)

            self.assertEqual([len(one) for one in asyncio.run(prompts())], [1, 2])
            self.assertEqual(channel.wait(request)["y"].tolist(), [2.0])
        self.manager.press_free()
        self.assertEqual(held.infer("echo", x=[2.0])["y"].tolist(), [2.0], "and it may ask again")

    def test_what_acts_or_shows_is_never_taken_from_comfyuis_cache(self) -> None:
        for node in ("LoadModel", "UnloadModel", "FleetStatus"):
            made = getattr(self.pack("nodes_fleet"), node)
            self.assertNotEqual(made.fingerprint_inputs(model="echo"), made.fingerprint_inputs(model="echo"))


if __name__ == "__main__":
    unittest.main()
