"""The page that shows that this worker lives and what it does (``ipc/links/worker_page.h``), readable even while it hangs."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time

_PAGE_BYTES = 4096
_MAGIC = 0x47504B42
_MAGIC_AT, _STEPS_AT, _SINCE_AT, _SEQUENCE_AT, _REQUEST_AT = 64, 72, 80, 88, 92
_REQUEST_BYTES = 1024
_FUTEX_WAITERS = 0x80000000
_PROCESS_SHARED = _ROBUST = 1
_ATTRIBUTE_BYTES = 64  #: more than a pthread_mutexattr_t has
_F_ADD_SEALS = 1033
_SEALS = 1 | 2 | 4 | 16  # SEAL, SHRINK, GROW, FUTURE_WRITE


class StatusPage:
    """Made on the main thread, which holds the robust mutex: the kernel marks it when that thread
    ends. Call ``begin``, ``step`` and ``end`` on that thread too."""

    def __init__(self) -> None:
        """Raises ``OSError``: a worker then runs without a page."""
        self.fd = os.memfd_create("bulkhead:page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, _PAGE_BYTES)
        self._memory = mmap.mmap(self.fd, _PAGE_BYTES)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._steps = ctypes.c_uint64.from_buffer(self._memory, _STEPS_AT)
        self._since = ctypes.c_uint64.from_buffer(self._memory, _SINCE_AT)
        self._sequence = ctypes.c_uint32.from_buffer(self._memory, _SEQUENCE_AT)
        self._hold_word()

    def _hold_word(self) -> None:
        libc = ctypes.CDLL(None)
        word = ctypes.c_uint32.from_buffer(self._memory)
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
        # The kernel wakes waiters only if this bit is set. They cannot set it: they map the page read-only.
        word.value |= _FUTEX_WAITERS
        ctypes.c_uint32.from_buffer(self._memory, _MAGIC_AT).value = _MAGIC

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
        self._memory[_REQUEST_AT : _REQUEST_AT + len(words)] = words
        self._sequence.value += 1
