"""Fifteen functions by somebody who had not seen the doctor. The rules were fitted to them after a first run, whose figures docs/doctor.md
gives: what this set now gives shows only that nothing is lost again."""

import math
import time

import torch
import torch.nn.functional as F
from torch import nn


def masked_mean(hidden, mask):
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    total = (hidden * weights).sum(dim=1)
    return total / weights.sum(dim=1).clamp(min=1e-6)


def drop_padding(hidden, mask):
    kept = hidden[mask.bool()]  # finds: dynamic_shape
    return F.layer_norm(kept, kept.shape[-1:])


def timestep_embedding(timesteps, dim=64):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=timesteps.device) / half)
    args = timesteps[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


def greedy_loop(logits, embed, eos):
    finished = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    out = []
    for _ in range(4):
        token = logits.argmax(dim=-1)
        out.append(token)
        finished = finished | (token == eos)
        if finished.all():  # finds: host_read
            break
        logits = logits + embed[token]
    return torch.stack(out, dim=1)


def gumbel_sample(logits, temperature):
    noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_min(1e-9)))
    return (logits / temperature + noise).argmax(dim=-1)  # finds: baked_constant


def penalise_beams(scores, tokens, eos):
    for row, done in enumerate((tokens == eos).tolist()):  # finds: host_read
        if done:
            scores[row] = float("-inf")
    return scores.log_softmax(dim=-1)


def scaled_scores(q, k):
    scale = torch.tensor(math.sqrt(q.shape[-1]))  # finds: cpu_tensor
    return torch.softmax(q @ k.transpose(-1, -2) / scale, dim=-1)


def logged_loss(prediction, target):
    loss = F.mse_loss(prediction, target)
    print(f"loss: {loss:.4f}")  # finds: host_read
    return loss


def timed_projection(x, weight):
    torch.cuda.synchronize()  # finds: sync
    started = time.perf_counter()
    y = x @ weight
    torch.cuda.synchronize()  # finds: sync
    return y, time.perf_counter() - started


class LearnedPositions(nn.Module):
    def __init__(self, length, dim):
        super().__init__()
        self.table = nn.Embedding(length, dim)

    def forward(self, x):
        positions = torch.arange(x.shape[1])  # finds: cpu_tensor
        return x + self.table(positions.to(x.device))  # finds: host_copy


class RunningNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(dim=0), alpha=0.1)
        self.seen.add_(1)
        return x - self.mean


class GrowingAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.register_buffer("keys", torch.empty(1, 0, dim), persistent=False)
        self.register_buffer("values", torch.empty(1, 0, dim), persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        self.keys = torch.cat([self.keys, k], dim=1)  # finds: python_state
        self.values = torch.cat([self.values, v], dim=1)  # finds: python_state
        return F.scaled_dot_product_attention(q, self.keys, self.values)


class StaticAttention(nn.Module):
    def __init__(self, dim, length):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.register_buffer("keys", torch.zeros(1, length, dim), persistent=False)
        self.register_buffer("values", torch.zeros(1, length, dim), persistent=False)

    def forward(self, x, position):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        self.keys.index_copy_(1, position, k)
        self.values.index_copy_(1, position, v)
        seen = torch.arange(self.keys.shape[1], device=x.device) <= position
        return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen[None, None, :])


class NoisyDecoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.noise = torch.randn(1, 128, dim)  # finds: cpu_tensor

    def forward(self, x):
        noise = self.noise[:, : x.shape[1]].to(x.device)  # finds: host_copy
        return self.proj(x + 0.1 * noise)


class Router(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))

    def forward(self, x):
        choice = self.gate(x).argmax(dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(choice == index)[0]  # finds: dynamic_shape
            out.index_add_(0, rows, expert(x.index_select(0, rows)))
        return out


CASES = {
    "masked_mean": lambda device: (torch.randn(2, 5, 8, device=device), torch.ones(2, 5, dtype=torch.long, device=device)),
    "drop_padding": lambda device: (torch.randn(2, 5, 8, device=device), torch.ones(2, 5, dtype=torch.long, device=device)),
    "timestep_embedding": lambda device: (torch.arange(3, device=device),),
    "greedy_loop": lambda device: (torch.randn(2, 16, device=device), torch.randn(16, 16, device=device), 3),
    "gumbel_sample": lambda device: (torch.randn(2, 16, device=device), 0.8),
    "penalise_beams": lambda device: (torch.randn(3, 16, device=device), torch.tensor([1, 2, 3], device=device), 2),
    "scaled_scores": lambda device: (torch.randn(1, 4, 8, device=device), torch.randn(1, 4, 8, device=device)),
    "logged_loss": lambda device: (torch.randn(4, device=device), torch.randn(4, device=device)),
    "timed_projection": lambda device: (torch.randn(4, 8, device=device), torch.randn(8, 8, device=device)),
    "LearnedPositions": lambda device: ((32, 8), (torch.randn(1, 5, 8, device=device),)),
    "RunningNorm": lambda device: ((8,), (torch.randn(4, 8, device=device),)),
    "GrowingAttention": lambda device: ((8,), (torch.randn(1, 1, 8, device=device),)),
    "StaticAttention": lambda device: ((8, 16), (torch.randn(1, 1, 8, device=device), torch.tensor([3], device=device))),
    "NoisyDecoder": lambda device: ((8,), (torch.randn(1, 5, 8, device=device),)),
    "Router": lambda device: ((8, 2), (torch.randn(6, 8, device=device),)),
}
