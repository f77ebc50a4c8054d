"""What the exporter needs of a model family, and the list of families.

A family is a `step.Step` (the model, cut) and a `Family` (its numbers, and the original for
comparison).
`FAMILIES` names them without an import, because their modules import torch and transformers.
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

#: Each family's name, and the transformers `model_type`s that it takes. Each of these has a parity
#: test.
FAMILIES: dict[str, tuple[str, ...]] = {
    "causal_lm": ("gemma", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"),
    "chatterbox_t3": ("chatterbox_t3",),
    "higgs_audio_v2": ("higgs_audio_v2",),
    "qwen3_vl": ("qwen3_vl",),
}


@dataclass(frozen=True)
class Numbers:
    """The manifest's numbers: what a runtime needs to allocate buffers and to stop."""

    vocabulary: int
    layers: int
    heads: int  #: of keys and values
    dim: int
    length_max: int  #: maximum of positions of the model
    codebooks: int = 1
    rows: int = 1
    stop: tuple[int, ...] = ()
    bos: int | None = None
    first_token: tuple[int, ...] | None = None
    delay_pattern: dict[str, Any] | None = None
    sampling_order: str = "hf"  #: "t3": min-p before top-p


@dataclass(frozen=True)
class Extra:
    """A further input of prefill; `shape` has "T" for the prompt's length."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class PromptForm:
    """Prefill's inputs and outputs."""

    input: str = "tokens"  #: or "embeddings"
    width: int | None = None  #: of embeddings
    logits: bool = False
    #: Range of a prompt's token ids, [low, high), if it is not the vocabulary.
    ids: tuple[int, int] | None = None
    extras: tuple[Extra, ...] = ()


@dataclass(frozen=True)
class Method:
    """A further function of the package, spelled as in the fleet file: `inputs` and `outputs` are
    {name: {dtype, shape}}."""

    name: str
    module: torch.nn.Module
    arguments: tuple[torch.Tensor, ...]  #: an example per input, in order
    dynamic_shapes: tuple[Any, ...] | None
    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A prompt for prefill: `tokens` [T, C], or `embeddings` [R, T, E] with `extras` by name.
    `rope` [3, T] and `rope_delta` if the step has them. Generation starts at position T."""

    tokens: torch.Tensor | None = None
    embeddings: torch.Tensor | None = None
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    rope: torch.Tensor | None = None
    rope_delta: int = 0


class Family(ABC):
    """One loaded model of a family.

    `model` is an instance of the upstream class, in evaluation mode. It stays usable: `reference`
    runs it unwrapped."""

    name: ClassVar[str]

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, gguf: str | None = None) -> Any:
        """Loads the upstream model of a Hugging Face folder, or of the GGUF file of that name in
        it."""
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=dtype, local_files_only=True)

    @abstractmethod
    def step(self) -> Step:
        """Cuts the model as it is now. `reference` must work unchanged afterwards."""

    @abstractmethod
    def numbers(self) -> Numbers: ...

    def prompt_form(self) -> PromptForm:
        return PromptForm()

    def methods(self) -> list[Method]:
        """Further functions, such as a vision encoder."""
        return []

    def sampling(self) -> dict[str, Any]:
        """Requests' defaults, from the model's generation_config."""
        config = getattr(self.model, "generation_config", None)
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample", "max_new_tokens")
        said = {name: getattr(config, name, None) for name in names}
        return {name: value for name, value in said.items() if value is not None}

    @abstractmethod
    def prompts(self) -> list[Prompt]:
        """A few prompts for the check at the end of an export."""

    def next_tokens(self, logits: torch.Tensor, generated: list[list[int]]) -> list[int]:
        """The original's greedy choice from logits [R, C, V] of one sequence, after `generated`."""
        chosen: list[int] = logits[0].argmax(-1).tolist()
        return chosen

    def stops(self, tokens: list[int]) -> bool:
        """Whether generation ends with these C tokens."""
        return len(tokens) == 1 and tokens[0] in self.numbers().stop

    @abstractmethod
    def reference(self, prompt: Prompt, count: int) -> list[list[int]]:
        """Greedy output of the upstream class: [count][C], fewer if it stops."""


def family_named(name: str) -> type[Family]:
    """Errors: input_invalid for an unknown family."""
    if name not in FAMILIES:
        raise Error("input_invalid", f"exporting as family {name!r}", f"families are: {', '.join(FAMILIES)}")
    module = importlib.import_module(f".{name}", __name__)
    found: type[Family] = module.FAMILY
    return found


def family_of(model_type: str) -> str:
    """The family that takes this `model_type` of a config.json.

    Errors: input_invalid, naming the known ones."""
    for name, model_types in FAMILIES.items():
        if model_type in model_types:
            return name
    known = ", ".join(sorted(one for types in FAMILIES.values() for one in types))
    raise Error("input_invalid", f"exporting a model of type {model_type!r}",
                f"types that are tested are: {known}; a model of the same structure as one of them can be tried with --family")  # fmt: skip
