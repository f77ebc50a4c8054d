"""Copies an engine's results once into memory that the client reads."""

from __future__ import annotations

from typing import Any, Mapping

from ..engine import Method, Result
from ..errors import Error
from ..tensors import ITEM_BYTES, Source, dtype_name, element_count
from . import declaration
from .messages import Output, json_text
from .requests import Request


def write(request: Request, returned: object, *, whole: bool) -> tuple[list[Output], bytes]:
    """Returns the outputs in the method's order, and the values as JSON. ``whole``: the answer,
    which has all outputs; a part may have some. Raises ``inference_failed``,
    ``resources_exhausted``; then frees what it allocated."""
    method = request.method
    tensors, values = _split(method, returned)
    text = json_text(values)
    outputs: list[Output] = []
    try:
        for declared in method.outputs:
            if declared.name in tensors:
                outputs.append(_place(request, declared.name, tensors.pop(declared.name)))
            elif whole:
                raise Error("inference_failed", f'{method.name} returned no "{declared.name}"', "return every output that the method declares")
        if tensors:
            raise Error("inference_failed", f"{method.name} returned {', '.join(tensors)}, which it does not declare",
                        "declare it as an output, or return it in `values`")  # fmt: skip
    except BaseException:
        for output in outputs:
            request.session.slabs.release(output.lease)
        raise
    return outputs, text


def _split(method: Method, returned: object) -> tuple[dict[str, Any], dict[str, Any]]:
    if isinstance(returned, Result):
        return dict(returned.tensors), returned.values
    if isinstance(returned, Mapping):
        return dict(returned), {}
    if returned is None and not method.outputs:
        return {}, {}
    raise Error("inference_failed", f"{method.name} returned {type(returned).__name__}",
                "return a Result, or a dict of its outputs" + (": what a generator returns is the whole answer" if method.streams else ""))  # fmt: skip


def _place(request: Request, name: str, value: Any) -> Output:
    method = request.method
    declared = next(output for output in method.outputs if output.name == name)
    copy = _Copy(value, declared.dtype)
    declaration.check_output(method, declared, copy.dtype, copy.shape)
    size_bytes = element_count(copy.shape) * ITEM_BYTES[copy.dtype]
    lease, room = request.session.slabs.allocate(size_bytes)
    try:
        if size_bytes:
            copy.into(room)
    except BaseException:
        request.session.slabs.release(lease)
        raise
    return Output(name, copy.dtype, copy.shape, lease)


class _Copy:
    """One tensor of any library, to be copied once."""

    def __init__(self, value: Any, wanted: str) -> None:
        self._value = value
        kind = type(value).__module__.partition(".")[0]
        self._is_torch = kind == "torch"
        self._is_numpy = kind == "numpy" and hasattr(value, "shape")
        self._source = None if self._is_torch or self._is_numpy else Source.of(value, wanted)
        self.dtype: str = self._source.dtype if self._source else dtype_name(value.dtype)
        self.shape: tuple[int, ...] = self._source.shape if self._source else tuple(value.shape)

    def into(self, room: memoryview) -> None:
        if self._source is not None:
            room[:] = self._source.data
        elif self._is_torch:
            import torch

            target = torch.frombuffer(room, dtype=getattr(torch, self.dtype)).reshape(self.shape)
            # From a GPU too; waits for the stream that computes it.
            target.copy_(self._value.detach())
        else:
            import numpy

            numpy.copyto(numpy.frombuffer(room, self.dtype).reshape(self.shape), self._value)
