"""Folders of small models of the true upstream classes, with random weights, as `save_pretrained` leaves them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

sys.path.append(str(Path(__file__).parent.parent / "export"))
import tiny_models  # noqa: E402

#: Roles, scenes and voices as Higgs Audio's own template writes them.
HIGGS_TEMPLATE = """
{%- macro said(content) -%}
{%- for item in content -%}
{{- '<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>' if item.type == 'audio' else item.text|trim }}{{ '\n' if not loop.last }}
{%- endfor -%}
{%- endmacro -%}
{{- bos_token }}
{%- for message in messages -%}
{%- if message.role == 'scene' -%}
{{- '<|scene_desc_start|>\n' + said(message.content) + '\n<|scene_desc_end|>' }}
{%- else -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + said(message.content) + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>' }}
{%- endif -%}
"""


def byte_tokenizer(special: list[str], **roles: str) -> Any:
    """A token for each byte, then the special ones from 256 on."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **roles)


def higgs_audio_v2(folder: Path) -> Path:
    special = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|scene_desc_start|>", "<|scene_desc_end|>",
               "<|AUDIO_OUT|>", "<|audio_out_bos|>", "<|audio_eos|>", "<|reserved_special_token_6|>"]  # fmt: skip
    tokenizer = byte_tokenizer(special, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", pad_token="<|eot_id|>")
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in special}
    config = transformers.HiggsAudioV2Config(
        **{**tiny_models.TEXT, "vocab_size": 300, "bos_token_id": ids["<|begin_of_text|>"], "eos_token_id": ids["<|eot_id|>"], "pad_token_id": ids["<|eot_id|>"],
           "max_position_embeddings": 4096},
        head_dim=12, num_codebooks=4, codebook_size=26, audio_token_id=ids["<|AUDIO_OUT|>"], audio_bos_token_id=ids["<|audio_out_bos|>"],
        audio_delay_token_id=ids["<|reserved_special_token_6|>"], audio_stream_bos_id=24, audio_stream_eos_id=25,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = tiny_models.scattered(transformers.HiggsAudioV2ForConditionalGeneration(config))
    with torch.no_grad():
        model.audio_lm_head.weight.view(4, 26, -1)[:, 25].mul_(0.2)  # else it ends after a few frames
    model.generation_config.ras_win_len, model.generation_config.ras_win_max_num_repeat = 7, 2
    model.save_pretrained(folder)
    codec = transformers.HiggsAudioV2TokenizerConfig(
        target_bandwidths=[1.0], codebook_size=24, codebook_dim=8, sample_rate=24000,
        acoustic_model_config={"model_type": "dac", "encoder_hidden_size": 4, "hidden_size": 16, "decoder_hidden_size": 64,
                               "downsampling_ratios": [8, 5, 4, 3], "upsampling_ratios": [8, 5, 4, 3]},
        semantic_model_config={"model_type": "hubert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                               "conv_dim": (8,) * 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        heard = transformers.HiggsAudioV2TokenizerModel(codec).eval()
        for quantizer in heard.quantizer.quantizers:
            torch.nn.init.normal_(quantizer.codebook.embed)
    heard.save_pretrained(folder / "codec")
    processor = transformers.HiggsAudioV2Processor(
        transformers.DacFeatureExtractor(feature_size=1, hop_length=1, sampling_rate=24000),
        tokenizer,
        transformers.HiggsAudioV2TokenizerModel.from_pretrained(folder / "codec"),
        chat_template=HIGGS_TEMPLATE,
        audio_stream_bos_id=24,
        audio_stream_eos_id=25,
    )
    processor.save_pretrained(folder)
    return folder
