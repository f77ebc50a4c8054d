"""Shared memory in this process: sealed, mapped memfds, and the records of who uses which bytes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import weakref
from collections import deque
from typing import Any, Callable

from .errors import Error
from .layout import LIMITS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_PROT_READ, _PROT_WRITE, _MAP_SHARED, _MAP_PRIVATE, _MAP_NORESERVE, _MAP_POPULATE = 1, 2, 1, 2, 0x4000, 0x8000
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_DONTDUMP, _MADV_POPULATE_READ = 4, 10, 16, 22
SEAL_FUTURE_WRITE = 16  #: `fcntl` has the others
SIZE_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEALED = "offer a memfd that is sealed as docs/channel.md says"

ALIGNMENT = LIMITS["tensor_alignment"]
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Highest bytes of entries of /proc/self/pagemap whose page is the file's (0x20), or neither in
#: memory (0x80) nor swapped out (0x40).
_UNWRITTEN = bytes(flags for flags in range(256) if flags & 0x20 or not flags & 0xC0)


CPU = (1, 0)  #: kDLCPU and device number, as in DLPack


class Region:
    """Memory that is mapped here, and its watchers."""

    def __init__(self, address: int, size_bytes: int, writable: bool, device: tuple[int, int] = CPU) -> None:
        self.address, self.size_bytes, self.writable, self.device = address, size_bytes, writable, device
        #: Its owner is about to give it up, or has ended: borrowers must return it.
        self.retired = False
        self._watchers: list[Callable[[], None]] = []
        self._gone: list[Callable[[], None]] = []

    def retire(self) -> None:
        """Owner's thread."""
        self.retired = True
        for watcher in list(self._watchers):
            watcher()

    def on_change(self, tell: Callable[[], None]) -> None:
        """Calls ``tell`` when this is retired, and when it is unmapped, on the
        thread that does so."""
        self._watchers.append(tell)
        self._gone.append(tell)

    def off_change(self, tell: Callable[[], None]) -> None:
        """Reverts one ``on_change``: a region may outlive many channels that it was lent on."""
        self._watchers.remove(tell)
        self._gone.remove(tell)

    def on_unmap(self, tell: Callable[[], None]) -> None:
        self._gone.append(tell)


