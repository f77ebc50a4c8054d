"""Models of true size with random weights, as `python -m bulkhead.export
tests/gpu/generation/models.py:NAME` takes them: what a step costs does not depend on what
the weights say."""

from __future__ import annotations

from typing import Any

import torch
import transformers

#: Of T3's layers, in Llama's words.
T3_LAYERS = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 16,
             "head_dim": 64}  # fmt: skip


def _drawn(kind: Any, config: Any) -> Any:
    """Made where it will run: drawing billions of numbers takes a CPU minutes."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return kind(config).eval()
    finally:
        torch.set_default_dtype(before)


def qwen3_4b() -> Any:
    """Qwen3-4B, which is also Qwen3-VL-4B's language model in size."""
    config = transformers.Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return _drawn(transformers.Qwen3ForCausalLM, config)


def higgs_v2() -> Any:
    """Higgs Audio v2 in its configuration's own defaults: 28 layers x 3,072, 8 codebooks, here with
    room for bos and eos."""
    return _drawn(transformers.HiggsAudioV2ForConditionalGeneration, transformers.HiggsAudioV2Config(codebook_size=1026))


def t3_guided() -> Any:
    """ChatterBox T3 itself, with classifier-free guidance; needs the package chatterbox-tts."""
    from bulkhead.export.families.chatterbox_t3 import t3_class

    torch.manual_seed(0)
    return t3_class()().eval()


def t3_single() -> Any:
    """T3's layers and vocabulary without guidance: what a guided step is held against."""
    config = transformers.LlamaConfig(**T3_LAYERS, vocab_size=8194, max_position_embeddings=4096, tie_word_embeddings=False,
                                      bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
    return _drawn(transformers.LlamaForCausalLM, config)


def rehearsal() -> Any:
    """So small that the bench's own way through can be tried on any machine."""
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                      vocab_size=512, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()
