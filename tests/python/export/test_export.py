"""The exporter: what it refuses, what a manifest may not say, and that compiled functions do what
their model does."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import tiny_models
import tokenizers
import torch
from bulkhead.errors import Error
from bulkhead.export import check, inductor, make, manifest, source, target
from bulkhead.export.__main__ import main as command
from bulkhead.export.gguf_once import parsed_once
from torch._inductor import cpu_vec_isa

MODELS = Path(os.environ["BULKHEAD_BUILD"]) / "models"
TINY = MODELS / "test" / "tiny_generate"
TINY_LONG = MODELS / "test" / "tiny_long"
MAKER = Path(__file__).resolve().parents[3] / "scripts" / "models" / "make_test_models.py"


class Sources(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="bh-export-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def refused(self, said: str, words: str, **options: str) -> None:
        with self.assertRaises(Error) as raised:
            source.load(said, torch.float32, **options)
        self.assertEqual(raised.exception.code, "input_invalid")
        self.assertIn(words, str(raised.exception))

    def test_what_is_not_there(self) -> None:
        self.refused(str(self.folder / "none"), "no such file or folder")
        self.refused(str(self.folder), "no config.json")
        self.refused(str(self.folder / "none.py") + ":model", "none.py")
        (self.folder / "weights.bin").write_bytes(b"\0")
        self.refused(str(self.folder / "weights.bin"), "give a folder")

    def test_a_config_that_lies(self) -> None:
        config = self.folder / "config.json"
        for text, words in (("{", "JSON"), ("[]", "model_type"), ("{}", "model_type"), ('{"model_type": "t5"}', "'t5'"), ("\udcff", "config.json")):
            config.write_text(text, errors="surrogateescape")
            self.refused(str(self.folder), words)

    def test_a_folder_without_its_weights(self) -> None:
        tiny_models.causal("llama").config.save_pretrained(self.folder)
        self.refused(str(self.folder), "loading")

    def test_a_gguf_file_is_parsed_once(self) -> None:
        parsed: list[str] = []
        with mock.patch("gguf.GGUFReader", side_effect=parsed.append), parsed_once():
            from gguf import GGUFReader

            for file in ("a", "a", "b", "a"):
                GGUFReader(file)
        self.assertEqual(parsed, ["a", "b"])

    def test_a_file_that_is_no_gguf(self) -> None:
        file = self.folder / "model.gguf"
        for content in (b"", b"GGUF", b"GGUF" + bytes(100), b"\xff" * 100):
            file.write_bytes(content)
            self.refused(str(file), "model.gguf")

    def test_a_function_that_returns_no_model(self) -> None:
        file = self.folder / "own.py"
        file.write_text("import torch\ndef linear(): return torch.nn.Linear(2, 2)\ndef seven(): return 7\ndef three(): return 1, 2, 3\n"
                        "def raises(): raise ValueError('none today')\n")  # fmt: skip
        self.refused(f"{file}:linear", "--family")
        self.refused(f"{file}:other", "other")
        self.refused(f"{file}:linear", "families are", family="none")
        self.refused(f"{file}:linear", "as causal_lm: 'Linear' object has no attribute", family="causal_lm")
        self.refused(f"{file}:seven", "of type int", family="causal_lm")
        self.refused(f"{file}:three", "of type tuple", family="causal_lm")
        self.refused(f"{file}:raises", "ValueError: none today")
        file.write_text("def (")
        self.refused(f"{file}:linear", "SyntaxError")

    def test_rotary_frequencies_keep_their_32_bits(self) -> None:
        """As where transformers loads a folder in 16 bits."""
        model = source.load(f"{MAKER}:tiny_generate", torch.bfloat16).family.model
        exact = source.load(f"{MAKER}:tiny_generate", torch.float32).family.model
        self.assertEqual({weight.dtype for weight in model.parameters()}, {torch.bfloat16})
        self.assertTrue(torch.equal(model.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq))
        model.save_pretrained(self.folder / "own")
        loaded = source.load(str(self.folder / "own"), torch.bfloat16).family.model
        self.assertTrue(torch.equal(loaded.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq))

    def test_a_folder_that_is_whole(self) -> None:
        model = tiny_models.causal("qwen3")
        model.save_pretrained(self.folder / "own")
        loaded = source.load(str(self.folder / "own"), torch.float32)
        self.assertEqual((loaded.name, loaded.family.name, loaded.origin["model_type"]), ("own", "causal_lm", "qwen3"))
        for name, weight in model.state_dict().items():
            self.assertTrue(torch.equal(weight, loaded.family.model.state_dict()[name]), name)

    def test_a_folder_without_a_tokenizer_has_none(self) -> None:
        """Transformers makes an empty one up for these, and not for others."""
        for model_type in ("qwen3", "gemma"):
            model = tiny_models.causal(model_type)
            model.save_pretrained(self.folder / model_type)
            loaded = source.load(str(self.folder / model_type), torch.float32)
            self.assertIsNone(loaded.family.tokenizer, model_type)
            words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
            words.save(str(self.folder / model_type / "tokenizer.json"))
            loaded = source.load(str(self.folder / model_type), torch.float32)
            self.assertEqual(loaded.family.tokenizer("a")["input_ids"], [0])


class Sizes(unittest.TestCase):
    def test_those_that_the_model_or_each_other_forbid(self) -> None:
        good: dict[str, Any] = {"device": "cpu", "kv_dtype": "float32", "length": 64, "slots": 2, "slots_max": 4, "buckets": None, "chunk": 8}
        loaded = source.Loaded(source.family_named("causal_lm")(tiny_models.causal("llama")), "tiny", {})
        for lie, words in (({"length": 63}, "--length 63"), ({"length": 161}, "64 to 160"), ({"slots": 0}, "--slots 0"), ({"slots": 5}, "--slots 5"),
                           ({"slots_max": 65}, "--slots-max 65"), ({"chunk": 7}, "--chunk 7"), ({"buckets": [128]}, "a bucket of 128")):  # fmt: skip
            with self.subTest(lie), tempfile.TemporaryDirectory(prefix="bh-export-") as folder, self.assertRaises(Error) as raised:
                make.make(loaded, Path(folder, "out"), **{**good, **lie}, tell=print)
            self.assertIn(words, str(raised.exception))


class Target(unittest.TestCase):
    """An export never costs what is not a package."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="bh-export-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def refused(self, out: Path, words: str, source: str | None = None) -> None:
        with self.assertRaises(Error) as raised:
            target.check(out, source)
        self.assertEqual(raised.exception.code, "input_invalid")
        self.assertIn(words, str(raised.exception))

    def test_new_empty_and_packages_are_taken(self) -> None:
        target.check(self.folder / "new" / "package")
        target.check(self.folder)
        target.check(TINY, str(self.folder))
        target.check(self.folder / "package", str(self.folder))  # beside the weights

    def test_what_is_no_package_is_left_alone(self) -> None:
        (self.folder / "thesis.tex").write_text("years")
        self.refused(self.folder, "holds something else than a package")
        self.refused(self.folder / "thesis.tex", "is a file")
        for text in ("", "[]", "{}", '{"format": "other/1"}', "\udcff"):
            (self.folder / manifest.FILE).write_text(text, errors="surrogateescape")
            self.refused(self.folder, "holds something else than a package")
        loaded = source.Loaded(source.family_named("causal_lm")(tiny_models.causal("llama")), "tiny", {})
        with self.assertRaises(Error):
            make.make(loaded, self.folder, device="cpu", kv_dtype="float32", length=64, slots=2, slots_max=4, buckets=None, chunk=8, tell=self.fail)
        self.assertEqual((self.folder / "thesis.tex").read_text(), "years")

    def test_the_source_is_left_alone_even_in_a_package(self) -> None:
        (self.folder / manifest.FILE).write_text(json.dumps({"format": manifest.FORMAT}))
        target.check(self.folder)
        for name in ("config.json", "deep/model.gguf", "own.py"):
            file = self.folder / name
            file.parent.mkdir(exist_ok=True)
            file.touch()
        for said in ("", "deep", "deep/model.gguf", "own.py:model"):
            self.refused(self.folder, "itself lies", f"{self.folder / said}")

    def test_a_package_whose_folder_cannot_be_renamed(self) -> None:
        partial, out = self.folder / "partial", self.folder / "package"
        for folder in (partial, out):
            folder.mkdir()
            (folder / "manifest.json").write_text(folder.name)
        rename, reason = os.rename, errno.EBUSY

        def refused(old: Path, new: Path) -> None:
            if Path(old) == out:
                raise OSError(reason, os.strerror(reason), str(old), None, str(new))
            rename(old, new)

        with mock.patch("os.rename", refused):
            with self.assertRaises(OSError):  # such as a mount point
                target.replace(partial, out)
            self.assertEqual((out / "manifest.json").read_text(), "package")
            reason = errno.EXDEV  # in an image of a container
            target.replace(partial, out)
        self.assertEqual((out / "manifest.json").read_text(), "partial")
        self.assertEqual(os.listdir(self.folder), ["package"])

    def test_the_command_refuses_before_it_loads(self) -> None:
        (self.folder / "config.json").write_text("{")
        done = Command.run_it(str(self.folder), str(self.folder))
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr.splitlines()[-1], "^error: input_invalid: .*itself lies")
        self.assertEqual([one.name for one in self.folder.iterdir()], ["config.json"])


