"""The doctor's remedies for boson-multimodal 0.1.1, by line. What follows from the modes and shapes that Python decides at each token
stays: that takes another design, as Higgs Audio v2 in Transformers has."""

from upstream import Patch

MODEL = "boson_multimodal/model/higgs_audio/modeling_higgs_audio.py"
MERGE = "boson_multimodal/model/higgs_audio/utils.py"
PATCHES = [
    Patch(MODEL, 1294, 1296, "cache_position = past_seen_tokens + torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)"),
    Patch(MODEL, 1297, 1302, "# the length is checked before the step"),
    Patch(MODEL, 1754, 1754, 'model_inputs["audio_out_ids_start"] = torch.zeros(1, dtype=torch.long, device=input_ids.device)'),
    Patch(MODEL, 1787, 1787, "cur_len = outputs.expanded_input_ids.shape[1]"),
    Patch(MODEL, 1859, 1861, 'model_kwargs["audio_out_ids_start"] = torch.zeros(1, dtype=torch.long, device=input_ids.device)'),
    Patch(MERGE, 279, 283, "audio_out_embed.shape[0] - audio_out_ids_start[-1:],"),
    Patch(MERGE, 287, 287, "token_placeholder_num.masked_scatter_(audio_out_token_mask, audio_out_codes_length.long())"),
    Patch(MERGE, 381, 381, "final_input_ids[batch_indices, col_indices] = torch.full((), audio_out_token_idx, device=target_device)"),
    Patch(MERGE, 384, 384, "final_audio_out_mask[batch_indices, col_indices] = torch.full((), True, device=target_device)"),
    Patch(MERGE, 290, 290, "max_token_num = int(_ceil_to_nearest(token_placeholder_num.sum(-1).max(), round_to))"),
]
