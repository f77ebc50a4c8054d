"""A folder of Higgs Audio 2 as boson-multimodal reads it, with few and small layers and random
weights, and the engine that loads it. The codec's networks take their widths from nowhere: small
ones are given to them while they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import small_models
import torch
import transformers
from boson_multimodal.audio_processing import higgs_audio_tokenizer
from boson_multimodal.model.higgs_audio import HiggsAudioConfig, HiggsAudioModel
from bulkhead.engines.higgs_audio_boson import HiggsAudio
from small_models import tiny_models

SPECIAL = ["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|scene_desc_start|>", "<|scene_desc_end|>",
           "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "<|audio_out_bos|>", "<|AUDIO_OUT|>", "<|end_of_text|>"]  # fmt: skip
CODEC = {"D": 32, "target_bandwidths": [1.0], "ratios": [8, 5, 4, 2], "sample_rate": 8000, "bins": 24, "n_q": 4, "codebook_dim": 8,
         "semantic_techer": "hubert_base_general"}  # fmt: skip


def hub(folder: Path) -> Any:
    """While it holds, this folder is the cache of the Hugging Face Hub."""
    return mock.patch("transformers.utils.hub.TRANSFORMERS_CACHE", str(folder))


def small_sizes() -> Any:
    codec = higgs_audio_tokenizer.dac2
    encoder, decoder = codec.Encoder, codec.Decoder
    return mock.patch.multiple(codec, Encoder=lambda _, *rest: encoder(4, *rest), Decoder=lambda dim, _, rates: decoder(dim, 64, rates))


class SmallHiggsAudio(HiggsAudio):
    """With a small codec."""

    def load(self, context: Any) -> None:
        with small_sizes():
            super().load(context)


def boson(folder: Path) -> Path:
    """With the codec in `folder/codec`, and its HuBERT in `folder/hub`, a cache of the
    Hugging Face Hub."""
    tokenizer = small_models.byte_tokenizer(SPECIAL, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", pad_token="<|end_of_text|>")
    tokenizer.save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    text = {**tiny_models.TEXT, "num_hidden_layers": 3, "vocab_size": len(tokenizer), "max_position_embeddings": 2048, "model_type": "llama",
            "bos_token_id": ids["<|begin_of_text|>"], "eos_token_id": ids["<|eot_id|>"], "pad_token_id": ids["<|end_of_text|>"]}  # fmt: skip
    config = HiggsAudioConfig(
        text_config=text, audio_adapter_type="dual_ffn_fast_forward", audio_dual_ffn_layers=[0, 2], encode_whisper_embed=False,
        encode_audio_in_tokens=True, use_delay_pattern=True, skip_audio_tower=True, audio_num_codebooks=4, audio_codebook_size=24,
        audio_stream_bos_id=24, audio_stream_eos_id=25, audio_in_token_idx=ids["<|AUDIO|>"], audio_out_token_idx=ids["<|AUDIO_OUT|>"],
        audio_out_bos_token_id=ids["<|audio_out_bos|>"], audio_eos_token_id=ids["<|audio_eos|>"], pad_token_id=ids["<|end_of_text|>"],
        bos_token_id=ids["<|begin_of_text|>"], eos_token_id=ids["<|eot_id|>"], torch_dtype="float32",
    )  # fmt: skip
    model = tiny_models.scattered(HiggsAudioModel(config))
    with torch.no_grad():
        # Else it ends after a few frames.
        model.audio_decoder_proj.audio_lm_head.weight.view(4, 26, -1)[:, 25].mul_(0.5)
        words = model.audio_decoder_proj.text_lm_head.weight
        # Upstream's loop fails where these are written.
        words[[ids["<|AUDIO|>"], ids["<|AUDIO_OUT|>"]]] = 0
        words[ids["<|audio_out_bos|>"]].mul_(2)  # it begins to speak by itself
    model.save_pretrained(folder)
    _codec(folder)
    return folder


def _codec(folder: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        semantic = transformers.HubertModel(transformers.HubertConfig(
            hidden_size=768, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8,) * 7,
            num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        ))  # fmt: skip
        kept = folder / "hub" / "models--bosonai--hubert_base"
        (kept / "refs").mkdir(parents=True)
        (kept / "refs" / "main").write_text("one")
        semantic.save_pretrained(kept / "snapshots" / "one")
        with hub(folder / "hub"), small_sizes():
            codec = higgs_audio_tokenizer.HiggsAudioTokenizer(**CODEC, device="cpu").eval()
        for layer in codec.quantizer.vq.layers:
            layer._codebook.inited.fill_(1)  # else the first sound that it hears makes them
            torch.nn.init.normal_(layer._codebook.embed)
    (folder / "codec").mkdir()
    (folder / "codec" / "config.json").write_text(json.dumps(CODEC))
    torch.save(codec.state_dict(), folder / "codec" / "model.pth")
