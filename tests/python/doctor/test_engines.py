"""Bulkhead's own engines of transformers' models, loaded from a folder of weights without a GPU:
what they capture has no finding."""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "engines"))
import small_models  # noqa: E402
from bulkhead.doctor import Report, diagnose  # noqa: E402
from bulkhead.engines.higgs_audio_v2 import HiggsAudio  # noqa: E402
from bulkhead.engines.qwen3_vl import Qwen3VL  # noqa: E402


class Reads(Qwen3VL):
    def _decode(self, *, token: Any, delta: Any, cache: Any) -> Any:
        return super()._decode(token=token, delta=delta * delta.item(), cache=cache)  # read


class Engines(unittest.TestCase):
    def examined(self, engine: type, make: Any, **options: Any) -> Report:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
            given = {name: value.format(folder) for name, value in options.items()}
            report = diagnose(engine, options={"model": folder, "cache_lengths": [256], **given})
        self.assertEqual((report.error, report.skipped, report.calls), ("", [], 3))
        return report

    def test_what_they_capture_has_no_finding_but_a_read_in_one(self) -> None:
        line = next(number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# read"))
        for engine, make, options, wanted in ((Reads, small_models.qwen3_vl, {}, [(Path(__file__), line, "host_read")]),
                                              (HiggsAudio, small_models.higgs_audio_v2, {"codec": "{}/codec"}, [])):  # fmt: skip
            with self.subTest(engine.__name__):
                found = [(Path(one.file), one.line, one.code) for one in self.examined(engine, make, **options).findings]
                self.assertEqual(found, wanted)


if __name__ == "__main__":
    unittest.main()
