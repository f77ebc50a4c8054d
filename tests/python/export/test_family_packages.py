"""Packages of each family, compiled: they generate what the upstream class generates, in Python,
and from the daemon."""

from __future__ import annotations

import os
import unittest
from pathlib import Path
from typing import Any

import bulkhead
import family_packages
import torch
from bulkhead.export import check
from bulkhead.export.families import Family, Prompt, chatterbox_t3
from daemon import Daemon

BUILD = Path(os.environ["BULKHEAD_BUILD"])
COUNT = 24

#: So that requests are greedy, and sampled by nothing that upstream's reference leaves out.
GREEDY: dict[str, dict[str, Any]] = {
    "chatterbox_t3": {"guidance": chatterbox_t3.GUIDANCE, "repetition_penalty": chatterbox_t3.PENALTY},
    "higgs_audio_v2": {},
    "qwen3_vl": {},
}


class Packages(unittest.TestCase):
    families: dict[str, Family]
    folders: dict[str, Path]

    @classmethod
    def setUpClass(cls) -> None:
        cls.families = {name: family_packages.family(name) for name in family_packages.NAMES}
        cls.folders = {name: family_packages.package(name, made, BUILD) for name, made in cls.families.items()}
        served = {**cls.folders, "conditioner": cls.folders["chatterbox_t3"]}
        models = "".join(f"  {name}:\n    runtime: generate\n    package: {folder}\n" for name, folder in served.items())
        cls.daemon = Daemon(f"version: 1\ndefaults: {{device: cpu, threads: 1}}\nmodels:\n{models}")
        cls.addClassCleanup(cls.daemon.stop)

    def setUp(self) -> None:
        self.client = bulkhead.connect(self.daemon.socket, name="test")
        self.addCleanup(self.client.close)

    def test_each_generates_as_upstream_in_python(self) -> None:
        for name, family in self.families.items():
            package = check.Package(self.folders[name])
            for number, prompt in enumerate(family.prompts()):
                with self.subTest(name, prompt=number):
                    verdict = check.compare(package, family, prompt, COUNT)
                    self.assertEqual((verdict.equal, verdict.gap), (verdict.count, 0.0))

    def test_each_method_gives_what_its_module_gives(self) -> None:
        for name, family in self.families.items():
            package = check.Package(self.folders[name])
            for method in family.methods():
                with self.subTest(name, method=method.name), torch.no_grad():
                    theirs, ours = (_listed(one(*method.arguments)) for one in (method.module, package.methods[method.name]))
                    for one, other in zip(ours, theirs, strict=True):
                        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)

    def test_each_generates_as_upstream_from_the_daemon(self) -> None:
        for name, family in self.families.items():
            for number, prompt in enumerate(family.prompts()):
                with self.subTest(name, prompt=number):
                    self.assertEqual(self.said(name, prompt), family.reference(prompt, COUNT))

    def test_a_prompt_made_by_the_packages_own_methods_is_the_same_prompt(self) -> None:
        speaking, seeing = self.families["chatterbox_t3"], self.families["qwen3_vl"]
        spoken, seen = speaking.prompts()[0], seeing.prompts()[1]

        speaker, voice, emotion = spoken.condition
        made = self.client.infer("chatterbox_t3", method="condition", speaker=speaker.numpy(), voice=voice.numpy(), emotion=emotion.numpy(), text=spoken.text.numpy())
        torch.testing.assert_close(torch.from_numpy(made["embeddings"].numpy()), spoken.embeddings, atol=1e-4, rtol=1e-4)

        looked = self.client.infer("qwen3_vl", method="vision", pixels=seen.pixels.numpy())
        at = seen.tokens[:, 0] == seeing.model.config.image_token_id
        torch.testing.assert_close(torch.from_numpy(looked["embeddings"].numpy()), seen.extras["vision"][at], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.from_numpy(looked["deepstack"].numpy()), seen.extras["deepstack"][:, at], atol=1e-4, rtol=1e-4)

    def test_one_process_conditions_and_another_speaks_and_nothing_is_copied_between_them(self) -> None:
        family = self.families["chatterbox_t3"]
        for prompt in family.prompts():
            speaker, voice, emotion = prompt.condition
            made = self.client.infer("conditioner", method="condition", speaker=speaker.numpy(), voice=voice.numpy(), emotion=emotion.numpy(), text=prompt.text.numpy())
            answer = self.client.generate("chatterbox_t3", None, {"embeddings": made["embeddings"]}, do_sample=False, max_new_tokens=COUNT, **GREEDY["chatterbox_t3"])
            self.assertEqual([[token] for token in answer], family.reference(prompt, COUNT))

        pids = {row["model"]: row["pid"] for row in self.client.ps()}
        conditioned, read = (slabs_of(pids[name], "conditioner") for name in ("conditioner", "chatterbox_t3"))
        self.assertTrue(read, "the worker that speaks maps no memory of the one that conditions")
        self.assertLessEqual(set(read), set(conditioned), "it is not the very memory that was written")
        self.assertEqual(set(read.values()), {"r--s"})

    def test_words_alone_need_neither_rotary_positions_nor_pictures(self) -> None:
        family = self.families["qwen3_vl"]
        prompt = family.prompts()[0]
        self.assertEqual(self.said("qwen3_vl", Prompt(tokens=prompt.tokens)), family.reference(prompt, COUNT))

    def test_frames_become_the_audio_that_upstreams_codec_makes_of_them(self) -> None:
        family = self.families["higgs_audio_v2"]
        # After the frame of all bos.
        frames = torch.tensor(self.said("higgs_audio_v2", family.prompts()[0]))[1:]
        heard = self.client.infer("higgs_audio_v2", method="decode_audio", frames=frames.numpy())
        with torch.no_grad():
            (method,) = family.methods()
            torch.testing.assert_close(torch.from_numpy(heard["samples"].numpy()), method.module(frames), atol=1e-4, rtol=1e-4)

    def said(self, name: str, prompt: Prompt) -> list[list[int]]:
        """What the daemon generates greedily, [steps][C]."""
        inputs = {extra: tensor.numpy() for extra, tensor in prompt.extras.items()}
        if prompt.rope is not None:
            inputs["rope"] = prompt.rope.numpy()
        tokens = None
        if prompt.embeddings is not None:
            inputs["embeddings"] = prompt.embeddings.numpy()
        else:
            tokens = (prompt.tokens if prompt.tokens.shape[1] > 1 else prompt.tokens[:, 0].contiguous()).numpy()
        answer = self.client.generate(name, tokens, inputs, do_sample=False, max_new_tokens=COUNT, **GREEDY[name])
        return [token if isinstance(token, list) else [token] for token in answer]


def slabs_of(pid: int, writer: str) -> dict[str, str]:
    """What this process maps of the writer's slabs: access by inode."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if f":{writer}/" in line]
    return {inode: access for _, access, _, _, inode, *_ in lines}


def _listed(given: Any) -> list[torch.Tensor]:
    return list(given) if isinstance(given, tuple | list) else [given]


if __name__ == "__main__":
    unittest.main()
