"""Patches of the places in chatterbox_before.py, as people published them: those that still read the host, and those that do not."""

import math

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

STOP_SPEECH_TOKEN, VOCAB_SIZE = 6562, 6561
SOS, EOS = 6561, 6562

# make_pad_mask: the tensor is made on the device, which copies it there, and its maximum is still read
def pad_mask_on_device(h):
    lengths = torch.tensor([h.shape[1]], device=h.device)  # finds: host_copy
    max_len = int(lengths.max())  # finds: host_read
    ticks = torch.arange(0, max_len, device=h.device)
    return ticks.unsqueeze(0) >= lengths.unsqueeze(-1)


# make_pad_mask: the length is known from the shape
def pad_mask_of_shape(h, lengths):
    ticks = torch.arange(h.shape[1], device=h.device)
    return ticks.unsqueeze(0) >= lengths.unsqueeze(-1)


# the loop's .item() became float(): the same read
def euler_with_float(x, t_span):
    for step in range(1, len(t_span)):
        t = float(t_span[step - 1])  # finds: host_read
        x = x + (t_span[step] - t_span[step - 1]) * torch.sin(x * t)
    return x


# the loop's time stays a tensor
def euler_on_device(x, t_span):
    for t, r in zip(t_span[:-1], t_span[1:]):
        x = x + (r - t) * torch.sin(x * t)
    return x


# `.item() > 0` became `> 0`: bool() reads it
def count_compared(x, mask):
    count = mask.sum()
    if count > 0:  # finds: host_read
        return x / count
    return x


# the branch became arithmetic
def count_clamped(x, mask):
    return x / mask.sum().clamp(min=1)


# `x[:, :t.item()]` became `x[:, :t]`: the slice reads it
def cut_by_tensor(x, t):
    return x[:, :t] * 2  # finds: host_read


# the slice became a mask
def cut_by_mask(x, t):
    return x * (torch.arange(x.shape[1], device=x.device) < t)


# `range(t.item())` became `range(int(t))`
def range_of_int(x, t):
    for _ in range(int(t)):  # finds: host_read
        x = x * 0.5
    return x


# the noise moves once and stays: the first call copies, and a graph captured before it has the other address
class NoiseKept(nn.Module):
    def __init__(self):
        super().__init__()
        self.rand_noise = torch.randn([1, 80, 64])  # finds: cpu_tensor

    def forward(self, mu):
        if self.rand_noise.device != mu.device:
            self.rand_noise = self.rand_noise.to(mu.device)  # finds: cpu_tensor
        return self.rand_noise[:, :, : mu.size(2)] + mu


# the noise is a buffer, which moves with the module
class NoiseBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rand_noise", torch.randn([1, 80, 64]), persistent=False)

    def forward(self, mu):
        return self.rand_noise[:, :, : mu.size(2)] + mu


# the positions are a buffer
class PositionalBuffer(nn.Module):
    def __init__(self, d_model, max_len):
        super().__init__()
        self.xscale = math.sqrt(d_model)
        position = torch.arange(0, max_len, dtype=torch.float32).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float32) * -(math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0), persistent=False)

    def forward(self, x):
        return x * self.xscale + self.pe[:, : x.size(1)]


# get_fixed_embedding: a slice of the table needs no index tensor
class SlicedPositions(nn.Module):
    def __init__(self, seq_len, dim):
        super().__init__()
        self.emb = nn.Embedding(seq_len, dim)

    def forward(self, x):
        for i in range(2):
            x = x + self.emb.weight[i + 1 : i + 2]
        return x


# the loop stops on a flag that stays on the device, and always runs to its bound
def sampling_to_bound(logits, speech_emb):
    stopped = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    predicted = []
    for _ in range(3):
        next_token = torch.where(stopped, torch.full_like(stopped, 1, dtype=torch.long), logits.argmax(dim=-1))
        stopped = stopped | (next_token == STOP_SPEECH_TOKEN)
        predicted.append(next_token)
        logits = logits + speech_emb[next_token]
    return torch.stack(predicted, dim=1)


