"""Folders of small models of the true upstream classes, with random weights, as
`save_pretrained` leaves them."""

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
    """A token for each byte, then the special ones from 256 on. Each token is one letter of the
    text that it is decoded to."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **roles)


def higgs_audio_v2(folder: Path, text: dict[str, Any] = {}) -> Path:
    special = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|scene_desc_start|>", "<|scene_desc_end|>",
               "<|AUDIO_OUT|>", "<|audio_out_bos|>", "<|audio_eos|>", "<|reserved_special_token_6|>"]  # fmt: skip
    tokenizer = byte_tokenizer(special, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", pad_token="<|eot_id|>")
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in special}
    config = transformers.HiggsAudioV2Config(
        **{**tiny_models.TEXT, "num_hidden_layers": 3, "vocab_size": 300, "bos_token_id": ids["<|begin_of_text|>"], "eos_token_id": ids["<|eot_id|>"], "pad_token_id": ids["<|eot_id|>"],
           "max_position_embeddings": 4096, "head_dim": 12, **text},
        num_codebooks=4, codebook_size=26, audio_token_id=ids["<|AUDIO_OUT|>"], audio_bos_token_id=ids["<|audio_out_bos|>"],
        audio_delay_token_id=ids["<|reserved_special_token_6|>"], audio_stream_bos_id=24, audio_stream_eos_id=25,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = tiny_models.scattered(transformers.HiggsAudioV2ForConditionalGeneration(config))
    with torch.no_grad():
        # Else it ends after a few frames.
        model.audio_lm_head.weight.mul_(2).view(4, 26, -1)[:, 25].zero_()
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


QWEN_TEMPLATE = """
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' }}
{%- for item in message.content -%}
{%- if item.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif item.type == 'video' -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else -%}{{ item.text }}{%- endif -%}
{%- endfor -%}
{{- '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


def qwen3_vl(folder: Path, text: dict[str, Any] = {}, vision: dict[str, Any] = {}) -> Path:
    """With sizes of its own where `text` and `vision` say so."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tokenizer = byte_tokenizer(special, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in special}
    config = transformers.Qwen3VLConfig(
        text_config={**tiny_models.TEXT, "num_hidden_layers": 3, "vocab_size": 263, "max_position_embeddings": 4096, "eos_token_id": ids["<|im_end|>"], "bos_token_id": None, "head_dim": 16,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}, **text},
        vision_config={"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
                       "out_hidden_size": 48, "num_position_embeddings": 36, "deepstack_visual_indexes": [1, 2], **vision},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    model = tiny_models.scattered(transformers.Qwen3VLForConditionalGeneration(config))
    with torch.no_grad():
        model.lm_head.weight.mul_(0.4)  # else the likeliest token is all but certain
        model.lm_head.weight[ids["<|im_end|>"]].mul_(0.05)  # else it ends after a few tokens
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ids["<|im_end|>"], ids["<|endoftext|>"]
    model.save_pretrained(folder)
    return _qwen_processor(folder, tokenizer)


def qwen3_vl_of_package(folder: Path) -> Path:
    """`tiny_models.qwen3_vl`, of which the exporter's tests make a package, with a processor of
    its vocabulary."""
    model = tiny_models.qwen3_vl()
    config = model.config
    special = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258, "<|image_pad|>": config.image_token_id, "<|video_pad|>": config.video_token_id,
               "<|vision_start|>": config.vision_start_token_id, "<|vision_end|>": config.vision_end_token_id}  # fmt: skip
    names = {index: name for name, index in special.items()}
    tokenizer = byte_tokenizer([names.get(index, f"<|{index}|>") for index in range(256, config.text_config.vocab_size)], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    model.save_pretrained(folder)
    return _qwen_processor(folder, tokenizer)


def _qwen_processor(folder: Path, tokenizer: Any) -> Path:
    patches: dict[str, Any] = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
    transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**patches), tokenizer, transformers.Qwen3VLVideoProcessor(**patches), chat_template=QWEN_TEMPLATE
    ).save_pretrained(folder)
    return folder
