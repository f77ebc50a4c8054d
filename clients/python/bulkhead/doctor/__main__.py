"""Says where, and why, code cannot be captured as a CUDA graph, on a machine without a GPU as
well as with one."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import select
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from ..errors import Error
from . import baseline  # nothing here imports PyTorch, whose absence is reported
from .findings import Report
from .report import sarif, text

_START_SECONDS = 600.0  #: for which Python may take to import PyTorch
#: After the deadline, for a callable that comes back to Python late, or takes no signal.
_GRACE_SECONDS = 30.0
#: What the child says: the target's code begins (twice with --gpu), the report is printed.
_BEGUN, _ENDED = b"b", b"e"
DONE, FOUND, FAILED = 0, 1, 2


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bulkhead.doctor", description=__doc__,
                                     epilog="Exit status: 0 nothing prevents capture, 1 a finding does, "
                                     "2 the target could not be looked at to the end, and why.")  # fmt: skip
    parser.add_argument("target", metavar="TARGET", help="package.module:function, file.py:function or …:Class, an exported "
                        "program (.pt2), or a model of the fleet")  # fmt: skip
    parser.add_argument("--inputs", metavar="FILE.py:FACTORY",
                        help="a function that is given the device and returns the arguments: a tuple, or a dictionary of names; "
                        "of a class (arguments of the constructor, arguments of the call)")  # fmt: skip
    parser.add_argument(
        "--compile", action="store_true", help="also what torch.compile says: graph breaks, and where CUDA Graphs are skipped"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="also capture on this machine's GPU, and measure what each finding costs"
    )
    parser.add_argument("--fleet", metavar="FILE", help="the fleet file of the model; else the daemon's")
    parser.add_argument("--engine", type=_options, metavar="JSON", help="TARGET is the class of an engine, with these options; "
                        "the functions that it gives to context.graph are looked at")  # fmt: skip
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON document")
    shape.add_argument("--sarif", action="store_true", help="SARIF 2.1.0, for editors and CI")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="leave out the findings that this file accepts")
    parser.add_argument("--write-baseline", type=Path, metavar="FILE", help="accept all findings of this run in this file")
    parser.add_argument("--deadline", type=seconds, default=120.0, metavar="S",
                        help="seconds after which a callable that does not return is given up (120)")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the target in a child process, so that this one can report a crash or a hang."""
    options = parsed(arguments)
    # A model's name may have a dot.
    if not any(mark in options.target for mark in ":/") and not options.target.endswith((".py", ".pt2")):
        return _of_fleet(options, sys.argv[1:] if arguments is None else arguments)
    ended, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ended)
        status = FAILED
        try:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):
                    # A report may have what the terminal cannot show.
                    stream.reconfigure(errors="backslashreplace")
            status = _told(options, lambda: os.write(end, _BEGUN))
            sys.stdout.flush()
        except BaseException as error:
            _refuse(options, Error("input_invalid", f"looking at {options.target}: {type(error).__name__}: {error}", ""))
        finally:
            with contextlib.suppress(Exception):  # a target may have closed it
                sys.stderr.flush()
            with contextlib.suppress(OSError):
                os.write(end, _ENDED)  # a target that ends its process leaves no report
            os._exit(status)
    os.close(end)
    try:
        said = _said(ended, child, options)
        how = os.waitpid(child, 0)[1]
    except Error as error:
        return _refuse(options, error)
    except KeyboardInterrupt:  # the child gets it too
        return 130
    if said == _ENDED and os.WIFEXITED(how):
        return os.WEXITSTATUS(how)
    by = signal.Signals(os.WTERMSIG(how)).name if os.WIFSIGNALED(how) else f"exit({os.WEXITSTATUS(how)})"
    return _refuse(options, Error("input_invalid", f"looking at {options.target}: it ended its process by {by}",
                                  "call it with these inputs on the CPU first: it must return"))  # fmt: skip


def _said(ended: int, child: int, options: argparse.Namespace) -> bytes:
    """The last that the child says.

    Errors: deadline_exceeded, counted from where the target's code begins; the child is killed."""
    error = Error("deadline_exceeded", f"looking at {options.target}: PyTorch was not imported within {_START_SECONDS:g} s",
                  f"try `import torch` with {sys.executable}")  # fmt: skip
    limit = _START_SECONDS
    while select.select([ended], [], [], limit)[0]:
        if (said := os.read(ended, 1)) != _BEGUN:
            return said
        limit = options.deadline + _GRACE_SECONDS
        error = Error("deadline_exceeded", f"looking at {options.target}: it did not return within {options.deadline:g} s, and took "
                                           "no signal", "give a longer --deadline, or smaller inputs")  # fmt: skip
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise error


