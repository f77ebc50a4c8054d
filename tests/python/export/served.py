"""What the worker makes of a package that a test has just compiled."""

from __future__ import annotations

from pathlib import Path

import bulkhead
from bulkhead.export import check
from bulkhead.export.families import Family
from daemon import Daemon


def verdicts(folder: Path, family: Family, count: int) -> list[check.Verdict]:
    """Of each prompt of tokens: what a daemon generates greedily, held against what the package
    gives in Python."""
    package = check.Package(folder)
    daemon = Daemon(f"version: 1\ndefaults: {{device: cpu, threads: 1}}\nmodels:\n  served: {{runtime: generate, package: {folder}}}\n")
    found = []
    try:
        with bulkhead.connect(daemon.socket, name="test") as client:
            for prompt in family.prompts():
                assert prompt.tokens is not None
                tokens, logits = package.generate(family, prompt, count)
                said = client.generate("served", prompt.tokens[:, 0].contiguous().numpy(), do_sample=False, max_new_tokens=count)
                found.append(check.judge(tokens, logits, [[token] for token in said]))
    finally:
        daemon.stop()
    return found
