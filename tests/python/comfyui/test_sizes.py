"""How much memory a model will have, by what is on disk, learnt and declared; and how
memory is told."""

from __future__ import annotations

import json
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from pack import GIB, WithPack


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

    def test_a_package_has_its_weights_and_its_cache(self) -> None:
        self.fleet(echo={})
        manifest = {"kv": {"layers": 3, "heads": 2, "dim": 8}, "rows": 2, "length": 512, "slots": 4, "dtypes": {"kv": "float32"}}
        with tempfile.TemporaryDirectory() as package:
            Path(package, "weights.safetensors").write_bytes(bytes(9))
            Path(package, "manifest.json").write_text(json.dumps(manifest))
            for told, positions in (({}, 4 * 512), ({"generate": {"slots": 1, "length": 64}}, 64)):
                size = self.expected({"runtime": "generate", "package": package, **told})
                self.assertEqual(size, 9 + 2 * 3 * 2 * 8 * 2 * positions * 4)

    def test_a_size_that_hardly_differs_is_not_written_again(self) -> None:
        learnt = self.pack("learnt")
        learnt.learn_size("one", 1000)
        file = Path(self.user.name, "bulkhead.json")
        for size, written in ((1030, 1000), (990, 1000), (1100, 1100)):
            learnt.learn_size("one", size)
            self.assertEqual(json.loads(file.read_text())["models"]["one"]["bytes"], written)

    def test_memory_is_told_in_the_unit_that_fits(self) -> None:
        told = [self.pack("sizes").text(size) for size in (0, 3 << 19, GIB - 1, GIB, 35 * GIB // 2)]
        self.assertEqual(told, ["0.0 MiB", "1.5 MiB", "1024.0 MiB", "1.00 GiB", "17.50 GiB"])


if __name__ == "__main__":
    unittest.main()
