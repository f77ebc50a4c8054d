"""The graph doctor: finds, without a GPU, where and why code cannot be captured as a CUDA graph.

    from bulkhead.doctor import diagnose

    report = diagnose(step, lambda device: (torch.zeros(1, 80, device=device),))
    for finding in report.findings:
        print(finding.file, finding.line, finding.code, finding.remedy)

``docs/doctor.md`` says what each code means.
"""

from .findings import CODES, SEVERITIES, Finding, Report

try:
    from .run import diagnose
except ModuleNotFoundError as missing:  # the command line says so itself
    if missing.name != "torch":
        raise

__all__ = ["CODES", "SEVERITIES", "Finding", "Report", "diagnose"]
