"""A model whose engine has another model of the fleet loaded, for its first request: ComfyUI
counts both, makes room for both and unloads both."""

from __future__ import annotations

import asyncio
import json
import unittest
import uuid
from pathlib import Path
from typing import Any

import bulkhead
import torch
from daemon import row, until
from pack import GIB, EngineFleet, WithPack, cuda
from stand_in_manager import Manager

GPU = uuid.UUID(int=1)


class LanguageModel(WithPack):
    def setUp(self) -> None:
        super().setUp()
        uses = {"engine": "Speaker", "options": {"language_model": "words"}}
        self.client = self.gpu_fleet((GPU,), EngineFleet, speaker={**uses, "size": 3 * GIB}, words={"engine": "Words", "size": 2 * GIB, "device": "auto"},
                                     also={**uses, "size": GIB}, large={"engine": "Words", "size": 4 * GIB})  # fmt: skip
        self.begin()

    def begin(self, number: int = 0) -> None:
        """``number``: the GPU's in ComfyUI, which also has those before it."""
        self.manage(Manager(*map(cuda, range(number + 1)), free=self.free_of))
        self.pack("devices").uuid_of = lambda device: str(GPU if device.index == number else uuid.UUID(int=2))

    def free_of(self, device: torch.device) -> int:
        return int(self.client.gpus()["gpus"][0]["free_bytes"])

    def prompt(self, model: str) -> None:
        self.manager.on_prompt_thread(lambda: self.assertEqual(asyncio.run(self.echo(model)), [1.0, 1.0, 1.0]))

    def loaded(self) -> list[str]:
        return [one["model"] for one in self.client.ps() if one["pid"] is not None]

    def test_it_is_counted_after_the_request_that_loads_it_and_ends_with_its_engine(self) -> None:
        self.prompt("speaker")
        sizes = {one.guest._guest().name: (one.guest.loaded_size(), one.device) for one in self.manager.listed}
        self.assertEqual(sizes, {"speaker": (3 * GIB, cuda(0)), "words": (2 * GIB, cuda(0))})
        kept = json.loads(Path(self.user.name, "bulkhead.json").read_text())["models"]
        self.assertEqual(kept["words"]["bytes"], 2 * GIB)
        self.manager.press_free()
        self.assertEqual((self.manager.names(), self.loaded(), self.free_of(cuda(0))), ([], [], 8 * GIB))
        self.prompt("large")
        self.manager.disable_smart_memory = True
        self.prompt("speaker")
        self.assertEqual(self.loaded(), ["speaker", "words"], "the two do not unload each other")
        next(one.guest._guest() for one in self.manager.listed if one.guest._guest().name == "speaker").detach()
        self.assertEqual(self.loaded(), [])

    def test_it_is_counted_on_the_gpu_that_the_daemon_chose(self) -> None:
        self.begin(1)
        self.prompt("speaker")
        self.assertEqual({one.guest._guest().name: one.device for one in self.manager.listed}, {"speaker": cuda(1), "words": cuda(1)})
        self.assertEqual([one.guest.loaded_size() for one in self.manager.listed if one.guest._guest().name == "words"], [2 * GIB])

    def test_room_is_made_for_those_that_are_not_loaded_and_not_by_the_engines_own(self) -> None:
        self.prompt("speaker")
        for unloaded, size in ((("speaker", "words"), 5 * GIB), (("words",), 2 * GIB), (("speaker",), 3 * GIB)):
            self.client.unload(*unloaded)
            self.prompt("speaker")
            self.assertEqual(self.manager.freed[-1], (size, cuda(0)))
        # ComfyUI would unload the smallest, its language model, which the request would load again.
        self.client.unload("speaker")
        self.prompt("large")
        words = row(self.client, "words")["pid"]
        self.prompt("speaker")
        self.assertEqual((row(self.client, "words")["pid"], self.loaded()), (words, ["speaker", "words"]))

    def test_the_node_and_keep_model_loaded_end_the_engine_first(self) -> None:
        nodes = self.pack("nodes_fleet")
        self.prompt("speaker")
        receipts, _ = asyncio.run(nodes.UnloadModel.execute("speaker")).args
        self.assertEqual([receipt["model"] for receipt in json.loads(receipts)], ["speaker", "words"])
        self.prompt("speaker")
        asyncio.run(nodes.unload("speaker"))
        self.assertEqual(self.loaded(), [])

    def test_a_comfyui_that_starts_again_lists_both_and_unloads_neither(self) -> None:
        self.prompt("speaker")
        self.new_comfyui()
        self.begin()
        self.manager.disable_smart_memory = True
        asyncio.run(self.pack("__init__").comfy_entrypoint())
        self.assertEqual((sorted(self.manager.names()), self.loaded()), (["speaker", "words"], ["speaker", "words"]))

    def test_another_engine_and_another_client_may_use_it(self) -> None:
        """Their requests are refused while it is unloaded, and asking again loads it."""
        for model in ("speaker", "also"):
            self.prompt(model)
        with self.client.open("words") as channel:
            asked = channel.submit(x=[-1.0])
            until(self.client, "words", lambda now: now["state"] == "busy")
            asyncio.run(self.pack("nodes_fleet").unload("speaker"))
            with self.assertRaises(bulkhead.Error) as refused:
                channel.wait(asked)
        self.assertEqual(refused.exception.code, "worker_draining")
        self.assertEqual(self.loaded(), ["also"])
        self.prompt("also")
        self.assertEqual(self.loaded(), ["words", "also"])

    def test_a_fleet_file_that_names_what_the_daemon_does_not_have_yet(self) -> None:
        self.prompt("large")
        fleet: dict[str, Any] = json.loads(self.daemon.fleet.read_text())
        fleet["models"]["large"]["options"] = {"language_model": "new"}
        fleet["models"]["new"] = fleet["models"]["words"]
        self.daemon.fleet.write_text(json.dumps(fleet))
        self.prompt("large")
        asyncio.run(self.pack("nodes_fleet").unload("large"))
        self.assertEqual(self.loaded(), [])


if __name__ == "__main__":
    unittest.main()
