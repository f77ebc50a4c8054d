"""Bulkhead's nodes for ComfyUI: each model in a process of its own, whose memory comes back when
it is unloaded."""

from __future__ import annotations

from typing import Any


async def comfy_entrypoint() -> Any:
    """ComfyUI calls it once. It needs neither a daemon nor the client: the nodes say
    what is missing."""
    from comfy_api.latest import ComfyExtension

    from . import manager
    from .nodes_fleet import FleetStatus, LoadModel, UnloadModel
    from .nodes_run import GenerateSpeech, RunAnyModel, VisionLanguage

    manager.enlist_again()

    class Bulkhead(ComfyExtension):
        async def get_node_list(self) -> list[Any]:
            return [LoadModel, UnloadModel, FleetStatus, GenerateSpeech, VisionLanguage, RunAnyModel]

    return Bulkhead()
