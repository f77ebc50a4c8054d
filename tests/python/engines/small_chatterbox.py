"""ChatterBox of the true classes with few and small layers, and the engine that loads it. Sizes
that upstream's classes take from nowhere are given to them while they are made."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import small_models
import soundfile
import tokenizers
import torch
from bulkhead.engines.chatterbox import ChatterBox
from chatterbox.models.s3gen import s3gen
from chatterbox.models.t3 import T3
from chatterbox.models.t3.llama_configs import LLAMA_CONFIGS
from chatterbox.models.tokenizers.tokenizer import SPECIAL_TOKENS
from chatterbox.tts import ChatterboxTTS, Conditionals, EnTokenizer, S3Gen, VoiceEncoder
from safetensors.torch import save_file
from s3tokenizer.model_v2 import S3TokenizerV2


@contextlib.contextmanager
def small_sizes(t3_width: int = 128) -> Iterator[None]:
    few = {"num_hidden_layers": 2, "intermediate_size": t3_width, "num_attention_heads": 16}
    heard = inspect.signature(S3TokenizerV2.__init__).parameters["config"].default
    with (
        mock.patch.dict(LLAMA_CONFIGS, Llama_520M={**LLAMA_CONFIGS["Llama_520M"], **few}),
        mock.patch.multiple(heard, n_audio_state=128, n_audio_head=2, n_audio_layer=1),
        mock.patch.object(s3gen, "UpsampleConformerEncoder", smaller(s3gen.UpsampleConformerEncoder, num_blocks=1, linear_units=64)),
        mock.patch.object(s3gen, "ConditionalDecoder", smaller(s3gen.ConditionalDecoder, n_blocks=1, num_mid_blocks=1)),
        mock.patch.object(s3gen, "HiFTGenerator", smaller(s3gen.HiFTGenerator, base_channels=64)),
    ):
        yield


def smaller(kind: Any, **sizes: Any) -> Any:
    return lambda **given: kind(**{**given, **sizes})


class SmallChatterBox(ChatterBox):
    """ChatterBox with few and small layers."""

    t3_width = 128

    def load(self, context: Any) -> None:
        with small_sizes(self.t3_width):
            super().load(context)


class SpokenTokens(SmallChatterBox):
    """Its T3 is `tiny_models.chatterbox_t3`, of which the exporter's tests make a package. Its
    sound is its speech tokens, so that two can be compared: upstream's vocoder draws random
    numbers."""

    t3_width = 256

    def load(self, context: Any) -> None:
        super().load(context)
        self.tts.s3gen.inference = lambda speech_tokens, ref_dict: (speech_tokens.reshape(1, -1).repeat_interleave(960, 1) / 6561, None)

    def _marked(self, sound: torch.Tensor) -> torch.Tensor:
        return sound[None]


def chatterbox(folder: Path) -> Path:
    vocabulary = {"[STOP]": 0, "[UNK]": 1, "[SPACE]": 2, "[START]": 255}
    vocabulary |= {chr(97 + index): 10 + index for index in range(26)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    inner.normalizer = tokenizers.normalizers.Lowercase()
    inner.add_special_tokens([token for token in SPECIAL_TOKENS if token in vocabulary])
    inner.save(str(folder / "tokenizer.json"))
    with small_sizes(), torch.random.fork_rng():
        torch.manual_seed(1)
        t3, encoder, generator = small_models.tiny_models.scattered(T3()), VoiceEncoder(), S3Gen()
        tts = ChatterboxTTS(t3, generator.eval(), encoder.eval(), EnTokenizer(str(folder / "tokenizer.json")), "cpu")
    with torch.no_grad():
        # What is said comes from few tokens, so that they repeat; and does not end.
        t3.speech_head.weight[40:].mul_(0.3)
        t3.speech_head.weight[:40].mul_(1.5)
    save_file(t3.state_dict(), folder / "t3_cfg.safetensors")
    save_file(encoder.state_dict(), folder / "ve.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in generator.state_dict().items()}, folder / "s3gen.safetensors")
    soundfile.write(folder / "voice.wav", numpy.random.default_rng(0).normal(0, 0.1, 24000), 24000)
    tts.prepare_conditionals(folder / "voice.wav")
    tts.conds.save(folder / "conds.pt")
    return folder
