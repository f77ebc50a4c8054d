"""Follows the step into the threads that it starts: the modes of PyTorch, and what Python traces,
are each thread's own."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, thread
from typing import Any, Callable, Iterator
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _pop_mode, _push_mode

from ...errors import Error
from ..source import here, started_at
from .functions import Functions
from .operators import Operators
from .watch import CustomOperator, Watch

_END_SECONDS = 1.0  #: for which the threads that a call has started are waited for at its end


class Threads:
    """Threads and work of executors are watched if they are started while entered; of others their
    use of a tensor is told."""

    def __init__(self, watch: Watch, fake: FakeTensorMode) -> None:
        self._watch, self._fake = watch, fake
        self._own = threading.local()  #: .is_watched: whether the modes are entered in this thread
        self._started: list[threading.Thread] = []  #: since the latest end of a call
        self._failed: list[BaseException] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        start, submit = threading.Thread.start, ThreadPoolExecutor.submit

        def started(one: Any) -> None:
            # Of an executor, whose work is followed by itself.
            if one._target is not thread._worker:
                one.run = self._followed(one.run, is_thread=True)
                self._started.append(one)
            start(one)

        def submitted(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            return submit(pool, self._followed(function), *args, **kwargs)

        self._own.is_watched = True
        with (
            mock.patch.object(threading.Thread, "start", started),
            mock.patch.object(ThreadPoolExecutor, "submit", submitted),
            mock.patch.object(FakeTensorMode, "in_kernel_invocation", self._of_each_thread()),
            mock.patch.object(FakeTensor, "__torch_dispatch__", self._dispatched()),
        ):
            yield
        self._own.is_watched = False

    def end_call(self) -> None:
        """Waits for the threads that the call has started. Raises what one of them raised."""
        end = time.monotonic() + _END_SECONDS
        for one in self._started:
            with contextlib.suppress(RuntimeError):  # it was not started after all
                one.join(max(0.0, end - time.monotonic()))
            if one.is_alive() and not one.daemon:
                self._watch.skip(f"thread {one.name}: it had not ended {_END_SECONDS:g} s after the step returned")
        self._started.clear()
        failed, self._failed = self._failed, []
        if failed:
            raise failed[0]

    def _followed(self, function: Callable[..., Any], is_thread: bool = False) -> Callable[..., Any]:
        location, lane, trace = here(), self._watch.new_lane(), sys.gettrace()

        def follow(*args: Any, **kwargs: Any) -> Any:
            try:
                with started_at(location), self._watch.in_lane(lane), self._watched(trace):
                    return function(*args, **kwargs)
            except (CustomOperator, Error) as error:
                self._failed.append(error)
                if not is_thread:
                    raise
            except Exception as error:
                if not is_thread:  # a future keeps it
                    raise
                self._failed.append(error)

        return follow

    @contextlib.contextmanager
    def _watched(self, trace: Any) -> Iterator[None]:
        if getattr(self._own, "is_watched", False):
            yield
            return
        before, lifts = sys.gettrace(), torch._C._only_lift_cpu_tensors()
        operators = Operators(self._watch)
        self._own.is_watched = True
        torch._C._set_only_lift_cpu_tensors(True)
        _push_mode(self._fake)  # its `__enter__` keeps what was before in one stack for all threads
        _push_mode(operators)
        sys.settrace(trace)
        try:
            with torch.no_grad(), Functions(self._watch):
                yield
        finally:
            sys.settrace(before)
            _pop_mode()
            _pop_mode(self._fake._mode_key)
            torch._C._set_only_lift_cpu_tensors(lifts)
            self._own.is_watched = False

    def _of_each_thread(self) -> property:
        """Whether a kernel runs is asked of the mode by whoever asks for a tensor's device,
        in any thread."""
        own = threading.local()
        return property(lambda mode: getattr(own, f"of_{id(mode)}", False),
                        lambda mode, value: setattr(own, f"of_{id(mode)}", value))  # fmt: skip

    def _dispatched(self) -> Any:
        dispatch = FakeTensor.__torch_dispatch__

        def dispatched(kind: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not getattr(self._own, "is_watched", False):
                self._watch.unwatched.add(threading.current_thread().name)
            return dispatch(function, types, args, kwargs or {})

        return classmethod(dispatched)
