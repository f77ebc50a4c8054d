"""Slabs: sealed memfds that the worker made, mapped here; and the books of who uses which bytes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import weakref
from typing import Any

from .errors import Error
from .layout import DIRECTION, LIMITS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_PROT_READ, _PROT_WRITE, _MAP_SHARED = 1, 2, 1
_MADV_DONTFORK, _MADV_DONTDUMP = 10, 16
_F_GET_SEALS = 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16

ALIGNMENT = LIMITS["tensor_alignment"]


class Mapping:
    """A mapped slab. Unmapped when the last view of it is gone."""

    def __init__(self, fd: int, size_bytes: int, direction: int) -> None:
        """Takes over ``fd``. Checks the seals before it maps: without them the peer could shrink the file under us."""
        try:
            needed = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
            if direction == DIRECTION["output"]:
                needed |= _SEAL_FUTURE_WRITE
            try:
                seals = fcntl.fcntl(fd, _F_GET_SEALS)
            except OSError:
                raise Error("protocol_violation", "a slab that is no memfd") from None
            if seals & needed != needed:
                raise Error("protocol_violation", f"a slab with seals {seals:#x}, which lack {needed & ~seals:#x}")
            if os.fstat(fd).st_size != size_bytes:
                raise Error("protocol_violation", f"a slab of {os.fstat(fd).st_size} bytes, announced with {size_bytes}")
            writable = direction == DIRECTION["input"]
            protection = _PROT_READ | (_PROT_WRITE if writable else 0)
            address = _libc.mmap(None, size_bytes, protection, _MAP_SHARED, fd, 0)
            if address in (None, ctypes.c_void_p(-1).value):
                number = ctypes.get_errno()
                raise Error("resources_exhausted", f"mapping a slab of {size_bytes} bytes: {os.strerror(number)}")
        finally:
            os.close(fd)
        self.address: int = address
        self.size_bytes = size_bytes
        self.writable = writable
        _libc.madvise(address, size_bytes, _MADV_DONTDUMP)
        _libc.madvise(address, size_bytes, _MADV_DONTFORK)
        weakref.finalize(self, _libc.munmap, address, size_bytes)

    def view(self, offset: int, size_bytes: int, owner: object) -> memoryview:
        """Bytes of the slab. Every view made of it, numpy arrays included, keeps ``owner`` alive."""
        if size_bytes == 0:
            return memoryview(b"")
        array: Any = (ctypes.c_ubyte * size_bytes).from_address(self.address + offset)
        array.owner = owner
        view = memoryview(array).cast("B")
        return view if self.writable else view.toreadonly()


class Allocator:
    """Which ranges of an input slab are leased: best fit, in units of 64 bytes. A generation is used once."""

    def __init__(self, size_bytes: int) -> None:
        usable = size_bytes // ALIGNMENT * ALIGNMENT
        self._free: dict[int, int] = {0: usable} if usable else {}
        self._generation = 0

    def allocate(self, size_bytes: int) -> tuple[int, int] | None:
        """Offset and generation, or None when there is no room."""
        needed = max(-(-size_bytes // ALIGNMENT), 1) * ALIGNMENT
        fitting = [(size, offset) for offset, size in self._free.items() if size >= needed]
        if not fitting:
            return None
        size, offset = min(fitting)
        del self._free[offset]
        if size > needed:
            self._free[offset + needed] = size - needed
        self._generation += 1
        return offset, self._generation

    def release(self, offset: int, size_bytes: int) -> None:
        size = max(-(-size_bytes // ALIGNMENT), 1) * ALIGNMENT
        for start, length in list(self._free.items()):
            if start + length == offset:
                del self._free[start]
                offset, size = start, size + length
        if offset + size in self._free:
            size += self._free.pop(offset + size)
        self._free[offset] = size
