"""Fifteen steps in the manner of published models, by somebody who expected first and ran the doctor afterwards."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class EulerScheduler:
    def __init__(self, steps, device):
        self.timesteps = torch.linspace(999, 0, steps, device=device)
        self.sigmas = torch.linspace(14.6, 0.0, steps + 1, device=device)

    def index_for(self, timestep):
        return (self.timesteps == timestep).nonzero()[0].item()  # finds: dynamic_shape host_read

    def step(self, prediction, timestep, sample):
        index = self.index_for(timestep)
        return sample + prediction * (self.sigmas[index + 1] - self.sigmas[index])


class EulerPipeline(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.unet = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, latents):
        scheduler = EulerScheduler(3, latents.device)
        for timestep in scheduler.timesteps:
            prediction = self.unet(latents) * torch.sigmoid(timestep)
            latents = scheduler.step(prediction, timestep, latents)
        return latents


class GuidedUnet(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.unet = nn.Conv1d(channels, channels, 3, padding=1)

    def forward(self, x, mask, guidance_scale=7.5):
        both = torch.cat([x, torch.zeros_like(x)])
        conditional, unconditional = self.unet(both).chunk(2)
        if guidance_scale > 1.0:
            x = unconditional + guidance_scale * (conditional - unconditional)  # finds: baked_constant
        else:
            x = conditional
        return x * mask


class DDIM(nn.Module):
    def __init__(self, channels, steps):
        super().__init__()
        self.steps = steps
        self.unet = nn.Conv2d(channels, channels, 3, padding=1)
        betas = torch.linspace(1e-4, 0.02, 1000)
        self.register_buffer("alphas", torch.cumprod(1 - betas, 0))

    def forward(self, x, guidance):
        stride = self.alphas.shape[0] // self.steps
        for step in reversed(range(self.steps)):
            now = self.alphas[step * stride]
            before = self.alphas[(step - 1) * stride] if step > 0 else torch.ones_like(now)
            noise = self.unet(x) * guidance
            clean = (x - (1 - now).sqrt() * noise) / now.sqrt()
            x = before.sqrt() * clean + (1 - before).sqrt() * noise
        return x


class FlowMatching(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.estimator = nn.Linear(dim, dim)

    def solve(self, x, span):
        t, dt = span[0], span[1] - span[0]
        for step in range(1, len(span)):
            x = x + dt * self.estimator(x + t)
            t = t + dt
            if step < len(span) - 1:
                dt = span[step + 1] - t
        return x

    def forward(self, mu, steps=4):
        z = torch.randn_like(mu)
        span = torch.linspace(0, 1, steps + 1, dtype=mu.dtype)  # finds: cpu_tensor
        span = 1 - torch.cos(span * 0.5 * torch.pi)
        return self.solve(z, span)


class CountingDecoder(nn.Module):
    def __init__(self, dim, length):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.register_buffer("keys", torch.zeros(1, length, dim))
        self.register_buffer("values", torch.zeros(1, length, dim))
        self.position = 0

    def forward(self, x):
        q, k, v = self.qkv(x).split(x.shape[-1], dim=-1)
        self.keys[:, self.position : self.position + 1] = k
        self.values[:, self.position : self.position + 1] = v
        self.position += 1  # finds: python_state
        seen = self.position
        return F.scaled_dot_product_attention(q, self.keys[:, :seen], self.values[:, :seen])


class StaticCache:
    def __init__(self, heads, length, width, device):
        self.keys = torch.zeros(1, heads, length, width, device=device)
        self.values = torch.zeros(1, heads, length, width, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)

    def update(self, k, v):
        self.keys.index_copy_(2, self.position, k)
        self.values.index_copy_(2, self.position, v)
        mask = torch.arange(self.keys.shape[2], device=k.device) <= self.position
        self.position.add_(1)
        return self.keys, self.values, mask


def decode_with_static_cache(token, embedding, projection, cache):
    x = F.embedding(token, embedding)
    q, k, v = (x @ projection).view(1, 1, 3, 2, -1).permute(2, 0, 3, 1, 4)
    keys, values, mask = cache.update(k, v)
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[None, None, None])
    return (y.transpose(1, 2).reshape(1, 1, -1) @ embedding.T).argmax(-1)


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim), persistent=False)
        self.cos = self.sin = None
        self.length = 0

    def _fill(self, length):
        self.length = length
        angles = torch.outer(torch.arange(length, device=self.frequencies.device).float(), self.frequencies)
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x, positions):
        if x.shape[1] > self.length:
            self._fill(max(x.shape[1], 32))
        cos, sin = self.cos[positions], self.sin[positions]
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin


class ResBlock(nn.Module):
    def __init__(self, channels, dilations):
        super().__init__()
        made = [nn.Conv1d(channels, channels, 3, dilation=one, padding=one) for one in dilations]
        self.convs = nn.ModuleList(nn.utils.parametrizations.weight_norm(conv) for conv in made)

    def forward(self, x):
        for conv in self.convs:
            x = x + conv(F.leaky_relu(x, 0.1))
        return x


class HifiGan(nn.Module):
    def __init__(self, mels, rates):
        super().__init__()
        self.pre = nn.Conv1d(mels, 32, 7, padding=3)
        self.ups = nn.ModuleList(nn.ConvTranspose1d(32 >> i, 16 >> i, 2 * r, r, padding=r // 2) for i, r in enumerate(rates))
        self.blocks = nn.ModuleList(ResBlock(16 >> i, (1, 3)) for i, _ in enumerate(rates))
        self.post = nn.Conv1d(32 >> len(rates), 1, 7, padding=3)

    def forward(self, mel):
        x = self.pre(mel)
        for up, block in zip(self.ups, self.blocks):
            x = block(up(F.leaky_relu(x, 0.1))) / len(self.blocks)
        return torch.tanh(self.post(F.leaky_relu(x)))


class StreamingVocoder(nn.Module):
    def __init__(self, mels, overlap):
        super().__init__()
        self.up = nn.ConvTranspose1d(mels, 1, 8, 4, padding=2)
        self.register_buffer("fade", torch.linspace(0, 1, overlap))
        self.overlap = overlap
        self.tail = None

    def forward(self, mel):
        audio = torch.tanh(self.up(mel))
        if self.tail is not None:
            mixed = audio[..., : self.overlap] * self.fade + self.tail * (1 - self.fade)
            audio = torch.cat([mixed, audio[..., self.overlap :]], dim=-1)
        self.tail = audio[..., -self.overlap :]  # finds: python_state
        return audio[..., : -self.overlap]


def regulate_lengths(hidden, log_durations, pace):
    durations = torch.clamp(torch.round((torch.exp(log_durations) - 1) * pace), min=0).long()
    frames = [torch.repeat_interleave(one, counts, dim=0) for one, counts in zip(hidden, durations)]  # finds: dynamic_shape
    return nn.utils.rnn.pad_sequence(frames, batch_first=True)


class VisionTransformer(nn.Module):
    def __init__(self, dim, grid):
        super().__init__()
        self.grid = grid
        self.patches = nn.Conv2d(3, dim, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, grid * grid + 1, dim) * 0.02)
        self.block = nn.TransformerEncoderLayer(dim, 2, 2 * dim, batch_first=True, norm_first=True)
        self.head = nn.Linear(dim, 10)

    def resampled(self, height, width):
        if height == self.grid and width == self.grid:
            return self.positions
        square = self.positions[:, 1:].reshape(1, self.grid, self.grid, -1).permute(0, 3, 1, 2)
        square = F.interpolate(square, size=(height, width), mode="bicubic", align_corners=False)
        return torch.cat([self.positions[:, :1], square.flatten(2).transpose(1, 2)], dim=1)

    def forward(self, images):
        x = self.patches(images)
        height, width = x.shape[-2:]
        x = torch.cat([self.cls.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], dim=1)
        return self.head(self.block(x + self.resampled(height, width))[:, 0])


class PackedVision(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.block = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, tokens, counts):
        padding = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        for row, count in enumerate(counts):
            padding[row, count:] = True  # finds: host_read
        y, _ = self.block(tokens, tokens, tokens, key_padding_mask=padding, need_weights=False)
        return y.masked_fill(padding[..., None], 0.0)


def nucleus(logits, temperature, top_p, history, penalty):
    seen = logits.gather(1, history)
    logits = logits.scatter(1, history, torch.where(seen < 0, seen * penalty, seen / penalty))
    ordered, order = torch.sort(logits / temperature, descending=True, dim=-1)
    probabilities = ordered.softmax(-1)
    ordered[probabilities.cumsum(-1) - probabilities > top_p] = -math.inf
    noise = torch.empty_like(ordered).exponential_(1.0)
    return order.gather(1, (ordered.softmax(-1) / noise).argmax(-1, keepdim=True))


def generate(logits, embedding, eos):
    tokens = []
    for _ in range(4):
        kept = torch.topk(logits, 5).values[..., -1:]
        logits = logits.masked_fill(logits < kept, -math.inf)
        token = torch.multinomial(logits.softmax(-1), 1)
        tokens.append(token)
        if token.item() == eos:  # finds: host_read
            break
        logits = embedding[token[:, 0]]
    return torch.cat(tokens, dim=1)


class Codebook(nn.Module):
    def __init__(self, codes, dim, levels):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(codes, dim) for _ in range(levels))

    def forward(self, x):
        residual, chosen, total = x, [], torch.zeros_like(x)
        for table in self.tables:
            index = torch.cdist(residual, table.weight[None]).argmin(-1)
            found = table(index)
            residual, total = residual - found, total + found
            chosen.append(index)
        return total, torch.stack(chosen, -1), F.mse_loss(total, x)



CASES = {
    "EulerPipeline": lambda device: ((4,), (torch.randn(1, 4, 8, 8, device=device),)),
    "GuidedUnet": lambda device: ((4,), (torch.randn(1, 4, 8, device=device), torch.ones(1, 1, 8, device=device), 3.0)),
    "DDIM": lambda device: ((4, 5), (torch.randn(1, 4, 8, 8, device=device), torch.full((), 2.0, device=device))),
    "FlowMatching": lambda device: ((8,), (torch.randn(1, 6, 8, device=device),)),
    "CountingDecoder": lambda device: ((8, 16), (torch.randn(1, 1, 8, device=device),)),
    "decode_with_static_cache": lambda device: (
        torch.tensor([[3]], device=device),
        torch.randn(16, 8, device=device),
        torch.randn(8, 24, device=device),
        StaticCache(2, 256, 4, device),
    ),
    "Rotary": lambda device: ((8,), (torch.randn(1, 4, 8, device=device), torch.arange(4, device=device))),
    "HifiGan": lambda device: ((8, (4, 2)), (torch.randn(1, 8, 12, device=device),)),
    "StreamingVocoder": lambda device: ((8, 4), (torch.randn(1, 8, 6, device=device),)),
    "regulate_lengths": lambda device: (torch.randn(2, 3, 8, device=device), torch.full((2, 3), 1.2, device=device), torch.full((), 1.0, device=device)),
    "VisionTransformer": lambda device: ((8, 4), (torch.randn(2, 3, 24, 16, device=device),)),
    "PackedVision": lambda device: ((8,), (torch.randn(2, 5, 8, device=device), torch.tensor([3, 5], device=device))),
    "nucleus": lambda device: (
        torch.randn(2, 16, device=device),
        torch.full((), 0.8, device=device),
        torch.full((), 0.9, device=device),
        torch.tensor([[1, 2], [3, 4]], device=device),
        torch.full((), 1.2, device=device),
    ),
    "generate": lambda device: (torch.randn(1, 16, device=device), torch.randn(16, 16, device=device), 3),
    "Codebook": lambda device: ((16, 8, 3), (torch.randn(1, 6, 8, device=device),)),
}
