"""Where there is a GPU: the fake run and a real capture agree on the corpus. Never run on one so far."""

from __future__ import annotations

import json
import subprocess
import sys
import unittest
from pathlib import Path

import torch
from findings import cases

HERE = Path(__file__).parent


@unittest.skipUnless(torch.cuda.is_available(), "no GPU here")
class Agreement(unittest.TestCase):
    def test_what_cannot_be_captured_has_a_finding(self) -> None:
        agreed, cautious, missed = 0, [], []
        for file in sorted((HERE / "corpus").glob("*.py")):
            for case in cases(file):
                ended = subprocess.run([sys.executable, "examine_on_gpu.py", file, case.name], capture_output=True, text=True, timeout=120, cwd=HERE)
                report = json.loads(ended.stdout.splitlines()[-1])
                captured = all(one["captured"] for one in report["captures"])
                prevents = any(one["severity"] == "prevents_capture" for one in report["findings"])
                agreed += captured != prevents
                cautious += [case.name] if captured and prevents else []
                missed += [case.name] if not captured and not prevents else []
        print(f"\nfake run and capture agree on {agreed} of {agreed + len(cautious) + len(missed)} functions; findings that the capture bore: {cautious}")
        self.assertEqual(missed, [])


if __name__ == "__main__":
    unittest.main()
