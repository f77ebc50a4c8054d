"""Nodes that ask models: speech, vision-language, and any."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from comfy_api.latest import IO, UI

from . import answers, daemon, form, layouts, menus, nodes_fleet, pictures, running
from .limits import PREVIEW_SECONDS
from .nodes_fleet import CATEGORY


class GenerateSpeech(IO.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return IO.Schema(
            node_id="BulkheadSpeech",
            display_name="Generate Speech (Bulkhead)",
            category=CATEGORY,
            description="Speaks a text, with the voice of a recording where the model can.",
            inputs=[menus.of_method("speak", "text", apart=("reference",)), IO.Audio.Input("reference", optional=True, tooltip="A voice: Load Audio uploads one.")],
            outputs=[IO.Audio.Output("audio"), IO.String.Output("info")],
            accept_all_inputs=True,
        )

    @classmethod
    async def execute(cls, reference: Any = None, **inputs: Any) -> Any:
        model, values = form.chosen(inputs)
        if not str(values.get("text", "")).strip():
            raise daemon.NodeError("the text is empty: write what the model shall speak")
        if reference is not None:
            values["reference"] = reference
        answer = await answers.ask(model, "speak", values, Heard().part)
        if "audio" not in answer.tensors:
            raise daemon.NodeError(f"{model} gave no `audio`: it gave {layouts.as_json(answer.values, answer.tensors)}")
        sound = layouts.audio(answer.tensors["audio"], answer.values.get("sample_rate"))
        return IO.NodeOutput(sound, layouts.as_json(answer.values, {}))


class Heard:
    """Shows the sound so far as the node's preview. Its final length is unknown: the bar only shows
    that work goes on."""

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self._shown = 0.0

    async def part(self, answer: answers.Answer) -> None:
        import torch

        if "audio" in answer.tensors:
            self._parts.append(answer.tensors["audio"].reshape(-1, answer.tensors["audio"].shape[-1]))
        if self._parts and time.monotonic() - self._shown >= PREVIEW_SECONDS:
            self._shown = time.monotonic()
            sound = torch.cat(self._parts, dim=-1)
            await running.show(len(self._parts), 2 * len(self._parts), pictures.waveform(sound))


class VisionLanguage(IO.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return IO.Schema(
            node_id="BulkheadVision",
            display_name="Vision Language (Bulkhead)",
            category=CATEGORY,
            description="Answers a prompt about images or a video, or without any.",
            inputs=[
                menus.of_method("answer", "prompt", apart=("images", "video")),
                IO.Image.Input("images", optional=True),
                IO.Image.Input("video", optional=True, tooltip="The frames of one video."),
                IO.Boolean.Input("keep_model_loaded", default=True, optional=True,
                                 tooltip="Off: its process ends after the answer. It is one process for all nodes that use the model."),
            ],
            outputs=[IO.String.Output("text"), IO.String.Output("info")],
            accept_all_inputs=True,
        )  # fmt: skip

    @classmethod
    async def execute(cls, images: Any = None, video: Any = None, keep_model_loaded: bool = True, **inputs: Any) -> Any:
        model, values = form.chosen(inputs)
        if not str(values.get("prompt", "")).strip():
            raise daemon.NodeError("the prompt is empty: write a question")
        values |= {name: value for name, value in (("images", images), ("video", video)) if value is not None}
        async with _kept(model, keep_model_loaded):
            answer = await answers.ask(model, "answer", values, Written().part)
        text = answer.values.get("text")
        if not isinstance(text, str):
            raise daemon.NodeError(f"{model} gave no `text`: it gave {layouts.as_json(answer.values, answer.tensors)}")
        running.write(text)
        info = layouts.as_json({name: value for name, value in answer.values.items() if name != "text"}, {})
        return IO.NodeOutput(text, info, ui=UI.PreviewText(text))


@asynccontextmanager
async def _kept(model: str, keep: bool) -> AsyncIterator[None]:
    """Reports the error of the block even if unloading the model then fails too."""
    try:
        yield
    except BaseException:
        if not keep:
            try:
                await running.interruptible(nodes_fleet.unload(model))
            except Exception as error:
                logging.warning("Bulkhead: %s was not unloaded: %s", model, error)
        raise
    if not keep:
        await running.interruptible(nodes_fleet.unload(model))


class RunAnyModel(IO.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return IO.Schema(
            node_id="BulkheadRun",
            display_name="Run Any Model (Bulkhead)",
            category=CATEGORY,
            description="Runs a method of any model of the fleet. Its first tensor is given in each layout that it fits.",
            inputs=[menus.any_method()],
            outputs=[IO.String.Output("values"), IO.Image.Output("image"), IO.Mask.Output("mask"), IO.Latent.Output("latent"),
                     IO.Audio.Output("audio")],
            accept_all_inputs=True,
        )  # fmt: skip

    @classmethod
    async def execute(cls, **inputs: Any) -> Any:
        key, values = form.chosen(inputs)
        model, _, method = key.partition("/")
        answer = await answers.ask(model, method or None, values, Written().part)
        text = layouts.as_json(answer.values, answer.tensors)
        running.write(text)
        first = next(iter(answer.tensors.values()), None)
        laid = [_laid(first, layouts.image), _laid(first, layouts.mask), _laid(first, layouts.latent),
                _laid(first, lambda tensor: layouts.audio(tensor, answer.values.get("sample_rate")))]  # fmt: skip
        return IO.NodeOutput(text, *laid, ui=UI.PreviewText(text))


def _laid(tensor: Any, layout: Any) -> Any:
    """Converts an output to a layout of ComfyUI. If that fails, whoever uses the output
    gets the reason."""
    from comfy_execution.graph_utils import ExecutionBlocker

    if tensor is None:
        return ExecutionBlocker("the model gave no tensor: use the output `values`")
    try:
        return layout(tensor)
    except daemon.NodeError as error:
        return ExecutionBlocker(str(error))


class Written:
    """Shows the text so far on the node. The number of parts is unknown: the bar only shows
    that they come."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._shown = 0.0

    async def part(self, answer: answers.Answer) -> None:
        self._parts.append(str(answer.values.get("text", "")))
        await running.show(len(self._parts), 2 * len(self._parts))
        if time.monotonic() - self._shown >= PREVIEW_SECONDS and (text := "".join(self._parts)):
            self._shown = time.monotonic()
            running.write(text)
