"""The small voice: what is streamed is the whole, requests do not touch each other, and bad
input is refused."""

from __future__ import annotations

import unittest

import numpy
import torch
from bulkhead.engine import InvalidInput
from bulkhead.engines.small_voice import PART_STEPS, RATE, STEP, SmallVoice, pitch_of
from calls import answered, loaded, started

TEXT = "A small voice, one two."


class SmallVoiceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.engine = loaded(SmallVoice)
        cls.parts, cls.whole = answered(cls.engine, "speak", text=TEXT)

    def test_what_is_streamed_is_the_whole(self) -> None:
        audio = self.whole.tensors["audio"]
        self.assertTrue(torch.equal(torch.cat([part.tensors["audio"] for part in self.parts], dim=1), audio))
        self.assertEqual({part.tensors["audio"].shape[1] for part in self.parts[:-1]}, {PART_STEPS * STEP})
        self.assertEqual(audio.shape[1] / RATE, self.whole.values["seconds"])

    def test_each_letter_sounds_and_a_space_fades(self) -> None:
        # Of each letter.
        loud = self.whole.tensors["audio"][0].view(len(TEXT), -1).abs().amax(dim=1)
        self.assertLess(float(loud.max()), 1.0)
        self.assertGreater(float(loud[0]), 0.05)
        letters = torch.tensor([not letter.isspace() for letter in TEXT])
        faded = self.whole.tensors["audio"][0].view(len(TEXT), -1)[:, -STEP:].abs().amax(dim=1)
        self.assertLess(float(faded[~letters].max()), 0.01)

    def test_the_second_request_equals_that_of_a_fresh_worker(self) -> None:
        given_up = started(self.engine, "speak", text="Something else entirely.")
        next(given_up)
        given_up.close()
        for graphs in ("preferred", "off"):
            with self.subTest(graphs=graphs):
                _, again = answered(self.engine, "speak", text=TEXT)
                _, fresh = answered(loaded(SmallVoice, graphs=graphs), "speak", text=TEXT)
                self.assertTrue(torch.equal(again.tensors["audio"], fresh.tensors["audio"]))

    def test_the_pitch_of_a_reference_is_taken(self) -> None:
        seconds = torch.arange(48000) / 48000
        voice = torch.sin(2 * torch.pi * 220 * seconds) + 0.5 * torch.sin(2 * torch.pi * 440 * seconds)
        self.assertAlmostEqual(pitch_of(voice[None], 48000), 220, delta=1)
        _, spoken = answered(self.engine, "speak", text=TEXT, reference=numpy.stack([voice, voice]), reference_rate=48000)
        _, said = answered(self.engine, "speak", text=TEXT, pitch=spoken.values["pitch"])
        self.assertTrue(torch.equal(spoken.tensors["audio"], said.tensors["audio"]))
        self.assertFalse(torch.equal(spoken.tensors["audio"], self.whole.tensors["audio"]))

    def test_no_text_and_half_an_hour_of_it_are_refused(self) -> None:
        for text in ("", " \n", "word " * 6000):
            with self.subTest(letters=len(text)), self.assertRaises(InvalidInput) as refused:
                answered(self.engine, "speak", text=text)
            self.assertIn("4096", refused.exception.remedy)


if __name__ == "__main__":
    unittest.main()
