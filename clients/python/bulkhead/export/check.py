"""Tries a package in Python: generates greedily and compares with the original model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import functions, manifest, weights
from .families import Family, Prompt

NEAR_TIE = 1e-3  #: two logits this close may swap between two correct float32 computations
NEAR_TIE_16 = 0.25  #: the same in bfloat16, which keeps 8 bits of a logit


class Package:
    """A package loaded by LibTorch's own loader: one sequence, no sampling. Only for checks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = manifest.read(folder)
        self.device = self.manifest["device"]
        tensors = weights.read(folder / self.manifest["weights"]["file"], self.device)
        self.prefill = self._function(self.manifest["prefill"]["file"], tensors)
        self.decode = [(one["sequences"], self._function(one["file"], tensors)) for one in self.manifest["decode"]]
        self.methods = {one["name"]: self._function(one["file"], tensors) for one in self.manifest["methods"]}

    def _function(self, name: str, tensors: dict[str, Tensor]) -> Any:
        function = functions.load(self.folder / name)
        renamed = self.manifest["constants"].get(name, {})
        wanted = {one: tensors[renamed.get(one, one)] for one in function.get_constant_fqns()}
        function.load_constants(wanted, check_full_update=True, user_managed=True)
        return function

    def buffers(self, slots: int, length: int) -> list[Tensor]:
        kv, said = self.manifest["kv"], self.manifest
        shape = (slots * said["rows"], kv["heads"], length, kv["dim"])
        dtype = getattr(torch, said["dtypes"]["kv"])
        return [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2 * kv["layers"])]

    def run_decode(self, tokens: Tensor, positions: Tensor, span: int, buffers: list[Tensor], rope_delta: Tensor | None = None) -> Tensor:
        """Logits [n, R, C, V] of tokens [n, C] at positions [n]."""
        n = tokens.shape[0]
        (function,) = [one for (low, high), one in self.decode if low <= n <= high]
        deltas = [] if rope_delta is None else [rope_delta.to(self.device)]
        logits = function(tokens.to(self.device), positions.to(self.device), torch.arange(span, device=self.device), *deltas, *buffers)
        return logits.reshape(n, self.manifest["rows"], self.manifest["codebooks"], -1)

    def run_prefill(self, prompt: Prompt, start: int, stop: int, span: int, buffers: list[Tensor]) -> Tensor:
        """Computes positions [start, stop) of a prompt; a single position is passed as two equal
        rows."""
        said = self.manifest["prefill"]
        positions = torch.arange(start, max(stop, start + 2)).clamp(max=stop - 1)
        rest = [] if prompt.rope is None else [prompt.rope[:, positions]]
        for extra in said["extras"]:
            rest.append(prompt.extras[extra["name"]].index_select(extra["shape"].index("T"), positions))
        if prompt.embeddings is not None:
            part = prompt.embeddings[:, positions]
        else:
            assert prompt.tokens is not None
            part = prompt.tokens[positions]
        given = [part, positions, torch.arange(span), *rest]
        logits: Tensor = self.prefill(*(tensor.contiguous().to(self.device) for tensor in given), *buffers)
        return logits

    def generate(self, family: Family | Greedy, prompt: Prompt, count: int) -> tuple[list[list[int]], list[Tensor]]:
        """At most `count` greedy tokens, up to the original's stop; and the logits [R, C, V] before
        each."""
        said = self.manifest
        size = int(prompt.tokens.shape[0] if prompt.tokens is not None else prompt.embeddings.shape[1])  # type: ignore[union-attr]
        length = min(size + count + 1, said["length_max"])
        buffers = self.buffers(1, length)
        delta = torch.tensor([prompt.rope_delta]) if said["rope_delta"] else None
        logits = self._prompt(prompt, size, buffers, delta)
        tokens: list[list[int]] = []
        seen: list[Tensor] = []
        if logits is None:
            logits = self.run_decode(torch.tensor([said["first_token"]]), torch.tensor([size]), size + 1, buffers, delta)[0]
            size += 1
        for position in range(size, size + count):
            seen.append(logits)
            tokens.append(family.next_tokens(logits, tokens))
            if len(tokens) == count or family.stops(tokens[-1]):
                break
            logits = self.run_decode(torch.tensor([tokens[-1]]), torch.tensor([position]), position + 1, buffers, delta)[0]
        return tokens, seen

    def _prompt(self, prompt: Prompt, size: int, buffers: list[Tensor], delta: Tensor | None) -> Tensor | None:
        """Writes a prompt's keys and values. Returns the logits after it, or None if decode needs a
        first token."""
        said = self.manifest["prefill"]
        whole = prompt.embeddings is not None or said["logits"]
        end = size if whole else size - 1  # the last token is the first step's
        logits = None
        for start in range(0, end, said["chunk_max"]):
            stop = min(end, start + said["chunk_max"])
            logits = self.run_prefill(prompt, start, stop, stop, buffers)
        if whole:
            return logits if said["logits"] else None
        assert prompt.tokens is not None
        return self.run_decode(prompt.tokens[end][None], torch.tensor([end]), size, buffers, delta)[0]


@dataclass(frozen=True)
class Verdict:
    """One prompt's result: how many of how many tokens were equal, and the gap of logits at the
    first difference."""

    equal: int
    count: int
    gap: float

    def good(self, tolerance: float) -> bool:
        return self.equal == self.count or self.gap <= tolerance


def compare(package: Package, family: Family, prompt: Prompt, count: int) -> Verdict:
    """Compares the package's greedy tokens with the original's."""
    theirs = family.reference(prompt, count)
    return judge(*package.generate(family, prompt, count), theirs)


def judge(ours: list[list[int]], logits: list[Tensor], theirs: list[list[int]]) -> Verdict:
    """At the first difference, the gap is between the package's own logits of both choices: a near
    tie excuses all that follows."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            gap = max(float(logits[index][0, c, a] - logits[index][0, c, b]) for c, (a, b) in enumerate(zip(one, other, strict=True)))
            return Verdict(index, len(theirs), gap)
    equal = min(len(ours), len(theirs))
    return Verdict(equal, max(len(ours), len(theirs)), float("inf") if len(ours) != len(theirs) else 0.0)


class Greedy:
    """Chooses as most families do; for checks of a package without its model."""

    def __init__(self, package: Package) -> None:
        self.stop = package.manifest["stop"]

    def next_tokens(self, logits: Tensor, generated: list[list[int]]) -> list[int]:
        chosen: list[int] = logits[0].argmax(-1).tolist()
        return chosen

    def stops(self, frame: list[int]) -> bool:
        return frame[0] in self.stop