def _of_fleet(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Returns only on an error: otherwise this process becomes `bulkhead doctor`, which reads the
    fleet and starts the model's interpreter."""
    program = shutil.which(
        "bulkhead", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    )
    if program is None:
        return _refuse(options, Error("input_invalid", f"looking at {options.target}: a model of a fleet is found by the program "
                                                       "bulkhead, which is not on PATH",
                                      "put its folder on PATH, or write TARGET as file.py:function or "
                                      "package.module:function"))  # fmt: skip
    os.execv(program, [program, "doctor", *arguments])


def _told(options: argparse.Namespace, begin: Callable[[], Any]) -> int:
    try:
        return _examined(options, begin)
    except Error as error:
        return _refuse(options, error)
    except BrokenPipeError:  # such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except OSError as error:
        return _refuse(options, Error("input_invalid", f"looking at {options.target}: {error}", ""))
    except KeyboardInterrupt:
        return 130


def _refuse(options: argparse.Namespace, error: Error) -> int:
    if options.json or options.sarif:
        _print(options, Report(options.target, error=error.attempt, remedy=error.remedy))
        sys.stdout.flush()
    else:
        print(f"error: {error.attempt} ({error.code})" + (f"\n  {error.remedy}" if error.remedy else ""), file=sys.stderr)
    return FAILED


def _examined(options: argparse.Namespace, begin: Callable[[], Any]) -> int:
    accepted = [] if options.baseline is None else baseline.read(options.baseline)
    with _output_to_stderr(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = _report(options, begin)
    if options.write_baseline is not None and (report.findings or not report.error):
        try:
            baseline.write(options.write_baseline, report.findings)
        except OSError as error:
            failed = f"writing the baseline {options.write_baseline}: {error.strerror}"
            report.end_early(failed, "name a file that can be written")
    found = len(report.findings)
    if accepted:
        report.findings = baseline.without(report.findings, accepted, options.baseline)
    _print(options, report, found - len(report.findings))
    return FAILED if report.error else FOUND if report.prevents_capture else DONE


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """What the target and its child processes write is not part of the report."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _print(options: argparse.Namespace, report: Report, accepted: int = 0) -> None:
    if options.json or options.sarif:
        print(json.dumps(report.document() if options.json else sarif(report), ensure_ascii=False))
    else:
        print(text(report, accepted), end="")


def _report(options: argparse.Namespace, begin: Callable[[], Any]) -> Report:
    # Otherwise a process that has asked whether there is a GPU leaves its children
    # without a driver.
    if options.gpu:
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        import torch
    except ImportError:
        raise Error("input_invalid", f"looking at {options.target}: PyTorch is missing in {sys.prefix}",
                    "run the doctor in the model's environment, or name it with --python") from None  # fmt: skip
    if not hasattr(torch._C, "_ensureCUDADeviceGuardSet") and not torch.cuda.is_available():
        raise Error("input_invalid",
                    f"looking at {options.target} without a GPU: fake tensors of PyTorch {torch.__version__} need a driver",
                    "use PyTorch 2.10 or newer, or a machine with a GPU")  # fmt: skip
    if options.gpu and not torch.cuda.is_available():
        raise Error("input_invalid", "capturing on a GPU: PyTorch finds none here", "leave out --gpu: the findings need none")
    from .calls import Deferred
    from .exported import Program
    from .run import diagnose
    from .target import load

    factory: Any = Deferred(lambda: load(options.inputs, "--inputs")) if options.inputs else None
    is_program = options.target.endswith(".pt2")
    target = Program(Path(options.target)) if is_program else Deferred(lambda: load(options.target, "TARGET"))
    return diagnose(target, factory, options=options.engine, compiler=options.compile, gpu=options.gpu,
                    deadline=options.deadline, name=options.target, begin=begin)  # fmt: skip


def _options(text: str) -> dict[str, Any]:
    read = json.loads(text)
    if not isinstance(read, dict):
        raise ValueError(text)
    return read


def seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e6:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
