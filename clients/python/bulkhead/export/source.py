"""Loads a model from a Hugging Face folder, a GGUF file, or a Python function that returns it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import Error
from .families import Family, family_named, family_of
from .gguf_once import parsed_once

if TYPE_CHECKING:
    import torch


CHATTERBOX = "t3_cfg.safetensors"  #: T3's weights in a ChatterBox folder, which has no config.json
#: What transformers makes any tokenizer of, beside the files of its class.
WORDS = ("tokenizer.json", "tokenizer.model", "tekken.json")


@dataclass(frozen=True)
class Loaded:
    family: Family
    name: str
    origin: dict[str, Any]  #: the manifest's `source`


def load(said: str, dtype: torch.dtype, family: str | None = None, name: str | None = None) -> Loaded:
    """`said`: a folder, a file.gguf, `file.py:function` or `module:function`. The function takes no
    argument and returns a module, or (module, tokenizer).

    Errors: input_invalid for a missing source, or an unknown family."""
    path = Path(said)
    if path.is_dir():
        return _folder(path, dtype, family, name)
    if path.is_file() and path.suffix.lower() == ".gguf":
        with parsed_once():
            return _gguf(path, dtype, family, name)
    if ":" in said and not path.exists():
        return _function(said, dtype, family, name)
    if path.exists():
        raise Error("input_invalid", f"reading a model from {said}", "give a folder with a config.json, a .gguf file, or FILE.py:FUNCTION")
    raise Error("input_invalid", f"reading a model from {said}: no such file or folder", "give a Hugging Face folder, a .gguf file, or FILE.py:FUNCTION")


def _folder(path: Path, dtype: torch.dtype, family: str | None, name: str | None) -> Loaded:
    config = path / "config.json"
    if not config.is_file() and (path / CHATTERBOX).is_file():
        kind = family_named(family or "chatterbox_t3")
        return Loaded(_with_words(kind, path, dtype, None), name or path.resolve().name, {"kind": "folder", "model_type": kind.name})
    if not config.is_file():
        raise Error("input_invalid", f"reading a model from {path}: no config.json there", "give the folder that holds it; of several GGUF files, give one")
    try:
        model_type = json.loads(config.read_text())["model_type"]
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as wrong:
        raise Error("input_invalid", f"reading {config}: {wrong!r}", "it must be a JSON object with a model_type") from None
    kind = family_named(family or family_of(model_type))
    return Loaded(_with_words(kind, path, dtype, None), name or path.resolve().name, {"kind": "folder", "model_type": model_type})


def _gguf(path: Path, dtype: torch.dtype, family: str | None, name: str | None) -> Loaded:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as wrong:  # gguf raises various errors
        raise Error("input_invalid", f"reading {path}: {wrong}", "transformers must be able to read this GGUF file") from wrong
    kind = family_named(family or family_of(config.model_type))
    return Loaded(_with_words(kind, path.parent, dtype, path.name), name or path.stem, {"kind": "gguf", "file": path.name, "model_type": config.model_type})


def _with_words(kind: type[Family], folder: Path, dtype: torch.dtype, gguf: str | None) -> Family:
    import transformers

    try:
        model = kind.load(folder, dtype, gguf)
    except (OSError, ValueError, KeyError, RuntimeError) as wrong:
        raise Error("input_invalid", f"loading {folder / gguf if gguf else folder} as {kind.name}: {wrong}", "the files must be whole, and of this family") from wrong
    tokenizer: Any = None  # without one, only token ids can be given
    words = folder / "tokenizer.json"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf, local_files_only=True)
    except (OSError, ValueError, KeyError):
        if words.is_file():  # all that ChatterBox has
            tokenizer = cast(Any, transformers.PreTrainedTokenizerFast)(tokenizer_file=str(words))
    if gguf is None and tokenizer is not None and not any((folder / name).is_file() for name in (*WORDS, *tokenizer.vocab_files_names.values())):
        tokenizer = None  # for some model_types transformers makes up an empty one
    return kind(model.eval(), tokenizer)


RETURNS = "the function takes no argument, and returns a torch.nn.Module, or one and its tokenizer"


def _function(said: str, dtype: torch.dtype, family: str | None, name: str | None) -> Loaded:
    import torch

    where, _, function = said.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            # It can import its neighbours, as with `python FILE.py`.
            sys.path.insert(0, str(Path(where).resolve().parent))
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        given = getattr(module, function)()
    except Exception as wrong:  # it is the user's code
        raise Error("input_invalid", f"calling {said}: {type(wrong).__name__}: {wrong}", f"give FILE.py:FUNCTION or MODULE:FUNCTION; {RETURNS}") from wrong
    model, tokenizer = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(model, torch.nn.Module):
        raise Error("input_invalid", f"exporting what {said} returned: it is of type {type(model).__name__}", RETURNS)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if family is None and model_type is None:
        raise Error("input_invalid", f"exporting what {said} returned: it has no config.model_type", "say which --family it is of")
    kind = family_named(family or family_of(str(model_type)))
    try:
        loaded = kind(in_dtype(model, dtype).eval(), tokenizer)
        loaded.numbers()
    except AttributeError as wrong:
        raise Error("input_invalid", f"exporting what {said} returned as {kind.name}: {wrong}", "it must be built as the models of this family are") from wrong
    return Loaded(loaded, name or function, {"kind": "python", "function": function, "model_type": model_type})


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Converts the model, except the frequencies of rotary angles: in 16 bits they are off by whole
    turns after some hundred positions, so transformers loads them in float32 too."""
    kept = [(module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
    model.to(dtype)
    for module, name, buffer in kept:
        setattr(module, name, buffer)
    return model
