"""Runs a callable under watch: makes it and calls it a few times with fake GPU tensors, and
reports the findings."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import pickle
import re
import signal
import sys
import threading
import traceback
from typing import Any, Callable, Collection, Iterator, Mapping, NoReturn
from unittest import mock

import torch
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..errors import Error
from . import calls, capture, compiled, exported, findings, numbers, settings, state
from .calls import Step
from .coverage import Executed
from .draws import Draws
from .failures import described
from .fake.cuda import StandIns
from .fake.functions import Functions
from .fake.operators import Operators
from .fake.threads import Threads
from .fake.watch import NOT_JOINED, Concatenation, CustomOperator, Watch
from .findings import Finding, Findings, Report
from .source import code_of, is_users, location_of, location_of_target, short, use_of

_CALLS = 3  #: the first may prepare; the second and third are compared
#: the first operand's name
_PAST = re.compile(
    r"cat\(\s*[\[(]\s*[\w.]*(past|cache|kv|prev|hist|attention_mask|tokens|input_ids|generated)", re.IGNORECASE
)
DEVICE = "cuda"


class Expired(BaseException):
    """The deadline has passed. Not an ``Exception``, so that user code does not catch it."""


def diagnose(target: Any, factory: Callable[[str], Any] | None = None, *, options: Mapping[str, Any] | None = None,
             compiler: bool = False, gpu: bool = False, deadline: float = 0, name: str = "",
             begin: Callable[[], None] = lambda: None) -> Report:  # fmt: skip
    """Calls ``target`` with what ``factory("cuda")`` returns: a tuple of arguments, a dictionary of
    named ones, or one argument. For a class the factory returns (arguments of the constructor,
    arguments of the call).

    ``target`` may also be an ``exported.Program``, or an engine's class if ``options`` is not None.
    ``gpu`` also captures the step on this machine's GPU; ``compiler`` adds torch.compile's
    findings. ``deadline`` is in seconds, 0 for none; it works on the main thread, and ``begin`` is
    called where it begins, before any code of the target's. Computes and allocates nothing but
    small tensors.
    """
    report = Report(name or getattr(target, "__qualname__", type(target).__name__))
    run = _Run(target, factory, options, compiler, report)
    if gpu:
        _elsewhere(run.all, report, deadline, begin)
    else:
        _warm_up()
    with _kept_settings(), _kept_process(), _quiet(), _deadline(deadline, begin):
        run.on_gpu() if gpu else run.all()
    return report


def _elsewhere(examine: Callable[[], None], report: Report, deadline: float, begin: Callable[[], None] = lambda: None) -> None:
    """Runs in a child process, before CUDA starts here: the capture must not meet fake tensors
    kept in globals."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), open(writing, "wb") as answer:
            try:
                _hide_gpu(report.target)
                _warm_up()
                with _kept_settings(), _kept_process(), _quiet(), _deadline(deadline, begin):
                    examine()
            except BaseException as error:
                report.end_early(*described(error, report.target))
            pickle.dump(vars(report), answer)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        told = answer.read()
    how = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if told:
        vars(report).update(pickle.loads(told))
    else:
        by = signal.Signals(-how).name if how < 0 else f"exit({how})"
        remedy = "call it with these inputs on the CPU first: it must return"
        report.end_early(f"{report.target} ended its process by {by}", remedy)


def _hide_gpu(target: str) -> None:
    """Fake tensors then ask no driver: one that this process's parent has started refuses a child,
    even the device of an index. Errors: input_invalid if the parent has counted its GPUs, as
    `torch.cuda.is_available()` does."""
    if not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):  # older fake tensors need the driver
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if torch.cuda.is_available():
        raise Error("input_invalid",
                    f"{target} was not looked at with fake tensors: this process had asked for its GPUs before, and a child of it "
                    "then has no driver",
                    "set PYTORCH_NVML_BASED_CUDA_CHECK=1 before Python starts, or use `python -m bulkhead.doctor --gpu`"
                    )  # fmt: skip


def _warm_up() -> None:
    """Imports what PyTorch needs for the first fake operator, so that the target's
    time excludes it."""
    with FakeTensorMode():
        torch.zeros(2, 2).sum()


