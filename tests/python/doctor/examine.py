"""`python examine.py PARTS FOLDER`: runs each part of a module on the CPU, then gives it to the
doctor. FOLDER receives the outputs, and in `examined.json` the findings, the package's executed
lines, and the lines of any package that read a tensor's value on the CPU. A process of its own,
since a patched copy of a package has the same name as the package."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from bulkhead.doctor import diagnose
from bulkhead.doctor.report import text
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = os.path.dirname(torch.__file__) + os.sep
SEEDS = 3  #: of each part whose output alone is compared
READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim")


class Executed:
    """The lines of one package's files that a run executes."""

    def __init__(self, package: str) -> None:
        self.root = str(Path(importlib.import_module(package).__path__[0]))
        self.lines: set[tuple[str, int]] = set()

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.root):
            return None
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace


class Reads(TorchDispatchMode):  # type: ignore[misc]
    """The lines whose operators read values, or make shapes of them. It knows nothing
    of the doctor."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[tuple[str, int]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.split("::")[1]
        by_mask = name in ("index", "index_put_") and any(one is not None and one.dtype == torch.bool for one in args[1])
        if name in READS or (by_mask and not (name == "index_put_" and args[2].numel() == 1)):
            frame = sys._getframe(1)
            while frame.f_code.co_filename.startswith(TORCH) and frame.f_back is not None:
                frame = frame.f_back
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return function(*args, **(kwargs or {}))


def kept_outside(arguments: Any) -> set[str]:
    """The attributes of modules that are tensors and neither parameters nor buffers: they stay on
    the CPU when their module moves."""
    modules = [one for argument in arguments if isinstance(argument, torch.nn.Module) for one in argument.modules()]
    return {f"{type(one).__qualname__}.{name}" for one in modules for name, value in vars(one).items() if has_tensor(value)}


def has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(has_tensor, value))
    return isinstance(value, torch.Tensor)


def main(module: str, folder: Path) -> None:
    parts = importlib.import_module(module)
    executed, reads = Executed(parts.PACKAGE), Reads()
    outputs, findings, errors, texts, kept = [], set(), [], [], set()
    for part, factory in parts.PARTS:
        torch.manual_seed(0)
        arguments = factory("cpu")
        kept |= kept_outside(arguments)
        torch.manual_seed(1)
        sys.settrace(executed.trace)
        try:
            with reads:
                outputs.append(part(*arguments))
        finally:
            sys.settrace(None)
        report = diagnose(part, factory, name=f"{module}.py:{part.__name__}")
        texts.append(f"$ python -m bulkhead.doctor {report.target} --inputs {module}.py:{factory.__name__}\n{text(report)}")
        findings |= {(relative(one.file), one.line, one.code) for one in report.findings}
        errors += [report.error] if report.error else []
    # Beyond what the doctor is given.
    for seed, (part, factory) in enumerate(SEEDS * getattr(parts, "COMPARED", [])):
        torch.manual_seed(seed)
        outputs.append(part(*factory("cpu")))
    torch.save(outputs, folder / "outputs.pt")
    lines = [
        (relative(file), line, Path(file).read_text().splitlines()[line - 1].strip()) for file, line in sorted(executed.lines)
    ]
    read = [(relative(file), line) for file, line in sorted(reads.lines)]
    (folder / "examined.json").write_text(json.dumps({"executed": lines, "reads": read, "findings": sorted(findings),
                                                      "errors": errors,
                                                     "report": "\n".join(texts), "kept_outside": sorted(kept)}))  # fmt: skip


def relative(file: str) -> str:
    """To the folder that its package was imported from."""
    roots = [root for root in sys.path if root and file.startswith(root + "/")]
    return file[len(max(roots, key=len)) + 1 :] if roots else file


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
