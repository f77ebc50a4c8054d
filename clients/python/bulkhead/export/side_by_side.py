"""Compiles the functions of a package in parallel, each in its own process.

One takes minutes, most of them in Python, which uses one CPU at a time. The processes are forked:
they share the model without a copy, at the same addresses. Each returns which tensors its function
needs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Error

Constants = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """`compile` writes the file `name`, and returns the constants that it needs."""

    name: str
    compile: Callable[[], Constants]


def compiled(tasks: list[Task], modules: Iterable[nn.Module], finished: Callable[[str, float], None]) -> dict[str, Constants]:
    """Runs each task; calls `finished` with its name and duration in seconds. Returns a tensor of
    `modules` as it is, one that a task made as a copy.

    Errors: what the first failing task raised. All processes have ended then."""
    held = {_identity(tensor): tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
    most = len(os.sched_getaffinity(0)) + 1  # three functions on two CPUs: none waits to run alone
    context = multiprocessing.get_context("fork")
    waiting = list(tasks)
    running: dict[Any, tuple[Task, BaseProcess, float]] = {}  #: by the pipe that returns the result
    done: dict[str, Constants] = {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                task = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_run, args=(task, set(held), theirs))
                process.start()
                theirs.close()
                running[ours] = (task, process, time.monotonic())
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                task, process, start = running[ready]
                answer = _answer(task, ready)
                del running[ready]
                process.join()
                done[task.name] = {name: held[one] if isinstance(one, tuple) else one for name, one in answer.items()}
                finished(task.name, time.monotonic() - start)
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()
    return {task.name: done[task.name] for task in tasks}


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _run(task: Task, held: set[tuple[Any, ...]], pipe: Connection) -> None:
    """Runs in the task's process. Answers with the tensors by name, each as its identity or as
    itself; or with an error."""
    import torch._inductor.config

    # Kernels are written for this number.
    torch._inductor.config.cpp.threads = torch.get_num_threads()
    # OpenMP's threads were not forked: a parallel region would wait for them.
    torch.set_num_threads(1)
    gc.disable()  # it would repeatedly walk all traced objects and find almost nothing
    answer: dict[str, Any] | Exception
    try:
        answer = {name: one if (one := _identity(tensor)) in held else tensor.detach() for name, tensor in task.compile().items()}
    except Error as wrong:
        answer = wrong
    except Exception:
        answer = RuntimeError(f"compiling {task.name}:\n{traceback.format_exc()}")
    # Connection.send would share tensors' memory, which ends with this process.
    pipe.send_bytes(pickle.dumps(answer))


def _answer(task: Task, pipe: Connection) -> dict[str, Any]:
    try:
        answer = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise Error("internal", f"compiling {task.name}: its process was ended", "look whether memory ran out") from None
    if isinstance(answer, Exception):
        raise answer
    said: dict[str, Any] = answer
    return said
