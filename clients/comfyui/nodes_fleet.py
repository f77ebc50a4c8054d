"""Nodes that look after the fleet: load, unload, status."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from comfy_api.latest import IO, UI

from . import answers, daemon, fleet_file, learnt, manager, menus, pictures, running, sizes
from .limits import UNLOAD_SECONDS

CATEGORY = "Bulkhead"
ALL = "(all models)"


class _Acts(IO.ComfyNode):
    """Runs at each prompt, because its result also depends on the daemon."""

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> int:
        return time.monotonic_ns()


def _after() -> Any:
    return IO.AnyType.Input("after", optional=True, tooltip="Connect anything that is to be done first.")


class LoadModel(_Acts):
    @classmethod
    def define_schema(cls) -> Any:
        return IO.Schema(
            node_id="BulkheadLoad",
            display_name="Load Model (Bulkhead)",
            category=CATEGORY,
            description="Starts a model's process ahead of its first use. Nodes that use a model load it by themselves.",
            inputs=[IO.Combo.Input("model", options=menus.models()), _after()],
            outputs=[IO.String.Output("info")],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, model: str) -> bool:
        return True  # `execute` reports a name that has left the menu: it knows why

    @classmethod
    async def execute(cls, model: str, after: Any = None) -> Any:
        text = await running.interruptible(_load(model))
        return IO.NodeOutput(text, ui=UI.PreviewText(text))


async def _load(model: str) -> str:
    async with daemon.connected() as client:
        started = time.monotonic()
        rows = await answers.load(client, model)
        async with await client.open(model) as channel:
            learnt.learn(model, channel.methods)
        patchers = manager.enlist(rows)
        manager.measure(patchers)
    device, pid = rows[0]["device"], rows[0]["pid"]
    text = f"{model} is ready on {device} after {time.monotonic() - started:.2f} s: process {pid}, {sizes.text(patchers[0].loaded_size())}"
    if not manager.is_reached(patchers[0]):
        text += ". ComfyUI does not compute there: its button Unload Models does not reach it, the node Unload Model does"
    return text


class UnloadModel(_Acts):
    @classmethod
    def define_schema(cls) -> Any:
        return IO.Schema(
            node_id="BulkheadUnload",
            display_name="Unload Model (Bulkhead)",
            category=CATEGORY,
            description="Ends a model's process, after what it is doing, and waits until its memory is back.",
            inputs=[IO.Combo.Input("model", options=[ALL, *menus.models()]), _after()],
            outputs=[IO.String.Output("receipt"), IO.Image.Output("memory")],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, model: str) -> bool:
        return True

    @classmethod
    async def execute(cls, model: str, after: Any = None) -> Any:
        receipts, text, picture = await running.interruptible(_unload(model))
        return IO.NodeOutput(json.dumps(receipts), picture, ui=UI.PreviewText(text))


async def _unload(model: str) -> tuple[list[dict[str, Any]], str, Any]:
    async with daemon.connected() as client:
        names = None if model == ALL else await _ending(client, model)
        before = await _memory(client, names)
        receipts = await _receipts(client, names)
        after = await _memory(client, names, on=list(before))
    text = "\n".join(map(manager.sentence, receipts)) or f"{model} had no process"
    return receipts, text, pictures.before_and_after(list(zip(before.values(), after.values())), text.splitlines()[0])


async def unload(model: str) -> None:
    """Returns when its memory is back, and that of its language model."""
    async with daemon.connected() as client:
        await _receipts(client, await _ending(client, model))


async def _ending(client: Any, model: str) -> list[str]:
    """Returns the model, then its language model if it uses one: an engine that still works would
    have that one loaded again."""
    first, *more = fleet_file.with_language_model(model)
    known = {row["model"] for row in await client.ps()} if more else set()
    return [first, *(name for name in more if name in known)]


async def _receipts(client: Any, names: list[str] | None) -> list[dict[str, Any]]:
    """Unloads these one after the other, or all models."""
    receipts: list[dict[str, Any]] = []
    for name in [ALL] if names is None else names:
        asked = {"all": True} if names is None else {"models": [name]}
        try:
            answered = await asyncio.wait_for(client.call("model.unload", asked), UNLOAD_SECONDS)
        except asyncio.TimeoutError:
            raise daemon.NodeError(f"{name} was not unloaded within {UNLOAD_SECONDS:.0f} s: `bulkhead why {name}` says why") from None
        receipts += answered["receipts"]
    return receipts


async def _memory(client: Any, names: list[str] | None, *, on: list[str] | None = None) -> dict[str, pictures.Memory]:
    """Measures each GPU that one of these models, or of all, is on, and the machine if a replica is
    on none. ``on``: these devices instead."""
    import psutil

    gpus = {name: gpu for gpu in (await client.gpus())["gpus"] if gpu["total_bytes"] for name in (gpu["uuid"], f"cuda:{gpu['index']}")}
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in await client.ps():
        if names is None or row["model"] in names:
            place = gpus[row["device"]]["uuid"] if row["device"] in gpus else "cpu"
            rows.setdefault(place, []).extend([row] if row["pid"] is not None else [])
    machine = psutil.virtual_memory()
    found = {}
    for place in on or [place for place in rows if rows[place]] or list(rows)[:1] or ["cpu"]:
        models = sum(sizes.of_process(row, place in gpus) for row in rows.get(place, []))
        if gpu := gpus.get(place):
            found[place] = pictures.Memory(f"cuda:{gpu['index']}", gpu["total_bytes"], gpu["total_bytes"] - gpu["free_bytes"], models)
        else:
            found[place] = pictures.Memory("cpu", machine.total, machine.total - machine.available, models)
    return found


class FleetStatus(_Acts):
    @classmethod
    def define_schema(cls) -> Any:
        return IO.Schema(
            node_id="BulkheadStatus",
            display_name="Fleet Status (Bulkhead)",
            category=CATEGORY,
            description="The models of the daemon, their states and their memory.",
            inputs=[_after()],
            outputs=[IO.String.Output("text"), IO.String.Output("json")],
            is_output_node=True,
        )

    @classmethod
    async def execute(cls, after: Any = None) -> Any:
        rows, text = await running.interruptible(_status())
        return IO.NodeOutput(text, json.dumps(rows), ui=UI.PreviewText(text))


async def _status() -> tuple[list[dict[str, Any]], str]:
    async with daemon.connected() as client:
        info, rows = await client.info(), await client.ps()
    lines = [f"bulkhead {info['version']}, {info['fleet']}"]
    for row in rows:
        lines.append(f"{row['model']}/{row['replica']}: {row['state']} on {row['device']}, {sizes.text(sizes.held(row))}, "
                     f"{row['requests']} requests, {row['errors']} errors, {row['restarts']} restarts")  # fmt: skip
    return rows, "\n".join(lines)
