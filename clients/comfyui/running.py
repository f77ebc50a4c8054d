"""A node's work under ComfyUI's eyes: an interrupt ends it, progress is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from .limits import CANCEL_SECONDS, INTERRUPT_POLL_SECONDS

T = TypeVar("T")


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the user interrupts, and when ComfyUI drops the prompt. The client
    cancels its request then."""
    from comfy import model_management

    task = asyncio.ensure_future(work)
    try:
        while not task.done() and not model_management.processing_interrupted():
            await asyncio.wait({task}, timeout=INTERRUPT_POLL_SECONDS)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
    if task.done() and not task.cancelled():
        task.exception()  # it was looked at: an interrupt comes before it
    model_management.throw_exception_if_processing_interrupted()
    return task.result()


async def show(done: float, total: float, preview: Any = None) -> None:
    """The node's progress bar, and an image beside it."""
    from comfy_api.latest import ComfyAPI

    await ComfyAPI().execution.set_progress(done, max(total, done, 1), preview_image=preview)


def write(text: str) -> None:
    """On the node, in place of what was written there before."""
    from comfy_execution.utils import get_executing_context
    from server import PromptServer

    page = PromptServer.instance
    page.send_progress_text(text, get_executing_context().node_id, page.client_id)
