"""Shared by engines that use transformers: a model's folder, its dtype, and key-value caches
of fixed sizes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ..engine import Context, InvalidInput, MissingModel
from ..errors import Error

CACHE_LENGTHS = (1024, 4096, 8192)  #: of static caches, in positions


def model_folder(context: Context, default: str, file: str = "config.json", option: str = "model") -> str:
    """Returns the local folder of the option, or of `default`: a folder, or a cached repository of
    the Hugging Face Hub. Downloads nothing. `file` is a file that it must have.

    Errors: MissingModel, which says what to fetch and where to put it."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name = str(context.options.get(option, default))
    if (Path(name) / file).is_file():
        return name
    remedy = f"fetch it with `hf download {default}`, or set options.{option} to a folder that has its files"
    if Path(name).is_absolute() or name.startswith("."):
        raise MissingModel(f"loading {name}, where no {file} is", remedy)
    try:
        found = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        fetch = f"`hf download {name}`" if isinstance(error, LocalEntryNotFoundError) else f"`hf download {default}`"
        raise MissingModel(
            f"loading {name}, which is neither a folder nor in the cache {constants.HF_HUB_CACHE}",
            f"fetch it with {fetch} (HF_HOME says where the cache is), or set options.{option} to a folder that has its files",
        ) from error
    if not (found / file).is_file():
        raise MissingModel(f"loading {name}, of which the cache {constants.HF_HUB_CACHE} has no {file}", remedy)
    return str(found)


def wave_file(sound: Any, rate: int) -> io.BytesIO:
    """Converts [channels, samples] to a file: upstream reads references with librosa."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, sound.T, rate, format="WAV", subtype="FLOAT")
    file.seek(0)
    return file


def load_files(folder: str, load: Callable[[], Any]) -> Any:
    """Returns what `load` returns.

    Errors: MissingModel if a file is missing; its attempt names the file."""
    try:
        return load()
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MissingModel(f"loading {folder}: {first}", "fetch all of its files with `hf download`, tokenizer and processor included") from error


def load_weights(kind: Any, folder: str, context: Context, **given: Any) -> Any:
    """Returns the model of class `kind`, with weights read straight onto the device, or by the
    given `device_map`.

    Errors: MissingModel, also if weights are missing: transformers would draw them at random."""

    def read() -> Any:
        placed = {"device_map": context.device, **given}
        return kind.from_pretrained(folder, dtype=dtype_of(context), local_files_only=True, output_loading_info=True, **placed)

    model, told = load_files(folder, read)
    if absent := sorted(told["missing_keys"]):
        raise MissingModel(f"loading {folder}, which has no {absent[0]} and {len(absent) - 1} other weights of {kind.__name__}",
                           "fetch the model as transformers reads it; one of the original authors' format must be converted first")  # fmt: skip
    return model.eval()


def dtype_of(context: Context) -> Any:
    """`options.dtype`: a name such as bfloat16, or auto, the model's own.

    Errors: config_invalid if it is not a dtype."""
    name = str(context.options.get("dtype", "auto"))
    dtype = "auto" if name == "auto" else getattr(torch, name, None)
    if dtype is None:
        raise Error("config_invalid", f"loading with dtype {name!r}", "options.dtype is auto, float32, float16 or bfloat16")
    return dtype


def check_length(config: Any, prompt: int, max_new_tokens: int) -> None:
    """Checks the prompt's length; `config` is the model's text part.

    Errors: InvalidInput if the prompt and new tokens exceed its positions."""
    most = config.max_position_embeddings
    if prompt + max_new_tokens > most:
        raise InvalidInput(f"answering a prompt of {prompt} positions with up to {max_new_tokens} tokens",
                           f"the model has {most} positions: give less text, fewer or smaller pictures, a shorter reference, or a smaller max_new_tokens")  # fmt: skip


def generation_config(model: Any, *, max_new_tokens: int, do_sample: bool, temperature: float, top_p: float, top_k: int, min_p: float) -> Any:
    """The model's own configuration, with a request's parameters; temperature 0 is greedy."""
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens, config.max_length = max_new_tokens, None
    config.disable_compile = True  # a static cache would switch it on
    config.do_sample = do_sample and temperature > 0
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p or None}
    for name, value in drawn.items():
        setattr(config, name, value if config.do_sample else None)
    return config


class Caches:
    """Static caches of `lengths` positions for `rows` sequences of equal length, each made once;
    none if graphs are off.

    `graphed` captures a function that decodes one position, once per cache:
    function(cache=…, **inputs)."""

    def __init__(self, context: Context, config: Any, lengths: Sequence[int], dtype: torch.dtype, rows: int = 1) -> None:
        self.config = config
        self.static: list[Any] = []
        text = config.get_text_config(decoder=True)
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        for length in sorted(lengths) if context.graphs != "off" else ():
            cache = transformers.StaticCache(config=config, max_cache_len=length)
            cache.early_initialization(rows, text.num_key_value_heads, dim, dtype, torch.device(context.device))
            self.static.append(cache)

    def graphed(self, context: Context, function: Callable[..., Any], **inputs: Tensor) -> Callable[..., Any]:
        done = context.graph(function, [{**inputs, "cache": cache} for cache in self.static])
        for cache in self.static:
            cache.reset()  # capturing wrote into it
        return done

    def fresh(self, prompt: int, most: int) -> Any:
        """Returns an empty cache for a prompt of `prompt` positions that may grow to `most`: the
        smallest static one with room for a token, or a dynamic one if no static one holds `most`.
        Call `with_room` before each token."""
        if not self.static or most > self.static[-1].layers[0].max_cache_len:
            return transformers.DynamicCache(config=self.config.get_text_config(decoder=True))
        cache = self._with(prompt + 1)
        cache.reset()
        return cache

    def with_room(self, cache: Any, length: int) -> Any:
        """Returns `cache`, or, if it lacks room for `length` positions, the next static one, with
        the contents copied."""
        if not isinstance(cache, transformers.StaticCache) or length <= cache.layers[0].max_cache_len:
            return cache
        larger = self._with(length)
        larger.reset()
        for index, layer in enumerate(cache.layers):
            larger.update(layer.keys, layer.values, index)
        return larger

    def _with(self, length: int) -> Any:
        return next(cache for cache in self.static if length <= cache.layers[0].max_cache_len)


def seen_mask(cache: Any, position: Tensor) -> Tensor | None:
    """What a new position may attend to: bool [1, 1, 1, length] of a static cache; a dynamic one
    needs no mask.

    Transformers makes the same mask, but waits for the GPU."""
    if not isinstance(cache, transformers.StaticCache):
        return None
    seen: Tensor = torch.arange(cache.layers[0].max_cache_len, device=position.device) <= position.view(-1, 1)
    return seen[None, None]


def position_of(cache: Any, device: Any) -> Tensor:
    """int64 [1, 1]: the next token's position."""
    seen = cache.get_seq_length()
    if isinstance(seen, Tensor):
        return seen.clone().view(1, 1)
    return torch.tensor([[seen]], device=device)
