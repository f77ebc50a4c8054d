"""DLPack in plain Python: imports other libraries' tensors as inputs, and exports ours."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from .errors import Error
from .layout import contiguous_strides
from .memory import bytes_at

CPU, CUDA = 1, 2
_READ_ONLY = 1


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_NAMES = {
    (6, 8): "bool", (1, 8): "uint8", (0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64",
    (2, 16): "float16", (4, 16): "bfloat16", (2, 32): "float32", (2, 64): "float64", (5, 64): "complex64",
    (5, 128): "complex128",
}  # fmt: skip
CODES = {name: code for code, name in _NAMES.items()}

_api = ctypes.pythonapi
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_IsValid.restype = ctypes.c_int
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Seen:
    """Another library's tensor; keep ``keep`` as long as its bytes are used."""

    def __init__(self, dtype: str, shape: tuple[int, ...], device: tuple[int, int], address: int, size_bytes: int, keep: object) -> None:
        self.dtype, self.shape, self.device = dtype, shape, device
        self.address, self.size_bytes, self.keep = address, size_bytes, keep

    def bytes(self) -> memoryview:
        """The bytes of a tensor in CPU memory."""
        return bytes_at(self.address, self.size_bytes, self.keep)


def read(value: Any, stream: int | None = None) -> Seen:
    """Reads a contiguous tensor in CPU memory, or on a GPU if ``stream`` names the stream
    that will read it.

    The capsule is not consumed: its destructor releases the tensor with the last reference.
    """
    try:
        return _read(value, stream)
    except (BufferError, ValueError) as error:  # by the array standard, an exporter's refusals
        raise Error("input_invalid", f"a {type(value).__name__} that is not given away: {error}",
                    "pass a plain tensor: of one that requires a gradient, its detach()") from None  # fmt: skip


def _read(value: Any, stream: int | None) -> Seen:
    kind, number = value.__dlpack_device__()
    device = int(kind), int(number)
    if device[0] != CPU and (device[0] != CUDA or stream is None):
        raise Error("input_invalid", "a tensor that is not in CPU memory", "move it to the CPU first, or open the channel with that GPU")
    order = {} if device[0] == CPU else {"stream": stream or 1}
    try:
        capsule = value.__dlpack__(max_version=(1, 0), **order)
    except TypeError:  # older than DLPack 1
        capsule = value.__dlpack__(**order)
    if _api.PyCapsule_IsValid(capsule, b"dltensor"):
        tensor = _Managed.from_address(_api.PyCapsule_GetPointer(capsule, b"dltensor")).tensor
    elif _api.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        tensor = _Versioned.from_address(_api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")).tensor
    else:
        raise Error("input_invalid", "a __dlpack__ that gives no DLPack capsule", "report this to that library")
    name = _NAMES.get((tensor.dtype.code, tensor.dtype.bits))
    if name is None or tensor.dtype.lanes != 1:
        raise Error("dtype_unsupported", f"a DLPack tensor of type code {tensor.dtype.code}, {tensor.dtype.bits} bits")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    size = math.prod(shape) * tensor.dtype.bits // 8
    expected = contiguous_strides(shape)
    if tensor.strides and size and any(shape[i] != 1 and tensor.strides[i] != expected[i] for i in range(tensor.ndim)):
        raise Error("input_invalid", "a DLPack tensor that is not contiguous", "make it contiguous first")
    return Seen(name, shape, device, (tensor.data or 0) + tensor.byte_offset, size, (capsule, value))


# Exported tensors that a consumer holds, by the address of the managed tensor.
_alive: dict[int, object] = {}


@_DELETER  # type: ignore[untyped-decorator, unused-ignore]
def _delete(address: int | None) -> None:
    _alive.pop(address or 0, None)


# By raw pointer: a capsule's destructor must not take a reference to it.
_raw_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_GetName", ctypes.pythonapi))
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@_DELETER  # type: ignore[untyped-decorator, unused-ignore]
def _capsule_gone(capsule: int) -> None:
    """A consumer renames the capsule and calls the deleter itself; an unconsumed one
    is deleted here."""
    name = _raw_name(capsule)
    if name in (b"dltensor", b"dltensor_versioned"):
        _alive.pop(_raw_pointer(capsule, name), None)


def export(view: Any, *, max_version: Any, copy: Any) -> Any:
    """Exports the slab in place as a capsule. Only DLPack 1 can mark an output read-only: older
    consumers get a copy."""
    versioned = max_version is not None and tuple(max_version)[0] >= 1
    data: Any = view.data
    if copy or (data.readonly and not versioned):
        data = memoryview(bytearray(data))
    size = len(data)
    # ctypes cannot borrow a read-only memoryview, but can borrow its object.
    holder = data.obj if isinstance(data.obj, ctypes.Array) else (ctypes.c_ubyte * max(size, 1)).from_buffer(data or bytearray(1))
    return _capsule(view, (CPU, 0), ctypes.addressof(holder) if size else None, data.readonly, versioned, (data, holder))


def export_device(view: Any, *, device: tuple[int, int], address: int, readonly: bool, keep: object, max_version: Any) -> Any:
    """Exports device memory. A consumer older than DLPack 1 does not learn that an
    output is read-only."""
    versioned = max_version is not None and tuple(max_version)[0] >= 1
    if readonly and not versioned:
        raise BufferError("a result on the GPU is read-only, which this consumer of DLPack does not understand: use a newer one, or cpu()")
    return _capsule(view, device, address, readonly, versioned, keep)


def _capsule(view: Any, device: tuple[int, int], address: int | None, readonly: bool, versioned: bool, keep: object) -> Any:
    rank = len(view.shape)
    shape = (ctypes.c_int64 * max(rank, 1))(*view.shape)
    strides = (ctypes.c_int64 * max(rank, 1))(*contiguous_strides(view.shape))
    code, bits = CODES[view.dtype]
    managed: Any = _Versioned() if versioned else _Managed()
    tensor = managed.tensor
    tensor.data = address
    tensor.device.kind, tensor.device.number = device
    tensor.ndim = rank
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, 1
    tensor.shape, tensor.strides, tensor.byte_offset = shape, strides, 0
    managed.deleter = _delete
    if versioned:
        managed.major, managed.minor = 1, 0
        managed.flags = _READ_ONLY if readonly else 0
    _alive[ctypes.addressof(managed)] = (managed, shape, strides, keep)
    name = b"dltensor_versioned" if versioned else b"dltensor"
    return _api.PyCapsule_New(ctypes.addressof(managed), name, ctypes.cast(_capsule_gone, ctypes.c_void_p))
