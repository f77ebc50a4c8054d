"""`python -m bulkhead chat` as people run it: the real SmolLM2, a real daemon, lines
typed and answered."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import bulkhead
import tokenizers
from bulkhead.text import Text
from daemon import BUILD, Daemon

SMOLLM2 = BUILD / "models" / "smollm2"
REFERENCES = Path(__file__).resolve().parent / "smollm2_greedy.json"


class Prompts(unittest.TestCase):
    def test_a_conversation_has_the_special_tokens_of_its_template_alone(self) -> None:
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "hello": 1}, unk_token="<s>"))
        words.add_special_tokens(["<s>"])
        words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        with tempfile.TemporaryDirectory(prefix="bh-text-") as folder:
            words.save(f"{folder}/tokenizer.json")
            Path(folder, "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
            Path(folder, "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
            text = Text(folder)
            self.assertEqual(text.encode("hello"), [0, 1])
            self.assertEqual(text.prompt([{"role": "user", "content": "hello"}]), [0, 1])


class Chat(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        if not (SMOLLM2 / "manifest.json").is_file():
            raise unittest.SkipTest(f"{SMOLLM2} is missing: scripts/models/prepare.py makes it")
        cls.daemon = Daemon(f"version: 1\ndefaults: {{device: cpu}}\nmodels:\n  smollm2: {{runtime: generate, package: {SMOLLM2}}}\n")
        cls.addClassCleanup(cls.daemon.stop)

    def chat(self, *options: str) -> subprocess.Popen[str]:
        """Greedy, and so the same each time."""
        command = [sys.executable, "-m", "bulkhead", "chat", "smollm2", "--socket", self.daemon.socket, "--temperature", "0", *options]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def test_a_question_is_answered_as_transformers_answers_it_and_the_next_one_goes_on_from_there(self) -> None:
        said = json.loads(REFERENCES.read_text())
        asked, text = said["prompts"][0], Text(SMOLLM2)
        pieces = text.stream()
        theirs = "".join(pieces.push(token) for token in asked["tokens"])

        out, err = self.chat("--max-new-tokens", str(said["tokens"])).communicate(f"{asked['text']}\n\nSay that in one sentence.\n", timeout=120)

        self.assertTrue(out.startswith(theirs + "\n"), out)
        self.assertTrue(out.removeprefix(theirs + "\n").strip(), "nothing was said to the second question")
        first, second = map(told, err.splitlines())
        self.assertEqual((first["new"], first["prompt"]), (len(asked["tokens"]), len(asked["prompt"])))
        self.assertGreater(second["prompt"], first["prompt"] + len(asked["tokens"]), "the first question and its answer are part of the second prompt")
        self.assertGreaterEqual(second["known"], first["prompt"], "and their keys and values were not computed again")

    def test_a_worker_killed_in_the_middle_of_an_answer_costs_that_answer_alone(self) -> None:
        chat = self.chat("--max-new-tokens", "300")
        assert chat.stdin is not None and chat.stdout is not None
        chat.stdin.write("Tell me a long story about the sea.\n")
        chat.stdin.flush()
        begun = chat.stdout.read(1)
        with bulkhead.connect(self.daemon.socket, name="test") as client:
            (row,) = (row for row in client.ps() if row["model"] == "smollm2")

        os.kill(row["pid"], signal.SIGKILL)
        out, err = chat.communicate("Name three planets.\n", timeout=120)

        self.assertEqual(chat.returncode, 0, err)
        self.assertRegex(err, r"error: .*after \d+ tokens: .*\(worker_lost\)")
        last = told(err.splitlines()[-1])
        self.assertGreater(last["new"], 5)
        self.assertGreater(len((begun + out).splitlines()), 1, "the answer to the second question stands on a line of its own")


def told(line: str) -> dict[str, Any]:
    """What the line behind an answer says."""
    found = re.fullmatch(r"(\d+) tokens \((\w+)\), [\d.]+ tokens/s, the first after \d+ ms; prompt of (\d+)(?:, (\d+) of them known already)?", line)
    assert found, line
    return {"new": int(found[1]), "finish": found[2], "prompt": int(found[3]), "known": int(found[4] or 0)}


if __name__ == "__main__":
    unittest.main()
