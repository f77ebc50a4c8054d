"""Client of Bulkhead, which runs each GPU model in its own process.

    import bulkhead
    with bulkhead.connect() as b:
        out = b.infer("minilm", input_ids=ids, attention_mask=mask)
        vector = out["embedding"].numpy()

Needs only Python. Tensors go in as numpy arrays, objects with DLPack or the buffer protocol, or
nested lists; they come out as views of the memory shared with the worker.
"""

from . import aio
from .channel import Channel
from .client import Client, connect
from .control import Notifications
from .errors import Error
from .generation import AsyncGeneration, Generation
from .protocol import Reply, Request
from .shared_tensors import Input, Output

__all__ = ["AsyncGeneration", "Channel", "Client", "Error", "Generation", "Input", "Notifications", "Output", "Reply", "Request", "aio", "connect"]
__version__ = "0.1.0"
