"""The graph doctor: where, and why, code cannot be captured as a CUDA graph, without a GPU.

    from bulkhead.doctor import diagnose

    report = diagnose(step, lambda device: (torch.zeros(1, 80, device=device),))
    for finding in report.findings:
        print(finding.file, finding.line, finding.code, finding.remedy)

It needs PyTorch 2.9 or newer. ``docs/doctor.md`` says what each code means.
"""

from .diagnose import diagnose
from .findings import CODES, SEVERITIES, Finding, Report

__all__ = ["CODES", "SEVERITIES", "Finding", "Report", "diagnose"]
