"""The same for asyncio.

    async with bulkhead.aio.connect() as b:
        out = await b.infer("minilm", input_ids=x)
        async for part in b.stream("llm", tokens=prompt):
            ...

Everything belongs to the loop that it was opened on. Cancelling a task cancels its request. Tasks that infer with one model
share its channel; what exceeds the requests that may be in flight there waits its turn.
"""

from .channel import Channel
from .client import Client, connect
from .control import Notifications

__all__ = ["Channel", "Client", "Notifications", "connect"]
