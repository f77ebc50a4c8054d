"""Each engine by a real daemon, from a folder of small random weights: what a client hears or reads
is what upstream says directly."""

from __future__ import annotations

import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import bulkhead
import numpy
import small_models
import torch
from bulkhead.engines.higgs_audio_v2 import HiggsAudio
from bulkhead.engines.qwen3_vl import Qwen3VL
from bulkhead.engines.small_voice import SmallVoice
from calls import SmallModelTest, answered, loaded
from daemon import Daemon

CHATTERBOX = Path(__file__).parents[3] / "build" / "chatterbox"
SECONDS = 120
VOICE = numpy.random.default_rng(1).normal(0, 0.1, (1, 9600)).astype(numpy.float32)
IMAGES = numpy.random.default_rng(2).integers(0, 256, (1, 24, 32, 3), dtype=numpy.uint8)
HIGGS = {"text": "Hello there.", "top_k": 6, "seed": 5, "max_new_tokens": 120}
QWEN = {"prompt": "What is to be seen?", "seed": 4, "max_new_tokens": 40}
CHATTERBOX_ASKED = {"text": "Hello there.", "seed": 3, "max_new_tokens": 30}


class ServedTest(SmallModelTest):
    """The engines' own tests compare them with upstream; here the daemon's answers are compared
    with the engines'."""

    @staticmethod
    def make(folder: Path) -> Path:
        for name, model in (("higgs", small_models.higgs_audio_v2), ("qwen", small_models.qwen3_vl)):
            (folder / name).mkdir()
            model(folder / name)
        return folder

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        engines = "bulkhead.engines"
        cls.options = {name: {"model": str(cls.folder / name), "cache_lengths": [256]} for name in ("higgs", "qwen")}
        fleet = {
            "voice": (f"{engines}.small_voice:SmallVoice", {}, "preferred"),
            "higgs": (f"{engines}.higgs_audio_v2:HiggsAudio", cls.options["higgs"], "preferred"),
            "higgs-eager": (f"{engines}.higgs_audio_v2:HiggsAudio", cls.options["higgs"], "off"),
            "qwen": (f"{engines}.qwen3_vl:Qwen3VL", cls.options["qwen"], "preferred"),
            "qwen-of-the-hub": (f"{engines}.qwen3_vl:Qwen3VL", {**cls.options["qwen"], "model": "o/n"}, "preferred"),
            "missing": (f"{engines}.qwen3_vl:Qwen3VL", {"model": "./nowhere"}, "preferred"),
        }
        repository = cls.folder / "home/hub/models--o--n"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text("x")
        shutil.copytree(cls.folder / "qwen", repository / "snapshots/x")
        cls.daemon = Daemon(fleet_of(fleet, {"HF_HOME": str(cls.folder / "home")}))
        cls.addClassCleanup(cls.daemon.stop)
        cls.client = bulkhead.connect(cls.daemon.socket)
        cls.addClassCleanup(cls.client.close)

    def asked(self, model: str, method: str, given: dict[str, Any], **inputs: Any) -> Any:
        return self.client.infer(model, inputs, method=method, parameters=given, deadline=SECONDS)

    def test_the_small_voice(self) -> None:
        ours = self.asked("voice", "speak", {"text": "One, two."})
        theirs = answered(loaded(SmallVoice), "speak", text="One, two.")[1]
        self.assertTrue(numpy.array_equal(ours["audio"].numpy(), theirs.tensors["audio"].numpy()))

    def test_higgs_audio(self) -> None:
        theirs = answered(loaded(HiggsAudio, self.options["higgs"]), "speak", **HIGGS, reference=VOICE)[1].tensors["audio"].numpy()
        self.assertGreater(theirs.shape[1], 24000 // 2)
        for model in ("higgs", "higgs-eager"):
            with self.subTest(model):
                parts = list(self.client.stream(model, {"reference": VOICE}, method="speak", parameters=HIGGS, deadline=SECONDS))
                self.assertTrue(numpy.array_equal(parts[-1]["audio"].numpy(), theirs))
                numpy.testing.assert_allclose(numpy.concatenate([part["audio"].numpy() for part in parts[:-1]], axis=1), theirs, atol=1e-6)
                left = self.client.stream(model, method="speak", parameters={**HIGGS, "max_new_tokens": 200}, deadline=SECONDS)
                next(left)
                left.close()
                self.assertTrue(numpy.array_equal(self.asked(model, "speak", HIGGS, reference=VOICE)["audio"].numpy(), theirs), "after a cancel")

    def test_qwen3_vl(self) -> None:
        theirs = answered(loaded(Qwen3VL, self.options["qwen"]), "answer", **QWEN, images=IMAGES)[1].values["text"]
        parts = list(self.client.stream("qwen", {"images": IMAGES}, method="answer", parameters=QWEN, deadline=SECONDS))
        self.assertEqual(parts[-1].values_json["text"], theirs)
        self.assertEqual("".join(part.values_json["text"] for part in parts[:-1]), theirs)
        self.assertEqual(parts[-1].values_json["attention"], "sdpa")

    def test_a_model_by_its_name_is_read_from_the_cache_of_the_hub(self) -> None:
        theirs = answered(loaded(Qwen3VL, self.options["qwen"]), "answer", **QWEN, images=IMAGES)[1].values["text"]
        self.assertEqual(self.asked("qwen-of-the-hub", "answer", QWEN, images=IMAGES).values_json["text"], theirs)

    def test_pictures_of_8k_and_batches_of_64_pass_and_other_sound_is_refused(self) -> None:
        for images in (numpy.zeros((1, 4320, 7680, 3), numpy.uint8), numpy.zeros((64, 16, 16, 3), numpy.uint8)):
            self.assertTrue(self.asked("qwen", "answer", {**QWEN, "max_new_tokens": 4}, images=images).values_json["text"])
        for given, sound, code in (({}, VOICE.repeat(6, axis=0), "shape_mismatch"), ({"reference_rate": 4000}, VOICE, "input_invalid")):
            with self.assertRaises(bulkhead.Error) as refused:
                self.asked("higgs", "speak", {**HIGGS, **given}, reference=sound)
            self.assertEqual(refused.exception.code, code)

    def test_a_missing_model_is_an_error_that_says_what_to_fetch(self) -> None:
        with self.assertRaises(bulkhead.Error) as missing:
            self.client.load("missing", deadline=SECONDS)
        self.assertIn("hf download Qwen/Qwen3-VL-4B-Instruct", str(missing.exception))
        self.assertIn("hf download", self.client.why("missing"))


class ServedChatterBox(unittest.TestCase):
    def test_chatterbox_speaks_in_parts_and_converts_as_upstream(self) -> None:
        if not CHATTERBOX.is_dir():
            self.skipTest(f"no {CHATTERBOX}: scripts/install --tests brings what ChatterBox imports")
        sys.path.append(str(CHATTERBOX))
        import small_chatterbox

        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as kept:
            folder = small_chatterbox.chatterbox(Path(kept))
            file = Path(small_chatterbox.__file__).resolve()
            daemon = Daemon(fleet_of({"chatterbox": (f"{file}:SmallChatterBox", {"model": str(folder), "cache_lengths": [256]}, "preferred")}, {"PYTHONPATH": str(CHATTERBOX)}))
            self.addCleanup(daemon.stop)
            engine = loaded(small_chatterbox.SmallChatterBox, {"model": str(folder)}, "off")
            theirs = answered(engine, "speak", **CHATTERBOX_ASKED, stream=False)[1].tensors["audio"].numpy()
            converted = engine.convert(source=VOICE, source_rate=24000, reference_rate=24000, seed=5).tensors["audio"].numpy()
            with bulkhead.connect(daemon.socket) as client:
                parts = list(client.stream("chatterbox", method="speak", parameters=CHATTERBOX_ASKED, deadline=SECONDS))
                reply = client.infer("chatterbox", {"source": VOICE}, method="convert", parameters={"seed": 5}, deadline=SECONDS)
        self.assertGreater(len(parts), 2)
        self.assertTrue(numpy.array_equal(parts[-1]["audio"].numpy(), theirs))
        self.assertTrue(numpy.array_equal(reply["audio"].numpy(), converted))


def fleet_of(models: dict[str, tuple[str, dict[str, Any], str]], environment: dict[str, str] = {}) -> str:
    text = "version: 1\ndefaults: {device: cpu, threads: 1}\nmodels:\n"
    for name, (engine, options, graphs) in models.items():
        text += f"  {name}: {{runtime: python, engine: '{engine}', interpreter: {sys.executable}, graphs: {graphs}, options: {options}, environment: {environment}}}\n"
    return text


if __name__ == "__main__":
    unittest.main()
