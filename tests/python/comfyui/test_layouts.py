"""ComfyUI's layouts and a model's tensors."""

from __future__ import annotations

import json
import unittest
from typing import Any

import torch
from pack import WithPack


class Layouts(WithPack):
    def setUp(self) -> None:
        super().setUp()
        self.layouts = self.pack("layouts")

    def given(self, value: Any, dtype: str, *shape: Any) -> Any:
        tensor, rate = self.layouts.to_tensor(value, {"name": "x", "dtype": dtype, "shape": list(shape)})
        return (tensor, rate) if rate is not None else tensor

    def test_an_image_becomes_bytes_and_comes_back(self) -> None:
        image = torch.tensor([0.0, 0.5, 1.0, -1.0, 2.0, 0.25]).reshape(1, 1, 2, 3)
        sent = self.given(image, "uint8", "n=1..", "height=1..", "width=1..", 3)
        self.assertEqual(sent.flatten().tolist(), [0, 128, 255, 0, 255, 64])
        back = self.layouts.image(sent)
        self.assertEqual((back.shape, back.dtype), (image.shape, torch.float32))
        self.assertTrue(torch.allclose(back, image.clamp(0, 1), atol=1 / 255))

    def test_a_sound_keeps_its_sign_in_integers_which_an_image_fills(self) -> None:
        sound = {"waveform": torch.tensor([[[0.0, 0.5, -0.5, 1.0, -1.0, 2.0]]]), "sample_rate": 8000}
        for dtype, numbers in (
            ("int16", [0, 1 << 14, -(1 << 14), (1 << 15) - 1, -(1 << 15), (1 << 15) - 1]),
            ("int8", [0, 64, -64, 127, -128, 127]),
            ("uint8", [128, 192, 64, 255, 0, 255]),
            ("int32", [0, 1 << 30, -(1 << 30), (1 << 31) - 1, -(1 << 31), (1 << 31) - 1]),
        ):
            sent, _ = self.given(sound, dtype, "channels=1..2", "samples=1..")
            self.assertEqual((str(sent.dtype), sent[0].tolist()), (f"torch.{dtype}", numbers))
        image = torch.tensor([0.0, 0.5, 1.0]).reshape(1, 1, 1, 3)
        for dtype, numbers in (("int16", [0, 16384, 32767]), ("int32", [0, 1 << 30, (1 << 31) - 1]), ("int8", [0, 64, 127])):
            self.assertEqual(self.given(image, dtype, 1, 1, 1, 3).flatten().tolist(), numbers)

    def test_what_integers_cannot_hold_is_refused(self) -> None:
        self.refused(lambda: self.given(torch.rand(1, 2, 2), "int64", 1, 2, 2), "input x takes int64[1, 2, 2]", "numbers as JSON")
        self.refused(lambda: self.given({"samples": torch.rand(1, 4, 8, 8)}, "uint8", 1, 4, 8, 8), "x is LATENT", "uint8[1, 4, 8, 8]")
        told = self.refused(lambda: self.given(torch.rand(2, 4, 5), "float32", "4..", f"width=5..{2**63 - 1}"), "float32[4.., width=5..]")
        self.assertNotIn("9223372036854775807", told)
        counts = torch.tensor([[3, 4]])
        self.assertTrue(torch.equal(self.given(counts, "int64", 1, 2), counts), "integers stay what they are")

    def test_colours_first_and_last(self) -> None:
        image = torch.rand(2, 4, 5, 3)
        sent = self.given(image, "float32", "n=1..", 3, "height=1..", "width=1..")
        self.assertEqual((sent.shape, sent.is_contiguous()), ((2, 3, 4, 5), True))
        self.assertTrue(torch.equal(self.layouts.image(sent), image))

    def test_a_batch_of_one_comes_and_goes(self) -> None:
        self.assertEqual(self.given(torch.rand(1, 4, 5), "float32", 4, 5).shape, (4, 5))
        self.assertEqual(self.given(torch.rand(1, 4, 5), "float32", 1, 1, 4, 5).shape, (1, 1, 4, 5))
        self.refused(lambda: self.given(torch.rand(3, 4, 5), "float32", 4, 5), "batch of 3", "float32[4, 5]")

    def test_sound_keeps_its_channels_and_tells_its_rate(self) -> None:
        sound = {"waveform": torch.rand(1, 2, 8), "sample_rate": 44100}
        sent, rate = self.given(sound, "float32", "channels=1..2", "samples=1..")
        self.assertEqual((sent.shape, rate), ((2, 8), 44100))
        self.assertTrue(torch.equal(self.layouts.audio(sent, rate)["waveform"], sound["waveform"]))
        self.assertEqual(self.layouts.audio(torch.rand(8), 8000)["waveform"].shape, (1, 1, 8))
        self.refused(lambda: self.given(sound, "float32", "samples=1.."), "x has shape [1, 2, 8]", "one channel")

    def test_masks_and_latents(self) -> None:
        self.assertEqual(self.layouts.mask(torch.rand(4, 5)).shape, (1, 4, 5))
        self.assertEqual(self.layouts.mask(torch.rand(2, 1, 4, 5)).shape, (2, 4, 5))
        self.assertEqual(self.layouts.mask(torch.tensor([[255]], dtype=torch.uint8)).tolist(), [[[1.0]]])
        latent = {"samples": torch.rand(1, 4, 8, 8)}
        self.assertTrue(torch.equal(self.layouts.latent(self.given(latent, "float32", 1, 4, 8, 8))["samples"], latent["samples"]))
        self.assertEqual(self.given(latent, "bfloat16", 1, 4, 8, 8).dtype, torch.bfloat16)

    def test_what_does_not_fit_is_told_with_its_shape(self) -> None:
        for layout, tensor in (("image", torch.rand(2, 7, 7)), ("mask", torch.rand(2, 3, 4, 5)), ("latent", torch.rand(4, 5))):
            self.refused(lambda layout=layout, tensor=tensor: getattr(self.layouts, layout)(tensor), str(list(tensor.shape)), "another output")
        self.refused(lambda: self.layouts.audio(torch.zeros(1, 4, dtype=torch.int64), 8000), "no sound", "int64[1, 4]")

    def test_numbers_by_hand_and_small_tensors_as_text(self) -> None:
        self.assertEqual(self.given("[[1, 2]]", "int64", 1, "n=1.."), [[1, 2]])
        self.assertEqual(json.loads(self.layouts.as_json({"a": 1}, {"y": torch.tensor([1, 2]), "big": torch.zeros(2000)})),
                         {"a": 1, "y": [1, 2], "big": "float32[2000]"})  # fmt: skip


if __name__ == "__main__":
    unittest.main()
