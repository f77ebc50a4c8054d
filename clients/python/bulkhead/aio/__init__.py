"""The client for asyncio.

    async with bulkhead.aio.connect() as b:
        out = await b.infer("minilm", input_ids=x)
        async for part in b.stream("llm", tokens=prompt):
            ...

All objects belong to the loop that opened them. Cancelling a task cancels its request. Tasks that
infer with one model share its channel; requests beyond its limit in flight wait their turn.
"""

from .channel import Channel
from .client import Client, connect
from .control import Notifications

__all__ = ["Channel", "Client", "Notifications", "connect"]
