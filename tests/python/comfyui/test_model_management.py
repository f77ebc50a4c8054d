"""What ComfyUI's model management does to a guest, trap by trap, on a stand-in manager and
a real daemon."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import unittest
import uuid
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest import mock

import bulkhead
import torch
from daemon import Daemon, fake_nvml, row, until, until_queued
from pack import GIB, WithPack, cuda
from stand_in_manager import MEMBERS, Interrupted, Manager, OutOfMemory

GPUS = (uuid.UUID(int=1), uuid.UUID(int=2))
ENGINES = Path(__file__).resolve().parents[1] / "worker" / "engines"


class OneModel(WithPack):
    def setUp(self) -> None:
        super().setUp()
        self.client = self.fleet(echo={"size": 64 << 20})

    def run_prompt(self) -> None:
        self.manager.on_prompt_thread(lambda: self.assertEqual(asyncio.run(self.echo("echo")), [1.0, 1.0, 1.0]))

    def state(self) -> Any:
        return row(self.client, "echo")["state"]

    def test_prompts_load_a_model_and_keep_it_and_free_unloads_it(self) -> None:
        """Whoever loaded or unloaded it before."""
        self.client.load("echo")
        self.assertEqual(self.manager.names(), [])
        for _ in range(2):
            self.run_prompt()
            pid = row(self.client, "echo")["pid"]
            self.run_prompt()
            self.assertEqual((self.manager.names(), row(self.client, "echo")["pid"]), (["echo"], pid))
            self.client.unload("echo")
            self.run_prompt()
            self.assertEqual(self.manager.names(), ["echo"])
            self.manager.press_free()
            self.assertEqual((self.manager.names(), self.state()), ([], "stopped"))

    def test_a_guest_is_what_the_manager_reads(self) -> None:
        """With the measured memory, of which no part goes alone; its model outlives `detach`, and
        only the pack holds it."""
        self.run_prompt()
        gc.collect()
        guest = self.manager.listed[0].guest
        self.assertFalse(guest.gone, "ComfyUI holds weak references only")
        for name in MEMBERS:
            getattr(guest, name)
        self.assertEqual((guest.parent, guest.is_dynamic(), guest.get_nested_additional_models()), (None, False, []))
        self.assertGreater(guest.loaded_size(), 64 << 20)
        self.assertLess(guest.loaded_size(), 128 << 20)
        self.assertEqual(guest.model_size(), guest.loaded_size())
        self.assertEqual(guest.current_loaded_device(), torch.device("cpu"))
        for amount in (0.1, 1, 1e30):
            self.assertEqual(guest.partially_unload(guest.offload_device, amount), 0)
        pid = row(self.client, "echo")["pid"]
        guest.detach(unpatch_all=False)
        self.assertEqual(row(self.client, "echo")["pid"], pid)
        self.manager.free = lambda device: 99
        model = weakref.ref(guest.model)
        hash(model())
        self.manager.free_memory(99.5, torch.device("cpu"))  # half a byte too little
        self.assertEqual(self.state(), "stopped")
        gc.collect()
        self.assertIsNotNone(model())
        self.pack("daemon").rows()  # as after the time for which an answer is used again
        self.assertEqual(guest.loaded_size(), 0)
        self.assertGreater(guest.model_size(), 64 << 20, "what was measured last")

    def test_without_a_daemon_detach_does_not_raise(self) -> None:
        self.run_prompt()
        self.client.stop()
        self.daemon.keeper.wait(60)
        with self.assertLogs(level="ERROR") as logged:
            self.manager.press_free()
        self.assertIn("echo was not unloaded", logged.output[0])
        self.assertTrue(self.manager.thread_lives)

    def test_sizes_that_cannot_be_told_do_not_end_the_prompt_thread(self) -> None:
        """ComfyUI reads them before it unloads: the weights may be gone, or of another
        user, by then."""
        self.run_prompt()
        self.client.unload("echo")
        self.pack("daemon").rows()
        with mock.patch.object(self.pack("sizes"), "expected", side_effect=PermissionError("model.safetensors")), self.assertLogs(level="WARNING") as logged:
            self.manager.press_free()
        self.assertIn("the size of echo is not known", logged.output[0])
        self.assertEqual((self.manager.names(), self.manager.thread_lives), ([], True))
        self.run_prompt()

    def test_a_daemon_that_hangs_is_waited_for_no_longer_than_the_bound(self) -> None:
        self.run_prompt()
        for module in ("manager", "daemon"):
            setattr(self.pack(module), "UNLOAD_SECONDS" if module == "manager" else "LOOK_SECONDS", 0.2)
        supervisor = self.client.info()["supervisor_pid"]
        os.kill(supervisor, signal.SIGSTOP)
        try:
            with self.assertLogs(level="ERROR"):
                self.manager.press_free()
        finally:
            os.kill(supervisor, signal.SIGCONT)
        self.run_prompt()

    def test_restarted_and_hung_workers_are_reached_by_the_next_unload(self) -> None:
        self.run_prompt()
        dead = row(self.client, "echo")["pid"]
        os.kill(dead, signal.SIGKILL)
        until(self.client, "echo", lambda now: now["state"] == "ready" and now["pid"] != dead)
        self.manager.press_free()
        self.assertEqual((self.manager.names(), self.state()), ([], "stopped"))
        self.run_prompt()
        hung = row(self.client, "echo")["pid"]
        os.kill(hung, signal.SIGSTOP)
        self.manager.press_free()
        self.assertFalse(Path(f"/proc/{hung}").exists(), "by the unload, or before it as one that hangs")
        self.assertEqual(self.state(), "stopped")
        self.run_prompt()

    def test_a_comfyui_that_starts_again_lists_what_it_used_and_what_is_still_loaded(self) -> None:
        self.run_prompt()
        for listed in (["echo"], []):  # loaded, and unloaded
            self.new_comfyui()
            self.manage(Manager())
            asyncio.run(self.pack("__init__").comfy_entrypoint())
            self.assertEqual(self.manager.names(), listed)
            self.manager.press_free()
            self.assertEqual(row(self.client, "echo")["state"], "stopped")
        Path(self.user.name, "bulkhead.json").unlink()  # of a ComfyUI that never used it
        self.client.load("echo")
        self.new_comfyui()
        asyncio.run(self.pack("__init__").comfy_entrypoint())
        self.assertEqual(self.manager.names(), [])


class Interrupts(WithPack):
    def setUp(self) -> None:
        super().setUp()
        self.client = self.fleet(slow={"run_ms": 600_000, "deadlines": {"request": "900s", "drain": "300ms", "kill": "300ms"}},
                                 loading={"environment": {"MINIMAL_LOAD_HANGS": "1"}})  # fmt: skip

    def busy(self) -> None:
        until(self.client, "slow", lambda now: now["state"] == "busy")

    def ends(self, work: Coroutine[Any, Any, Any], raised: type[BaseException], reached: Callable[[], Any],
             act: Callable[[], Any]) -> None:  # fmt: skip
        """Once `reached` has returned, `act` ends a node's work by that exception; it runs on the
        prompt's loop."""

        async def prompt() -> None:
            working = asyncio.ensure_future(work)
            await asyncio.to_thread(reached)
            act()
            with self.assertRaises(raised):
                await working

        asyncio.run(prompt())

    def interrupt(self, work: Coroutine[Any, Any, Any], reached: Callable[[], Any]) -> None:
        self.ends(work, Interrupted, reached, lambda: setattr(self.manager, "interrupted", True))

    def test_a_load_that_was_interrupted_is_reached_by_the_next_unload(self) -> None:
        self.interrupt(self.echo("loading"), lambda: until(self.client, "loading", lambda now: now["state"] == "loading"))
        self.assertEqual((self.manager.names(), row(self.client, "loading")["state"]), (["loading"], "loading"))
        self.manager.press_free()
        self.assertEqual((self.manager.names(), row(self.client, "loading")["state"]), ([], "stopped"))

    def test_a_request_that_is_interrupted_is_cancelled_also_behind_another_clients(self) -> None:
        self.interrupt(self.echo("slow"), self.busy)
        self.assertFalse(self.manager.interrupted, "ComfyUI's flag is taken back, as its own nodes do")
        self.assertEqual(row(self.client, "slow")["errors"], 1, "the worker has answered `cancelled`")
        self.client.unload("slow")  # whose model does not notice
        with self.client.open("slow") as channel:
            channel.submit(x=[1.0])
            self.busy()
            self.interrupt(self.echo("slow"), lambda: until_queued(self.client, "slow", 1))
            now = row(self.client, "slow")
            self.assertEqual((now["queued"], now["in_flight"], now["errors"]), (0, 1, 2), "the other client's still runs")

    def test_an_interrupt_during_unload_ends_the_node_and_the_unload_goes_on(self) -> None:
        """A server's request is what it waits for."""
        with self.client.open("slow") as channel:
            request = channel.submit(x=[1.0])
            self.busy()
            unload = self.pack("nodes_fleet").UnloadModel.execute("slow")
            self.interrupt(unload, lambda: until(self.client, "slow", lambda now: now["state"] != "busy"))
            with self.assertRaises(bulkhead.Error):
                channel.wait(request)
        until(self.client, "slow", lambda now: now["state"] == "stopped")

    def test_unload_drains_and_other_clients_get_worker_draining(self) -> None:
        """By the node, and by the button; asking again loads the model."""
        unload = self.pack("nodes_fleet").UnloadModel.execute
        for how in (lambda: asyncio.run(unload("slow")), self.manager.press_free):
            with self.client.open("slow") as channel:
                self.manager.on_prompt_thread(lambda: self.pack("manager").enlist([row(self.client, "slow")]))
                asked = [channel.submit(x=[1.0]), channel.submit(x=[2.0])]
                self.busy()
                how()
                for request in asked:
                    with self.assertRaises(bulkhead.Error) as refused:
                        channel.wait(request)
                    self.assertEqual(refused.exception.code, "worker_draining")
            self.assertEqual(row(self.client, "slow")["state"], "stopped")
            self.client.load("slow")

    def test_a_model_that_is_removed_during_a_request_ends_it(self) -> None:
        def rename() -> None:
            fleet = json.loads(self.daemon.fleet.read_text())
            self.daemon.fleet.write_text(json.dumps({**fleet, "models": {"renamed": fleet["models"]["slow"]}}))
            self.client.reload()

        self.ends(self.echo("slow"), self.pack("daemon").NodeError, self.busy, rename)
        self.refused(lambda: asyncio.run(self.echo("slow")), "no model 'slow'", "renamed")
        self.manager.press_free()
        self.assertTrue(self.manager.thread_lives)

    def test_unload_during_a_request_drains_and_ends(self) -> None:
        """Of another node of the same prompt, which blocks the loop that the request
        is awaited on."""
        self.ends(self.echo("slow"), self.pack("daemon").NodeError, self.busy, self.manager.press_free)
        self.assertEqual(row(self.client, "slow")["state"], "stopped")


