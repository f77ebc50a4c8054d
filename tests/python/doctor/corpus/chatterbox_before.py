"""Places of chatterbox-tts that people published patches for, as they were. Each names its file; where no version is named, 0.1.1 and
0.1.7 have the line. What is named "of forks" was published for the file, and is in neither release."""

import math

import torch
import torch.nn.functional as F
from torch import nn

STOP_SPEECH_TOKEN, VOCAB_SIZE = 6562, 6561
SOS, EOS = 6561, 6562

# models/s3gen/utils/mask.py: make_pad_mask
def make_pad_mask(lengths, max_len=0):
    batch_size = lengths.size(0)
    max_len = max_len if max_len > 0 else lengths.max().item()  # finds: host_read
    seq_range = torch.arange(0, max_len, dtype=torch.int64, device=lengths.device)
    seq_range_expand = seq_range.unsqueeze(0).expand(batch_size, max_len)
    return seq_range_expand >= lengths.unsqueeze(-1)


# models/s3gen/flow.py (0.1.1): CausalMaskedDiffWithXvec.inference
def flow_masks(token, token_len, prompt_feat, h):
    mask = (~make_pad_mask(token_len)).unsqueeze(-1).to(h)
    token = token.unsqueeze(-1) * mask
    mel_len1, mel_len2 = prompt_feat.shape[1], h.shape[1] - prompt_feat.shape[1]
    mask = (~make_pad_mask(torch.tensor([mel_len1 + mel_len2]))).to(h)  # finds: cpu_tensor
    return token, h * mask.unsqueeze(-1)


# models/s3gen/flow.py (0.1.7): CausalMaskedDiffWithXvec.inference
def out_of_range_tokens(token):
    if (token >= VOCAB_SIZE).any():  # finds: host_read
        token = token.clamp(max=VOCAB_SIZE - 1)
    return token.long()


# models/s3gen/flow.py (0.1.1): MaskedDiffWithXvec.inference
def mel_length(token_len2, h):
    mel_len2 = int(token_len2 / 25 * 22050 / 256)  # finds: host_read
    return F.interpolate(h.transpose(1, 2), size=mel_len2)


# models/s3gen/flow_matching.py (0.1.1): CausalConditionalCFM, its noise made in __init__
class CausalNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.rand_noise = torch.randn([1, 80, 50 * 300])  # finds: cpu_tensor

    def forward(self, mu, temperature):
        z = self.rand_noise[:, :, : mu.size(2)].to(mu.device).to(mu.dtype) * temperature  # finds: host_copy baked_constant
        return z + mu


# models/s3gen/flow_matching.py, of forks: solve_euler with `t.item()` in its loop; 0.1.1 keeps the time a tensor, 0.1.7 has another loop
def euler_reading_time(x, t_span):
    t, dt = t_span[0], t_span[1] - t_span[0]
    for step in range(1, len(t_span)):
        x = x + dt * torch.sin(x * t.item())  # finds: host_read
        t = t + dt
        if step < len(t_span) - 1:
            dt = t_span[step + 1] - t
    return x


# models/s3gen, of forks: lengths used as numbers without `.item()`
def cut_to_length(x, lengths):
    t = lengths.max()
    ticks = torch.arange(0, t, device=x.device)  # finds: host_read
    x = x[:, :t]  # finds: host_read
    return x + ticks


# models/s3gen, of forks: `count.item() > 0` became `count > 0`
def steps_of_tensor(x, count):
    if count > 0:  # finds: host_read
        for _ in range(count):  # finds: host_read
            x = x * 0.5
    return x


# models/s3gen/utils/mask.py: add_optional_chunk_mask
def checked_chunk_masks(chunk_masks):
    if (chunk_masks.sum(dim=-1) == 0).sum().item() != 0:  # finds: host_read
        chunk_masks[chunk_masks.sum(dim=-1) == 0] = True
    return chunk_masks


# models/s3gen/transformer/embedding.py: PositionalEncoding
class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len):
        super().__init__()
        self.xscale = math.sqrt(d_model)
        self.pe = torch.zeros(max_len, d_model)  # finds: cpu_tensor
        position = torch.arange(0, max_len, dtype=torch.float32).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float32) * -(math.log(10000.0) / d_model))
        self.pe[:, 0::2] = torch.sin(position * div_term)
        self.pe[:, 1::2] = torch.cos(position * div_term)
        self.pe = self.pe.unsqueeze(0)

    def forward(self, x):
        self.pe = self.pe.to(x.device)  # finds: cpu_tensor
        return x * self.xscale + self.pe[:, : x.size(1)]


# models/s3gen/transformer/embedding.py: position_encoding, batched offsets
def batched_positions(offset, table):
    index = offset.unsqueeze(1) + torch.arange(0, 4).to(offset.device)  # finds: cpu_tensor
    return F.embedding(index * (index > 0), table)


# models/s3gen/s3gen.py (0.1.1): S3Token2Mel.forward
def token_lengths(speech_tokens):
    speech_token_lens = torch.LongTensor([speech_tokens.size(1)]).to(speech_tokens.device)  # finds: cpu_tensor
    return speech_tokens * speech_token_lens


# models/s3gen/hifigan.py: HiFTGenerator._stft
class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stft_window = torch.hann_window(16)  # finds: cpu_tensor

    def forward(self, x):
        spec = torch.stft(x, 16, 4, 16, window=self.stft_window.to(x.device), return_complex=True)  # finds: host_copy
        return torch.view_as_real(spec)


