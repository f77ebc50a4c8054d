"""GPU memory shared with a worker, through ctypes on NVIDIA's driver: slabs, events, and the
order of streams.

Tested only with a fake driver, on machines without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import weakref
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any, Callable, Iterable

from .errors import Error, broken
from .layout import FEATURE, KIND
from .memory import Region

DLPACK_CUDA = 2  #: kDLCUDA
LEGACY_STREAM = 1  #: the number of the driver's stream 0 in DLPack and __cuda_array_interface__
EVENTS_MAX = 64  #: of one channel

_log = logging.getLogger("bulkhead")

_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ, _READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_…
_LAZY_PEER_ACCESS = 1
_DISABLE_TIMING = 2
_NON_BLOCKING = 1
_UNIFIED_ADDRESSING, _VMM, _VMM_BY_FD, _IPC_EVENTS = 41, 102, 103, 125  # CU_DEVICE_ATTRIBUTE_…


class _Handle(ctypes.Structure):
    """CUipcMemHandle, CUipcEventHandle."""

    _fields_ = [("bytes", c_char * 64)]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("type", c_int), ("device", c_int), ("flags", c_int)]


# Every function that is called, by its symbol with this signature: `_v2` if cuda.h renames it so.
_FUNCTIONS: dict[str, tuple[str, list[Any]]] = {
    "cuInit": ("cuInit", [c_uint]),
    "cuGetErrorName": ("cuGetErrorName", [c_int, POINTER(c_char_p)]),
    "cuDeviceGet": ("cuDeviceGet", [POINTER(c_int), c_int]),
    "cuDeviceGetUuid": ("cuDeviceGetUuid_v2", [c_char * 16, c_int]),
    "cuDeviceGetAttribute": ("cuDeviceGetAttribute", [POINTER(c_int), c_int, c_int]),
    "cuDevicePrimaryCtxRetain": ("cuDevicePrimaryCtxRetain", [POINTER(c_void_p), c_int]),
    "cuCtxPushCurrent": ("cuCtxPushCurrent_v2", [c_void_p]),
    "cuCtxPopCurrent": ("cuCtxPopCurrent_v2", [POINTER(c_void_p)]),
    "cuCtxSynchronize": ("cuCtxSynchronize", []),
    "cuMemImportFromShareableHandle": ("cuMemImportFromShareableHandle", [POINTER(c_ulonglong), c_void_p, c_int]),
    "cuMemRelease": ("cuMemRelease", [c_ulonglong]),
    "cuMemAddressReserve": ("cuMemAddressReserve", [POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_ulonglong]),
    "cuMemAddressFree": ("cuMemAddressFree", [c_uint64, c_size_t]),
    "cuMemMap": ("cuMemMap", [c_uint64, c_size_t, c_size_t, c_ulonglong, c_ulonglong]),
    "cuMemUnmap": ("cuMemUnmap", [c_uint64, c_size_t]),
    "cuMemSetAccess": ("cuMemSetAccess", [c_uint64, c_size_t, POINTER(_Access), c_size_t]),
    "cuIpcOpenMemHandle": ("cuIpcOpenMemHandle_v2", [POINTER(c_uint64), _Handle, c_uint]),
    "cuIpcCloseMemHandle": ("cuIpcCloseMemHandle", [c_uint64]),
    "cuIpcOpenEventHandle": ("cuIpcOpenEventHandle", [POINTER(c_void_p), _Handle]),
    "cuEventCreate": ("cuEventCreate", [POINTER(c_void_p), c_uint]),
    "cuEventDestroy": ("cuEventDestroy_v2", [c_void_p]),
    "cuEventRecord": ("cuEventRecord", [c_void_p, c_void_p]),
    "cuStreamCreate": ("cuStreamCreate", [POINTER(c_void_p), c_uint]),
    "cuStreamDestroy": ("cuStreamDestroy_v2", [c_void_p]),
    "cuStreamSynchronize": ("cuStreamSynchronize", [c_void_p]),
    "cuStreamWaitEvent": ("cuStreamWaitEvent", [c_void_p, c_void_p, c_uint]),
    "cuMemcpyAsync": ("cuMemcpyAsync", [c_uint64, c_uint64, c_size_t, c_void_p]),
}


class Driver:
    """The library $BULKHEAD_LIBCUDA, else libcuda.so.1. ``call`` raises the driver's errors."""

    def __init__(self) -> None:
        name = os.environ.get("BULKHEAD_LIBCUDA") or "libcuda.so.1"
        try:
            library = ctypes.CDLL(name)
            self._functions: dict[str, Callable[..., int]] = {}
            for function, (symbol, arguments) in _FUNCTIONS.items():
                found = getattr(library, symbol)
                found.argtypes, found.restype = arguments, c_int
                self._functions[function] = found
        except (OSError, AttributeError) as error:
            raise Error("load_failed", f"opening NVIDIA's driver {name}: {error}", "install the NVIDIA driver; or pass no gpu") from None
        self.call("cuInit", 0)

    def call(self, function: str, *arguments: Any) -> None:
        if status := self._functions[function](*arguments):
            name = c_char_p()
            self._functions["cuGetErrorName"](status, ctypes.byref(name))
            code = {2: "out_of_memory", 100: "load_failed", 101: "not_permitted", 304: "not_permitted", 801: "not_permitted"}.get(status, "internal")
            raise Error(code, f"{function}: {(name.value or b'an unknown error').decode()} ({status})",
                        "free memory of this GPU" if code == "out_of_memory" else
                        "device memory is shared within one machine, one driver, and containers that may see each other")  # fmt: skip

    def knows(self, attribute: int, device: int, otherwise: bool = False) -> bool:
        value = c_int()
        status = self._functions["cuDeviceGetAttribute"](ctypes.byref(value), attribute, device)
        return bool(value.value) if status == 0 else otherwise


