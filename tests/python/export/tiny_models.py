"""Small models of the true upstream classes.

Their random weights are large enough that what they generate varies.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

LAYERS = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT = {**LAYERS, "vocab_size": 300, "max_position_embeddings": 160, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False}

#: Options of each `model_type` that the common ones do not say.
CAUSAL: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 12},
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "mistral": {"sliding_window": None, "head_dim": 12},
    "olmo2": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
}  # fmt: skip


def scattered(model: Any, seed: int = 0) -> Any:
    """The same model with weights drawn again, matrices wide enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_((0 if "bias" in name else 1) + 0.2 * torch.randn(weight.shape, generator=generator))
            else:
                # 1 for tables of embeddings.
                narrow = 1 if weight.shape[0] > 4 * weight.shape[-1] else weight.shape[-1] ** -0.5
                weight.copy_(1.2 * narrow * torch.randn(weight.shape, generator=generator))
    return model.eval()


def causal(model_type: str, **sizes: int) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **{**TEXT, **CAUSAL[model_type], **sizes})
    return scattered(transformers.AutoModelForCausalLM.from_config(config))


def qwen3_vl() -> Any:
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        vision_config={"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
                       "out_hidden_size": 48, "num_position_embeddings": 36, "deepstack_visual_indexes": [1, 2]},
        image_token_id=290, video_token_id=291, vision_start_token_id=292, vision_end_token_id=293,
    )  # fmt: skip
    return scattered(transformers.Qwen3VLForConditionalGeneration(config))


def higgs_audio_v2(codec: bool = False) -> Any:
    """Four codebooks of 24 codes; without `codec`, text to codes alone.

    `codec` needs torchaudio to be installed.
    """
    config = transformers.HiggsAudioV2Config(
        **{**TEXT, "vocab_size": 320, "eos_token_id": 309, "bos_token_id": 301}, head_dim=12, num_codebooks=4, codebook_size=26,
        audio_token_id=316, audio_bos_token_id=313, audio_delay_token_id=314, audio_stream_bos_id=24, audio_stream_eos_id=25,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 0.125, "high_freq_factor": 0.5,
                         "original_max_position_embeddings": 64},
    )  # fmt: skip
    model = scattered(transformers.HiggsAudioV2ForConditionalGeneration(config))
    if codec:
        said = transformers.HiggsAudioV2TokenizerConfig(
            target_bandwidths=[20], codebook_size=24, codebook_dim=8, sample_rate=24000, strides=(1, 1), channel_ratios=(1, 1),
            acoustic_model_config={"model_type": "dac", "encoder_hidden_size": 4, "hidden_size": 16, "decoder_hidden_size": 64,
                                   "downsampling_ratios": [4, 3, 2], "upsampling_ratios": [4, 3, 2]},
            semantic_model_config={"model_type": "hubert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                                   "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
                                   "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model.codec = transformers.HiggsAudioV2TokenizerModel(said).eval()
            for quantizer in model.codec.quantizer.quantizers:
                torch.nn.init.normal_(quantizer.codebook.embed)
    return model


def higgs_audio_v2_with_codec() -> Any:
    return higgs_audio_v2(codec=True)


def chatterbox_t3() -> Any:
    """T3 of chatterbox-tts with its own vocabulary, positions and voice conditioning.

    Its layers are few and small. The perceiver is 1,024 wide whatever the configuration says, so
    that the width is the true one.
    """
    from bulkhead.export.families import chatterbox_t3 as family

    kind = family.t3_class()
    configs = family._modules("t3.llama_configs").LLAMA_CONFIGS
    configs["tiny"] = {**configs["Llama_520M"], "num_hidden_layers": TEXT["num_hidden_layers"], "intermediate_size": 256, "num_attention_heads": 16}
    hp = family._modules("t3.modules.t3_config").T3Config()
    hp.llama_config_name = "tiny"
    return scattered(kind(hp))
