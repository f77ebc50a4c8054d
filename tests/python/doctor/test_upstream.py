"""ChatterBox and Higgs Audio 2 as published, of small random weights, without a GPU: the doctor
finds what a list that was checked by hand says, no executed line that reads a value is left
unexplained, and its remedies, tried on a copy, mend without changing the outputs."""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path
from typing import ClassVar

import chatterbox_patches
import higgs_patches
import torch
from upstream import FORMS, Patch, checked, examined, found, patched

HERE = Path(__file__).parent


class Upstream:
    name: ClassVar[str]
    beside: ClassVar[str]  #: the folder that scripts/install --tests fills
    needs: ClassVar[tuple[str, ...]]  #: packages, the first under examination
    patches: ClassVar[list[Patch]]
    #: tensors of modules, neither parameter nor buffer: the line that makes each and is found,
    #: or why none is
    kept: ClassVar[dict[str, str]]

    @classmethod
    def setUpClass(cls) -> None:
        package, *others = (found(one, cls.beside) for one in cls.needs)
        if package is None or None in others:
            raise unittest.SkipTest(f"no {' or '.join(cls.needs)}: scripts/install --tests brings what the doctor's tests import")
        cls.rows = checked(HERE / f"{cls.name}.checked")
        cls.before, cls.outputs = examined(f"{cls.name}_parts", cls.beside, [])
        with tempfile.TemporaryDirectory() as folder:
            patched(package, cls.patches, Path(folder))
            cls.after, cls.outputs_after = examined(f"{cls.name}_parts", cls.beside, [Path(folder)])

    def test_finds_what_was_checked_by_hand(self) -> None:
        self.assertEqual(self.before["errors"], [])
        expected = {(row.file, row.line, row.code) for row in self.rows if row.code != "-" and row.fate != "after"}
        found = {tuple(one) for one in self.before["findings"]}
        print(f"\n{self.needs[0]}: {len(found)} findings, {len(self.before['executed'])} executed lines")
        self.assertEqual(found, expected)

    def test_the_report_is_the_one_in_docs(self) -> None:
        self.assertEqual(self.before["report"], self.documented().read_text(), "python test_upstream.py --write writes it")

    @classmethod
    def documented(cls) -> Path:
        return HERE.parents[2] / f"docs/doctor-{cls.name}-report.txt"

    def test_each_executed_line_that_may_read_is_found_or_explained(self) -> None:
        known = {(row.file, row.line) for row in self.rows}
        forms = {(file, line) for file, line, text in self.before["executed"] if FORMS.search(text)}
        reads = {(file, line) for file, line in self.before["reads"]}
        print(
            f"\n{self.needs[0]}: {len(forms)} executed lines that may read, copy or make a tensor of the CPU; {len(reads)} lines "
            "read a value on the CPU"
        )
        self.assertEqual((forms | reads) - known, set())

    def test_each_tensor_that_does_not_move_with_its_module_is_found_or_explained(self) -> None:
        self.assertEqual(self.before["kept_outside"], sorted(self.kept))
        found = {f"{file}:{line}" for file, line, code in self.before["findings"] if code == "cpu_tensor"}
        self.assertEqual([name for name, why in self.kept.items() if ".py:" in why and why not in found], [])

    def test_remedies_mend_and_change_no_output(self) -> None:
        self.assertEqual(self.after["errors"], [])
        expected = {(row.file, row.line, row.code) for row in self.rows if row.fate in ("stays", "after") and row.code != "-"}
        found = {tuple(one) for one in self.after["findings"]}
        print(f"\n{self.needs[0]}: {len(self.before['findings'])} findings before the remedies, {len(found)} after")
        self.assertEqual(found, expected)
        for one, other in zip(self.outputs, self.outputs_after, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


class Documents(unittest.TestCase):
    def test_name_as_many_findings_as_were_checked_by_hand(self) -> None:
        for name in ("chatterbox", "higgs"):
            count = sum(row.code != "-" and row.fate != "after" for row in checked(HERE / f"{name}.checked"))
            self.assertRegex((HERE.parents[2] / f"docs/doctor-{name}.md").read_text(), rf"(?m)^{count} findings[.:]")


class ChatterBox(Upstream, unittest.TestCase):
    name, beside, needs, patches = "chatterbox", "chatterbox", ("chatterbox", "s3tokenizer"), chatterbox_patches.PATCHES
    kept = {
        "AudioEncoderV2.freqs_cis": "of the speech tokenizer, which reads a reference before these parts begin",
        "EspnetRelPositionalEncoding.pe": "chatterbox/models/s3gen/transformer/embedding.py:236",
        "HiFTGenerator.stft_window": "chatterbox/models/s3gen/hifigan.py:379",
    }


class HiggsAudio(Upstream, unittest.TestCase):
    name, beside, needs, patches = "higgs", "boson", ("boson_multimodal",), higgs_patches.PATCHES
    kept = {
        "HiggsAudioModel.audio_codebook_weights": "of the loss: no step of these parts takes it",
        "LlamaRotaryEmbedding.original_inv_freq": "another name of the buffer inv_freq, read where the frequencies depend on the "
                                                  "length",
    }


def write() -> None:
    for one in (ChatterBox, HiggsAudio):
        one.documented().write_text(examined(f"{one.name}_parts", one.beside, [])[0]["report"])


if __name__ == "__main__":
    write() if sys.argv[1:] == ["--write"] else unittest.main()