class _Run:
    def __init__(self, target: Any, factory: Any, options: Mapping[str, Any] | None, compiler: bool, report: Report) -> None:
        self._target, self._factory, self._options, self._compiler, self._report = target, factory, options, compiler, report
        self._found = Findings()
        self._said: list[compiled.Said] = []
        self._watch = Watch(self._found, location_of_target(target, report.target))
        #: before the calls, in the first, in the others
        self._setup, self._executed, self._again = Executed(), Executed(), Executed()
        self._stand_ins = StandIns(self._watch.refuse, self._watch.is_capturing)
        self._watch.streams = self._stand_ins.streams

    def all(self) -> None:
        settings.environment(self._found)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with self._guarded(), self._stand_ins, _without_cudnn(), torch.no_grad():
            functions, threads = Functions(self._watch), Threads(self._watch, fake)
            self._watch.end_call = threads.end_call
            with (settings.watched(self._found), threads.followed(), fake, Operators(self._watch), functions,
                  functions.whole_lists(), self._watch.registrations()):  # fmt: skip
                self._import()
                with self._setup.recorded():
                    steps = self._made()
                for step, args, kwargs in steps:
                    self._call_often(step, args, kwargs)
            if self._compiler:
                for step, args, kwargs in steps:
                    self._said += compiled.said_of(fake, step, args, kwargs)
        report = self._report
        if not report.error and "cuda" not in self._watch.devices:
            why = "all tensors of its calls lie on the CPU" if self._watch.devices else "its calls have no tensors"
            report.end_early(f"{report.target}: {why}, so nothing was looked at",
                             "make the arguments, and what the function keeps, on the device that the function of --inputs is "
                             "given")  # fmt: skip
        if not report.error and self._watch.unwatched:
            names = ", ".join(sorted(self._watch.unwatched))
            report.end_early(f"{report.target} uses tensors in threads that run since before it ({names}): not all was seen",
                             "start them in the step, or in what makes it: the command line imports the file itself")  # fmt: skip
        report.skipped += self._watch.skipped
        with self._guarded():
            for executed in (self._setup, self._executed, self._again):
                settings.scan(self._found, executed)
            settings.left(self._found, self._watch.target)
            report.notes = compiled.tell(self._found, self._said, self._watch.target)
        report.findings = self._found.sorted()

    def on_gpu(self) -> None:
        report, found = self._report, list(self._report.findings)
        before, remedy = report.error, report.remedy
        report.error = ""
        self._capture(found)
        # What the fake run could not do hides nothing, and is not hidden.
        if before and before != report.error:
            report.error, report.remedy = f"{before}; on the GPU: {report.error or 'it ran'}", remedy

    def _capture(self, found: list[Finding]) -> None:
        with self._guarded(), torch.no_grad():
            self._import()
            for step, args, kwargs in self._made():
                target = location_of_target(step, self._report.target)
                captured = capture.capture(lambda: calls.called(step, args, kwargs), found, torch.cuda, target=target)
                self._report.captures.append(captured.document(found))
                failure = captured.failure
                if failure is not None and failure.code == capture.OUT_OF_MEMORY:
                    self._report.end_early(f"{self._report.target} was not captured: {failure.reason}", failure.remedy)
                elif failure and (failure.file, failure.line) not in [(one.file, one.line) for one in self._report.findings]:
                    self._report.findings.append(failure)

    def _import(self) -> None:
        if isinstance(self._factory, calls.Deferred):
            self._factory = self._factory.load()
        if isinstance(self._target, calls.Deferred):
            self._target = self._target.load()
            # Imported for this run: nothing of the user's is changed.
            if isinstance(self._target, torch.nn.Module):
                self._target = self._target.to(DEVICE).eval()

    def _made(self) -> list[Step]:
        if self._options is not None:
            steps = calls.of_engine(self._target, self._options, DEVICE)
        elif isinstance(self._target, exported.Program):
            given = (self._factory or self._target.inputs)(DEVICE)
            steps = self._target.steps(calls.arguments(given), DEVICE)
        else:
            steps = [self._step()]
        for tensor in tree_leaves([(args, kwargs) for _, args, kwargs in steps]):
            if isinstance(tensor, torch.Tensor):
                self._watch.devices.add(tensor.device.type)
                if tensor.device.type == "cpu":
                    self._watch.born(tensor, None, "argument")
        return steps

    def _step(self) -> Step:
        given = self._given()
        step = self._target
        method = step.name if isinstance(step, calls.Method) else ""
        if method:
            step = step.of
        if inspect.isclass(step):
            constructor, given = given if isinstance(given, tuple) and len(given) == 2 else ((), given)
            args, kwargs = calls.arguments(constructor)
            calls.fits(step, args, kwargs, f"the constructor of {self._report.target}", calls.OF_CLASS)
            try:
                step = step(*args, **kwargs)
            except Exception as error:
                attempt, remedy = described(error, f"the constructor of {self._report.target}")
                raise Error("input_invalid", attempt, calls.OF_CLASS if args or kwargs else remedy) from error
            if isinstance(step, torch.nn.Module):
                step = step.to(DEVICE).eval()
        args, kwargs = calls.arguments(given)
        called = getattr(step, method) if method else step
        takes = called.forward if isinstance(called, torch.nn.Module) else called
        calls.fits(takes, args, kwargs, self._report.target, calls.OF_FUNCTION if called is self._target else calls.OF_CLASS)
        return called, args, kwargs

    def _given(self) -> Any:
        if self._factory is None:
            return ()
        try:
            return self._factory(DEVICE)
        except Exception as error:
            attempt, remedy = described(error, "the function of --inputs")
            if isinstance(error, TypeError) and location_of(error) is None:
                remedy = "it is called with the device: def inputs(device): return (torch.zeros(1, device=device),)"
            raise Error("input_invalid", attempt, remedy) from error

    def _call_often(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before: Any = None
        traces: list[Any] = []
        self._watch.target = location_of_target(step, self._report.target)
        known, of_first = {one.key for one in self._found.sorted()}, set[Any]()
        draws = Draws(roots(step, args, kwargs))
        for number in range(1, _CALLS + 1):
            if number <= 2:
                self._found.seen.clear()
            draws.begin_call()
            result = self._call(step, args, kwargs, number > 1)
            after = state.snapshot(roots(step, args, kwargs) | of_modules(self._executed))
            traces.append(self._watch.trace)
            if number == 1:
                of_first = self._found.seen - known
                self._tell_concatenations(result, args, kwargs)
            elif number == _CALLS:
                state.tell(self._found, state.changes(before, after, self._watch.used), self._again, self._watch.target)
            before = after
        # Findings of the first call alone, in functions that ask whether they are captured.
        for one in self._found.sorted():
            if one.key in of_first - self._found.seen and (one.file, one.function) in self._watch.asks_capture:
                self._found.drop(one)
        if draws.has_drawn:
            with draws.told(self._found):
                again = numbers.trace(self._watch, draws, step, args, kwargs)
            traces.append(traces[-1] if again is None else again)
        numbers.tell_differences(self._found, traces[-2], traces[-1])
        files = {*self._setup, *self._executed}
        numbers.vary(self._found, self._watch, draws, (step, args, kwargs), roots(step, args, kwargs), files, *traces[-2:])

    def _call(self, step: Any, args: Any, kwargs: Any, again: bool) -> Any:
        self._watch.begin_call()
        self._watch.step = self._watch.recording = True
        try:
            with (self._again if again else self._executed).recorded():
                result = calls.called(step, args, kwargs)
                self._watch.end_call()
        finally:
            self._watch.step = self._watch.recording = False
        self._report.calls += 1
        for location in self._stand_ins.streams.not_joined():
            self._watch.add_refused(NOT_JOINED, "", location or self._watch.target)
        return result

    def _tell_concatenations(self, result: Any, args: Any, kwargs: Any) -> None:
        """Reports a cache that is an argument and is returned longer: the next call's argument has
        another shape."""
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for leaf in tree_leaves(result):
            made: Concatenation | None = getattr(leaf, "_doctor_cat", None)
            if made is None or len(set(made.operands)) == 1:  # a batch that is doubled
                continue
            if given & set(made.operands) and _PAST.search(use_of(made.location).text):
                self._found.add(findings.PYTHON_STATE, findings.RECAPTURES, made.location,
                                "an argument is returned longer than it was: as the next call's argument it has another shape",
                                "write into a cache of a fixed length: cache.index_copy_(dim, position, new), and mask what is "
                                "behind")  # fmt: skip

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turns any early end of the run into a sentence of the report."""
        report = self._report
        try:
            yield
        except CustomOperator as unknown:
            report.skipped.append(f"{unknown}; what comes after it was not looked at")
            report.end_early(f"{report.target} was not looked at to the end",
                             "what is skipped says why; give the doctor the parts before it and after it")  # fmt: skip
        except KeyboardInterrupt:
            raise
        except Expired as expired:
            report.end_early(f"{report.target} did not end: {expired}", "give a longer --deadline, or smaller inputs")
        except BaseException as error:  # such as asyncio.CancelledError
            report.end_early(*described(error, report.target))


def roots(step: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The objects that may keep state between calls."""
    function = code_of(step)
    names = ()
    if function is not None and not isinstance(step, functools.partial):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
    named = dict(zip(names if inspect.isfunction(step) else names[1:], args))
    named |= {str(index): value for index, value in enumerate(args) if index >= len(named)}
    found: dict[str, Any] = {f"argument {name}": value for name, value in (named | kwargs).items()}
    if not inspect.isfunction(step):
        found["self"] = step.__self__ if inspect.ismethod(step) else step
    if function is not None and is_users(function.__code__.co_filename):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            with contextlib.suppress(ValueError):  # an empty cell
                found[f"variable {name}"] = cell.cell_contents
        parameters = inspect.signature(function).parameters.values()
        found |= {f"default {one.name}": one.default for one in parameters if one.default is not one.empty}
        found |= {f"global {name}": value for name, value in _variables(function.__globals__)}
    return found


def of_modules(files: Collection[str]) -> dict[str, Any]:
    """The variables of the user's own modules whose ``files`` ran; not those of
    installed packages."""
    own = {file for file in files if "-packages" + os.sep not in file}
    found: dict[str, Any] = {}
    for module in filter(inspect.ismodule, list(sys.modules.values())):
        if _absolute(vars(module).get("__file__") or "") in own:
            found |= {f"global {module.__name__} {name}": value for name, value in _variables(vars(module))}
    return found


_absolute = functools.cache(os.path.abspath)  #: asked of thousands of modules at each call


def _variables(names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(names.items()):
        if not (name.startswith("__") or inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)):
            yield name, value


@contextlib.contextmanager
def _kept_settings() -> Iterator[None]:
    """Restores what user code sets: the environment, and the compiler's settings. Each run
    begins with the same random numbers, which may decide a branch: two runs of the same code
    give the same report."""
    asked = [(config, name) for config in (dynamo, inductor) for name in settings.HIDING if hasattr(config, name)]
    compiler = {(config, name): getattr(config, name) for config, name in asked}
    # Transformers would move weights in threads, which know no fake tensors.
    with mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"), torch.random.fork_rng(devices=()):
        torch.random.default_generator.manual_seed(0)
        try:
            yield
        finally:
            for (config, name), value in compiler.items():
                setattr(config, name, value)


@contextlib.contextmanager
def _kept_process() -> Iterator[None]:
    """Lets `os._exit` of user code raise SystemExit, so that what was found until then is told. In
    another process, or thread, it ends the process."""
    running, end = (os.getpid(), threading.get_ident()), os._exit

    def ended(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) != running:
            end(status)
        raise SystemExit(status)

    with mock.patch.object(os, "_exit", ended):
        yield


def _quiet() -> contextlib.AbstractContextManager[bool]:
    """Silences PyTorch's own traceback of a wrong shape, logged before it raises."""
    return mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    cudnn, fast = torch.backends.cudnn.enabled, torch.backends.mha.get_fastpath_enabled()
    torch.backends.cudnn.enabled = False  # it asks for the driver
    torch.backends.mha.set_fastpath_enabled(False)  # its operator has no fake implementation
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = cudnn
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def _deadline(seconds: float, begin: Callable[[], None]) -> Iterator[None]:
    begin()
    if seconds <= 0 or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: Any) -> None:
        lines = ((one.f_code.co_filename, line) for one, line in traceback.walk_stack(frame))
        where = next((f" at {short(file)}:{line}" for file, line in lines if is_users(file)), ", before it was called")
        raise Expired(f"{seconds:g} s are over{where}")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
