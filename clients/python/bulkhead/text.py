"""Converts text to token ids and back with a package's tokenizer and chat template.

Needs the packages ``tokenizers`` and, for chat templates, ``jinja2``: the wheel's extra ``text``.
"""

from __future__ import annotations

import datetime
import importlib
import json
from pathlib import Path
from typing import Any, Mapping, Sequence

from .errors import Error

#: One turn of a conversation: ``{"role": "user", "content": "…"}``.
Message = Mapping[str, Any]

_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


class Text:
    """A package's tokenizer and chat template."""

    def __init__(self, package: str | Path) -> None:
        """``package``: the folder, as named by ``methods["generate"]["package"]``."""
        folder = Path(package)
        try:
            tokenizers: Any = importlib.import_module("tokenizers")  # it has no type hints
        except ImportError:
            raise Error("input_invalid", "text to tokens: the package `tokenizers` is not installed",
                        "pip install tokenizers jinja2, or give token ids") from None  # fmt: skip
        path = folder / _TOKENIZER
        if not path.is_file():
            raise Error("input_invalid", f"text to tokens: {path} is not there", "give token ids, or export the model with its tokenizer")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more specific
            raise Error("input_invalid", f"reading {path}: {error}", "export the model again") from None
        self._decode_stream = tokenizers.decoders.DecodeStream
        self._settings = _settings(folder / _SETTINGS)
        self._template = _template(folder, self._settings)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Encodes with the special tokens that the tokenizer adds around a text."""
        return self._ids(text, True)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encodes a conversation, up to where the model is to answer."""
        return self._ids(self.render(messages), False)

    def _ids(self, text: str, special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # An undecodable byte of an argument or file, kept as a surrogate.
            raise Error("input_invalid", f"text to tokens: {text[error.start]!a} is not a character", "give text in UTF-8") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def render(self, messages: Sequence[Message]) -> str:
        """Applies the chat template to a conversation."""
        if self._template is None:
            raise Error("input_invalid", "the package has no chat template", "send the text as it is (--raw)")
        try:
            import jinja2
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise Error("input_invalid", "reading a chat template: the package `jinja2` is not installed",
                        "pip install jinja2, or send the text as it is (--raw)") from None  # fmt: skip

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        # The same environment as in transformers, for which templates are written.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.datetime.now().strftime(form))
        try:
            return environment.from_string(self._template).render(messages=list(messages), add_generation_prompt=True, **self._special())
        except jinja2.TemplateError as error:
            raise Error("input_invalid", f"the chat template refuses the conversation: {error}", "see chat_template.jinja of the package") from None

    def _special(self) -> dict[str, str]:
        """``bos_token`` and similar entries; each is a text, or an object that holds it."""
        found = {name: value for name, value in self._settings.items() if name.endswith("_token") and isinstance(value, (str, dict))}
        return {name: value if isinstance(value, str) else str(value.get("content", "")) for name, value in found.items()}

    def stream(self) -> Pieces:
        """Decodes the tokens of one answer."""
        return Pieces(self._tokenizer, self._decode_stream(skip_special_tokens=True))


class Pieces:
    """Decodes tokens one by one: a character that takes several tokens comes with the last."""

    def __init__(self, tokenizer: Any, stream: Any) -> None:
        self._tokenizer, self._stream = tokenizer, stream

    def push(self, token: int) -> str:
        """Returns the text that this token completes; may be empty."""
        piece: str | None = self._stream.step(self._tokenizer, token)
        return piece or ""


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise Error("input_invalid", f"reading {path}: {error}", "export the model again") from None
    return settings if isinstance(settings, dict) else {}


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / _TEMPLATE
    if path.is_file():
        return path.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates, by name
        template = next((one.get("template") for one in template if isinstance(one, dict) and one.get("name") == "default"), None)
    return template if isinstance(template, str) else None
