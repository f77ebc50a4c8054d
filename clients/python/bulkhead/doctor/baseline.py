"""Accepted findings in a file, identified by code, file, function and source line, so that they
survive edits elsewhere; equal ones are counted. A file is named relative to the baseline's folder:
the working directory does not matter."""

from __future__ import annotations

import json
import linecache
import os
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import Error
from .findings import Finding
from .source import short

_KEYS = ("code", "file", "function", "source")


def entry(finding: Finding, folder: Path) -> dict[str, str]:
    is_path = os.path.isabs(finding.file) and "-packages" + os.sep not in finding.file
    return {
        "code": finding.code,
        "file": os.path.relpath(finding.file, folder) if is_path else short(finding.file),
        "function": finding.function,
        "source": linecache.getline(finding.file, finding.line).strip(),
    }


def write(file: Path, found: list[Finding]) -> None:
    accepted = [entry(finding, file.parent) for finding in found]
    file.write_text(json.dumps({"accepted": accepted}, indent=1, ensure_ascii=False) + "\n")


def read(file: Path) -> list[dict[str, str]]:
    """Errors: input_invalid."""
    try:
        accepted: Any = json.loads(file.read_text())["accepted"]
        return [{key: str(one[key]) for key in _KEYS} for one in accepted]
    except OSError as error:
        why = error.strerror
    except (ValueError, KeyError, TypeError):
        why = "it is not a baseline of the doctor"
    raise Error("input_invalid", f"reading the baseline {file}: {why}", "write one with --write-baseline FILE")


def without(found: list[Finding], accepted: list[dict[str, str]], file: Path) -> list[Finding]:
    """Leaves out as many of equal findings as were accepted, the first ones."""
    left = Counter(tuple(one.values()) for one in accepted)
    rest: list[Finding] = []
    for finding in found:
        key = tuple(entry(finding, file.parent).values())
        if left[key]:
            left[key] -= 1
        else:
            rest.append(finding)
    return rest
