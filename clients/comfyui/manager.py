"""The models that ComfyUI's model management lists, so that its Unload button, /free, its own need
of memory and --disable-smart-memory reach them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from . import daemon, fleet_file, learnt, sizes
from .devices import device_of
from .limits import LOOK_AGE_SECONDS, UNLOAD_SECONDS
from .patcher import Patcher

#: ComfyUI holds weak references only. One for each model: a second one would list it twice.
_patchers: dict[str, Patcher] = {}


def make_room(absent: list[dict[str, Any]], used: list[str]) -> None:
    """Asks ComfyUI to free what loads of these rows will take together: it does not see what other
    processes need. Of the models ``used``, none is unloaded for it."""
    from comfy import model_management

    needed: dict[Any, int] = {}
    for row in absent:
        device = _device(row)
        needed[device] = needed.get(device, 0) + sizes.expected(row)
    mine = [_patchers[model] for model in used if model in _patchers]
    kept = [one for one in model_management.current_loaded_models if one.model in mine]
    for device, size in needed.items():
        if size > 0 and device.type != "cpu":
            model_management.free_memory(size + model_management.extra_reserved_memory(), device, keep_loaded=kept)


def enlist(rows: list[dict[str, Any]]) -> list[Patcher]:
    """Lists models that are used together, on ComfyUI's thread. Call it before a load, so that
    Unload Models can end what an interrupt does not; and before each request, since ComfyUI may
    have detached a model, or needs memory itself."""
    from comfy import model_management

    patchers = [_patcher_on(row["model"], _device(row)) for row in rows]
    try:
        daemon.rows()  # with the process that may just have been loaded
    except Exception as error:  # a busy daemon answers late
        for row, patcher in zip(rows, patchers):
            logging.warning("Bulkhead: %s is listed with the size that was told before: %s", patcher.name, error)
            if row["pid"] is not None:
                patcher.assume(sizes.of_process(row, patcher.load_device.type != "cpu"))
    model_management.load_models_gpu(patchers)
    return patchers


def enlist_again() -> None:
    """Call when ComfyUI starts: lists the models that it used in its last run and that
    are still loaded."""
    try:
        models = {row["model"] for row in daemon.rows()}
        used = {name for model in models if learnt.methods(model) for name in fleet_file.with_language_model(model)}
    except Exception as error:  # whatever it is, ComfyUI must start
        logging.debug("Bulkhead: it is not known which models are loaded: %s", error)
        return
    enlist_loaded(used)


def enlist_loaded(models: Collection[str]) -> list[Patcher]:
    """Lists those of the models that have a process. Never raises."""
    try:
        loaded = {row["model"]: row for row in reversed(daemon.rows()) if row["pid"] is not None and row["model"] in models}
        return enlist(list(loaded.values())) if loaded else []
    except Exception as error:
        logging.debug("Bulkhead: it is not known which models are loaded: %s", error)
        return []


def measure(patchers: list[Patcher]) -> None:
    """Keeps the sizes of loaded models, for which the next load asks room. Call it after a run too:
    memory grows while a model runs."""
    for patcher in patchers:
        if size := patcher.loaded_size():
            learnt.learn_size(patcher.name, size)


def is_reached(patcher: Patcher) -> bool:
    """Does Unload Models cover its device? It covers those that ComfyUI computes on."""
    from comfy import model_management

    return patcher.load_device in model_management.get_all_torch_devices()


def _device(row: dict[str, Any]) -> Any:
    from comfy import model_management

    return device_of(row) if row["device"] != "auto" else model_management.get_torch_device()


def _patcher_on(model: str, device: Any) -> Patcher:
    patcher = _patchers.get(model)
    if patcher is None or patcher.load_device != device:
        patcher = _patchers[model] = Patcher(
            model,
            device,
            lambda: sum(sizes.of_process(row, device.type != "cpu") for row in _rows(model) if row["pid"] is not None and device_of(row) == device),
            lambda: max(map(sizes.expected, _rows(model)), default=0),
            lambda: unload(model),
        )
    return patcher


def _rows(model: str) -> list[dict[str, Any]]:
    return [row for row in daemon.rows(age=LOOK_AGE_SECONDS / 10) if row["model"] == model]


def unload(model: str) -> None:
    """Ends the model, then its language model, which one that still worked would have loaded
    again. Blocks until the daemon has the memory back, at most for each one's own deadlines and
    ours."""
    first, *more = fleet_file.with_language_model(model)
    known = {row["model"] for row in daemon.rows()} if more else set()
    for name in [first, *(name for name in more if name in known)]:
        for receipt in daemon.ask("model.unload", {"models": [name]}, deadline=UNLOAD_SECONDS)["receipts"]:
            logging.info("Bulkhead: %s", sentence(receipt))
    daemon.rows()


def sentence(receipt: dict[str, Any]) -> str:
    text = f"{receipt['model']} is unloaded: {sizes.text(sizes.held(receipt))} came back in {receipt['ms'] / 1000:.2f} s, {receipt['ended']}"
    if receipt["verified"]:
        return text + ", verified"
    held = ", ".join(f"{one['name']} ({one['pid']}) holds {sizes.text(one['bytes'])}" for one in receipt["held_by"])
    return text + ", not verified" + (f": {held}" if held else "")
