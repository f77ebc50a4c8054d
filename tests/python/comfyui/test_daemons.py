"""Nodes where something is wanting: no daemon, one of another release, one that answers late;
another system; no client."""

from __future__ import annotations

import asyncio
import os
import sys
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import bulkhead
from fake_daemon import Connection
from fakes import HELLO, ROW, OfFakes, answering, request, send_sound


class Daemons(OfFakes):
    def test_no_daemon(self) -> None:
        self.enterContext(mock.patch.dict(os.environ, BULKHEAD_SOCKET=os.path.join(self.user.name, "nobody.sock")))
        self.refused(lambda: self.speak(**HELLO), "not_running", "bulkhead up FLEET")
        for node in ("LoadModel", "UnloadModel", "FleetStatus"):
            made = getattr(self.pack("nodes_fleet"), node)
            inputs = {} if node == "FleetStatus" else {"model": "voice"}
            self.refused(lambda made=made, inputs=inputs: asyncio.run(made.execute(**inputs)), "bulkhead up FLEET")
        self.assertIn("bulkhead up FLEET", self.pack("menus").models()[0])

    def test_a_daemon_of_another_release(self) -> None:
        def unknown(connection: Connection, request: dict[str, Any]) -> None:
            connection.send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "no", "data": {
                "code": "method_unknown", "attempt": "fleet.status", "remedy": ""}}})  # fmt: skip

        self.fake(lambda worker: None, fleet_status=unknown)
        self.refused(lambda: self.speak(**HELLO), "method_unknown", bulkhead.__version__, "9.9.9", "of one release")

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
        """Nodes ask by a connection of their own; what model management asks is not answered
        within its bound."""
        asking: list[Connection] = []

        def status(connection: Connection, request: dict[str, Any]) -> None:
            asking.append(connection)
            if connection is asking[0]:
                connection.answer(request, {"models": [ROW]})

        daemon = self.fake(lambda worker: send_sound(worker, request(worker), [0.5]), fleet_status=status)
        self.pack("daemon").LOOK_SECONDS = 0.1
        with self.assertLogs(level="WARNING") as logged:
            self.assertEqual(self.speak(**HELLO).args[0]["waveform"].tolist(), [[[0.5]]])
            (listed,) = self.manager.listed
            self.assertEqual((listed.guest._guest().name, listed.guest.loaded_size()), ("voice", ROW["host_bytes"]))
        self.assertIn("voice is listed with the size that was told before: deadline_exceeded", logged.output[0])
        daemon.handlers["fleet.status"] = answering({"models": [{**ROW, "host_bytes": 3 << 20}]})
        self.pack("daemon").LOOK_SECONDS = 60
        self.pack("daemon").rows()
        self.assertEqual(listed.guest.loaded_size(), 3 << 20)

    def test_a_daemon_that_tells_its_gpus_late_is_not_waited_for(self) -> None:
        gpu = {"index": 1, "uuid": "GPU-00000000-0000-0000-0000-000000000002"}
        daemon = self.fake(lambda worker: None, gpu_status=answering({"gpus": [gpu]}))
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
                self.refused(lambda: self.speak(**HELLO), "Linux", "WSL2", system)

    def test_without_the_client_or_with_its_namesake(self) -> None:
        with without("bulkhead"):
            self.assertEqual(len(asyncio.run(self.nodes())), 6)
            self.refused(lambda: self.speak(**HELLO), "scripts/wheel", "docs/comfyui.md", f"{sys.executable} -m pip install build/wheel/bulkhead_gpu-")
        with mock.patch.dict(sys.modules, bulkhead=mock.Mock(spec=["__file__"], __file__="/x/bulkhead.py")):
            self.refused(lambda: self.speak(**HELLO), "another project", "pip uninstall bulkhead, then install the wheel", "scripts/wheel")

    async def nodes(self) -> list[Any]:
        extension = await self.pack("__init__").comfy_entrypoint()
        found = await extension.get_node_list()
        for node in found:
            node.define_schema()
        return list(found)


@contextmanager
def without(name: str) -> Iterator[None]:
    """That module cannot be imported."""
    with mock.patch.dict(sys.modules, {one: None for one in [name, *sys.modules] if one.split(".")[0] == name}):
        yield


if __name__ == "__main__":
    unittest.main()