# the loop asks each eighth token: fewer reads, and still one
def sampling_in_chunks(logits, speech_emb):
    for step in range(8):
        next_token = logits.argmax(dim=-1)
        if step % 8 == 7 and (next_token == STOP_SPEECH_TOKEN).any():  # finds: host_read
            break
        logits = logits + speech_emb[next_token]
    return logits


# out of range tokens: clamped, not asked
def tokens_clamped(token):
    return token.clamp(max=VOCAB_SIZE - 1).long()


# a cache made around its constructor, and read by a name of other versions
def cache_of_parts(keys, values):
    cache = object.__new__(DynamicCache)  # finds: duck_typed_cache
    cache._key_cache, cache._value_cache = [keys], [values]  # finds: duck_typed_cache
    k = cache._key_cache[0]  # finds: duck_typed_cache
    return (keys @ k.transpose(-1, -2)).softmax(dim=-1) @ values


# the setting makes Dynamo silent; the read is still there
def scalars_made_silent(x, lengths):
    torch._dynamo.config.capture_scalar_outputs = True  # finds: hidden_setting
    max_len = lengths.max().item()  # finds: host_read
    return x[:, :max_len]


# the mask is made for the longest prompt, once, and indexed by a tensor
class MaskTable(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.register_buffer("masks", torch.ones(length, length, dtype=torch.bool).tril(), persistent=False)

    def forward(self, scores, position):
        return scores.masked_fill(~self.masks.index_select(0, position), float("-inf"))


# flow.py: the length follows from a shape, and the number of frames for each token
def mel_length_of_shape(token, h):
    mel_len2 = int(token.shape[1] / 25 * 22050 / 256)
    return F.interpolate(h.transpose(1, 2), size=mel_len2)


# embedding.py: the positions are made on the device
def positions_on_device(offset, table):
    index = offset.unsqueeze(1) + torch.arange(0, 4, device=offset.device)
    return F.embedding(index * (index > 0), table)


# drop_invalid_tokens: the loop remembers where the tokens begin and end, but slices by what it reads
def dropped_by_flags(x):
    ends = (x == EOS).int().argmax()
    return x[1:ends]  # finds: host_read


# drop_invalid_tokens: what is outside becomes silence
def silenced(x):
    inside = ((x == SOS).cumsum(0) > 0) & ((x == EOS).cumsum(0) == 0) & (x != SOS)
    return torch.where(inside, x, torch.zeros_like(x))


# tts.py: tokens that are no speech, by torch.masked_select: the same count
def speech_selected(speech_tokens):
    return torch.masked_select(speech_tokens, speech_tokens < 6561)  # finds: dynamic_shape


# tts.py: they keep their places
def speech_or_silence(speech_tokens):
    return torch.where(speech_tokens < 6561, speech_tokens, torch.zeros_like(speech_tokens))


# tts.py: the exaggeration is written, whatever it was
def emotion_written(exaggeration, emotion_adv):
    return emotion_adv.copy_(exaggeration.expand(1, 1, 1))


# tts.py: the sound goes into pinned memory, and is watermarked after the step
def sound_to_host(wav, host):
    host.copy_(wav.squeeze(0), non_blocking=True)
    return wav


# s3gen.py: the lengths are filled on the device
def token_lengths_filled(speech_tokens):
    return speech_tokens * torch.full((1,), speech_tokens.size(1), dtype=torch.long, device=speech_tokens.device)


# hifigan.py: the window is a buffer
class VocoderBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("stft_window", torch.hann_window(16), persistent=False)

    def forward(self, x):
        return torch.view_as_real(torch.stft(x, 16, 4, 16, window=self.stft_window, return_complex=True))


# t3.py: the device asserts
def ensured_on_device(text_tokens):
    torch._assert_async((text_tokens == 255).sum() >= text_tokens.size(0))
    return text_tokens


# cond_enc.py: the dtype is asked, not a value
def cast_by_dtype(v, dtype):
    return v.to(dtype=dtype if v.is_floating_point() else None)


# mask.py: rows that are masked whole are set on the device, always
def chunk_masks_always(chunk_masks):
    return chunk_masks | ~chunk_masks.any(dim=-1, keepdim=True)


# mask.py: `.item() != 0` became `.any()`: the same read
def chunk_masks_if_any(chunk_masks):
    if (~chunk_masks.any(dim=-1)).any():  # finds: host_read
        return chunk_masks | ~chunk_masks.any(dim=-1, keepdim=True)
    return chunk_masks


CASES = {
    "pad_mask_on_device": lambda device: (torch.zeros(1, 6, 8, device=device),),
    "pad_mask_of_shape": lambda device: (torch.zeros(1, 6, 8, device=device), torch.tensor([4], device=device)),
    "euler_with_float": lambda device: (torch.randn(1, 4, device=device), torch.linspace(0, 1, 4, device=device)),
    "euler_on_device": lambda device: (torch.randn(1, 4, device=device), torch.linspace(0, 1, 4, device=device)),
    "count_compared": lambda device: (torch.randn(4, device=device), torch.ones(4, device=device)),
    "count_clamped": lambda device: (torch.randn(4, device=device), torch.ones(4, device=device)),
    "cut_by_tensor": lambda device: (torch.randn(2, 4, device=device), torch.tensor(2, device=device)),
    "cut_by_mask": lambda device: (torch.randn(2, 4, device=device), torch.tensor(2, device=device)),
    "range_of_int": lambda device: (torch.randn(2, 4, device=device), torch.tensor(2, device=device)),
    "NoiseKept": lambda device: ((), (torch.randn(1, 80, 12, device=device),)),
    "NoiseBuffer": lambda device: ((), (torch.randn(1, 80, 12, device=device),)),
    "PositionalBuffer": lambda device: ((8, 32), (torch.randn(1, 4, 8, device=device),)),
    "SlicedPositions": lambda device: ((16, 8), (torch.randn(1, 1, 8, device=device),)),
    "sampling_to_bound": lambda device: (torch.randn(1, 16, device=device), torch.randn(16, 16, device=device)),
    "sampling_in_chunks": lambda device: (torch.randn(1, 16, device=device), torch.randn(16, 16, device=device)),
    "tokens_clamped": lambda device: (torch.ones(1, 4, dtype=torch.int32, device=device),),
    "cache_of_parts": lambda device: (torch.randn(1, 4, 8, device=device), torch.randn(1, 4, 8, device=device)),
    "scalars_made_silent": lambda device: (torch.randn(2, 4, device=device), torch.tensor([4, 3], device=device)),
    "MaskTable": lambda device: ((16,), (torch.randn(1, 16, device=device), torch.tensor([3], device=device))),
    "mel_length_of_shape": lambda device: (torch.ones(1, 25, dtype=torch.long, device=device), torch.randn(1, 4, 8, device=device)),
    "positions_on_device": lambda device: (torch.tensor([0, 2], device=device), torch.randn(16, 8, device=device)),
    "dropped_by_flags": lambda device: (torch.tensor([6561, 4, 6562], device=device),),
    "silenced": lambda device: (torch.tensor([6561, 4, 6562], device=device),),
    "speech_selected": lambda device: (torch.tensor([4, 5, 6562], device=device),),
    "speech_or_silence": lambda device: (torch.tensor([4, 5, 6562], device=device),),
    "emotion_written": lambda device: (torch.full((), 0.7, device=device), torch.full((1, 1, 1), 0.5, device=device)),
    "sound_to_host": lambda device: (torch.randn(1, 64, device=device), torch.empty(64, pin_memory=True)),
    "token_lengths_filled": lambda device: (torch.ones(1, 4, dtype=torch.long, device=device),),
    "VocoderBuffer": lambda device: ((), (torch.randn(1, 64, device=device),)),
    "ensured_on_device": lambda device: (torch.tensor([[255, 4, 0]], device=device),),
    "cast_by_dtype": lambda device: (torch.randn(1, 8, device=device), torch.float16),
    "chunk_masks_always": lambda device: (torch.ones(1, 4, 4, dtype=torch.bool, device=device),),
    "chunk_masks_if_any": lambda device: (torch.ones(1, 4, 4, dtype=torch.bool, device=device),),
}
