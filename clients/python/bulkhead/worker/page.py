"""The page that shows that this worker lives and what it does (``docs/worker-link.md``), readable
even while it hangs."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time

from ..memory import SEAL_FUTURE_WRITE, SIZE_SEALS
from .link_messages import PAGE

_AT: dict[str, int] = {name: at for name, _, at, _ in PAGE["members"]}
_REQUEST_BYTES = next(int(kind[5:-1]) for name, kind, *_ in PAGE["members"] if name == "request")
_FUTEX_WAITERS = 0x80000000
_PROCESS_SHARED = _ROBUST = 1
_ATTRIBUTE_BYTES = 64  #: more than a pthread_mutexattr_t has


class StatusPage:
    """Made on the main thread, which holds the robust mutex: the kernel marks it when that thread
    ends. Call ``begin``, ``step`` and ``end`` on that thread too."""

    def __init__(self) -> None:
        """Raises ``OSError``: a worker then runs without a page."""
        self.fd = os.memfd_create("bulkhead:page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, PAGE["bytes"])
        self._memory = mmap.mmap(self.fd, PAGE["bytes"])
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS | SEAL_FUTURE_WRITE)
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._steps = ctypes.c_uint64.from_buffer(self._memory, _AT["steps"])
        self._since = ctypes.c_uint64.from_buffer(self._memory, _AT["running_since_ns"])
        self._sequence = ctypes.c_uint32.from_buffer(self._memory, _AT["request_sequence"])
        self._hold_word()

    def _hold_word(self) -> None:
        libc = ctypes.CDLL(None)
        word = ctypes.c_uint32.from_buffer(self._memory, _AT["alive"])
        mutex = ctypes.c_void_p(ctypes.addressof(word))
        kind = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        failed = (
            libc.pthread_mutexattr_init(kind)
            or libc.pthread_mutexattr_setpshared(kind, _PROCESS_SHARED)
            or libc.pthread_mutexattr_setrobust(kind, _ROBUST)
            or libc.pthread_mutex_init(mutex, kind)
            or libc.pthread_mutex_lock(mutex)
        )
        if failed:
            raise OSError(failed, "holding the word in the worker's page")
        # The kernel wakes waiters only if this bit is set. They cannot set it: they map the
        # page read-only.
        word.value |= _FUTEX_WAITERS
        ctypes.c_uint32.from_buffer(self._memory, _AT["magic_number"]).value = PAGE["magic"]

    def begin(self, text: str) -> None:
        """Work starts now; ``text`` describes it."""
        self._tell(text)
        self._since.value = time.monotonic_ns()

    def step(self, text: str | None = None) -> None:
        """The running work has reached a new step."""
        if text is not None:
            self._tell(text)
        self._steps.value += 1

    def end(self) -> None:
        self._steps.value += 1
        self._since.value = 0

    def _tell(self, text: str) -> None:
        words = text.encode("utf-8", "replace")[: _REQUEST_BYTES - 1] + b"\0"
        self._sequence.value += 1
        self._memory[_AT["request"] : _AT["request"] + len(words)] = words
        self._sequence.value += 1
