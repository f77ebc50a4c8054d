"""What examples/vad_timeline.py computes beside the model's probabilities: samples at 16 kHz, and
segments of speech."""

from __future__ import annotations

import sys
import tempfile
import unittest
import wave
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "clients/python/examples"))
from vad_timeline import read_wav, resample, speech_segments  # noqa: E402


class Files(unittest.TestCase):
    def written(self, samples: list[int], *, channels: int = 1, width: int = 2, rate: int = 48_000) -> str:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = f"{folder.name}/a.wav"
        with wave.open(path, "wb") as file:
            file.setparams((channels, width, rate, 0, "NONE", ""))
            file.writeframes(np.array(samples, "<i2" if width == 2 else "u1").tobytes())
        return path

    def test_mono_is_read_and_stereo_is_averaged(self) -> None:
        samples, rate = read_wav(self.written([0, 16384, -32768]))
        self.assertEqual((samples.tolist(), rate), ([0, 0.5, -1], 48_000))
        self.assertEqual(read_wav(self.written([16384, 0, -16384, -16384], channels=2))[0].tolist(), [0.25, -0.5])

    def test_other_files_are_refused_by_name(self) -> None:
        whole = self.written([1, 2, 3])
        with open(whole, "r+b") as file:
            file.truncate(20)
        for path in (self.written([1], width=1), self.written([0] * 6, channels=6), whole):
            with self.assertRaisesRegex(SystemExit, f"reading {path}: "):
                read_wav(path)


class Resampling(unittest.TestCase):
    def sine(self, hz: float, rate: int, count: int) -> np.ndarray:
        return np.sin(2 * np.pi * hz * np.arange(count) / rate).astype(np.float32)

    def test_a_tone_keeps_frequency_phase_and_level_and_a_constant_its_value(self) -> None:
        inner = slice(200, -200)
        for rate in (8_000, 11_025, 22_050, 44_100, 48_000, 96_000):
            tone = resample(self.sine(1000, rate, rate), rate, 16_000)
            np.testing.assert_allclose(tone[inner], self.sine(1000, 16_000, 16_000)[inner], atol=2e-3, err_msg=str(rate))
            constant = resample(np.full(rate, 0.5, np.float32), rate, 16_000)
            np.testing.assert_allclose(constant[inner], 0.5, atol=1e-5, err_msg=str(rate))
        lost = resample(self.sine(10_000, 48_000, 48_000), 48_000, 16_000)
        np.testing.assert_allclose(lost[inner], 0, atol=1e-3, err_msg="what the lower rate cannot carry is silent")
        samples = np.array([0.1, -0.2], np.float32)
        self.assertIs(resample(samples, 16_000, 16_000), samples)


class Segments(unittest.TestCase):
    def of(self, *runs: tuple[int, float]) -> list[tuple[int, int]]:
        """Runs of chunks with one probability each."""
        return speech_segments([value for count, value in runs for _ in range(count)], 0.5)

    def test_segments_are_those_of_silero_vads_rule(self) -> None:
        speech, silence = (10, 0.9), (10, 0)
        for runs, expected in (
            # Padded on both sides.
            (((10, 0.1), (20, 0.9), (10, 0.1)), [(10 * 512 - 480, 30 * 512 + 480)]),
            ((silence, (7, 0.9), silence), []),  # a short sound is not speech
            ((speech, (3, 0), speech, silence), [(0, 23 * 512 + 480)]),  # a dip is not a pause
            ((speech, (30, 0.4), speech, silence), [(0, 50 * 512 + 480)]),  # between the thresholds
            ((speech, (5, 0), speech, silence), [(0, 10 * 512 + 480), (15 * 512 - 480, 25 * 512 + 480)]),
            (((20, 0.9),), [(0, 20 * 512)]),  # until the end
            ((), []),
        ):
            with self.subTest(runs):
                self.assertEqual(self.of(*runs), expected)


if __name__ == "__main__":
    unittest.main()
