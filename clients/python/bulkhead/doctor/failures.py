"""What ended a run, in a sentence: the target's error, with its line, or the doctor's own."""

from __future__ import annotations

import os
import re
import traceback

from ..errors import Error
from .source import one_line, location_of, short

_OF_FAKE_TENSORS = re.compile(
    r"NVIDIA driver|driver version is insufficient|FakeTensor|its data is not allocated|aten\.\w+\.\w+$|on device \"meta\""
)
#: Lines of the doctor that give PyTorch, or the target, what the target gave: what these raise
#: is the target's.
_PASSED_ON = re.compile(r"\bargs\b|\braise\b|\(DEVICE\)|made\(\)")
_FOLDER = os.path.dirname(os.path.realpath(__file__)) + os.sep


def described(error: BaseException, target: str) -> tuple[str, str]:
    """What failed, at which user line, and the remedy."""
    location = location_of(error)
    where = f" at {location}" if location else ""
    try:
        text = str(error)
    except Exception:  # the user's own class
        text = ""
    if isinstance(error, Error):
        return error.attempt, error.remedy
    if isinstance(error, ModuleNotFoundError):
        return (
            f"{target} needs the package {error.name!r}{where}, which is missing here",
            f"install it into this environment, or name the model's own with --python: pip install {error.name}",
        )
    if isinstance(error, SyntaxError) and error.filename:
        return f"{target} has a syntax error in {short(error.filename)}:{error.lineno}: {error.msg}", "correct it first"
    if isinstance(error, MemoryError) or "out of memory" in text:
        return f"{target} ran out of memory{where}: {one_line(text or type(error).__name__, 300)}", "give smaller inputs"
    if "does not require grad" in text:
        return (
            f"{target} computes gradients{where}, which are off here: {one_line(text, 120)}",
            "leave the backward pass out of what the doctor is given",
        )
    if isinstance(error, SystemExit):
        return f"{target} ended the process{where}: SystemExit({error.code})", "let the callable return"
    if isinstance(error, (TypeError, AttributeError)):  # such as x.foo: the user's own mistake
        text = text.replace("FakeTensor", "Tensor")
    elif location is not None and _OF_FAKE_TENSORS.search(text):
        return (f"{target} needs a GPU{where}: `{location.text.strip()}` does what fake tensors cannot ({one_line(text, 120)})",
                "leave that line out of what the doctor is given, or run it on a machine with a GPU")  # fmt: skip
    told = f"{type(error).__name__}: {one_line(text or 'without a message', 300)}"
    if (own := _of_the_doctor(error)) is not None:
        return (f"the doctor itself failed at {short(own.filename)}:{own.lineno}, while it looked at {target}{where}: {told}",
                "report it, with that line of the target; until it is mended, leave the line out of what the doctor is given"
                )  # fmt: skip
    return (
        f"{target} raised {type(error).__name__}{where}: {one_line(text or 'without a message', 300)}",
        "call it with these inputs on the CPU first: it must return",
    )


def _of_the_doctor(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame, if it is the doctor's: its own mistake, unless PyTorch refuses there
    what the target asks of it."""
    last = next(reversed(traceback.extract_tb(error.__traceback__)), None)
    if last is None or isinstance(error, RuntimeError) or _PASSED_ON.search(last.line or ""):
        return None
    return last if os.path.realpath(last.filename).startswith(_FOLDER) else None