def available_bytes() -> int | None:
    """Available host memory by the kernel's estimate; None if /proc is not mounted."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    except OSError:
        return None


def check_room(size_bytes: int) -> None:
    """Raises if there is no room: posix_fallocate would cause SIGXFSZ, or the OOM killer."""
    file_max = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    available = available_bytes()
    for what, most in (("the limit on file size (ulimit -f)", None if file_max == resource.RLIM_INFINITY else file_max),
                       ("available host memory", available)):  # fmt: skip
        if most is not None and size_bytes > most:
            raise Error("resources_exhausted", f"{size_bytes} bytes of shared memory; {what} is {most} bytes",
                        "allocate smaller tensors, or free host memory")  # fmt: skip


class Mapping(Region):
    """A mapped memfd. Unmapped, and its descriptor closed, with its last view."""

    def __init__(self, fd: int, size_bytes: int, *, writable: bool, flags: int = _MAP_SHARED) -> None:
        """Takes over ``fd``. A private mapping bears a write to a view that is marked read-only."""
        protection = _PROT_READ | (_PROT_WRITE if writable or flags & _MAP_PRIVATE else 0)
        address = _libc.mmap(None, size_bytes, protection, flags, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            number = ctypes.get_errno()
            os.close(fd)
            raise Error("resources_exhausted", f"mapping a slab of {size_bytes} bytes: {os.strerror(number)}",
                        "drop tensors that are no longer needed")  # fmt: skip
        _libc.madvise(address, size_bytes, _MADV_DONTDUMP)
        _libc.madvise(address, size_bytes, _MADV_DONTFORK)
        super().__init__(address, size_bytes, writable)
        self.fd = fd
        weakref.finalize(self, _unmap, os.getpid(), address, size_bytes, fd, self._gone).atexit = False

    @classmethod
    def of_slab(cls, fd: int, size_bytes: int, *, writable: bool) -> Mapping:
        """Takes over ``fd``. Checks the seals before it maps: without them the peer could shrink
        the file while it is mapped."""
        try:
            needed = SIZE_SEALS | (0 if writable else SEAL_FUTURE_WRITE)
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                raise Error("protocol_violation", "a slab that is not a memfd") from None
            if seals & needed != needed:
                raise Error("protocol_violation", f"a slab with seals {seals:#x}, which lack {needed & ~seals:#x}")
            if os.fstat(fd).st_size != size_bytes:
                raise Error("protocol_violation", f"a slab of {os.fstat(fd).st_size} bytes, announced with {size_bytes}")
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size_bytes, writable=writable)

    @classmethod
    def make(cls, size_bytes: int, label: str, *, only_we_write: bool) -> Mapping:
        """Allocates memory with its pages, sealed as in ``docs/channel.md``; as an output, which
        any worker accepts as a loan, if ``only_we_write``."""
        check_room(size_bytes)
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            os.close(fd)
            raise Error("resources_exhausted", f"{size_bytes} bytes of shared memory: {error.strerror}",
                        "drop tensors that are no longer needed") from None  # fmt: skip
        mapping = cls(fd, size_bytes, writable=True, flags=_MAP_SHARED | _MAP_POPULATE)
        # After the mapping above: FUTURE_WRITE keeps it writable and forbids later ones.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | (SEAL_FUTURE_WRITE if only_we_write else 0))
        return mapping

    @classmethod
    def lent(cls, fd: int, size_bytes: int) -> Mapping:
        """Takes over ``fd``, memory that another process lends for reading. Raises
        ``protocol_violation`` unless its size and contents are sealed and all its pages
        are allocated."""
        try:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                raise Error("protocol_violation", f"adopting a slab of {size_bytes} bytes: the descriptor is not a memfd", _SEALED) from None
            status = os.fstat(fd)
            why = ("it is not sealed against a change of size" if seals & SIZE_SEALS != SIZE_SEALS else
                   "it is not sealed against writing" if not seals & (SEAL_FUTURE_WRITE | fcntl.F_SEAL_WRITE) else
                   f"the memfd has {status.st_size} bytes" if status.st_size != size_bytes else
                   f"only {status.st_blocks * 512} of them have memory" if status.st_blocks * 512 < size_bytes else "")  # fmt: skip
            if why:
                raise Error("protocol_violation", f"adopting a slab of {size_bytes} bytes: {why}", _SEALED)
        except BaseException:
            os.close(fd)
            raise
        # MAP_POPULATE would copy each page, and huge pages would be reserved for copies that are
        # hardly ever made.
        mapping = cls(fd, size_bytes, writable=False, flags=_MAP_PRIVATE | _MAP_NORESERVE)
        # Before Linux 5.14 the first read does it.
        _libc.madvise(mapping.address, size_bytes, _MADV_POPULATE_READ)
        return mapping

    def drop_writes(self, offset: int, size_bytes: int) -> None:
        """Of a lent mapping: drops what this process wrote to these bytes. It would hide what their
        owner writes there next."""
        first, end = (self.address + offset) // _PAGE_BYTES, -(-(self.address + offset + size_bytes) // _PAGE_BYTES)
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
                entries = os.pread(pagemap.fileno(), 8 * (end - first), 8 * first)
        except OSError:
            entries = b""
        # A page that is dropped faults at its next read: in vain, that costs as much
        # as a copy of it.
        if len(entries) < 8 * (end - first) or entries[7::8].translate(None, _UNWRITTEN):
            _libc.madvise(self.address, self.size_bytes, _MADV_DONTNEED)

    def view(self, offset: int, size_bytes: int, owner: object) -> memoryview:
        """Returns bytes of the slab, as ``bytes_at``."""
        view = bytes_at(self.address + offset, size_bytes, owner)
        return view if self.writable else view.toreadonly()


def bytes_at(address: int, size_bytes: int, owner: object) -> memoryview:
    """Every view of these bytes, numpy arrays included, keeps ``owner`` alive."""
    if size_bytes == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_ubyte * size_bytes).from_address(address)
    array.owner = owner
    return memoryview(array).cast("B")


def _unmap(process: int, address: int, size_bytes: int, fd: int, then: list[Callable[[], None]]) -> None:
    os.close(fd)
    if os.getpid() != process:
        return  # a forked child lacks these pages (MADV_DONTFORK); other memory may be there now
    _libc.munmap(address, size_bytes)
    for tell in then:
        tell()


class Allocator:
    """The leased ranges of an input slab: best fit, in units of 64 bytes. Each lease_id is used
    once."""

    def __init__(self, size_bytes: int) -> None:
        usable = size_bytes // ALIGNMENT * ALIGNMENT
        self._all = {0: usable} if usable else {}
        self._free: dict[int, int] = dict(self._all)
        self._given_back: deque[tuple[int, int]] = deque()
        self._lease_id = 0

    def allocate(self, size_bytes: int) -> tuple[int, int] | None:
        """Returns the offset and the lease_id of a new lease, or None where none fits."""
        self._take_back()
        needed = _rounded(size_bytes)
        fitting = [(size, offset) for offset, size in self._free.items() if size >= needed]
        if not fitting:
            return None
        size, offset = min(fitting)
        del self._free[offset]
        if size > needed:
            self._free[offset + needed] = size - needed
        self._lease_id += 1
        return offset, self._lease_id

    def release(self, offset: int, size_bytes: int) -> None:
        """Any thread, even during ``allocate`` or at the interpreter's end: only
        records the release."""
        self._given_back.append((offset, size_bytes))

    @property
    def is_empty(self) -> bool:
        self._take_back()
        return self._free == self._all

    def _take_back(self) -> None:
        while self._given_back:
            offset, size_bytes = self._given_back.popleft()
            size = _rounded(size_bytes)
            for start, length in self._free.items():
                if start + length == offset:
                    del self._free[start]
                    offset, size = start, size + length
                    break
            size += self._free.pop(offset + size, 0)
            self._free[offset] = size


def _rounded(size_bytes: int) -> int:
    return max(-(-size_bytes // ALIGNMENT), 1) * ALIGNMENT
