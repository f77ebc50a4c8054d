"""Functions patterned after places in published packages; each names where."""

import torch
import torch.nn.functional as F
from torch import nn


# boson-multimodal 0.1.1, model/higgs_audio/modeling_higgs_audio.py: HiggsAudioModel.forward
def decoding_audio_token(hidden, audio_mask):
    is_decoding_audio_token = audio_mask[:, -1:].reshape((-1, 1)).contiguous().item()  # finds: host_read
    return hidden * 2 if is_decoding_audio_token else hidden


# boson-multimodal 0.1.1, modeling_higgs_audio.py: _sample_audio_tokens, the delay pattern
def delayed_ends(next_audio_tokens):
    all_eos_indices = (next_audio_tokens == 25).nonzero()  # finds: dynamic_shape
    return all_eos_indices.sum()


# boson-multimodal 0.1.1, modeling_higgs_audio.py: _sample_audio_tokens, repetition-aware sampling
def resampled_rows(tokens, logits, window):
    rep_num = (window == tokens.unsqueeze(1)).sum(dim=1)
    row_indices = torch.nonzero(rep_num >= 2).squeeze(1)  # finds: dynamic_shape
    resampled = logits[row_indices].argmax(dim=-1)
    return tokens.index_copy(0, row_indices, resampled)


# boson-multimodal 0.1.1, modeling_higgs_audio.py: generate, which asks for the mode
def generation_mode(input_ids, hidden):
    if input_ids[0][-1] == 5:  # finds: host_read
        return hidden * 0
    elif input_ids[0][-1] == 6:  # finds: host_read
        return hidden * 2
    return hidden


# boson-multimodal 0.1.1, model/higgs_audio/utils.py: merge_input_ids_with_audio_features
def merged_length(placeholders, embeds):
    max_token_num = placeholders.sum(-1).max()
    return torch.zeros((1, max_token_num, 8), device=embeds.device)  # finds: host_read


# boson-multimodal 0.1.1, utils.py: merge_input_ids_with_audio_features, text positions
def overwritten_text(final, embeds, text_mask):
    rows, columns = torch.where(text_mask)  # finds: dynamic_shape
    final[rows, columns] = embeds[rows, columns]
    return final


# boson-multimodal 0.1.1, utils.py: merge_input_ids_with_audio_features, the features' mask
def feature_mask(lengths):
    return torch.arange(4).expand(2, 4).to(lengths.device) < lengths.unsqueeze(1)  # finds: cpu_tensor


# transformers 4.46, generation/utils.py: _update_model_kwargs_for_generation
class GrowingAttentionMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.model_kwargs = {}

    def forward(self, scores):
        mask = self.model_kwargs.get("attention_mask", scores.new_ones(1, 4))
        self.model_kwargs["attention_mask"] = torch.cat([mask, mask.new_ones((mask.shape[0], 1))], dim=-1)  # finds: python_state
        return scores * mask.sum()


# transformers 4.46, models/whisper/modeling_whisper.py: _compute_mask_indices asks for each row's length
def lengths_of_rows(attention_mask, x):
    input_lengths = attention_mask.detach().sum(-1).tolist()  # finds: host_read
    return x / len(input_lengths)


# s3tokenizer 0.3.0, utils.py: log_mel_spectrogram
def magnitudes(audio):
    window = torch.hann_window(16).to(audio.device)  # finds: cpu_tensor
    return torch.stft(audio, 16, 4, window=window, return_complex=True)[..., :-1].abs() ** 2


# silero-vad 6.2.3, utils_vad.py: get_speech_timestamps reads each window's probability
def speech_probabilities(windows, weight):
    probabilities = []
    for window in windows:
        speech = torch.sigmoid(window @ weight).item()  # finds: host_read
        probabilities.append(speech)
    return probabilities


# diffusers 0.29, models/embeddings.py: get_timestep_embedding
def get_timestep_embedding(timesteps):
    exponent = -9.2 * torch.arange(start=0, end=8, dtype=torch.float32, device=timesteps.device) / 8
    emb = timesteps[:, None].float() * torch.exp(exponent)[None, :]
    return torch.cat([torch.sin(emb), torch.cos(emb)], dim=-1)


# transformers 4.46, models/llama/modeling_llama.py: LlamaRMSNorm
class LlamaRMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(input_dtype)


# chatterbox-tts 0.1.7, models/s3gen/matcha/decoder.py: SinusoidalPosEmb and Block1D
def block_of_decoder(x, mask, weight):
    return F.mish(F.group_norm(F.conv1d(x * mask, weight, padding=1), 2)) * mask


# transformers 4.46, generation/utils.py: _update_model_kwargs_for_generation
def next_step_arguments(hidden, attention_mask):
    logits = hidden * attention_mask.sum()
    model_kwargs = {"attention_mask": attention_mask}
    model_kwargs["attention_mask"] = torch.cat(  # finds: python_state
        [attention_mask, attention_mask.new_ones((attention_mask.shape[0], 1))], dim=-1
    )
    return logits, model_kwargs


CASES = {
    "next_step_arguments": lambda device: (torch.randn(1, 8, device=device), torch.ones(1, 5, dtype=torch.long, device=device)),
    "decoding_audio_token": lambda device: (torch.randn(1, 4, device=device), torch.ones(1, 4, dtype=torch.bool, device=device)),
    "delayed_ends": lambda device: (torch.tensor([25, 3, 25], device=device),),
    "resampled_rows": lambda device: (torch.ones(4, dtype=torch.long, device=device), torch.randn(4, 16, device=device), torch.ones(4, 7, device=device)),
    "generation_mode": lambda device: (torch.ones(1, 4, dtype=torch.long, device=device), torch.randn(1, 4, device=device)),
    "merged_length": lambda device: (torch.ones(1, 4, dtype=torch.long, device=device), torch.randn(1, 4, 8, device=device)),
    "overwritten_text": lambda device: (
        torch.zeros(1, 4, 8, device=device), torch.randn(1, 4, 8, device=device), torch.ones(1, 4, dtype=torch.bool, device=device)
    ),
    "feature_mask": lambda device: (torch.tensor([3, 4], device=device),),
    "GrowingAttentionMask": lambda device: ((), (torch.randn(1, 4, device=device),)),
    "lengths_of_rows": lambda device: (torch.ones(2, 4, dtype=torch.long, device=device), torch.randn(2, 4, device=device)),
    "magnitudes": lambda device: (torch.rand(1, 64, device=device),),
    "speech_probabilities": lambda device: (torch.randn(2, 8, device=device), torch.randn(8, device=device)),
    "get_timestep_embedding": lambda device: (torch.arange(3, device=device),),
    "LlamaRMSNorm": lambda device: ((8,), (torch.randn(1, 4, 8, device=device),)),
    "block_of_decoder": lambda device: (torch.randn(1, 4, 8, device=device), torch.ones(1, 1, 8, device=device), torch.randn(4, 4, 3, device=device)),
}
