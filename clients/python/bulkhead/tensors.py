"""Tensors for callers: inputs to fill in place, outputs to read in place."""

from __future__ import annotations

import math
import operator
from typing import Any, Iterator, Sequence

from . import dlpack
from .errors import Error
from .layout import DTYPE, LIMITS

DTYPE_NAMES: dict[int, str] = {value: "bool" if name == "boolean" else name for name, value in DTYPE.items()}
DTYPE_NUMBERS: dict[str, int] = {name: value for value, name in DTYPE_NAMES.items()}
ITEM_BYTES: dict[str, int] = {name: bits // 8 for name, (_, bits) in dlpack.CODES.items()}
# Formats of the struct module and of numpy's buffers; C's long has 8 bytes on all
# supported systems.
_FORMATS: dict[str, str] = {
    "bool": "?", "uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "float16": "e",
    "float32": "f", "float64": "d",
}  # fmt: skip
_BY_FORMAT = {code: name for name, code in _FORMATS.items()} | {"l": "int64", "Zf": "complex64", "Zd": "complex128"}

#: With the largest items, 16 bytes, the size still fits a signed 64-bit integer.
ELEMENTS_MAX = (1 << 59) - 1


def array_type(dtype: str) -> str:
    """The array interface's spelling, ``<f4``; for bfloat16, which it lacks, that of its bits."""
    if dtype in ("bool", "bfloat16"):
        return {"bool": "|b1", "bfloat16": "<u2"}[dtype]
    return f"{'|' if ITEM_BYTES[dtype] == 1 else '<'}{dtype[0]}{ITEM_BYTES[dtype]}"


def element_count(shape: Sequence[int]) -> int:
    return math.prod(shape)


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        dims = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise Error("shape_mismatch", f"a tensor of shape {shape!r}", "a shape is a sequence of whole numbers") from None
    if len(dims) > LIMITS["rank_max"] or any(size < 0 for size in dims):
        raise Error("shape_mismatch", f"a tensor of shape {list(dims)}", f"at most {LIMITS['rank_max']} sizes, none negative")
    if math.prod(max(size, 1) for size in dims) > ELEMENTS_MAX:
        raise Error("shape_mismatch", f"a tensor of shape {list(dims)}", f"at most {ELEMENTS_MAX} elements, sizes of 0 not counted")
    return dims


def dtype_name(dtype: Any) -> str:
    """Parses a name, or an object whose text ends in one: ``numpy.float32``, ``torch.bfloat16``,
    ``np.dtype("int64")``."""
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
    name = str(name).rsplit(".", 1)[-1].removesuffix("_")
    name = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int64"}.get(name, name)
    if name not in ITEM_BYTES:
        raise Error("dtype_unsupported", f"dtype {dtype}", "use one of " + ", ".join(ITEM_BYTES))
    return name


class TensorView:
    """Bytes with a dtype and a shape: the base of inputs and outputs.

    Nothing is copied: ``numpy()``, ``memoryview(t.data)`` and ``torch()`` are views of the slab,
    and keep the lease alive.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], data: memoryview | None) -> None:
        self.dtype = dtype
        self.shape = shape
        self._data = data

    @property
    def data(self) -> memoryview:
        """The bytes, row-major."""
        if self._data is None:
            raise Error("input_invalid", "using a tensor after it was released", "allocate another one")
        return self._data

    @property
    def device(self) -> tuple[int, int]:
        """As in DLPack: (1, 0) is the CPU, (2, n) the n-th GPU."""
        return dlpack.CPU, 0

    def cpu(self) -> TensorView:
        """Returns itself, or a copy of a GPU tensor in CPU memory."""
        return self

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return element_count(self.shape) * ITEM_BYTES[self.dtype]

    def numpy(self) -> Any:
        """A view of the slab; of ``uint16`` for bfloat16, which numpy lacks."""
        import numpy  # type: ignore[import-not-found, unused-ignore]

        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype
        if self.nbytes == 0:
            return numpy.empty(self.shape, dtype)
        return numpy.frombuffer(self.data, dtype).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def torch(self) -> Any:
        """A view of the slab if that is writable; an output is not, so it is copied."""
        import torch  # type: ignore[import-not-found, unused-ignore]

        kind = getattr(torch, self.dtype)
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=kind)
        source = self.data if not self.data.readonly else bytearray(self.data)
        return torch.frombuffer(source, dtype=kind).reshape(self.shape)

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        return dlpack.export(self, max_version=max_version, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def tolist(self) -> Any:
        """Nested lists, without numpy. Not for bfloat16 and complex dtypes."""
        if self.dtype not in _FORMATS:
            raise Error("dtype_unsupported", f"a list of {self.dtype}", "use numpy() or torch()")
        if self.nbytes == 0:
            return _empty_list(self.shape)
        code: Any = _FORMATS[self.dtype]
        return self.data.cast(code, self.shape).tolist()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar tensor has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}, shape={list(self.shape)})"


def _empty_list(shape: tuple[int, ...]) -> Any:
    return [_empty_list(shape[1:]) for _ in range(shape[0])] if shape else []


class Source:
    """Any input value as contiguous bytes: ``data`` in CPU memory, or at ``address`` on a GPU."""

    def __init__(self, dtype: str, shape: tuple[int, ...], data: memoryview, keep: object = None,
                 device: tuple[int, int] = (dlpack.CPU, 0), address: int = 0) -> None:  # fmt: skip
        self.dtype, self.shape, self.data, self.keep = dtype, shape, data, keep
        self.device, self.address = device, address

    @classmethod
    def of(cls, value: Any, wanted: str | None, stream: int | None = None) -> Source:
        """``wanted``: the method's declared dtype, for values without one. ``stream``: the stream
        that will read GPU tensors; without it they are refused."""
        if isinstance(value, TensorView) and value.device[0] == dlpack.CPU:
            return cls(value.dtype, value.shape, value.data, value)
        if not isinstance(value, (list, tuple, int, float, bool, bytes, bytearray, TensorView)):
            try:
                view = memoryview(value)
            except (TypeError, BufferError, ValueError):
                pass
            else:
                return cls._of_buffer(view)
        if hasattr(value, "__dlpack__"):
            return cls._of_dlpack(value, stream)
        if isinstance(value, (bytes, bytearray)):
            return cls("uint8", (len(value),), memoryview(value))
        if isinstance(value, (list, tuple, int, float, bool)):
            return cls._of_list(value, wanted)
        raise Error("input_invalid", f"a {type(value).__name__} as a tensor",
                    "pass a buffer (numpy, array, bytes), anything with __dlpack__, or nested lists")

    @classmethod
    def _of_buffer(cls, view: memoryview) -> Source:
        name = _BY_FORMAT.get(view.format.lstrip("@=<"))
        if name is None or (view.format.startswith((">", "!"))):
            raise Error("dtype_unsupported", f"a buffer of format {view.format!r}", "use one of " + ", ".join(ITEM_BYTES))
        shape = tuple(view.shape) if view.shape is not None else (view.nbytes // view.itemsize,)
        if view.nbytes == 0:
            return cls(name, shape, memoryview(b""))
        # memoryview casts only C-contiguous data; other data is copied into order once.
        data = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        return cls(name, shape, data, keep=view)

    @classmethod
    def _of_dlpack(cls, value: Any, stream: int | None) -> Source:
        seen = dlpack.read(value, stream)
        data = seen.bytes() if seen.device[0] == dlpack.CPU else memoryview(b"")
        return cls(seen.dtype, seen.shape, data, seen.keep, seen.device, seen.address)

    @classmethod
    def _of_list(cls, value: Any, wanted: str | None) -> Source:
        import struct

        shape: list[int] = []
        level = value
        while isinstance(level, (list, tuple)):
            shape.append(len(level))
            if not level:
                break
            level = level[0]
        flat = list(_flatten(value, len(shape), shape))
        name = wanted or ("float32" if any(isinstance(item, float) for item in flat) else "int64")
        if name not in _FORMATS:
            raise Error("dtype_unsupported", f"a list as {name}", "pass a numpy array or a torch tensor")
        try:
            data = struct.pack(f"<{len(flat)}{_FORMATS[name]}", *flat)
        except (struct.error, OverflowError) as error:
            raise Error("dtype_unsupported", f"numbers that {name} cannot hold: {error}", "pass numbers of the declared dtype") from None
        return cls(name, tuple(shape), memoryview(data))


def _flatten(value: Any, depth: int, shape: list[int], at: int = 0) -> Iterator[Any]:
    if at == depth:
        if isinstance(value, (list, tuple)):
            raise Error("shape_mismatch", "lists of unequal depth", "nest lists evenly")
        yield value
        return
    if not isinstance(value, (list, tuple)) or len(value) != shape[at]:
        raise Error("shape_mismatch", f"a list that has not {shape[at]} items like the first one beside it", "nest lists evenly")
    for item in value:
        yield from _flatten(item, depth, shape, at + 1)
