"""The doctor's remedies for boson-multimodal 0.1.1, by line. What the host has as a shape, or has
decided itself, needs no read; one read for each token is left, which asks it for the next mode
and for the end."""

from upstream import Patch

MODEL = "boson_multimodal/model/higgs_audio/modeling_higgs_audio.py"
MERGE = "boson_multimodal/model/higgs_audio/utils.py"
HEAD = "boson_multimodal/model/higgs_audio/audio_head.py"
PATCHES = [
    # Of a prompt only the last row is sampled; training takes those of the labels.
    Patch(HEAD, 122, 122,
          "audio_logits = self.audio_lm_head(hidden_states[:, -1] if use_cache else hidden_states[audio_out_mask])"),
    # Both feed-forwards of all rows, and of each row one.
    Patch(MODEL, 692, 699,
          "text_hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))\n"
          "audio_hidden_states = self.audio_mlp(self.audio_post_attention_layernorm(hidden_states))\n"
          "residual = residual + torch.where(real_audio_out_mask.unsqueeze(-1), audio_hidden_states, text_hidden_states)"),
    Patch(MODEL, 1294, 1296,
          "cache_position = past_seen_tokens + torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)"),
    Patch(MODEL, 1297, 1302, "# the length is checked before the step"),
    Patch(MODEL, 1329, 1329, "is_decoding_audio_token = self.is_decoding_audio_token  # the caller knows the mode"),
    # The delays as tensors; -1: none is counted.
    Patch(MODEL, 1548, 1566,
          "codebook = torch.arange(self.audio_num_codebooks, device=device)\n"
          "eos, bos = self.config.audio_stream_eos_id, self.config.audio_stream_bos_id\n"
          "next_audio_tokens = torch.where(codebook > num_delay, bos, next_audio_tokens)\n"
          "num_delay = (num_delay + 1).clamp(max=self.audio_num_codebooks - 1)\n"
          "is_counting, is_eos = num_remaining_delays >= 0, next_audio_tokens == eos\n"
          "first = torch.where(is_eos.any(), is_eos.int().argmax(), 0)\n"
          "end = torch.where(is_counting, self.audio_num_codebooks - num_remaining_delays, first)\n"
          "next_audio_tokens = torch.where(codebook < end, eos, next_audio_tokens)\n"
          "begun = torch.where(is_eos.any(), self.audio_num_codebooks - first - 1, -1)\n"
          "num_remaining_delays = torch.where(is_counting, num_remaining_delays - 1, begun)\n"
          "is_over = (is_counting | is_eos.any()) & (num_remaining_delays <= 0)\n"
          "next_tokens = torch.where(is_over, audio_eos_token_id, next_tokens)\n"
          "num_delay = torch.where(is_over, 0, num_delay)\n"
          "num_remaining_delays = torch.where(is_over, -1, num_remaining_delays)"),
    Patch(MODEL, 1713, 1714,
          "num_delay = torch.zeros((), dtype=torch.long, device=input_ids.device)\n"
          "num_remaining_delays = torch.full((), -1, device=input_ids.device)"),
    Patch(MODEL, 1720, 1720, "if (last_token := input_ids[0, -1].item()) == self.config.audio_out_token_idx:"),
    Patch(MODEL, 1727, 1731,
          "is_eos = model_kwargs['audio_out_ids'][:, -1] == self.config.audio_stream_eos_id\n"
          "first = is_eos.int().argmax()\n"
          "num_remaining_delays = torch.where(is_eos.any(), self.audio_num_codebooks - first - 1, -1)"),
    Patch(MODEL, 1738, 1738, "if last_token == audio_out_bos_token_id:"),
    Patch(MODEL, 1740, 1740, "elif last_token == self.audio_out_token_idx:"),
    Patch(MODEL, 1745, 1745,
          "self.is_decoding_audio_token = is_audio_generation_mode = generation_mode == GenerationMode.AUDIO_IN_PROGRESS"),
    Patch(MODEL, 1754, 1754,
          'model_inputs["audio_out_ids_start"] = torch.zeros(1, dtype=torch.long, device=input_ids.device)'),
    Patch(MODEL, 1787, 1787, "cur_len = outputs.expanded_input_ids.shape[1]"),
    Patch(MODEL, 1859, 1861,
          'model_kwargs["audio_out_ids_start"] = torch.zeros(1, dtype=torch.long, device=input_ids.device)'),
    # One read for each token, of the next mode and of the end.
    Patch(MODEL, 1903, 1909,
          "input_ids_full = torch.cat([input_ids_full, next_tokens[:, None]], dim=-1)\n"
          "unfinished_sequences = unfinished_sequences & ~stopping_criteria(input_ids_full, scores)\n"
          "ended = (unfinished_sequences.max() == 0).long()\n"
          "last_token, this_peer_finished = torch.stack((next_tokens[0], ended)).tolist()\n"
          "if not is_audio_generation_mode or last_token != self.audio_out_token_idx:\n"
          "    input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)"),
    Patch(MERGE, 279, 283, "audio_out_embed.shape[0] - audio_out_ids_start[-1:],"),
    Patch(MERGE, 287, 287,
          "token_placeholder_num.masked_scatter_(audio_out_token_mask, audio_out_codes_length.long())"),
    # Each placeholder has a start, and each code a row: of one sequence of codes all
    # lengths are shapes.
    Patch(MERGE, 289, 292,
          "new_token_positions = token_placeholder_num.cumsum(-1) - 1; has_features = audio_features_embed is not None\n"
          "count_in, count_out = (0 if starts is None else len(starts) for starts in "
          "(audio_features_length if has_features else audio_in_ids_start, audio_out_ids_start))\n"
          "max_token_num = _ceil_to_nearest(int(token_placeholder_num.sum(-1).max()) if batch_size > 1 or has_features else "
          "sequence_length - count_in - count_out + sum(len(codes) for codes in (audio_in_embed, audio_out_embed) "
          "if codes is not None), round_to)\n"
          "nb_audio_pad = max_token_num - 1 - new_token_positions[:, -1]"),
    Patch(MERGE, 320, 325,
          "batch_id = torch.arange(batch_size, device=target_device).unsqueeze(1).expand(batch_size, sequence_length)\n"
          "places = lambda mask, count: mask.flatten().int().argsort(descending=True, stable=True)[:count]\n"
          "places_in, places_out = places(audio_in_token_mask, count_in), places(audio_out_token_mask, count_out)\n"
          "audio_in_batch_id, audio_out_batch_id = batch_id.flatten()[places_in], batch_id.flatten()[places_out]\n"
          "audio_features_token_ends = new_token_positions.flatten()[places_in]\n"
          "audio_out_embed_ends = new_token_positions.flatten()[places_out]"),
    Patch(MERGE, 375, 378,
          "ends = audio_out_embed_ends.unsqueeze(1)\n"
          "within = (seq_indices >= audio_out_embed_token_starts.unsqueeze(1)) & (seq_indices <= ends)\n"
          "filled = places(within, audio_out_embed.shape[0])\n"
          "batch_indices, col_indices = filled // max_token_num, filled % max_token_num"),
    Patch(MERGE, 381, 381,
          "final_input_ids[batch_indices, col_indices] = torch.full((), audio_out_token_idx, device=target_device)"),
    Patch(MERGE, 384, 384, "final_audio_out_mask[batch_indices, col_indices] = torch.full((), True, device=target_device)"),
    Patch(MERGE, 386, 387,
          "text = places(text_token_mask, input_ids.numel() - count_in - count_out)\n"
          "batch_indices, non_audio_indices = text // sequence_length, text % sequence_length"),
    Patch(MERGE, 396, 397, "if batch_size == 1: pass  # is given without padding\nelif left_padding:"),
]  # fmt: skip