class Command(unittest.TestCase):
    @staticmethod
    def run_it(*arguments: str) -> subprocess.CompletedProcess[str]:
        with mock.patch.object(sys, "argv", ["bulkhead.export", *arguments]):
            return forked.run(command, arguments)

    def test_an_error_is_one_line(self) -> None:
        """Of the command as people start it; the other tests fork."""
        done = subprocess.run([sys.executable, "-m", "bulkhead.export", "/none/at/all", "/none/out"], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout.count("Traceback")), (1, 0))
        self.assertRegex(done.stderr.splitlines()[-1], "^error: input_invalid: .*no such file or folder")

    def test_a_gpu_that_is_not_there(self) -> None:
        if torch.cuda.is_available():
            self.skipTest("a GPU is there")
        done = self.run_it("/none/at/all", "/none/out", "--device", "cuda")
        self.assertEqual(done.returncode, 1)
        self.assertIn("PyTorch sees none", done.stderr)

    def test_numbers_that_make_no_sense_are_refused_before_the_model_is_loaded(self) -> None:
        """Nothing lies where the source should: whoever looked would say so."""
        for option, value in (("--tokens", "-3"), ("--slots", "0"), ("--slots-max", "65"), ("--chunk", "2"), ("--length", "63"), ("--buckets", "64,1")):
            with self.subTest(option):
                done = self.run_it("/none/at/all", "/none/out", option, value)
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertRegex(done.stderr, f"^error: input_invalid: exporting with ({option}|a bucket of) ")

    def test_a_package_of_which_a_file_was_changed(self) -> None:
        with tempfile.TemporaryDirectory(prefix="bh-export-") as folder:
            copied = Path(folder, "tiny")
            shutil.copytree(TINY, copied)
            done = self.run_it("--check", str(copied))
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertTrue(done.stdout.endswith(" whole\n"), done.stdout)
            for name in ("decode_batch.pt2", "weights.safetensors"):
                with open(copied / name, "r+b") as file:
                    last = file.seek(-1, os.SEEK_END)
                    byte = file.read(1)[0]
                    file.seek(last)
                    file.write(bytes([byte ^ 1]))
                    file.flush()
                    done = self.run_it("--check", str(copied))
                    file.seek(last)
                    file.write(bytes([byte]))
                self.assertEqual(done.returncode, 1, name)
                self.assertIn(f"the SHA-256 of {name} is", done.stderr)

    def test_a_package_of_an_earlier_exporter_is_compared_as_far_as_it_says(self) -> None:
        with tempfile.TemporaryDirectory(prefix="bh-export-") as folder:
            copied = Path(folder, "tiny")
            shutil.copytree(TINY, copied)
            said = json.loads((copied / manifest.FILE).read_text())
            said.pop("functions", None)
            (copied / manifest.FILE).write_text(json.dumps(said))
            done = self.run_it("--check", str(copied))
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("whole; of its functions", done.stdout)


