"""What the exporter asks of a family of models, and which families there are.

A family is a `step.Step` (the model, cut) and a `Family` (its numbers, and the original to compare with). `FAMILIES`
names them without importing them: their modules import torch and transformers.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import Error

if TYPE_CHECKING:
    import torch

    from ..step import Step

#: Family by name, and the `model_type`s of transformers that it takes. Each `model_type` here has a parity test.
FAMILIES: dict[str, tuple[str, ...]] = {
    "causal_lm": ("gemma", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"),
    "chatterbox_t3": ("chatterbox_t3",),
    "higgs_audio_v2": ("higgs_audio_v2",),
    "qwen3_vl": ("qwen3_vl",),
}


@dataclass(frozen=True)
class Numbers:
    """Of the manifest: what a runtime must know to make the buffers and to stop."""

    vocabulary: int
    layers: int
    heads: int  #: of keys and values
    dim: int
    length_max: int  #: positions the model was made for
    codebooks: int = 1
    rows: int = 1
    stop: tuple[int, ...] = ()
    bos: int | None = None
    first_token: tuple[int, ...] | None = None
    delay_pattern: dict[str, Any] | None = None
    sampling_order: str = "hf"  #: "t3": min-p before top-p


@dataclass(frozen=True)
class Extra:
    """A further input of prefill: `shape` has "T" where the prompt's length stands."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class PromptForm:
    """What prefill takes and gives."""

    input: str = "tokens"  #: or "embeddings"
    width: int | None = None  #: of embeddings
    logits: bool = False
    ids: tuple[int, int] | None = None  #: token ids [low, high) that a prompt may have, where they are not the vocabulary's
    extras: tuple[Extra, ...] = ()


@dataclass(frozen=True)
class Method:
    """A further function of the package, in the fleet file's own words: `inputs` and `outputs` are {name: {dtype, shape}}."""

    name: str
    module: torch.nn.Module
    arguments: tuple[torch.Tensor, ...]  #: an example of each input, in order
    dynamic_shapes: tuple[Any, ...] | None
    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A prompt as prefill takes it: `tokens` [T, C], or `embeddings` [R, T, E] with `extras` by name. `rope` [3, T] and
    `rope_delta` where the step has them. Generation starts at position T."""

    tokens: torch.Tensor | None = None
    embeddings: torch.Tensor | None = None
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    rope: torch.Tensor | None = None
    rope_delta: int = 0


class Family(ABC):
    """One loaded model of a family.

    `model` is the upstream class's own, in evaluation mode, and stays usable: `reference` runs it unwrapped."""

    name: ClassVar[str]

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, gguf: str | None = None) -> Any:
        """The upstream model of a Hugging Face folder, or of the GGUF file of that name in it."""
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=dtype, local_files_only=True)

    @abstractmethod
    def step(self) -> Step:
        """The model, cut: each call cuts it as it is now, and `reference` must work on unchanged after it."""

    @abstractmethod
    def numbers(self) -> Numbers: ...

    def prompt_form(self) -> PromptForm:
        return PromptForm()

    def methods(self) -> list[Method]:
        """Further functions, such as a vision encoder."""
        return []

    def sampling(self) -> dict[str, Any]:
        """Defaults of requests, from the model's generation_config."""
        config = getattr(self.model, "generation_config", None)
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample", "max_new_tokens")
        said = {name: getattr(config, name, None) for name in names}
        return {name: value for name, value in said.items() if value is not None}

    @abstractmethod
    def prompts(self) -> list[Prompt]:
        """A few, for the check at the end of an export."""

    def next_tokens(self, logits: torch.Tensor, generated: list[list[int]]) -> list[int]:
        """Greedy choice as the original makes it, from logits [R, C, V] of one sequence, after `generated`."""
        chosen: list[int] = logits[0].argmax(-1).tolist()
        return chosen

    def stops(self, tokens: list[int]) -> bool:
        """Whether generation ends with these C tokens."""
        return len(tokens) == 1 and tokens[0] in self.numbers().stop

    @abstractmethod
    def reference(self, prompt: Prompt, count: int) -> list[list[int]]:
        """What the upstream class itself generates greedily: [count][C], fewer where it stops."""


def family_named(name: str) -> type[Family]:
    """Errors: input_invalid, for a family that is not there."""
    if name not in FAMILIES:
        raise Error("input_invalid", f"exporting as family {name!r}", f"families are: {', '.join(FAMILIES)}")
    module = importlib.import_module(f".{name}", __name__)
    found: type[Family] = module.FAMILY
    return found


def family_of(model_type: str) -> str:
    """The family that takes this `model_type` of a config.json.

    Errors: input_invalid, naming those that are taken."""
    for name, model_types in FAMILIES.items():
        if model_type in model_types:
            return name
    known = ", ".join(sorted(one for types in FAMILIES.values() for one in types))
    raise Error("input_invalid", f"exporting a model of type {model_type!r}",
                f"types that are tested are: {known}; a model of the same structure as one of them can be tried with --family")  # fmt: skip
