"""As much of ``comfy_api.latest`` as the pack's nodes are declared with: each input and output is
noted as it was said."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any


class _Kind:
    """``IO.Audio`` and the like."""

    def __init__(self, name: str) -> None:
        self.name = name

    def Input(self, id: Any, *rest: Any, **told: Any) -> SimpleNamespace:
        return SimpleNamespace(kind=self.name, id=getattr(id, "id", id), told=told)

    def Output(self, id: str = "", **told: Any) -> SimpleNamespace:
        return SimpleNamespace(kind=self.name, id=id, told=told)

    def Option(self, key: str, inputs: list[Any]) -> SimpleNamespace:
        return SimpleNamespace(key=key, inputs=inputs)


class _Kinds:
    ComfyNode = object

    @staticmethod
    def Schema(**told: Any) -> SimpleNamespace:
        return SimpleNamespace(**told)

    @staticmethod
    def NodeOutput(*args: Any, **told: Any) -> SimpleNamespace:
        return SimpleNamespace(args=args, **told)

    def __getattr__(self, name: str) -> _Kind:
        return _Kind(name)


class ExecutionBlocker:
    def __init__(self, message: str) -> None:
        self.message = message


#: (done, total, whether there was a picture)
progress: list[tuple[float, float, bool]] = []
#: What was written on the node, its number, and the page that was told.
written: list[tuple[str, str, str]] = []


class ComfyAPI:
    @property
    def execution(self) -> ComfyAPI:
        return self

    async def set_progress(self, value: float, max_value: float, preview_image: Any = None) -> None:
        progress.append((value, max_value, preview_image is not None))


def install(user_folder: str) -> None:
    latest = types.ModuleType("comfy_api.latest")
    latest.__dict__.update(IO=_Kinds(), UI=SimpleNamespace(PreviewText=lambda text: text), ComfyAPI=ComfyAPI, ComfyExtension=object)
    package, execution = types.ModuleType("comfy_api"), types.ModuleType("comfy_execution")
    graph, paths = types.ModuleType("comfy_execution.graph_utils"), types.ModuleType("folder_paths")
    utils, server = types.ModuleType("comfy_execution.utils"), types.ModuleType("server")
    graph.__dict__.update(ExecutionBlocker=ExecutionBlocker)
    utils.__dict__.update(get_executing_context=lambda: SimpleNamespace(node_id="7"))
    page = SimpleNamespace(client_id="page", send_progress_text=lambda *told: written.append(told))
    server.__dict__.update(PromptServer=SimpleNamespace(instance=page))
    paths.__dict__.update(get_user_directory=lambda: user_folder)
    sys.modules.update({"comfy_api": package, "comfy_api.latest": latest, "comfy_execution": execution,
                        "comfy_execution.graph_utils": graph, "comfy_execution.utils": utils, "folder_paths": paths, "server": server})  # fmt: skip