# models/t3/t3.py: _ensure_BOT_EOT
def ensure_start_and_stop(text_tokens):
    B = text_tokens.size(0)
    assert (text_tokens == 255).int().sum() >= B, "missing start_text_token"  # finds: host_read
    assert (text_tokens == 0).int().sum() >= B, "missing stop_text_token"  # finds: host_read
    return text_tokens


# models/t3/modules/learned_pos_emb.py: get_fixed_embedding, from the loop of t3.py
class LearnedPositionEmbeddings(nn.Module):
    def __init__(self, seq_len, dim):
        super().__init__()
        self.emb = nn.Embedding(seq_len, dim)

    def get_fixed_embedding(self, idx):
        device = self.emb.weight.device
        idx = idx.to(device) if torch.is_tensor(idx) else torch.tensor(idx, device=device)  # finds: host_copy
        return self.emb(torch.atleast_2d(idx))

    def forward(self, x):
        for i in range(2):
            x = x + self.get_fixed_embedding(i + 1)
        return x


# models/t3/t3.py: T3.inference, its loop
def sampling_loop(logits, speech_emb):
    generated_ids = torch.tensor([[6561]], dtype=torch.long, device=logits.device)  # finds: host_copy
    predicted = []
    for _ in range(3):
        next_token = torch.argmax(logits, dim=-1, keepdim=True)
        predicted.append(next_token)
        generated_ids = torch.cat([generated_ids, next_token], dim=1)
        if next_token.view(-1) == STOP_SPEECH_TOKEN:  # finds: host_read
            break
        logits = logits + speech_emb[next_token[:, 0]]
    return torch.cat(predicted, dim=1)


# models/t3/modules/cond_enc.py: T3Cond.to
def cast_condition(v, dtype):
    is_fp = type(v.view(-1)[0].item()) is not int  # finds: host_read
    return v.to(dtype=dtype if is_fp else None)


# models/s3tokenizer/__init__.py: drop_invalid_tokens, called by tts.py
def drop_invalid_tokens(x):
    if SOS in x:  # finds: host_read
        s = (x == SOS).nonzero(as_tuple=True)[0].squeeze(0) + 1  # finds: dynamic_shape
    else:
        s = 0
    if EOS in x:  # finds: host_read
        e = (x == EOS).nonzero(as_tuple=True)[0].squeeze(0)  # finds: dynamic_shape
    else:
        e = None
    x = x[s:e]  # finds: host_read
    return x


# tts.py: ChatterboxTTS.generate asks whether the exaggeration is another one
def emotion(exaggeration, emotion_adv):
    if exaggeration != emotion_adv[0, 0, 0]:  # finds: host_read baked_constant
        emotion_adv = (exaggeration * torch.ones(1, 1, 1)).to(device=emotion_adv.device)  # finds: cpu_tensor baked_constant
    return emotion_adv


# tts.py: ChatterboxTTS.generate, the sound goes to the host for the watermark
def watermarked(wav):
    wav = wav.squeeze(0).detach().cpu().numpy()  # finds: host_read
    watermarked_wav = wav * 0.5
    return torch.from_numpy(watermarked_wav).unsqueeze(0)


# tts.py (0.1.7): ChatterboxTTS.generate
def speech_only(speech_tokens):
    speech_tokens = speech_tokens[speech_tokens < 6561]  # finds: dynamic_shape
    return speech_tokens.to(speech_tokens.device)


CASES = {
    "make_pad_mask": lambda device: (torch.tensor([3, 4], device=device),),
    "flow_masks": lambda device: (
        torch.ones(1, 4, device=device), torch.tensor([4], device=device), torch.zeros(1, 2, 8, device=device), torch.zeros(1, 6, 8, device=device)
    ),
    "out_of_range_tokens": lambda device: (torch.ones(1, 4, dtype=torch.int32, device=device),),
    "mel_length": lambda device: (torch.tensor(25, device=device), torch.randn(1, 4, 8, device=device)),
    "CausalNoise": lambda device: ((), (torch.randn(1, 80, 12, device=device), 0.8)),
    "euler_reading_time": lambda device: (torch.randn(1, 4, device=device), torch.linspace(0, 1, 4, device=device)),
    "cut_to_length": lambda device: (torch.randn(2, 4, device=device), torch.tensor([4, 3], device=device)),
    "steps_of_tensor": lambda device: (torch.randn(2, 4, device=device), torch.tensor(2, device=device)),
    "checked_chunk_masks": lambda device: (torch.ones(1, 4, 4, dtype=torch.bool, device=device),),
    "PositionalEncoding": lambda device: ((8, 32), (torch.randn(1, 4, 8, device=device),)),
    "batched_positions": lambda device: (torch.tensor([0, 2], device=device), torch.randn(16, 8, device=device)),
    "token_lengths": lambda device: (torch.ones(1, 4, dtype=torch.long, device=device),),
    "Vocoder": lambda device: ((), (torch.randn(1, 64, device=device),)),
    "ensure_start_and_stop": lambda device: (torch.tensor([[255, 4, 0]], device=device),),
    "LearnedPositionEmbeddings": lambda device: ((16, 8), (torch.randn(1, 1, 8, device=device),)),
    "sampling_loop": lambda device: (torch.randn(1, 16, device=device), torch.randn(16, 16, device=device)),
    "cast_condition": lambda device: (torch.randn(1, 8, device=device), torch.float16),
    "drop_invalid_tokens": lambda device: (torch.tensor([6561, 4, 6562], device=device),),
    "emotion": lambda device: (0.7, torch.full((1, 1, 1), 0.5, device=device)),
    "watermarked": lambda device: (torch.randn(1, 64, device=device),),
    "speech_only": lambda device: (torch.tensor([4, 5, 6562], device=device),),
}