class Manifest(unittest.TestCase):
    def setUp(self) -> None:
        self.said = manifest.read(TINY)

    def problem(self, said: Any) -> str:
        found = manifest.problems(said, TINY)
        self.assertTrue(found)
        return found[0]

    def test_nothing_is_wrong_with_a_true_one(self) -> None:
        self.assertEqual(manifest.problems(self.said, TINY), [])

    def test_each_member_is_needed_and_of_a_type(self) -> None:
        for name in self.said:
            without = {key: value for key, value in self.said.items() if key != name}
            if name in manifest.OPTIONAL:
                self.assertEqual(manifest.problems(without, TINY), [])
            else:
                self.assertIn("format" if name == "format" else name, self.problem(without))
            if name != "rope_delta":
                self.assertIn(name, self.problem({**self.said, name: 0.5}))

    def test_lies_about_sizes_and_files(self) -> None:
        def lie(change: Any) -> str:
            said = copy.deepcopy(self.said)
            change(said)
            return self.problem(said)

        self.assertIn("slots", lie(lambda said: said.update(slots=9)))
        self.assertIn("length", lie(lambda said: said.update(length=257)))
        self.assertIn("no decode function takes 2", lie(lambda said: said["decode"].pop()))
        self.assertIn("not there", lie(lambda said: said["prefill"].update(file="other.pt2")))
        self.assertIn("folder itself", lie(lambda said: said["prefill"].update(file="../tiny_generate/prefill.pt2")))
        for size in (1, 1 << 40):
            self.assertIn("bytes", lie(lambda said: said["weights"].update(bytes=size)))
        self.assertIn("'functions' names", lie(lambda said: said["functions"].pop("prefill.pt2")))
        self.assertIn("'functions' names", lie(lambda said: said["functions"].update({"other.pt2": ""})))
        self.assertIn("unknown", lie(lambda said: said.update(other=1)))
        self.assertIn("format", self.problem({**self.said, "format": "bulkhead-generate/2"}))
        self.assertIn("object", self.problem([]))

    def test_it_is_read_with_named_errors(self) -> None:
        with tempfile.TemporaryDirectory(prefix="bh-export-") as folder:
            for text in (None, "{", "[]", json.dumps({**self.said, "slots": 9})):
                if text is not None:
                    Path(folder, manifest.FILE).write_text(text)
                with self.assertRaises(Error) as raised:
                    manifest.read(Path(folder))
                self.assertEqual(raised.exception.code, "input_invalid")


