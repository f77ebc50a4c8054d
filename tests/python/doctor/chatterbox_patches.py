"""The doctor's remedies for chatterbox-tts 0.1.7, by line."""

from upstream import Patch

S3GEN, T3 = "chatterbox/models/s3gen", "chatterbox/models/t3"
PATCHES = [
    Patch(f"{S3GEN}/flow.py", 162, 162, "mask = (~make_pad_mask(token_len, token.shape[1])).unsqueeze(-1).to(embedding)"),
    Patch(f"{S3GEN}/flow.py", 164, 165, "# tokens are checked before the step"),
    Patch(f"{S3GEN}/flow.py", 182, 182, "mask = (~make_pad_mask(h_lengths, h.shape[1])).unsqueeze(1).to(h)"),
    Patch(f"{S3GEN}/hifigan.py", 207, 207, "F_mat = torch.zeros((f0.size(0), self.harmonic_num + 1, f0.size(-1)), device=f0.device)"),
    Patch(f"{S3GEN}/hifigan.py", 212, 213, "phase_vec = torch.rand((f0.size(0), self.harmonic_num + 1, 1), device=f0.device) * (2 * np.pi) - np.pi"),
    Patch(f"{S3GEN}/hifigan.py", 379, 379, "window = torch.from_numpy(get_window('hann', istft_params['n_fft'], fftbins=True).astype(np.float32)); "
          "self.register_buffer('stft_window', window, persistent=False)"),
    Patch(f"{S3GEN}/s3gen.py", 218, 218, "speech_token_lens = torch.full((len(speech_tokens),), speech_tokens.size(-1), dtype=torch.long, device=self.device)"),
    Patch(f"{S3GEN}/s3gen.py", 326, 326, "cache_source = torch.zeros(1, 1, 0, device=self.device, dtype=self.dtype)"),
    Patch(f"{S3GEN}/transformer/embedding.py", 221, 221, "self.register_buffer('pe', None, persistent=False)"),
    Patch(f"{S3GEN}/utils/mask.py", 161, 163, "chunk_masks = chunk_masks | ~chunk_masks.any(dim=-1, keepdim=True)"),
    Patch(f"{T3}/modules/cond_enc.py", 28, 28, "is_fp = v.is_floating_point()"),
    Patch(f"{T3}/modules/learned_pos_emb.py", 29, 29, "idx = idx.to(device) if torch.is_tensor(idx) else torch.full((), idx, device=device)"),
    Patch(f"{T3}/t3.py", 36, 37, "torch._assert_async((text_tokens == hp.start_text_token).sum() >= B)\n"
          "torch._assert_async((text_tokens == hp.stop_text_token).sum() >= B)"),
    Patch(f"{T3}/t3.py", 319, 319, "bos_token = torch.full((1, 1), self.hp.start_speech_token, dtype=torch.long, device=device)"),
    Patch(f"{T3}/t3.py", 357, 357, "cfg = torch.full((), cfg_weight, device=cond.device, dtype=cond.dtype)"),
]  # fmt: skip
