"""The models that ComfyUI's model management lists, so that its Unload button, /free, its own need
of memory and --disable-smart-memory reach them."""

from __future__ import annotations

import logging
from typing import Any

from . import daemon, learnt, sizes
from .devices import device_of
from .limits import LOOK_AGE_SECONDS, UNLOAD_SECONDS
from .patcher import Patcher

#: ComfyUI holds weak references only. One for each model: a second one would list it twice.
_patchers: dict[str, Patcher] = {}


def make_room(model: str, row: dict[str, Any]) -> None:
    """Asks ComfyUI to free what a load will take: it does not see what other processes need."""
    from comfy import model_management

    device = _device(row)
    needed = sizes.expected(row)
    if needed > 0 and device.type != "cpu":
        model_management.free_memory(needed + model_management.extra_reserved_memory(), device)


def enlist(model: str, row: dict[str, Any]) -> Patcher:
    """Lists the model, on ComfyUI's thread. Call it before a load, so that Unload Models can end
    what an interrupt does not; and before each request, since ComfyUI may have detached the model,
    or needs memory itself."""
    from comfy import model_management

    device = _device(row)
    patcher = _patchers.get(model)
    if patcher is None or patcher.load_device != device:
        patcher = _patchers[model] = _patcher(model, device)
    try:
        daemon.rows()  # with the process that may just have been loaded
    except Exception as error:  # a busy daemon answers late
        logging.warning("Bulkhead: %s is listed with the size that was told before: %s", model, error)
        if row["pid"] is not None:
            patcher.assume(sizes.of_process(row, device.type != "cpu"))
    model_management.load_models_gpu([patcher])
    return patcher


def enlist_again() -> None:
    """Call when ComfyUI starts: lists the models that it used in its last run and that
    are still loaded."""
    try:
        for row in daemon.rows():
            if row["pid"] is not None and learnt.methods(row["model"]):
                enlist(row["model"], row)
    except Exception as error:  # whatever it is, ComfyUI must start
        logging.debug("Bulkhead: it is not known which models are loaded: %s", error)


def measure(patcher: Patcher) -> None:
    """Keeps the size of a loaded model, for which the next load asks room. Call it after a run too:
    memory grows while a model runs."""
    if size := patcher.loaded_size():
        learnt.learn_size(patcher.name, size)


def is_reached(patcher: Patcher) -> bool:
    """Does Unload Models cover its device? It covers those that ComfyUI computes on."""
    from comfy import model_management

    return patcher.load_device in model_management.get_all_torch_devices()


def _device(row: dict[str, Any]) -> Any:
    from comfy import model_management

    return device_of(row) if row["device"] != "auto" else model_management.get_torch_device()


def _patcher(model: str, device: Any) -> Patcher:
    return Patcher(
        model,
        device,
        lambda: sum(sizes.of_process(row, device.type != "cpu") for row in _processes(model) if device_of(row) == device),
        lambda: max(map(sizes.expected, _rows(model)), default=0),
        lambda: unload(model),
    )


def _rows(model: str) -> list[dict[str, Any]]:
    return [row for row in daemon.rows(age=LOOK_AGE_SECONDS / 10) if row["model"] == model]


def _processes(model: str) -> list[dict[str, Any]]:
    return [row for row in _rows(model) if row["pid"] is not None]


def unload(model: str) -> None:
    """Blocks until the daemon has the memory back, at most for the model's own
    deadlines and ours."""
    for receipt in daemon.ask("model.unload", {"models": [model]}, deadline=UNLOAD_SECONDS)["receipts"]:
        logging.info("Bulkhead: %s", sentence(receipt))
    daemon.rows()


def sentence(receipt: dict[str, Any]) -> str:
    text = f"{receipt['model']} is unloaded: {sizes.text(sizes.held(receipt))} came back in {receipt['ms'] / 1000:.2f} s, {receipt['ended']}"
    if receipt["verified"]:
        return text + ", verified"
    held = ", ".join(f"{one['name']} ({one['pid']}) holds {sizes.text(one['bytes'])}" for one in receipt["held_by"])
    return text + ", not verified" + (f": {held}" if held else "")
