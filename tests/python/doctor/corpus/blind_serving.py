"""Fifteen steps of serving code by somebody who had only read the list of codes, each patterned after code that is in use: a mixture of
experts, speculative decoding, a beam search, a scheduler of diffusion, a vision tower, samplers, a codec, streaming convolutions and
caches. Four are clean, the last ones. The marks are as they were written before the doctor ran."""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F

BLANK, EOS, IMAGE = 0, 2, 31
BEAMS = 3


class SparseMoe(nn.Module):
    def __init__(self, hidden=16, ffn=32, experts=4, top_k=2):
        super().__init__()
        self.experts_count = experts
        self.top_k = top_k
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, ffn), nn.SiLU(), nn.Linear(ffn, hidden))
            for _ in range(experts))

    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        flat = hidden_states.view(-1, width)
        weights = F.softmax(self.gate(flat), dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(flat.dtype)
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=self.experts_count).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            slot, row = torch.where(mask[index])  # finds: dynamic_shape
            state = flat[None, row].reshape(-1, width)
            state = expert(state) * weights[row, slot, None]
            out.index_add_(0, row, state.to(flat.dtype))
        return out.view(batch, length, width)


class Verifier:
    def __init__(self, device):
        self.rng = torch.Generator(device=device)
        self.rng.manual_seed(11)
        self.accepted_total = 0

    def residual(self, target, draft, at):
        gap = (target[:, at] - draft[:, at]).clamp(min=0)
        return gap / gap.sum(dim=-1, keepdim=True)

    def verify(self, tokens, draft, target):
        length = tokens.shape[1]
        picked = tokens.unsqueeze(-1)
        ratio = target[:, :length].gather(2, picked) / draft.gather(2, picked)
        coin = torch.rand(ratio.shape, generator=self.rng, device=ratio.device)  # finds: rng
        kept = (coin < ratio).squeeze(-1)
        run = kept.long().cumprod(dim=1).sum(dim=1)
        count = min(int(run.min()), length - 1)  # finds: host_read
        self.accepted_total += count  # finds: python_state
        bonus = torch.multinomial(self.residual(target, draft, count), 1)
        return torch.cat([tokens[:, :count], bonus], dim=1)


def verify_draft(verifier: Verifier, tokens, draft, target):
    return verifier.verify(tokens, draft, target)


@dataclass
class Beams:
    scores: torch.Tensor
    finished: torch.Tensor
    hypotheses: list = field(default_factory=list)


def reorder(past, index):
    return tuple((k.index_select(0, index), v.index_select(0, index)) for k, v in past)


def search_beams(logits, beams: Beams, past):
    vocab = logits.shape[-1]
    logprobs = F.log_softmax(logits.float(), dim=-1)
    total = (logprobs + beams.scores[:, None]).view(1, -1)
    best, flat = torch.topk(total, 2 * BEAMS, dim=1)
    parent = torch.div(flat, vocab, rounding_mode="floor")
    token = flat % vocab
    survivors = []
    for rank, (score, where, what) in enumerate(
            zip(best[0], parent[0], token[0].tolist())):  # finds: host_read
        if what == EOS:
            beams.hypotheses.append((score, where))
        elif len(survivors) < BEAMS:
            survivors.append(rank)
    keep = torch.tensor(survivors, device=logits.device)  # finds: host_copy
    beams.scores.copy_(best[0].index_select(0, keep))
    past = reorder(past, parent[0].index_select(0, keep))
    if torch.all(beams.finished) and len(beams.hypotheses) >= BEAMS:  # finds: host_read
        return None, past
    return token[0].index_select(0, keep), past


class EulerScheduler:
    def __init__(self, steps=8):
        sigmas = torch.linspace(1.0, 0.0, steps + 1)
        self.sigmas = sigmas
        self.timesteps = sigmas[:-1] * 1000
        self.step_index = None

    def set_timesteps(self, device):
        self.timesteps = self.timesteps.to(device)
        self.step_index = None

    def index_for(self, timestep):
        found = (self.timesteps == timestep).nonzero()  # finds: dynamic_shape
        return found[0].item()  # finds: host_read

    def step(self, model_output, timestep, sample):
        if self.step_index is None:
            self.step_index = self.index_for(timestep)
        sigma = self.sigmas[self.step_index]
        following = self.sigmas[self.step_index + 1]
        denoised = sample - sigma * model_output  # finds: cpu_tensor
        slope = (sample - denoised) / sigma
        previous = sample + slope * (following - sigma)
        self.step_index += 1  # finds: python_state
        return previous


def denoise(scheduler: EulerScheduler, latents, noise):
    timestep = scheduler.timesteps[0]
    return scheduler.step(noise, timestep, latents)


