"""Accepted findings in a file, identified by code, file, function and source line, so that they survive edits elsewhere."""

from __future__ import annotations

import json
import linecache
from pathlib import Path
from typing import Any

from ..errors import Error
from .findings import Finding
from .source import short

_KEYS = ("code", "file", "function", "source")


def entry(finding: Finding) -> dict[str, str]:
    return {"code": finding.code, "file": short(finding.file), "function": finding.function, "source": linecache.getline(finding.file, finding.line).strip()}


def write(file: Path, found: list[Finding]) -> None:
    file.write_text(json.dumps({"accepted": [entry(finding) for finding in found]}, indent=1, ensure_ascii=False) + "\n")


def read(file: Path) -> list[dict[str, str]]:
    """Errors: input_invalid."""
    try:
        accepted: Any = json.loads(file.read_text())["accepted"]
        return [{key: str(one[key]) for key in _KEYS} for one in accepted]
    except OSError as error:
        raise Error("input_invalid", f"reading the baseline {file}: {error.strerror}", "write one with --write-baseline FILE") from None
    except (ValueError, KeyError, TypeError):
        raise Error("input_invalid", f"reading the baseline {file}: it is not a baseline of the doctor", "write one with --write-baseline FILE") from None


def without(found: list[Finding], accepted: list[dict[str, str]]) -> list[Finding]:
    return [finding for finding in found if entry(finding) not in accepted]
