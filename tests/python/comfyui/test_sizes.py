"""How much memory a model will have, by what is on disk, learnt and declared; and how
memory is told."""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from pack import GIB, WithPack


HIGGS = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "dtype": "bfloat16"}
HIGGS_POSITION = 2 * 2 * 8 * 2  #: bytes of a layer
LENGTHS = 1024 + 4096 + 8192


def repository(home: str, name: str, **files: bytes) -> Path:
    """In the Hub's cache; ``model_pth`` is the file model.pth."""
    kept = Path(home, "hub", f"models--{name.replace('/', '--')}")
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text("one")
    snapshot = kept / "snapshots/one"
    snapshot.mkdir(parents=True)
    for file, content in files.items():
        (snapshot / ".".join(file.rsplit("_", 1))).write_bytes(content)
    return snapshot


def safetensors(tensors: dict[str, list[int]]) -> bytes:
    """A file of float32 tensors by their shapes, all zero."""
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    said = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(said)) + said + bytes(end)


class Sizes(WithPack):
    def expected(self, declared: dict[str, Any], **row: Any) -> int:
        """Of a model that the fleet file declares so, though the daemon does not read it again."""
        self.daemon.fleet.write_text(json.dumps({"version": 1, "models": {"one": declared}}))
        return int(self.pack("sizes").expected({"model": "one", **row}))

    def test_the_weights_of_a_repository_are_those_in_the_hubs_cache(self) -> None:
        self.fleet(echo={})
        hub = {"runtime": "python", "engine": "a:B", "options": {"model": "owner/name"}}
        with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, {"HF_HOME": home, "HF_HUB_CACHE": ""}):
            self.assertEqual(self.expected(hub), 0)
            self.assertEqual(self.expected(hub, memory={"estimated": 5 * GIB, "measured": None}), 5 * GIB, "what is declared")
            self.assertEqual(self.expected(hub, memory={"estimated": None, "measured": None}), 0)
            kept = Path(home, "hub/models--owner--name")
            for revision, size in (("old", 5), ("new", 7)):
                (kept / "snapshots" / revision).mkdir(parents=True)
                (kept / "snapshots" / revision / "model.safetensors").write_bytes(bytes(size))
            (kept / "refs").mkdir()
            (kept / "refs/main").write_bytes(b"\xff")
            self.assertEqual(self.expected(hub), 0, "a cache that cannot be read")
            (kept / "refs/main").write_text("new")
            self.assertEqual(self.expected(hub), 7)
            self.assertEqual(self.expected(hub, memory={"estimated": 5 * GIB}), 7, "weights on disk come before it")
            text = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "dtype": "bfloat16"}
            (kept / "snapshots/new/config.json").write_text(json.dumps({"text_config": text}))
            self.assertEqual(self.expected(hub), 7, "whose caches nobody knows")
            hub |= {"engine": "bulkhead.engines.qwen3_vl:Qwen3VL", "options": {"model": "owner/name", "cache_lengths": [256, 1024]}}
            self.assertEqual(self.expected(hub), 7 + 2 * 3 * 2 * 8 * (256 + 1024) * 2)

    def hub(self) -> str:
        """The cache of the Hub, empty."""
        self.fleet(echo={})
        home = self.enterContext(tempfile.TemporaryDirectory())
        self.enterContext(mock.patch.dict(os.environ, {"HF_HOME": home, "HF_HUB_CACHE": ""}))
        return home

    def engine(self, name: str, **more: Any) -> int:
        return self.expected({"runtime": "python", "engine": f"bulkhead.engines.{name}", **more})

    def test_an_engine_without_options_loads_its_own_repository_with_its_own_lengths(self) -> None:
        home = self.hub()
        self.assertEqual(self.engine("qwen3_vl:Qwen3VL"), 0)
        for name, of in (("qwen3_vl:Qwen3VL", "Qwen/Qwen3-VL-4B-Instruct"), ("higgs_audio_v2:HiggsAudio", "bosonai/higgs-audio-v2-generation-3B-base")):
            repository(home, of, model_safetensors=bytes(7), config_json=json.dumps(HIGGS).encode())
            self.assertEqual(self.engine(name), 7 + 3 * HIGGS_POSITION * LENGTHS)
            self.assertEqual(self.engine(name, graphs="off"), 7)
        for off in ("off", "'off'"):  # also as the fleet's default
            self.daemon.fleet.write_text(f"version: 1\ndefaults: {{graphs: {off}}}\nmodels:\n  one: {{runtime: python, engine: 'bulkhead.engines.qwen3_vl:Qwen3VL'}}\n")
            self.assertEqual(self.pack("sizes").expected({"model": "one"}), 7)

    def test_boson_has_a_codec_and_caches_of_its_second_networks(self) -> None:
        home = self.hub()
        config = {"text_config": HIGGS, "torch_dtype": "bfloat16", "audio_dual_ffn_layers": [0, 2]}
        folder = repository(home, "bosonai/higgs-audio-v2-generation-3B-base", model_safetensors=bytes(7), config_json=json.dumps(config).encode())
        caches = (3 + 2) * HIGGS_POSITION * LENGTHS
        self.assertEqual(self.engine("higgs_audio_boson:HiggsAudio"), 7 + caches)
        repository(home, "bosonai/higgs-audio-v2-tokenizer", model_pth=bytes(11), config_json=json.dumps(HIGGS).encode())
        self.assertEqual(self.engine("higgs_audio_boson:HiggsAudio"), 7 + 11 + caches)
        repository(home, "own/codec", model_pth=bytes(13))
        self.assertEqual(self.engine("higgs_audio_boson:HiggsAudio", options={"model": str(folder), "codec": "own/codec"}), 7 + 13 + caches)

    def test_the_codec_that_a_processor_names_counts_once(self) -> None:
        home = self.hub()
        folder = repository(home, "bosonai/higgs-audio-v2-generation-3B-base", model_safetensors=bytes(7))
        repository(home, "own/codec", model_safetensors=bytes(13))
        (folder / "codec").mkdir()
        (folder / "codec/model.safetensors").write_bytes(bytes(17))
        for codec, size in (("own/codec", 13), (str(folder / "codec"), 0), ("not/fetched", 0)):
            (folder / "processor_config.json").write_text(json.dumps({"audio_tokenizer": {"audio_tokenizer_name_or_path": codec}}))
            self.assertEqual(self.engine("higgs_audio_v2:HiggsAudio"), 7 + 17 + size)

    def test_chatterbox_has_the_files_that_it_reads_and_the_caches_of_its_t3(self) -> None:
        home = self.hub()
        layers = {f"tfmr.layers.{at}.self_attn.{one}_proj.weight": [64, 4] for at in range(3) for one in ("q", "k", "v", "o")}
        t3 = safetensors({**layers, "speech_head.weight": [9, 4]})
        of = {"ve_safetensors": bytes(3), "t3_cfg_safetensors": t3, "s3gen_safetensors": bytes(5)}
        folder = repository(home, "ResembleAI/chatterbox", **of, t3_cfg_pt=bytes(101), s3gen_pt=bytes(103), t3_mtl23ls_v2_safetensors=bytes(107))
        weights, position = 3 + len(t3) + 5, 2 * 2 * 3 * 64 * 4
        self.assertEqual(self.engine("chatterbox:ChatterBox"), weights + position * (512 + 1280))
        self.assertEqual(self.engine("chatterbox:ChatterBox", options={"cache_lengths": [256]}), weights + position * 256)
        self.assertEqual(self.engine("chatterbox:ChatterBox", options={"language_model": "t3"}), weights - 12 * 64 * 4 * 4)
        (folder / "t3_cfg.safetensors").write_bytes(b"\xff" * 9)
        self.assertEqual(self.engine("chatterbox:ChatterBox"), 3 + 9 + 5, "a file that cannot be read")

    def test_what_the_language_model_holds_is_not_the_engines(self) -> None:
        home = self.hub()
        model = safetensors({"model.visual.patch.weight": [2, 3], "model.language_model.layers.0.mlp.weight": [5, 7], "lm_head.weight": [11, 5]})
        repository(home, "Qwen/Qwen3-VL-4B-Instruct", model_safetensors=model, config_json=json.dumps(HIGGS).encode())
        whole = self.engine("qwen3_vl:Qwen3VL", graphs="off")
        self.assertEqual(whole, len(model))
        self.assertEqual(self.engine("qwen3_vl:Qwen3VL", options={"language_model": "words"}), whole - 4 * (5 * 7 + 11 * 5))

    def test_a_package_has_its_weights_and_its_cache(self) -> None:
        self.fleet(echo={})
        manifest = {"kv": {"layers": 3, "heads": 2, "dim": 8}, "rows": 2, "length": 512, "slots": 4, "dtypes": {"kv": "float32"}}
        with tempfile.TemporaryDirectory() as package:
            Path(package, "weights.safetensors").write_bytes(bytes(9))
            Path(package, "manifest.json").write_text(json.dumps(manifest))
            for told, positions in (({}, 4 * 512), ({"generate": {"slots": 1, "length": 64}}, 64)):
                size = self.expected({"runtime": "generate", "package": package, **told})
                self.assertEqual(size, 9 + 2 * 3 * 2 * 8 * 2 * positions * 4)

    def test_a_size_that_hardly_differs_is_not_written_again_and_is_told_in_the_unit_that_fits(self) -> None:
        learnt = self.pack("learnt")
        learnt.learn_size("one", 1000)
        file = Path(self.user.name, "bulkhead.json")
        for size, written in ((1030, 1000), (990, 1000), (1100, 1100)):
            learnt.learn_size("one", size)
            self.assertEqual(json.loads(file.read_text())["models"]["one"]["bytes"], written)
        told = [self.pack("sizes").text(size) for size in (0, 3 << 19, GIB - 1, GIB, 35 * GIB // 2)]
        self.assertEqual(told, ["0.0 MiB", "1.5 MiB", "1024.0 MiB", "1.00 GiB", "17.50 GiB"])



if __name__ == "__main__":
    unittest.main()