class PatchRope(nn.Module):
    def __init__(self, dim=8, theta=10000.0, merge=2):
        super().__init__()
        self.merge = merge
        self.register_buffer("inv_freq", theta ** (-torch.arange(0, dim, 2).float() / dim),
                             persistent=False)

    def table(self, size):
        positions = torch.arange(size, device=self.inv_freq.device, dtype=self.inv_freq.dtype)  # finds: host_read
        return torch.outer(positions, self.inv_freq)

    def forward(self, grid_thw):
        ids = []
        for t, h, w in grid_thw:
            rows = torch.arange(h, device=grid_thw.device).unsqueeze(1).expand(-1, w)  # finds: host_read
            cols = torch.arange(w, device=grid_thw.device).unsqueeze(0).expand(h, -1)  # finds: host_read
            ids.append(torch.stack([rows.flatten(), cols.flatten()], dim=-1).repeat(t, 1))  # finds: host_read
        ids = torch.cat(ids, dim=0)
        biggest = grid_thw[:, 1:].max()
        freqs = self.table(biggest)
        return freqs[ids].flatten(1)


class ImageCache:
    def __init__(self, device):
        self.keys = torch.zeros(1, 2, 16, 8, device=device)
        self.values = torch.zeros(1, 2, 16, 8, device=device)

    def get_max_length(self):
        return self.keys.shape[2]