class OnGpus(WithPack):
    """GPUs of a fake driver: what is measured, asked for and given back are its figures."""

    def setUp(self) -> None:
        super().setUp()
        self.client = self.gpu_fleet(GPUS, first={"gpu": 0, "size": 3 * GIB}, second={"gpu": 0, "size": 4 * GIB},
                                     elsewhere={"gpu": 1, "size": GIB})  # fmt: skip
        self.manage(Manager(cuda(0), cuda(1), free=self.free_of))
        self.numbers = {cuda(0): GPUS[0], cuda(1): GPUS[1]}
        self.pack("devices").uuid_of = lambda device: str(self.numbers[device])

    def free_of(self, device: torch.device) -> int:
        return next(gpu["free_bytes"] for gpu in self.client.gpus()["gpus"] if gpu["uuid"] == f"GPU-{self.numbers[device]}")

    def prompt(self, model: str) -> None:
        self.manager.on_prompt_thread(lambda: asyncio.run(self.echo(model)))

    def test_the_drivers_figure_is_counted_and_what_is_in_the_way_is_unloaded(self) -> None:
        self.prompt("first")
        guest = self.manager.listed[0].guest
        self.assertEqual((guest.loaded_size(), guest.load_device), (3 * GIB, cuda(0)))
        self.assertEqual(guest.current_loaded_device(), cuda(0))
        self.manager.on_prompt_thread(lambda: self.manager.free_memory(5 * GIB, cuda(0)))
        self.assertEqual((self.manager.names(), row(self.client, "first")["gpu_bytes"]), (["first"], 3 * GIB))
        # A checkpoint of ComfyUI's own.
        self.manager.on_prompt_thread(lambda: self.manager.free_memory(6 * GIB, cuda(0)))
        self.assertEqual((self.free_of(cuda(0)), row(self.client, "first")["state"]), (8 * GIB, "stopped"))
        self.assertEqual(guest.current_loaded_device(), guest.offload_device)
        self.manager.disable_smart_memory = True  # a load unloads the rest
        self.prompt("first")
        self.prompt("second")
        self.assertEqual((self.manager.names(), row(self.client, "first")["state"]), (["second"], "stopped"))
        raised = self.pack("daemon").translated(bulkhead.Error("out_of_memory", "allocating 2 GiB for speak", "unload another model"))
        self.assertIsInstance(raised, OutOfMemory)
        self.assertIn("allocating 2 GiB", str(raised))

    def test_a_driver_that_tells_no_figure_of_a_process(self) -> None:
        """As in WSL2 and in containers: without a worker's own report, what is expected
        counts."""
        with open(self.daemon.fleet.parent / "machine", "a") as machine:
            machine.write("device 0 na_processes\n")
        self.prompt("first")
        guest = self.manager.listed[0].guest
        self.assertIsNone(row(self.client, "first")["gpu_bytes"])
        self.assertEqual((guest.loaded_size(), guest.current_loaded_device()), (self.weights(), cuda(0)))
        self.manager.press_free()
        self.assertEqual(row(self.client, "first")["state"], "stopped")

    def test_what_torch_has_in_the_worker_counts_where_the_driver_tells_no_figure(self) -> None:
        here = self.daemon.fleet.parent
        (here / "torch.py").write_text("import types\ncuda = types.SimpleNamespace(is_initialized=lambda: False, memory_allocated=lambda: 0, "
                                       f"memory_reserved=lambda: {2 * GIB}, max_memory_reserved=lambda: {2 * GIB})\n")  # fmt: skip
        (here / "no_figures").write_text(f"gpu GPU-{GPUS[0]} {8 * GIB} Fake\ndevice 0 na_processes\n")
        engine = {"runtime": "python", "engine": f"{ENGINES}/echo.py:OnAGpu", "interpreter": sys.executable, "device": f"GPU-{GPUS[0]}",
                  "options": {"granted": str(here / "no_figures"), "torch": True}, "environment": {"PYTHONPATH": str(here)}}  # fmt: skip
        daemon = Daemon(json.dumps({"version": 1, "models": {"engine": engine}}), fake_nvml(here / "no_figures"))
        self.addCleanup(daemon.stop)
        self.client = self.serve(daemon.socket)
        self.prompt("engine")
        self.assertIsNone(row(self.client, "engine")["gpu_bytes"])
        self.assertEqual(self.manager.listed[0].guest.loaded_size(), 2 * GIB)

    def test_gpus_are_matched_by_uuid_whatever_their_numbers(self) -> None:
        self.numbers = {cuda(0): GPUS[1], cuda(1): GPUS[0]}  # CUDA_DEVICE_ORDER
        self.prompt("first")
        self.assertEqual(self.manager.listed[0].guest.load_device, cuda(1))

    def test_a_gpu_that_comfyui_does_not_use_is_none_of_its_memory(self) -> None:
        self.manage(Manager(cuda(0), free=self.free_of))
        self.prompt("elsewhere")
        self.assertEqual(self.manager.listed[0].guest.load_device, torch.device("cpu"))
        load = self.pack("nodes_fleet").LoadModel.execute
        self.assertIn("Unload Models does not reach it", asyncio.run(load("elsewhere")).args[0])
        self.assertNotIn("reach", asyncio.run(load("first")).args[0])
        self.prompt("first")
        self.manager.free_memory(8 * GIB, cuda(0))
        self.assertEqual(self.manager.names(), ["elsewhere"])

    def test_before_a_load_comfyui_is_asked_for_what_was_measured_last(self) -> None:
        """Also the next ComfyUI; for a file's size, and for what is declared, where nothing else
        is known."""
        self.prompt("second")
        self.assertEqual(self.manager.freed[-1][0], self.weights())
        self.manager.press_free()
        self.prompt("second")
        self.assertEqual(self.manager.freed[-1], (4 * GIB, cuda(0)))
        self.client.unload("second")
        self.new_comfyui()
        self.pack("devices").uuid_of = lambda device: str(self.numbers[device])
        self.prompt("second")
        self.assertEqual(self.manager.freed[-1], (4 * GIB, cuda(0)))
        unheard_of = {"model": "unheard_of", "device": f"GPU-{GPUS[1]}", "memory": {"estimated": 2 * GIB, "measured": None}}
        self.pack("manager").make_room([unheard_of], ["unheard_of"])
        self.assertEqual(self.manager.freed[-1], (2 * GIB, cuda(1)))

    def weights(self) -> int:
        from daemon import MINIMAL

        return (MINIMAL / "bulkhead-worker").stat().st_size

    def test_replicas_are_counted_on_the_gpu_that_each_is_on(self) -> None:
        self.prompt("first")
        guest = self.manager.listed[0].guest
        (one,) = [row for row in self.client.ps() if row["model"] == "first"]
        rows = [{**one, "replica": number, "device": f"GPU-{gpu}", "gpu_bytes": size}
                for number, (gpu, size) in enumerate(((GPUS[0], GIB), (GPUS[1], 4 * GIB), (GPUS[0], 2 * GIB)))]  # fmt: skip
        with mock.patch.object(self.pack("daemon"), "rows", lambda age=0.0: rows):
            self.assertEqual((guest.load_device, guest.loaded_size()), (cuda(0), 3 * GIB))

    def test_a_model_that_moves_to_another_gpu_is_listed_there(self) -> None:
        self.prompt("first")
        fleet = json.loads(self.daemon.fleet.read_text())
        moved = fleet["models"]["first"]
        moved |= {name: fleet["models"]["elsewhere"][name] for name in ("device", "environment")}
        self.daemon.fleet.write_text(json.dumps(fleet))
        self.client.reload()
        # So that what was known before the load would be used, if it could be.
        self.pack("manager").LOOK_AGE_SECONDS = 1000
        self.prompt("first")
        self.assertEqual([(one.guest.load_device, one.guest.loaded_size()) for one in self.manager.listed], [(cuda(1), GIB)])
        self.manager.on_prompt_thread(lambda: self.manager.free_memory(8 * GIB, cuda(0)))
        self.assertEqual(row(self.client, "first")["gpu_bytes"], GIB, "it is in nobody's way there")
        self.manager.press_free()
        self.assertEqual((self.manager.names(), row(self.client, "first")["state"]), ([], "stopped"))

    def test_the_picture_of_all_models_has_bars_for_each_gpu(self) -> None:
        for model in ("first", "elsewhere"):
            self.client.load(model)
        drawn: list[Any] = []
        fleet = self.pack("nodes_fleet")
        draw = fleet.pictures.before_and_after
        with mock.patch.object(fleet.pictures, "before_and_after", lambda devices, text: drawn.extend(devices) or draw(devices, text)):
            picture = asyncio.run(fleet.UnloadModel.execute(fleet.ALL)).args[1]
            alone = asyncio.run(fleet.UnloadModel.execute("first")).args[1]
        told = [[(one.device, one.total, one.used, one.models) for one in pair] for pair in drawn]
        self.assertEqual(told[:2], [[("cuda:0", 8 * GIB, 3 * GIB, 3 * GIB), ("cuda:0", 8 * GIB, 0, 0)],
                                    [("cuda:1", 8 * GIB, GIB, GIB), ("cuda:1", 8 * GIB, 0, 0)]])  # fmt: skip
        self.assertEqual(told[2:], [[("cuda:0", 8 * GIB, 0, 0)] * 2], "a model without a process is shown where it would be")
        bars = self.pack("pictures")
        self.assertEqual(picture.shape[1] - alone.shape[1], 2 * (bars.BAR + bars.GAP))


if __name__ == "__main__":
    unittest.main()
