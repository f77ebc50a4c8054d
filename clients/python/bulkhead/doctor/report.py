"""The report in words, by file, each finding with its source line and a caret; and as SARIF,
which editors and CI services read."""

from __future__ import annotations

import itertools
import linecache
import os
import textwrap
import unicodedata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .findings import CODES, PREVENTS_CAPTURE, SEVERITIES, Finding, Note, Report
from .source import short

_WIDTH = 100
_NOTE = "torch_compile"  #: SARIF's rule for what the compiler says of a line that has no finding


def text(report: Report, accepted: int = 0) -> str:
    lines: list[str] = []
    for file, found in itertools.groupby(report.findings, key=lambda finding: finding.file):
        lines += [short(file), ""]
        for finding in found:
            lines += [*_finding(finding), ""]
    lines += [f"skipped: {reason}" for reason in report.skipped] + [f"note: {_note(note)}" for note in report.notes]
    for one in report.captures:
        lines.append(f"captured: a replay takes {one['replay_ms']} ms" if one["captured"] else f"not captured: {one['error']}")
        waits = f"in {one['idle_ms']} ms of them the GPU waits between two kernels"
        lines.append(f"  the step itself takes {one['eager_ms']} ms; {waits}")
        lines += [_cost(cost) for cost in one["costs"]]
    if report.error:
        lines += [f"error: {report.error}", f"  {report.remedy}"]
    return "\n".join([*lines, summary(report, accepted)]) + "\n"


def _cost(cost: dict[str, Any]) -> str:
    at, saved = f"{short(cost['file'])}:{cost['line']}", cost["saved_ms"]
    less = "" if saved is None else f"; without its reads and copies a call takes {saved:.4f} ms less"
    waits = f"the GPU waits {cost['idle_ms']:.4f} ms after it"
    return f"  {at} holds the host for {cost['held_ms']:.4f} ms in a call, and {waits}{less}"


def _note(note: Note) -> str:
    return f"{short(note.file)}{f':{note.line}' if note.line else ''} in {note.function or 'the module'}: {note.reason}"


def _finding(finding: Finding) -> list[str]:
    at = f"{finding.line}:{finding.column} " if finding.line else ""
    lines = [f"  {at}{finding.code} ({SEVERITIES[finding.severity]}) in {finding.function or 'the module'}"]
    source = linecache.getline(finding.file, finding.line).rstrip()
    if source:
        shown = source.expandtabs()
        margin = len(shown) - len(shown.lstrip())
        first = max(_width(source[: finding.column - 1].expandtabs()) - margin, 0)
        last = _width((source[: finding.end_column - 1] if finding.end_column else source).expandtabs()) - margin
        lines += [f"      {shown.strip()}", "      " + " " * first + "^" * max(last - first, 1)]
    told = [(finding.reason, "    ", "    "), (finding.remedy, "    remedy: ", "      ")]
    if finding.path:
        told.append(("called by " + " > ".join(finding.path), "    ", "      "))
    for text, first_indent, indent in told:
        lines += textwrap.wrap(text, _WIDTH - 4, initial_indent=first_indent, subsequent_indent=indent,
                               break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return lines


def _width(text: str) -> int:
    """Width in terminal columns."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text
    )


def summary(report: Report, accepted: int = 0) -> str:
    counts = {severity: sum(finding.severity == severity for finding in report.findings) for severity in SEVERITIES}
    told = ", ".join(f"{count} {SEVERITIES[severity]}" for severity, count in counts.items() if count)
    count = len(report.findings)
    line = f"{report.target}: {count} finding{'s' * (count != 1)}" + (f" ({told})" if told else "") + f" in {report.calls} calls"
    return line + (f"; {accepted} accepted by the baseline" if accepted else "")


def sarif(report: Report) -> dict[str, Any]:
    """SARIF 2.1.0."""
    rules = CODES | {_NOTE: "what torch.compile says of a line that has no finding"}
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "bulkhead doctor",
                "rules": [{"id": code, "shortDescription": {"text": told}} for code, told in rules.items()],
            }
        },
        "columnKind": "unicodeCodePoints",
        "results": [*map(_of_finding, report.findings), *(_result(_NOTE, "note", note.reason, note) for note in report.notes)],
        "invocations": [{"executionSuccessful": not report.error, "toolExecutionNotifications": _notices(report)}],
    }
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _of_finding(finding: Finding) -> dict[str, Any]:
    level = "error" if finding.severity == PREVENTS_CAPTURE else "warning"
    result = _result(finding.code, level, f"{finding.reason}. Remedy: {finding.remedy}", finding, severity=finding.severity)
    if finding.end_column > finding.column:
        result["locations"][0]["physicalLocation"]["region"]["endColumn"] = finding.end_column
    return result


def _result(rule: str, level: str, text: str, at: Finding | Note, **properties: str) -> dict[str, Any]:
    region = {"startLine": max(at.line, 1), "startColumn": max(at.column, 1)}
    return {
        "ruleId": rule,
        "level": level,
        "message": {"text": text},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(at.file)}, "region": region}}],
        "properties": {**properties, "function": at.function},
    }


def _uri(file: str) -> str:
    relative = os.path.relpath(file)
    return Path(file).as_uri() if relative.startswith("..") and os.path.isabs(file) else quote(Path(relative).as_posix())


def _notices(report: Report) -> list[dict[str, Any]]:
    told = [("warning", one) for one in report.skipped]
    if report.error:
        told.append(("error", f"{report.error}. Remedy: {report.remedy}" if report.remedy else report.error))
    return [{"level": level, "message": {"text": text}} for level, text in told]
