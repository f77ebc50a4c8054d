"""Which of ComfyUI's devices a worker is on."""

from __future__ import annotations

from typing import Any


def device_of(row: dict[str, Any]) -> Any:
    """Returns ComfyUI's object for the worker's GPU, found by UUID. ``cpu`` for a worker on the CPU, and for one on a GPU
    that ComfyUI does not use: ComfyUI cannot give that memory to another model."""
    import torch
    from comfy import model_management

    uuid = gpu_uuid(row["device"])
    for device in model_management.get_all_torch_devices():
        if uuid is not None and device.type == "cuda" and uuid_of(device) == uuid:
            return device
    return torch.device("cpu")


def gpu_uuid(device: str) -> str | None:
    """Parses the daemon's ``cuda:1`` or ``GPU-…``; None for the CPU."""
    from .daemon import ask

    if device.startswith("GPU-"):
        return device.removeprefix("GPU-")
    if not device.startswith("cuda:"):
        return None
    for gpu in ask("gpu.status")["gpus"]:
        if gpu["index"] == int(device.removeprefix("cuda:")):
            return str(gpu["uuid"]).removeprefix("GPU-")
    return None


def uuid_of(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
