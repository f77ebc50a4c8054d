"""The report as SARIF 2.1.0, which editors and CI services read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .findings import CODES, PREVENTS_CAPTURE, Finding, Report


def document(report: Report) -> dict[str, Any]:
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "bulkhead doctor", "rules": [{"id": code, "shortDescription": {"text": told}} for code, told in CODES.items()]}},
        "results": [_result(finding) for finding in report.findings],
        "invocations": [{"executionSuccessful": not report.error, "toolExecutionNotifications": [_notice(one) for one in _notices(report)]}],
    }
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _result(finding: Finding) -> dict[str, Any]:
    region: dict[str, int] = {"startLine": max(finding.line, 1), "startColumn": max(finding.column, 1)}
    if finding.end_column > finding.column:
        region["endColumn"] = finding.end_column
    return {
        "ruleId": finding.code,
        "level": "error" if finding.severity == PREVENTS_CAPTURE else "warning",
        "message": {"text": f"{finding.reason}. Remedy: {finding.remedy}"},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(finding.file)}, "region": region}}],
        "properties": {"severity": finding.severity, "function": finding.function},
    }


def _uri(file: str) -> str:
    relative = os.path.relpath(file)
    return Path(relative).as_posix() if not relative.startswith("..") else Path(file).as_uri() if os.path.isabs(file) else file


def _notices(report: Report) -> list[str]:
    return report.skipped + ([report.error] if report.error else [])


def _notice(text: str) -> dict[str, Any]:
    return {"level": "warning", "message": {"text": text}}
