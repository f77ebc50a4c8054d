"""The mode that watches Python functions that reach no operator."""

from __future__ import annotations

import contextlib
import copy
import sys
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from ...errors import Error
from ..source import here
from . import values
from .cuda import CudaGenerator
from .origins import is_of_gpu, is_pinned, read_before
from .watch import DRAWN, PINNED, CustomOperator, Watch, stand_in

_LIST_ELEMENTS_MAX = 1 << 24  #: of a list that stands in for unknown values
_TEXTS = frozenset(("__repr__", "__format__", "__str__"))


class Functions(TorchFunctionMode):  # type: ignore[misc]
    """Functions that reach no operator, or that a fake tensor refuses."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        with self._watch.function(name, first.device if first is not None and name == "new_tensor" else kwargs.get("device")):
            if isinstance(generator := kwargs.get("generator"), CudaGenerator):
                if not generator.is_registered:
                    self._watch.refuse(DRAWN, name)
                kwargs = {**kwargs, "generator": None}
            if first is not None and name in _TEXTS:
                return self._text(first, name, args)
            if first is not None and name in ("numpy", "__array__"):
                return self._array(first, args)
            if name == "pin_memory" and first is not None:
                self._watch.refuse(PINNED)
                first._doctor_pinned = True
                return first
            if name == "is_pinned" and first is not None:
                return is_pinned(first)
            if name == "__reduce_ex__" and first is not None:
                return self._pickled(first, args[1])
            if name == "tensor_split" and first is not None and first.device.type == "cuda":
                args, kwargs = self._split(args, kwargs)
            if name == "__deepcopy__" and first is not None:
                return args[1].setdefault(id(first), first.clone())
            if name in ("data_ptr", "__dlpack__") and first is not None:
                if self._watch.step:
                    raise CustomOperator(f"Tensor.{name}() at {here() or self._watch.target}: a fake tensor has no memory, so "
                                         "what is done there is not known")  # fmt: skip
                return id(first)
            if kwargs.pop("pin_memory", False):
                self._watch.refuse(PINNED)
                result = function(*args, **kwargs)
                result._doctor_pinned = True
                return result
            # How safetensors maps a file.
            if name == "asarray" and args and isinstance(args[0], torch.UntypedStorage):
                with no_dispatch():
                    return function(*args, **kwargs)
            if (
                name in ("tensor", "as_tensor", "asarray")
                and args
                and isinstance(args[0], (list, tuple))
                and _has_tensor(args[0])
            ):
                args = (tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, args[0]), *args[1:])
            if name == "scaled_dot_product_attention":
                with sdpa_kernel(SDPBackend.MATH):  # the others ask the driver
                    return function(*args, **kwargs)
            if name in ("stft", "istft") and len(args) > 0:
                args, kwargs = self._same_device(name, args, kwargs)
            return function(*args, **kwargs)

    def _same_device(self, name: str, args: Any, kwargs: Any) -> Any:
        window = kwargs.get("window")
        if isinstance(window, torch.Tensor) and window.device != args[0].device:
            self._watch.met(window if window.device.type == "cpu" else args[0], name, is_number=False)
            outside = getattr(torch.overrides, "_no_torch_function_mode", contextlib.nullcontext)
            with outside():
                kwargs = {**kwargs, "window": torch.empty_like(window, device=args[0].device)}
        return args, kwargs

    def _text(self, tensor: Any, name: str, args: Any) -> str:
        if tensor.device.type == "cuda":
            self._watch.read()
        if name == "__format__" and tensor.dim() == 0:
            return format(values.asked(tensor, lambda one: one.item(), stand_in(tensor.dtype)), args[1])
        return f"tensor(…, size={tuple(tensor.shape)})"

    def _pickled(self, tensor: Any, protocol: int) -> Any:
        """What `pickle` and `torch.save` take of a tensor: its values, or a zero
        for all of them."""
        if _is_copied_shallowly():
            return torch.ops.aten.alias.default, (tensor,)
        if tensor.device.type == "cuda":
            self._watch.read()
        value = values.known(tensor)
        with no_dispatch():
            real = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if value is None else value
            return torch.Tensor.__reduce_ex__(real, protocol)

    def _split(self, args: Any, kwargs: Any) -> Any:
        """Of `tensor_split` by a tensor, which lies on the CPU: by its values."""
        rest = dict(kwargs)
        at = args[1] if len(args) > 1 else rest.pop("tensor_indices_or_sections", None)
        if not isinstance(at, torch.Tensor) or at.device.type != "cpu":
            return args, kwargs
        if read_before(at) is None:  # of others the finding is the read
            self._watch.met(at, "tensor_split", is_number=True)
        return (args[0], self._list(at), *args[2:]), rest

    def _array(self, tensor: Any, args: Any) -> Any:
        if tensor.device.type == "cuda":
            self._watch.read()
        value, array = values.known(tensor), values.array(tensor)
        if is_of_gpu(tensor):
            self._watch.not_taken(array, value is not None and not values.is_assumed(tensor), read_before(tensor))
        return array.astype(args[1], copy=False) if len(args) > 1 and args[1] is not None else array

    def whole_lists(self) -> Any:
        """While entered, `tolist` reads all values at once: a fake tensor's own reads each."""
        return mock.patch.object(fake_tensor.FakeTensor, "tolist", lambda tensor: self._list(tensor))

    def _list(self, tensor: Any) -> Any:
        if tensor.device.type == "cuda":
            self._watch.read()
        value, assumed = values.known(tensor), values.is_assumed(tensor)
        if value is not None and (not assumed or not value.numel()):
            read = values.asked(tensor, lambda one: one.tolist())
            if tensor.device.type == "cuda":
                # The user may change it.
                read = copy.deepcopy(self._watch.answer(read, tensor.dtype, True))
        else:
            item = self._watch.answer(values.asked(tensor, lambda one: one.flatten()[0].item()), tensor.dtype, True, assumed)
            if tensor.numel() > _LIST_ELEMENTS_MAX:
                raise Error("input_invalid", f"{here() or self._watch.target} reads {tensor.numel()} values into Python, of "
                                             f"which the doctor makes at most {_LIST_ELEMENTS_MAX}",
                            "keep them a tensor; or give smaller inputs")  # fmt: skip
            with no_dispatch():
                read = torch.full(tuple(tensor.shape), item, dtype=tensor.dtype).tolist()
        if is_of_gpu(tensor):
            self._watch.not_taken(read, value is not None and not assumed, read_before(tensor))
        return read


def _has_tensor(value: Any) -> bool:
    """Quick for a list of many numbers."""
    return any(map(_has_tensor, value)) if isinstance(value, (list, tuple)) else isinstance(value, torch.Tensor)


def _is_copied_shallowly() -> bool:
    """Whether it is `copy.copy` that asks: nothing is read."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, torch._tensor.__file__, torch.overrides.__file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == copy.__file__
