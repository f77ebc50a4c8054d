"""Which of ComfyUI's devices a worker is on."""

from __future__ import annotations

import logging
from typing import Any

#: Of the last `gpu.status`.
_gpus: list[dict[str, Any]] = []


def device_of(row: dict[str, Any]) -> Any:
    """Returns ComfyUI's object for the worker's GPU, found by UUID. ``cpu`` for a worker on the
    CPU, and for one on a GPU that ComfyUI does not use: ComfyUI cannot give that memory to
    another model."""
    import torch
    from comfy import model_management

    uuid = gpu_uuid(row["device"])
    for device in model_management.get_all_torch_devices():
        if uuid is not None and device.type == "cuda" and uuid_of(device) == uuid:
            return device
    return torch.device("cpu")


def gpu_uuid(device: str) -> str | None:
    """Parses the daemon's ``cuda:1`` or ``GPU-…``; None for the CPU. If the daemon answers late,
    uses its last answer."""
    global _gpus
    from .daemon import ask

    if device.startswith("GPU-"):
        return device.removeprefix("GPU-")
    if not device.startswith("cuda:"):
        return None
    try:
        _gpus = ask("gpu.status")["gpus"]
    except Exception as error:
        logging.warning("Bulkhead: the GPU that %s names is looked up in the daemon's last answer: %s", device, error)
    for gpu in _gpus:
        if gpu["index"] == int(device.removeprefix("cuda:")):
            return str(gpu["uuid"]).removeprefix("GPU-")
    return None


def uuid_of(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
