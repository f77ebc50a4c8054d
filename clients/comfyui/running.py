"""A node's work within ComfyUI: an interrupt ends it, and its progress is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from .limits import CANCEL_SECONDS, INTERRUPT_POLL_SECONDS

T = TypeVar("T")


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``. Cancels it when the user interrupts or ComfyUI drops the
    prompt; the client then cancels its request."""
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
    """Replaces the text on the node."""
    from comfy_execution.utils import get_executing_context
    from server import PromptServer

    page = PromptServer.instance
    page.send_progress_text(text, get_executing_context().node_id, page.client_id)
