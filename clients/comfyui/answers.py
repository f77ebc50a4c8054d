"""One request to a model: loaded, listed with ComfyUI, asked, and its answer copied out of the
memory shared with the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

from . import daemon, fleet_file, form, learnt, manager, running
from .limits import REQUEST_SECONDS

RUNNING = ("ready", "busy")


class Answer(NamedTuple):
    tensors: dict[str, Any]  #: torch tensors of ComfyUI's own memory
    values: dict[str, Any]


Part = Callable[[Answer], Awaitable[None]]


async def ask(model: str, method: str | None, values: dict[str, Any], part: Part) -> Answer:
    """Asks the model once. A user's interrupt cancels it. ``method`` None: the model's only method.
    ``part`` receives the parts of a stream."""
    return await running.interruptible(_ask(model, method, values, part))


async def _ask(model: str, method: str | None, values: dict[str, Any], part: Part) -> Answer:
    async with daemon.connected() as client:
        rows = await load(client, model)
        async with await client.open(model) as channel:
            learnt.learn(model, channel.methods)
            name = _method(model, method, channel.methods)
            tensors, parameters = form.request(channel.methods[name], values, of=f"{model}.{name}")
            patchers = manager.enlist(rows)
            manager.measure(patchers)
            answer = Answer({}, {})
            async with aclosing(channel.stream(tensors, method=name, parameters=parameters, deadline=REQUEST_SECONDS)) as replies:
                async for reply in replies:
                    answer, more = Answer({one: tensor.torch() for one, tensor in reply.items()}, reply.values_json), reply.more
                    # It looks at the worker's memory, and an interrupt leaves this frame
                    # in a traceback.
                    del reply
                    if more and "progress" in answer.values:
                        await running.show(answer.values["progress"]["done"], answer.values["progress"]["total"])
                    elif more:
                        await part(answer)
            if any(row["pid"] is None for row in rows):  # its language model, which is loaded now
                patchers = manager.enlist_loaded([row["model"] for row in rows]) or patchers
            manager.measure(patchers)
            return answer


def _method(model: str, name: str | None, methods: dict[str, Any]) -> str:
    if name is None and len(methods) == 1:
        return str(next(iter(methods)))
    if name is not None and name in methods:
        return name
    wanted = "more than one method" if name is None else f"no method {name!r}"
    raise daemon.NodeError(f"{model} has {wanted}: it has {', '.join(methods)}. Choose another model, or the node Run Any Model")


async def load(client: Any, model: str) -> list[dict[str, Any]]:
    """Loads the model. Returns its row and that of its language model, if it uses one, which is
    loaded only for the first request. First asks ComfyUI for the room of both; shows the load's
    progress on the node."""
    rows = _rows(await client.ps(), model)
    if absent := [row for row in rows if row["state"] not in RUNNING]:
        manager.make_room(absent, [row["model"] for row in rows])
    if rows[0]["state"] in RUNNING:
        return rows
    manager.enlist(rows)
    async with await client.events(model) as events:
        watching = asyncio.ensure_future(_progress(events))
        try:
            await client.load(model)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
    return _rows(await client.ps(), model)


async def _progress(events: Any) -> None:
    async for event in events:
        if event.get("event") == "progress":
            await running.show(event["done"], event["total"])


def _rows(rows: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """Of the model, and of its language model if it uses one: the first replica that runs, else
    the first."""
    ordered = sorted(rows, key=lambda row: row["state"] not in RUNNING)
    found = [next((row for row in ordered if row["model"] == name), None) for name in fleet_file.with_language_model(model)]
    if found[0] is None:
        raise daemon.NodeError(f"the daemon has no model {model!r}: it has {', '.join(sorted({row['model'] for row in rows})) or 'none'}. "
                               "Press R, and choose one, or add it to the fleet file and run `bulkhead reload`")  # fmt: skip
    return [row for row in found if row is not None]