class VisionLanguage(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 32)

    def merge(self, ids, features):
        embeds = self.embed(ids)
        special = ids == IMAGE
        if special.sum() != features.shape[0]:  # finds: host_read
            raise ValueError(
                f"{special.sum()} image tokens and {features.shape[0]} features do not match")
        embeds[special] = features.to(embeds.dtype)  # finds: dynamic_shape
        return embeds

    def forward(self, ids, features, cache):
        x = self.merge(ids, features)
        q, k, v = (part.view(1, -1, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if hasattr(cache, "get_max_length"):  # finds: duck_typed_cache
            length = ids.shape[1]
            cache.keys[:, :, :length] = k
            cache.values[:, :, :length] = v
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(1, -1, 16)[:, -1])


def sequence_mask(lengths, longest=None):
    if longest is None:
        longest = lengths.max()
    steps = torch.arange(longest)  # finds: host_read cpu_tensor
    return steps[None, :] < lengths[:, None].to(steps.device)  # finds: host_read


class LengthRegulator(nn.Module):
    def __init__(self, width=16, hop=1.0):
        super().__init__()
        self.hop = hop
        self.predictor = nn.Linear(width, 1)
        self.speaker = torch.randn(1, 1, width)

    def forward(self, phonemes):
        log_durations = self.predictor(phonemes).squeeze(-1)
        durations = (log_durations.exp() * self.hop).round().clamp(min=1).long()
        frames = torch.repeat_interleave(phonemes[0], durations[0], dim=0)  # finds: dynamic_shape
        self.speaker = self.speaker.to(phonemes.device)  # finds: cpu_tensor
        mask = sequence_mask(durations.sum(dim=1))
        return frames[None] + self.speaker, mask.to(phonemes.device)


class Codebook(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.register_buffer("inited", torch.ones(1))
        self.register_buffer("embed", torch.randn(size, width))
        self.register_buffer("hits", torch.zeros(size, dtype=torch.long))

    @torch.no_grad()
    def init_embed(self, data):
        if self.inited:  # finds: host_read
            return
        self.embed.copy_(data[: self.embed.shape[0]])
        self.inited.fill_(1)

    def forward(self, x):
        self.init_embed(x)
        distance = -(x.pow(2).sum(1, keepdim=True) - 2 * x @ self.embed.t()
                     + self.embed.t().pow(2).sum(0, keepdim=True))
        codes = distance.max(dim=-1).indices
        self.hits += torch.bincount(codes, minlength=self.embed.shape[0])  # finds: dynamic_shape
        return F.embedding(codes, self.embed), codes


class ResidualVQ(nn.Module):
    def __init__(self, width=8, size=16, layers=6, frame_rate=75):
        super().__init__()
        self.frame_rate = frame_rate
        self.layers = nn.ModuleList(Codebook(width, size) for _ in range(layers))

    def quantizers_for(self, bandwidth):
        per_layer = math.log2(self.layers[0].embed.shape[0]) * self.frame_rate
        return int(max(1, math.floor(bandwidth * 1000 / per_layer)))

    def forward(self, x):
        residual = x.transpose(1, 2).reshape(-1, x.shape[1])
        total = torch.zeros_like(residual)
        every = []
        for layer in self.layers[: self.quantizers_for(1.2)]:
            quantized, codes = layer(residual)
            residual = residual - quantized
            total = total + quantized
            every.append(codes)
        return total, torch.stack(every)


def penalise(logits, history, penalty):
    score = torch.gather(logits, 1, history)
    score = torch.where(score < 0, score * penalty, score / penalty)  # finds: baked_constant
    return logits.scatter(1, history, score)


def nucleus(logits, top_p):
    ordered, index = torch.sort(logits, descending=True)
    mass = F.softmax(ordered, dim=-1).cumsum(dim=-1)
    drop = mass - F.softmax(ordered, dim=-1) > top_p  # finds: baked_constant
    return logits.masked_fill(drop.scatter(1, index, drop), float("-inf"))


def sample_request(logits, history, stop_ids, temperature, top_p, penalty):
    logits = penalise(logits, history, penalty)
    banned = torch.tensor([0, 1, 3], device=logits.device)  # finds: host_copy
    logits = logits.index_fill(1, banned, float("-inf"))
    logits = nucleus(logits / temperature, top_p)  # finds: baked_constant
    token = torch.distributions.Categorical(logits=logits).sample()  # finds: host_read
    finished = token in stop_ids  # finds: host_read
    return token, finished


class ChunkedVocoder(nn.Module):
    def __init__(self, mels=8, hop=4):
        super().__init__()
        torch._dynamo.config.suppress_errors = True  # finds: hidden_setting
        self.pre = nn.Conv1d(mels, 16, 3)
        self.up = nn.ConvTranspose1d(16, 1, hop, stride=hop)
        self.seen = None
        self.latencies = []
        self.windows = {}

    def window(self, length, device):
        if length not in self.windows:
            self.windows[length] = torch.hann_window(length).to(device)  # finds: cpu_tensor
        return self.windows[length]

    def forward(self, mel):
        start = time.perf_counter()
        self.seen = mel if self.seen is None else torch.cat([self.seen, mel], dim=-1)  # finds: python_state
        audio = self.up(torch.relu(self.pre(self.seen)))[..., -16:]
        audio = audio * self.window(audio.shape[-1], mel.device)
        torch.cuda.synchronize()  # finds: sync
        self.latencies.append(time.perf_counter() - start)  # finds: python_state
        return audio


class Transducer(nn.Module):
    def __init__(self, width=12, vocab=20, most=3):
        super().__init__()
        self.most = most
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTMCell(width, width)
        self.joint = nn.Linear(2 * width, vocab)

    def forward(self, frame, last, h, c):
        energy = frame.pow(2).mean()
        level = 10 * math.log10(energy + 1e-6)  # finds: host_read
        if level < -80:
            return last, h, c
        emitted = []
        for _ in range(self.most):
            h2, c2 = self.lstm(self.embed(last), (h, c))
            logits = self.joint(torch.cat([frame, h2], dim=-1))
            assert not torch.isnan(logits).any(), "NaN in the joint network"  # finds: host_read
            symbol = np.argmax(logits.detach().cpu().numpy(), axis=-1)  # finds: host_read
            if symbol[0] == BLANK:
                break
            emitted.append(symbol)
            last = torch.from_numpy(symbol).to(frame.device)  # finds: host_copy
            h, c = h2, c2
        return last, h, c


class RingAttention(nn.Module):
    def __init__(self, width=16, heads=2, capacity=12):
        super().__init__()
        self.heads = heads
        self.capacity = capacity
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        shape = (1, heads, capacity, width // heads)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))
        self.register_buffer("end", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(x).chunk(3, dim=-1))
        steps = torch.arange(length, device=x.device) + self.end
        slots = steps % self.capacity
        self.keys.index_copy_(2, slots, k)
        self.values.index_copy_(2, slots, v)
        self.end.add_(length)
        slot = torch.arange(self.capacity, device=x.device)
        behind = (self.end - 1 - slot) % self.capacity
        position = self.end - 1 - behind
        allowed = (position >= 0)[None] & (steps[:, None] >= position[None])
        attended = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=allowed)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


def filtered(logits, top_k):
    ordered, _ = torch.sort(logits, dim=-1, descending=True)
    pivot = ordered.gather(-1, (top_k - 1)[:, None])
    return torch.where(logits < pivot, torch.full_like(logits, -torch.inf), logits)


def race_sample(logits, temperature, top_k, out, finished, eos):
    scaled = logits / temperature.clamp(min=1e-5)[:, None]
    probabilities = torch.softmax(filtered(scaled, top_k), dim=-1)
    race = torch.empty_like(probabilities).exponential_(1)
    token = torch.argmax(probabilities / race, dim=-1)
    token = torch.where(finished, eos, token)
    finished |= token == eos
    out.copy_(token)
    return out


class GatheredExperts(nn.Module):
    def __init__(self, width=16, ffn=24, experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(width, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, ffn, width) * 0.1)
        self.w2 = nn.Parameter(torch.randn(experts, width, ffn) * 0.1)
        self.w3 = nn.Parameter(torch.randn(experts, ffn, width) * 0.1)
        self.last = None

    def forward(self, x):
        scores = F.softmax(self.gate(x), dim=-1)
        weights, chosen = torch.topk(scores, self.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        gate = F.silu(torch.einsum("ti,taoi->tao", x, self.w1[chosen]))
        up = torch.einsum("ti,taoi->tao", x, self.w3[chosen])
        down = torch.einsum("tao,taio->tai", gate * up, self.w2[chosen])
        mixed = torch.einsum("tai,ta->ti", down, weights)
        if self.training:
            self.last = scores.mean().item()
        assert mixed.shape == x.shape, f"{mixed.shape} is not {x.shape}"
        return mixed


class CausalConv(nn.Module):
    def __init__(self, channels, kernel, dilation=1):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, kernel, dilation=dilation)
        self.register_buffer("context", torch.zeros(1, channels, (kernel - 1) * dilation))

    def forward(self, x):
        joined = torch.cat([self.context, x], dim=-1)
        self.context.copy_(joined[..., -self.context.shape[-1]:])
        return self.conv(joined)


class StreamingStack(nn.Module):
    def __init__(self, channels=8, layers=3):
        super().__init__()
        self.blocks = nn.ModuleList(CausalConv(channels, 3, 2 ** i) for i in range(layers))
        self.scale = nn.Parameter(torch.ones(channels, 1))

    def forward(self, x):
        skips = []
        with nullcontext():
            for block in self.blocks:
                x = x + torch.nn.functional.elu(block(x)) * self.scale
                skips.append(x)
        return torch.stack(skips).sum(dim=0)


def scheduled(device):
    scheduler = EulerScheduler(256)
    scheduler.set_timesteps(device)
    return scheduler, *(torch.randn(1, 4, 8, 8, device=device) for _ in range(2))


def beams_inputs(device):
    beams = Beams(torch.zeros(BEAMS, device=device), torch.zeros(1, dtype=torch.bool, device=device))
    past = [tuple(torch.randn(BEAMS, 2, 5, 8, device=device) for _ in range(2)) for _ in range(2)]
    return torch.randn(BEAMS, 40, device=device), beams, past


def verified(device):
    tokens = torch.randint(0, 32, (1, 4), device=device)
    draft, target = (torch.softmax(torch.randn(1, length, 32, device=device), -1) for length in (4, 5))
    return Verifier(device), tokens, draft, target


CASES = {
    "SparseMoe": lambda device: ((), (torch.randn(1, 3, 16, device=device),)),
    "verify_draft": verified,
    "search_beams": beams_inputs,
    "denoise": scheduled,
    "PatchRope": lambda device: ((), (torch.tensor([[1, 4, 6], [1, 2, 2]], device=device),)),
    "VisionLanguage": lambda device: (
        (),
        (torch.tensor([[1, IMAGE, IMAGE, 5]], device=device), torch.randn(2, 16, device=device), ImageCache(device)),
    ),
    "LengthRegulator": lambda device: ((), (torch.randn(1, 6, 16, device=device),)),
    "ResidualVQ": lambda device: ((), (torch.randn(1, 8, 20, device=device),)),
    "sample_request": lambda device: (
        torch.randn(1, 64, device=device),
        torch.randint(0, 64, (1, 5), device=device),
        torch.tensor([2, 7], device=device),
        0.8,
        0.95,
        1.1,
    ),
    "ChunkedVocoder": lambda device: ((), (torch.randn(1, 8, 6, device=device),)),
    "Transducer": lambda device: (
        (),
        (
            torch.randn(1, 12, device=device),
            torch.ones(1, dtype=torch.long, device=device),
            torch.zeros(1, 12, device=device),
            torch.zeros(1, 12, device=device),
        ),
    ),
    "RingAttention": lambda device: ((), (torch.randn(1, 1, 16, device=device),)),
    "race_sample": lambda device: (
        torch.randn(2, 50, device=device),
        torch.full((2,), 0.7, device=device),
        torch.full((2,), 5, device=device),
        torch.zeros(2, dtype=torch.long, device=device),
        torch.zeros(2, dtype=torch.bool, device=device),
        torch.full((2,), 2, device=device),
    ),
    "GatheredExperts": lambda device: ((), (torch.randn(3, 16, device=device),)),
    "StreamingStack": lambda device: ((), (torch.randn(1, 8, 4, device=device),)),
}
