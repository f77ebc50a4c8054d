"""Where there is a GPU: the fake run and a real capture agree on the corpus."""

from __future__ import annotations

import multiprocessing
import os
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from examine_on_gpu import examined
from findings import cases

CORPUS = Path(__file__).parent / "corpus"
CASE_S = 60  #: of a case that is waited for; the others run meanwhile
AT_ONCE = max(4, 3 * (os.cpu_count() or 4) // 4)


@unittest.skipUnless(torch.cuda.is_available(), "no GPU here")
class Agreement(unittest.TestCase):
    def test_what_cannot_be_captured_has_a_finding(self) -> None:
        agreed, cautious, missed, failed, refused, named = 0, [], [], [], 0, 0
        server = multiprocessing.get_context("forkserver")
        # It imports torch once, and does not touch the GPU.
        server.set_forkserver_preload(["examine_on_gpu"])
        # A capture that fails can spoil CUDA for its whole process.
        with server.Pool(AT_ONCE, maxtasksperchild=1) as processes:
            running = [(case.name, processes.apply_async(examined, (file, case.name))) for file in sorted(CORPUS.glob("*.py")) for case in cases(file)]
            for name, one in running:
                try:
                    report = one.get(CASE_S)
                except Exception as error:
                    failed.append(f"{name}: {error!r}")
                    continue
                captured = bool(report.get("captures")) and all(each["captured"] for each in report["captures"])
                prevents = any(each["severity"] == "prevents_capture" for each in report["findings"])
                agreed += captured != prevents
                for one in report.get("captures", []):
                    refused += not one["captured"]
                    named += one.get("failed_at", {}).get("has_finding", False)
                    print(*costs(name, one), sep="\n")
                cautious += [name] if captured and prevents else []
                if not captured and not prevents:
                    missed.append(f"{name}: {report.get('error', {}).get('attempt', '')} {[each['error'] for each in report.get('captures', [])]}")
        told = f"fake run and capture agree on {agreed} of {len(running)} functions; findings that the capture bore: {cautious}; not found: {missed}"
        print(f"\n{told}; of {refused} refused captures {named} end in a line that had a finding; no answer: {failed}")
        self.assertEqual(missed + failed, [])


def costs(name: str, captured: dict[str, Any]) -> Iterator[str]:
    """What each finding costs a call, and the gaps between kernels."""
    yield f"{name}: eager {captured['eager_ms']} ms, of which the GPU waits {captured['idle_ms']} ms between kernels; replay {captured['replay_ms']} ms"
    for cost in captured["costs"]:
        yield f"  line {cost['line']}: held {cost['held_ms']:.4f} ms, waited after {cost['idle_ms']:.4f} ms, shorter without {cost['saved_ms']}"


if __name__ == "__main__":
    unittest.main()
