"""Engines as they come: each fault is an ordinary, tested case. ``Bad`` does what its options say,
at load or at a request."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import bulkhead
import numpy
from bulkhead.engine import Context, Integer, InvalidInput, MissingModel, Result, Tensor, Text, method

SOUND = [Tensor("audio", "float32", ["samples=0.."])]
_kept: list[Any] = []


class OutOfMemoryError(RuntimeError):
    """As torch's, whose name is all that is known of it: torch may not be there."""


def hold_the_lock(seconds: int) -> None:
    """As a C extension that computes without letting the interpreter go."""
    os.write(1, b"the lock is held\n")
    ctypes.PyDLL(None).sleep(seconds)  # the blocking line


def raise_an_error() -> None:
    raise RuntimeError("the engine's own words")


class Bad:
    """Does as it is told."""

    def load(self, context: Context) -> None:
        self.context = context
        if "takes" in context.options:  # of the fake GPU
            held = Path(context.options["held_in"], str(os.getpid()))
            held.with_suffix(".new").write_text(str(context.options["takes"]))
            held.with_suffix(".new").rename(held)
        self.do(context.options.get("load", ""), context.options.get("seconds", 60))

    def unload(self) -> None:
        self.do(self.context.options.get("unload", ""))

    @method(parameters=[Text("what"), Integer("seconds", 0)], outputs=SOUND)
    def act(self, *, what: str, seconds: int) -> Any:
        """Does it."""
        done = self.do(what, seconds)
        return Result(audio=numpy.zeros(1, "float32"), values={"pid": os.getpid()}) if done is None else done

    @method(parameters=[Integer("parts", 3), Integer("fails_at", -1), Integer("ticks", 0)], outputs=SOUND)
    def stream(self, *, parts: int, fails_at: int, ticks: int) -> Any:
        """Yields numbers."""
        for part in range(parts):
            for tick in range(ticks):
                self.context.progress(tick, ticks, "ticking")
            if part == fails_at:
                raise_an_error()
            yield Result(audio=numpy.full(2, part, "float32"), values={"part": part})
        return Result(audio=numpy.arange(parts, dtype="float32"), values={"parts": parts})

    @method(inputs=[Tensor("x", "float32", ["samples=0.."])], outputs=SOUND)
    def double(self, *, x: Any) -> Any:
        """In place: as `torch.from_numpy(x).mul_(2)`, which does not heed that an
        array is read-only."""
        memory = numpy.ctypeslib.as_array((ctypes.c_float * x.size).from_address(x.__array_interface__["data"][0]))
        memory *= 2
        return Result(audio=x)

    @method(outputs=SOUND)
    def endless(self) -> Any:
        """Until it is cancelled."""
        try:
            while True:
                try:
                    yield Result(values={"on": True})
                except Exception:  # noqa: BLE001  an engine that goes on whatever happens
                    pass
                time.sleep(0.01)
        finally:
            _kept.append("ended")

    @method()
    def ended(self) -> Any:
        """How many endless ones have ended."""
        return Result(values={"ended": _kept.count("ended")})

    def do(self, what: str, seconds: int = 60) -> Any:
        if what == "raise":
            raise_an_error()
        if what == "import":
            import no_such_module  # type: ignore[import-not-found]  # noqa: F401
        if what == "missing":
            raise MissingModel("loading weights: no folder /models/voice", "fetch org/voice, and put it into /models/voice")
        if what == "refuse":
            raise InvalidInput("speaking: the text is empty", "give some text")
        if what == "exit":
            sys.exit(3)
        if what == "memory":
            raise MemoryError("no room")
        if what == "memory of another model":
            raise bulkhead.Error("out_of_memory", "running method \"generate\"", "send it again")
        if what == "memory of torch":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if what == "hold":
            hold_the_lock(seconds or 60)
        if what == "spin":
            all(True for _ in iter(int, 1))  # the spinning line
        if what == "segv":
            ctypes.string_at(0)
        if what == "print":
            for line in range(20_000):
                print("a line of the engine", line)
        if what == "leak":
            _kept.append(bytearray(os.urandom(1 << 20) * 64))
        if what == "swallow":
            for number in (signal.SIGTERM, signal.SIGABRT, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            hold_the_lock(seconds or 60)
        if what in ("fork", "forked segv"):
            if (child := os.fork()) == 0:
                if what == "forked segv":
                    ctypes.string_at(0)
                # The child goes back as if it were the worker.
                return {"audio": numpy.ones(1, "float32")}
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return Result(audio=numpy.zeros(1, "float32"), values={"status": status})
        if what == "spawn":
            child = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
            return Result(audio=numpy.zeros(1, "float32"), values={"child": child})
        if what == "close":
            os.close(1)
            os.close(2)
        return {
            "nothing": lambda: 7, "other dtype": lambda: {"audio": numpy.zeros(1)}, "other rank": lambda: {"audio": numpy.zeros((1, 1), "float32")},
            "no output": lambda: {}, "more": lambda: {"audio": numpy.zeros(1, "float32"), "video": numpy.zeros(1)},
            "no JSON": lambda: Result(audio=numpy.zeros(1, "float32"), values={"it": object()}),
            "strided": lambda: {"audio": numpy.arange(8, dtype="float32")[::2]}, "list": lambda: {"audio": [1.0, 2.0]},
        }.get(what, lambda: None)()  # fmt: skip


class Undeclared:
    """Has no method."""

    def load(self, context: Context) -> None:
        pass