@functools.cache
def _driver() -> Driver:
    return Driver()


class Gpu:
    """One GPU, through its primary context, which PyTorch uses too. Any thread; the context is
    current only in ``with gpu:``."""

    def __init__(self, ordinal: int) -> None:
        self.driver = _driver()
        self.ordinal = ordinal
        device, context, uuid = c_int(), c_void_p(), (c_char * 16)()
        self.driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.driver.call("cuDeviceGetUuid", uuid, device)
        # Until the process ends.
        self.driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.device, self._context = device.value, context
        self.uuid = bytes(uuid)
        self.dlpack_device = (DLPACK_CUDA, ordinal)
        self.process = os.getpid()

    @property
    def features(self) -> int:
        """Slab kinds that can be shared: none without interprocess events."""
        knows, device = self.driver.knows, self.device
        if not knows(_UNIFIED_ADDRESSING, device) or not knows(_IPC_EVENTS, device, otherwise=True):
            return 0
        return FEATURE["cuda_ipc"] | (FEATURE["cuda_vmm"] if knows(_VMM, device) and knows(_VMM_BY_FD, device) else 0)

    def __enter__(self) -> Gpu:
        self.driver.call("cuCtxPushCurrent", self._context)
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.call("cuCtxPopCurrent", ctypes.byref(c_void_p()))

    def call(self, function: str, *arguments: Any) -> None:
        with self:
            self.driver.call(function, *arguments)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Queues a copy of device or host memory on the stream."""
        if size_bytes:
            self.call("cuMemcpyAsync", target, source, size_bytes, stream)


_gpus: dict[int, Gpu] = {}


def gpu(ordinal: int) -> Gpu:
    """Returns one of the GPUs that CUDA_VISIBLE_DEVICES shows. A forked child cannot use CUDA if
    its parent did."""
    found = _gpus.get(ordinal)
    if found is None or found.process != os.getpid():
        found = _gpus[ordinal] = Gpu(ordinal)
    return found


class DeviceMapping(Region):
    """A worker's slab in device memory, mapped here. Unmapped with its last view, after
    all queued work."""

    def __init__(self, on: Gpu, address: int, size_bytes: int, writable: bool, unmap: Callable[[], None]) -> None:
        super().__init__(address, size_bytes, writable, on.dlpack_device)
        self.gpu = on
        weakref.finalize(self, _unmap_device, on, unmap, self._gone).atexit = False

    @classmethod
    def of_vmm(cls, on: Gpu, fd: int, size_bytes: int, *, writable: bool) -> DeviceMapping:
        """Does not take over ``fd``."""
        handle, address = c_ulonglong(), c_uint64()
        access = _Access(_ON_DEVICE, on.device, _READ_WRITE if writable else _READ)
        with on, contextlib.ExitStack() as undo:
            call = on.driver.call
            call("cuMemImportFromShareableHandle", ctypes.byref(handle), fd, _POSIX_FD)
            undo.callback(call, "cuMemRelease", handle)
            call("cuMemAddressReserve", ctypes.byref(address), size_bytes, 0, 0, 0)
            undo.callback(call, "cuMemAddressFree", address, size_bytes)
            call("cuMemMap", address, size_bytes, 0, handle, 0)
            undo.callback(call, "cuMemUnmap", address, size_bytes)
            call("cuMemSetAccess", address, size_bytes, ctypes.byref(access), 1)
            unmap = undo.pop_all().close
        return cls(on, address.value, size_bytes, writable, unmap)

    @classmethod
    def of_handle(cls, on: Gpu, handle: bytes, size_bytes: int, *, writable: bool) -> DeviceMapping:
        """CUDA maps a legacy handle only writable: this class alone protects an output from
        being written."""
        address, call = c_uint64(), on.driver.call
        with on:
            call("cuIpcOpenMemHandle", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return cls(on, address.value, size_bytes, writable, lambda: call("cuIpcCloseMemHandle", address))


def _unmap_device(on: Gpu, unmap: Callable[[], None], then: list[Callable[[], None]]) -> None:
    if os.getpid() != on.process:
        return
    try:
        with on:
            on.driver.call("cuCtxSynchronize")
            unmap()
    except Error as error:
        _log.warning("letting go of a GPU slab: %s", error)
    for tell in then:
        tell()


class Events:
    """One channel's interprocess events, and the stream on which its GPU tensors are
    written and read.

    ``stream`` is a CUstream as a number, such as ``torch.cuda.current_stream().cuda_stream``.
    """

    def __init__(self, on: Gpu, stream: int) -> None:
        self.gpu, self.stream = on, 0 if stream == LEGACY_STREAM else stream
        #: Why they cannot be used here; memory then cannot be exchanged in order.
        self.refused: Error | None = None
        self._offered: set[int] = set()
        self._theirs: dict[int, c_void_p] = {}
        self._ours: list[tuple[int, c_void_p]] = []
        self._turn = 0
        self._join: c_void_p | None = None  # our own stream, behind those that read a result

    def on_offer(self, number: int, from_worker: int, handle: bytes) -> None:
        if number == 0 or number in self._offered or len(self._offered) >= EVENTS_MAX or from_worker > 1:
            raise broken(f"event {number} is invalid, is offered twice, or is one too many")
        self._offered.add(number)
        if self.refused is not None:
            return
        event = c_void_p()
        try:
            self.gpu.call("cuIpcOpenEventHandle", ctypes.byref(event), _Handle.from_buffer_copy(handle))
        except Error as error:
            _log.warning("opening an event of a worker's, host slabs are used instead: %s", error)
            self.refused = error.again()
            return
        if from_worker:
            self._theirs[number] = event
        else:
            self._ours.append((number, event))

    def knows(self, number: int) -> bool:
        return number in self._theirs

    def wait(self, number: int, stream: int | None = None) -> None:
        """Makes the stream wait for an event of the worker's."""
        self.gpu.call("cuStreamWaitEvent", self.stream if stream is None else stream, self._theirs[number], 0)

    def admit(self, stream: int, ready: int) -> int:
        """Orders a consumer's stream, numbered as in DLPack, behind the worker's event. Returns the
        driver's stream."""
        stream = 0 if stream == LEGACY_STREAM else stream
        if ready and ready in self._theirs:
            self.wait(ready, stream)
        return stream

    def record(self, stream: int | None = None) -> int:
        """Records an event behind the stream's queued work. Returns the number to send. Events are
        used in turn, and may be reused at once."""
        if not self._ours:
            raise Error("protocol_violation", "a worker that offered GPU slabs but no events", "use a client and a daemon of matching releases")
        self._turn = (self._turn + 1) % len(self._ours)
        number, event = self._ours[self._turn]
        self.gpu.call("cuEventRecord", event, self.stream if stream is None else stream)
        return number

    def record_behind(self, streams: Iterable[int]) -> int:
        """Records an event behind all streams. If one was destroyed, waits here and returns 0."""
        others = set(streams) - {self.stream}
        if not others:
            return self.record()
        try:
            with self.gpu:
                call = self.gpu.driver.call
                if self._join is None:
                    self._join = c_void_p()
                    call("cuStreamCreate", ctypes.byref(self._join), _NON_BLOCKING)
                passed = c_void_p()
                call("cuEventCreate", ctypes.byref(passed), _DISABLE_TIMING)
                for stream in others | {self.stream}:
                    call("cuEventRecord", passed, stream)
                    call("cuStreamWaitEvent", self._join, passed, 0)
                call("cuEventDestroy", passed)
                return self.record(self._join.value)
        except Error:
            self.gpu.call("cuCtxSynchronize")
            return 0

    def close(self) -> None:
        try:
            with self.gpu:
                for event in [*self._theirs.values(), *(event for _, event in self._ours)]:
                    self.gpu.driver.call("cuEventDestroy", event)
                if self._join is not None:
                    self.gpu.driver.call("cuStreamDestroy", self._join)
        except Error as error:
            _log.warning("closing a channel's events: %s", error)
        self._theirs.clear()
        self._ours.clear()
        self._join = None


def import_slab(events: Events, kind: int, size_bytes: int, writable: bool, fds: list[int], handle: bytes) -> DeviceMapping:
    """Maps the worker's slab. If this process cannot, logs a line and raises the reason."""
    if events.refused is not None:
        raise events.refused.again()
    try:
        if kind == KIND["cuda_vmm"]:
            return DeviceMapping.of_vmm(events.gpu, fds[0], size_bytes, writable=writable)
        return DeviceMapping.of_handle(events.gpu, handle, size_bytes, writable=writable)
    except Error as error:
        _log.warning("importing a GPU slab of %d bytes: %s", size_bytes, error)
        raise
