"""Higgs Audio 2 as its own package serves it, of the true class with small random
weights: a prompt, the first audio token, then the steps of the delay pattern, over static
caches of two lengths."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from boson_multimodal.model.higgs_audio import HiggsAudioConfig, HiggsAudioModel
from transformers import StaticCache

PACKAGE = "boson_multimodal"
TEXT = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 256, "pad_token_id": 290}  # fmt: skip


def speech(model: HiggsAudioModel, caches: OrderedDict[int, Any], prompt: torch.Tensor, nothing_heard: torch.Tensor,
           count: int = 3) -> torch.Tensor:  # fmt: skip
    with torch.no_grad():
        _, audio = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), audio_in_ids=nothing_heard, audio_in_ids_start=nothing_heard[0],
            past_key_values_buckets=caches, max_new_tokens=count, use_cache=True, do_sample=True, temperature=0.7, top_k=20, top_p=0.95,
            ras_win_len=7, ras_win_max_num_repeat=2,
        )  # fmt: skip
    return audio[0]


AUDIO_OUT_BOS, AUDIO_EOS = 293, 294


def of_speech(device: Any) -> tuple[Any, ...]:
    config = HiggsAudioConfig(
        text_config=dict(TEXT), audio_adapter_type="dual_ffn_fast_forward", audio_dual_ffn_layers=[0, 2], audio_ffn_hidden_size=32,
        audio_ffn_intermediate_size=48, skip_audio_tower=True, encode_audio_in_tokens=True, use_delay_pattern=True, audio_num_codebooks=4,
        audio_codebook_size=24, audio_stream_bos_id=24, audio_stream_eos_id=25, audio_in_token_idx=291, audio_out_token_idx=292,
        pad_token_id=290,
    )  # fmt: skip
    model = HiggsAudioModel(config).eval().to(device)
    model.audio_out_bos_token_id, model.audio_eos_token_id = AUDIO_OUT_BOS, AUDIO_EOS
    cached = copy.deepcopy(config.text_config)
    cached.num_hidden_layers += len(config.audio_dual_ffn_layers)
    caches = OrderedDict(
        (length, StaticCache(config=cached, batch_size=1, max_cache_len=length, device=device, dtype=model.dtype)) for length in (32, 64)
    )
    return model, caches, torch.tensor([[1, 2, 3, 4, AUDIO_OUT_BOS]], device=device), torch.zeros(4, 0, dtype=torch.long, device=device)


PARTS = [(speech, of_speech)]
# Its output alone, to the end of the delay pattern.
COMPARED = [(lambda *given: speech(*given, count=56), of_speech)]