class Vectors(unittest.TestCase):
    def test_those_of_this_cpu_are_picked_without_another_interpreter(self) -> None:
        def loads(code: str) -> bool:
            return bool(cpu_vec_isa.VecAVX2().check_build(code))

        works, lacks = 'extern "C" int works() { return 1; }', 'extern "C" int missing(); int lacks = missing();'
        told: list[bool] = []
        with mock.patch("subprocess.check_call", side_effect=AssertionError("an interpreter")):
            self.assertFalse(loads(works), "it is started by this function")
            with mock.patch.object(cpu_vec_isa, "pick_vec_isa", lambda: told.extend([loads(works), loads(lacks)])):
                inductor.pick_vectors()
        self.assertEqual(told, [True, False])
        inductor.pick_vectors()
        self.assertEqual(cpu_vec_isa.pick_vec_isa().bit_width(), 512 if "avx512f" in inductor.cpu_flags() else 256)


class Compiled(unittest.TestCase):
    """The tiny package of make_test_models.py, against the model that it was made from."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.package = check.Package(TINY)
        cls.family = source.load(f"{MAKER}:tiny_generate", torch.float32).family

    def prompt(self, size: int, seed: int) -> check.Prompt:
        generator = torch.Generator().manual_seed(seed)
        return check.Prompt(tokens=torch.randint(3, 512, (size, 1), generator=generator))

    def test_greedy_tokens_are_the_originals(self) -> None:
        for size in (1, 2, 3, 4, 17, 100, 200):
            verdict = check.compare(self.package, self.family, self.prompt(size, size), 40)
            self.assertTrue(verdict.good(check.NEAR_TIE), f"{size}: {verdict}")

    def test_one_that_ends_earlier_or_later_than_the_original_is_not_good(self) -> None:
        logits = [torch.zeros(1, 1, 8), torch.zeros(1, 1, 8)]
        for ours, theirs in (([[3]], [[3], [4]]), ([[3], [4]], [[3]])):
            verdict = check.judge(ours, logits[: len(ours)], theirs)
            self.assertFalse(verdict.good(check.NEAR_TIE), str(verdict))

    def test_chunks_of_a_prompt_are_as_good_as_the_whole(self) -> None:
        prompt, whole, parts = self.prompt(60, 5), self.package.buffers(1, 80), self.package.buffers(1, 80)
        self.package.run_prefill(prompt, 0, 60, 60, whole)
        for start, stop in ((0, 2), (2, 31), (31, 33), (33, 60)):
            self.package.run_prefill(prompt, start, stop, stop, parts)
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            self.assertFalse(one[:, :, 60:].any(), "written beyond the prompt")

    def test_what_a_buffer_held_before_leaves_no_trace(self) -> None:
        """Bit for bit, for decode of one and of several, and for prefill: also where the span goes
        on over old positions."""
        prompt = self.prompt(20, 6)
        for n in (1, 2, 5):
            results = []
            for fill in (0.0, 1e6):
                buffers = [torch.full_like(one, fill) for one in self.package.buffers(n, 50)]
                for slot in range(n):
                    self.package.run_prefill(prompt, 0, 20, 30, [one[slot : slot + 1] for one in buffers])
                results.append(self.package.run_decode(torch.full((n, 1), 9), torch.full((n,), 20), 50, buffers))
                self.assertTrue(all((one[:, :, 21:] == fill).all() for one in buffers), "written beyond its position")
            self.assertTrue(torch.equal(*results))

    def test_steps_go_on_beyond_4096_positions(self) -> None:
        """Where Inductor would write sums in another way: greedy tokens across it, and two
        sequences as each alone."""
        package, family = check.Package(TINY_LONG), source.load(f"{MAKER}:tiny_long", torch.float32).family
        verdict = check.compare(package, family, self.prompt(4090, 7), 16)
        self.assertTrue(verdict.good(check.NEAR_TIE), str(verdict))
        buffers = package.buffers(2, 5001)
        generator = torch.Generator().manual_seed(8)
        for one in buffers:
            one[:, :, :5000] = torch.randn(one[:, :, :5000].shape, generator=generator)
        alone = [package.run_decode(torch.tensor([[9]]), torch.tensor([5000]), 5001, [one[n : n + 1].clone() for one in buffers]) for n in (0, 1)]
        both = package.run_decode(torch.tensor([[9], [9]]), torch.tensor([5000, 5000]), 5001, buffers)
        torch.testing.assert_close(both, torch.cat(alone), rtol=1e-4, atol=1e-4)

    def test_sequences_together_are_as_alone(self) -> None:
        """Of unlike lengths, at each batch size that is exported; logits, since these may differ in
        the last bits."""
        sizes = (3, 40, 11, 25, 7, 60, 2, 33)
        for n in range(2, 9):
            buffers = self.package.buffers(n, 64)
            alone = []
            for slot, size in enumerate(sizes[:n]):
                prompt = self.prompt(size, slot)
                own = [one[slot : slot + 1] for one in buffers]
                self.package.run_prefill(prompt, 0, size, size, own)
                apart = [one.clone() for one in own]
                alone.append(self.package.run_decode(torch.tensor([[slot + 4]]), torch.tensor([size]), size + 1, apart)[0])
            tokens = torch.arange(4, 4 + n)[:, None]
            together = self.package.run_decode(tokens, torch.tensor(sizes[:n]), max(sizes[:n]) + 1, buffers)
            torch.testing.assert_close(together, torch.stack(alone), rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    unittest.main()
