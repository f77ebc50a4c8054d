"""Twenty steps by a stranger to the doctor, written from knowledge of CUDA graph capture and PyTorch 2.11 alone: no run of the doctor, and
none of its sources, rules or pages, stood behind an expectation. Each expectation's reason stands on the line above it; a trap that is
legal says so where it stands. Thirteen steps have findings, the first seven have none."""

import logging
import math
import random
import time
from dataclasses import dataclass

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

logger = logging.getLogger(__name__)
IMAGE_TOKEN = 9
STATS = {"steps": 0}


# Clean: seven steps


class RingDecodeLayer(nn.Module):
    """One decode step on fixed buffers; the position is a device tensor of one element."""

    def __init__(self, dim, heads, max_len, device):
        super().__init__()
        self.heads, self.head_dim, self.max_len = heads, dim // heads, max_len
        self.qkv = nn.Linear(dim, 3 * dim, bias=False, device=device)
        self.out = nn.Linear(dim, dim, bias=False, device=device)
        self.register_buffer("k", torch.zeros(2, heads, max_len, self.head_dim, device=device))
        self.register_buffer("v", torch.zeros(2, heads, max_len, self.head_dim, device=device))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long, device=device))
        self.register_buffer("slots", torch.arange(max_len, device=device))

    @torch.no_grad()
    def forward(self, x):
        batch = x.shape[0]
        q, k, v = (part.view(batch, self.heads, 1, self.head_dim) for part in self.qkv(x).chunk(3, dim=-1))
        self.k.index_copy_(2, self.position, k)
        # Legal: a 1-D index tensor is an index_put on the device (a 0-dim one would be item()).
        self.v[:, :, self.position] = v
        scores = torch.einsum("bhqd,bhkd->bhqk", q, self.k) * self.head_dim**-0.5
        scores = scores.masked_fill(self.slots > self.position, float("-inf"))
        mixed = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(dim=-1), self.v)
        # Legal: the counter is a tensor and changed in place, so each replay moves it on.
        self.position.add_(1).remainder_(self.max_len)
        return self.out(mixed.reshape(batch, 1, -1))


def nucleus_sample(logits, temperature, top_p, counts, penalty):
    scores = logits.float() / temperature.unsqueeze(-1).clamp_min(1e-4)
    scores = torch.where(counts > 0, scores - penalty.unsqueeze(-1) * counts, scores)
    ordered, order = scores.sort(dim=-1, descending=True)
    probs = ordered.softmax(dim=-1)
    outside = probs.cumsum(dim=-1) - probs > top_p.unsqueeze(-1)
    # Legal: a number through a boolean mask is dispatched to masked_fill_, with no nonzero and no copy.
    ordered[outside] = float("-inf")
    # Legal: the default generator is registered, and multinomial now checks its input by asynchronous assertions.
    picked = torch.multinomial(ordered.softmax(dim=-1), num_samples=1)
    token = order.gather(-1, picked)
    counts.scatter_add_(-1, token, torch.ones_like(token, dtype=counts.dtype))
    return token.squeeze(-1)


class EulerFlow(nn.Module):
    """Flow matching with classifier-free guidance: a fixed number of Euler steps, unrolled into one graph."""

    def __init__(self, channels, steps, guidance, device):
        super().__init__()
        self.guidance = guidance
        self.net = nn.Sequential(nn.Conv1d(2 * channels + 1, 16, 3, padding=1), nn.SiLU(), nn.Conv1d(16, channels, 3, padding=1))
        span = 1 - torch.cos(torch.linspace(0, 1, steps + 1) * 0.5 * math.pi)
        self.register_buffer("t_span", span)
        self.to(device)

    @torch.inference_mode()
    def forward(self, mu, mask):
        x = torch.randn_like(mu) * mask
        null = torch.zeros_like(mu)
        # Legal: iteration over a device tensor unbinds it; no value is read.
        for start, end in zip(self.t_span[:-1], self.t_span[1:]):
            time_row = start.expand(2 * mu.shape[0], 1, mu.shape[-1])
            velocity = self.net(torch.cat([torch.cat([x, x]), torch.cat([mu, null]), time_row], dim=1))
            cond, uncond = velocity.chunk(2)
            x = x + (end - start) * ((1 + self.guidance) * cond - self.guidance * uncond) * mask
        return x


class LengthRegulator(nn.Module):
    """Expands phonemes to frames; a last, empty phoneme takes what is left of a fixed number of frames."""

    def __init__(self, frames, bins, dim, device):
        super().__init__()
        self.frames, self.bins = frames, bins
        self.pitch_embed = nn.Linear(bins, dim, bias=False, device=device)
        self.register_buffer("edges", torch.linspace(80.0, 400.0, bins - 1, device=device))

    def forward(self, states, log_durations, pitch):
        wanted = (log_durations.exp() - 1).clamp(min=0).round().long()
        ends = wanted.cumsum(0).clamp(max=self.frames)
        durations = torch.diff(ends, prepend=ends.new_zeros(1))
        durations = torch.cat([durations, self.frames - ends[-1:]])
        states = F.pad(states, (0, 0, 0, 1))
        # Legal: with output_size given, repeat_interleave has a fixed shape and does not read the sum.
        expanded = torch.repeat_interleave(states, durations, dim=0, output_size=self.frames)
        # Legal: with num_classes given, one_hot reads nothing on a CUDA device.
        buckets = F.one_hot(torch.bucketize(pitch, self.edges), num_classes=self.bins)
        return expanded + self.pitch_embed(buckets.to(expanded.dtype))


class StreamingVad(nn.Module):
    """Hysteresis and recurrent state as buffers that are written in place."""

    def __init__(self, batch, context, hidden, patience, device):
        super().__init__()
        self.low, self.high, self.patience = 0.35, 0.5, patience
        self.front = nn.Conv1d(1, hidden, 5, stride=2, device=device)
        self.cell = nn.GRUCell(hidden, hidden, device=device)
        self.head = nn.Linear(hidden, 1, device=device)
        self.register_buffer("context", torch.zeros(batch, context, device=device))
        self.register_buffer("state", torch.zeros(batch, hidden, device=device))
        self.register_buffer("speaking", torch.zeros(batch, dtype=torch.bool, device=device))
        self.register_buffer("silence", torch.zeros(batch, dtype=torch.long, device=device))

    @torch.no_grad()
    def forward(self, chunk):
        # Legal: a cat with a kept context, but of fixed length, and copied back into the same storage.
        window = torch.cat([self.context, chunk], dim=1)
        self.context.copy_(window[:, -self.context.shape[1] :])
        features = self.front(window.unsqueeze(1)).relu().mean(dim=-1)
        self.state.copy_(self.cell(features, self.state))
        prob = self.head(self.state).sigmoid().squeeze(-1)
        self.silence.add_(1).masked_fill_(prob > self.low, 0)
        self.speaking.logical_or_(prob > self.high).logical_and_(self.silence < self.patience)
        return torch.where(self.speaking, prob, torch.zeros_like(prob))


def merge_image_features(input_ids, embeds, patches, grid):
    is_image = input_ids == IMAGE_TOKEN
    # Legal: masked_scatter takes its places from a prefix sum on the device; .to() of a dtype is no copy from the host.
    merged = embeds.masked_scatter(is_image.unsqueeze(-1).expand_as(embeds), patches.to(embeds.dtype))
    nth_image = is_image.long().cumsum(dim=-1).sub_(1).clamp_min_(0)
    rows, cols = grid.unbind(dim=-1)
    text_positions = (~is_image).long().cumsum(dim=-1)
    positions = torch.stack(
        [
            text_positions,
            torch.where(is_image, text_positions + rows[nth_image], text_positions),
            torch.where(is_image, text_positions + cols[nth_image], text_positions),
        ]
    )
    return merged, positions


class TwoTowers(nn.Module):
    """Two encoders side by side: the second stream is forked from, and joined to, the one that is captured."""

    def __init__(self, dim, device):
        super().__init__()
        self.text_tower = nn.Sequential(nn.Linear(dim, dim), nn.GELU()).to(device)
        self.audio_tower = nn.Sequential(nn.Linear(dim, dim), nn.Tanh()).to(device)
        self.side = torch.cuda.Stream() if torch.cuda.is_available() else None

    @torch.no_grad()
    def forward(self, text, audio):
        if self.side is None:
            return F.normalize(self.text_tower(text), dim=-1) * F.normalize(self.audio_tower(audio), dim=-1)
        main = torch.cuda.current_stream()
        # Legal: wait_stream before and after, which is how a capture takes in a second stream.
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            heard = F.normalize(self.audio_tower(audio), dim=-1)
        read = F.normalize(self.text_tower(text), dim=-1)
        main.wait_stream(self.side)
        return read * heard


# With findings: thirteen steps


def greedy_decode_step(hidden, wqkv, cache_k, cache_v, pos, lm_head):
    q, k, v = (hidden @ wqkv).chunk(3, dim=-1)
    # pos is a 0-dim integer tensor of the device: as an index it becomes select(item()), a hidden read.
    cache_k[:, pos] = k  # finds: host_read
    # The same again.
    cache_v[:, pos] = v  # finds: host_read
    visible = torch.arange(cache_k.shape[1], device=hidden.device) <= pos
    scores = torch.einsum("bd,btd->bt", q, cache_k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    token = (torch.einsum("bt,btd->bd", weights, cache_v) @ lm_head).argmax(dim=-1)
    # Legal: += on a tensor is add_ in place.
    pos += 1
    return token


@dataclass
class SamplingConfig:
    temperature: float
    banned: torch.Tensor
    generator: torch.Generator


def sample_next(logits, cfg: SamplingConfig):
    # The temperature is a Python float of the caller's: the captured division keeps the one of the capture.
    scaled = logits / cfg.temperature  # finds: baked_constant
    # A number through an integer index tensor: index_put_ makes it a 0-dim CPU tensor and copies that to the device, with a sync.
    scaled[:, cfg.banned] = float("-inf")  # finds: host_copy
    floor = scaled.topk(4, dim=-1).values[:, -1:]
    probs = scaled.masked_fill(scaled < floor, float("-inf")).softmax(dim=-1)
    # A generator of the caller's own, which no graph knows: capture refuses it.
    noise = torch.empty_like(probs).exponential_(1.0, generator=cfg.generator)  # finds: rng
    return (probs / noise).argmax(dim=-1)


def ancestral_sigmas(sigma_from, sigma_to):
    variance = sigma_to**2 * (sigma_from**2 - sigma_to**2) / sigma_from**2
    # Python's min compares two device tensors and takes the bool of the answer.
    sigma_up = min(sigma_to, variance**0.5)  # finds: host_read
    return (sigma_to**2 - sigma_up**2) ** 0.5, sigma_up


def ancestral_step(x, denoised, sigmas, i):
    # i is a Python number that differs per step: the views are those of the capture.
    sigma, sigma_next = sigmas[i], sigmas[i + 1]  # finds: baked_constant
    derivative = (x - denoised) / sigma
    sigma_down, sigma_up = ancestral_sigmas(sigma, sigma_next)
    x = x + derivative * (sigma_down - sigma)
    # The bool of a device tensor.
    if sigma_next > 0:  # finds: host_read
        x = x + torch.randn_like(x) * sigma_up
    return x


class IstftHead(nn.Module):
    def __init__(self, dim, n_fft, hop, device):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.proj = nn.Linear(dim, n_fft + 2, device=device)
        self.register_buffer("window", torch.hann_window(n_fft, device=device))

    @torch.no_grad()
    def forward(self, x):
        magnitude, phase = self.proj(x).transpose(1, 2).chunk(2, dim=1)
        spectrum = torch.polar(magnitude.exp().clamp(max=1e2), phase)
        # istft looks on the host whether the window's overlap-add is anywhere zero (the NOLA check): a hidden read.
        wav = torch.istft(spectrum, self.n_fft, self.hop, window=self.window, center=True)  # finds: host_read
        peak = wav.abs().amax()
        # The bool of a device tensor.
        if peak > 1.0:  # finds: host_read
            wav = wav / peak
        return wav


class StatefulVad(nn.Module):
    def __init__(self, batch, samples, hidden, threshold, device):
        super().__init__()
        self.threshold = threshold
        self.speech_chunks = 0
        self.front = nn.Linear(samples, hidden, device=device)
        self.cell = nn.LSTMCell(hidden, hidden, device=device)
        self.head = nn.Linear(hidden, 1, device=device)
        self.state = (torch.zeros(batch, hidden, device=device), torch.zeros(batch, hidden, device=device))

    @torch.no_grad()
    def forward(self, chunk):
        h, c = self.cell(self.front(chunk).relu(), self.state)
        # The attribute is bound to new tensors: each replay reads the state that the capture read.
        self.state = (h, c)  # finds: python_state
        prob = self.head(h).sigmoid().squeeze(-1)
        # item().
        if prob.max().item() > self.threshold:  # finds: host_read
            # A counter in Python, which replays don't move.
            self.speech_chunks += 1  # finds: python_state
        return prob


def prepare_multimodal(pixels, patch_proj, embeds, image_mask):
    # A list becomes a CPU tensor that is copied to the device, at each call.
    mean = torch.tensor([0.481, 0.457, 0.408], device=pixels.device).view(1, 3, 1, 1)  # finds: host_copy
    # new_tensor likewise.
    std = pixels.new_tensor([0.268, 0.261, 0.275]).view(1, 3, 1, 1)  # finds: host_copy
    patches = F.unfold((pixels - mean) / std, kernel_size=4, stride=4).transpose(1, 2).flatten(0, 1)
    features = patches @ patch_proj
    # An assertion takes the bool of a device tensor.
    assert image_mask.sum() == features.shape[0], "image tokens and patches differ in number"  # finds: host_read
    merged = embeds.clone()
    # A tensor through a boolean mask: the mask is expanded by nonzero, whose length depends on the data.
    merged[image_mask] = features  # finds: dynamic_shape
    return merged


def speaker_vector(hidden_states, mask, proj):
    # A Python list as an index: made into a CPU tensor and copied to the device, at each call.
    picked = hidden_states[:, [1, 3, 5]]  # finds: host_copy
    # int() of a device tensor, once a row.
    lengths = [int(row.sum()) for row in mask]  # finds: host_read
    last = torch.stack([picked[row, :, length - 1] for row, length in enumerate(lengths)])
    weights = mask.to(picked.dtype)[:, None, :, None]
    mean = (picked * weights).sum(dim=2) / weights.sum(dim=2).clamp(min=1e-6)
    vector = F.normalize(torch.cat([last, mean], dim=-1).flatten(1) @ proj, dim=-1)
    # The result is fetched to the host within the step.
    return vector.cpu().numpy()  # finds: host_read


def positional_attention(q, k, v, pos_table, keep):
    length = q.shape[-2]
    # arange without a device is born on the CPU, and indexes a table of the device.
    q = q + pos_table[torch.arange(length)]  # finds: cpu_tensor
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    # A 0-dim CPU tensor: where takes it, by copying it to the device.
    scores = torch.where(keep, scores, torch.tensor(-1e9))  # finds: cpu_tensor
    weights = scores.softmax(dim=-1)
    mixed = torch.einsum("bhqk,bhkd->bhqd", weights, v)
    return mixed.transpose(1, 2).flatten(2)


def expand_and_pick(states, durations, f0):
    # An early exit on the bool of a device tensor.
    if not durations.any():  # finds: host_read
        return states, f0, f0
    # Without output_size the number of frames is the sum of the durations.
    frames = torch.repeat_interleave(states, durations, dim=0)  # finds: dynamic_shape
    energy = frames.pow(2).mean(dim=-1)
    # nonzero.
    voiced = (f0 > 0).nonzero(as_tuple=True)[0]  # finds: dynamic_shape
    # masked_select.
    loud = energy.masked_select(energy > energy.mean())  # finds: dynamic_shape
    return frames, voiced, loud


class GrowingAttention(nn.Module):
    def __init__(self, dim, heads, device):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False, device=device)
        self.out = nn.Linear(dim, dim, bias=False, device=device)
        self.k = torch.empty(1, heads, 0, dim // heads, device=device)
        self.v = torch.empty_like(self.k)

    @torch.no_grad()
    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        # A cache that grows by cat and is bound again.
        self.k = torch.cat([self.k, k], dim=2)  # finds: python_state
        # Its other half.
        self.v = torch.cat([self.v, v], dim=2)  # finds: python_state
        if x.is_cuda:
            # The stream under capture can't be waited for.
            torch.cuda.current_stream().synchronize()  # finds: sync
        # A counter in a module-level dict.
        STATS["steps"] += 1  # finds: python_state
        mixed = F.scaled_dot_product_attention(q, self.k, self.v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class StaticLayerCache:
    def __init__(self, batch, slots, dim, device):
        self.k = torch.zeros(batch, slots, dim, device=device)
        self.v = torch.zeros(batch, slots, dim, device=device)

    def update(self, k, v, slot):
        self.k.index_copy_(1, slot, k)
        self.v.index_copy_(1, slot, v)
        return self.k, self.v


def attend_with_cache(x, wq, wk, wv, cache, slot):
    q, k, v = x @ wq, x @ wk, x @ wv
    # The cache is told by hasattr, and called if it quacks.
    k, v = cache.update(k, v, slot) if hasattr(cache, "update") else (k, v)  # finds: duck_typed_cache
    weights = torch.einsum("bqd,bkd->bqk", q, k).mul_(q.shape[-1] ** -0.5).softmax(dim=-1)
    entropy = -(weights * weights.clamp_min(1e-9).log()).sum(dim=-1).mean()
    # An f-string formats a device tensor, whether or not the logger's level lets it through.
    logger.debug(f"attention entropy {entropy:.3f}")  # finds: host_read
    return torch.einsum("bqk,bkd->bqd", weights, v)


def draft_and_verify(context, draft, target, timings):
    ids = context
    for _ in range(3):
        # Legal: a cat within the step, from one fixed length to another.
        ids = torch.cat([ids, draft[ids[:, -1]].argmax(dim=-1, keepdim=True)], dim=1)
    if ids.is_cuda:
        # A wait for the device during capture.
        torch.cuda.synchronize()  # finds: sync
    # A list of the caller's that grows per call, and no longer once the step is replayed.
    timings.append(time.perf_counter())  # finds: python_state
    logits, proposed = target[ids[:, -4:-1]], ids[:, -3:]
    chance = logits.softmax(dim=-1).gather(-1, proposed.unsqueeze(-1)).squeeze(-1)
    # A number of Python's generator: each replay compares with the one of the capture.
    accepted = (chance > random.random()).long().cumprod(dim=-1)  # finds: rng
    return torch.where(accepted.bool(), proposed, logits.argmax(dim=-1)), accepted.sum(dim=-1)


class GuidedDenoiser(nn.Module):
    """Last in CASES: what its constructor sets, stays set in the process."""

    def __init__(self, channels, device):
        super().__init__()
        # What can't be compiled falls back to eager without a word.
        torch._dynamo.config.suppress_errors = True  # finds: hidden_setting
        self.time_mlp = nn.Sequential(nn.Linear(8, channels), nn.SiLU()).to(device)
        self.net = nn.Conv2d(channels, channels, 3, padding=1, device=device)
        self.register_buffer("freqs", torch.logspace(0, -3, 4, device=device))

    @torch.no_grad()
    def forward(self, latents, cond, t, guidance):
        angles = t[:, None].float() * self.freqs
        shift = self.time_mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))[:, :, None, None]
        both = torch.cat([latents + cond, latents])
        with_cond, without = self.net(both + torch.cat([shift, shift])).chunk(2)
        # The guidance is a Python number of the caller's: the graph keeps the one of the capture.
        noise = without + guidance * (with_cond - without)  # finds: baked_constant
        return (latents - noise).clamp_(-4.0, 4.0)


def longs(values, device):
    return torch.tensor(values, dtype=torch.long, device=device)


def drawn(device, *shapes):
    return tuple(torch.randn(shape, device=device) for shape in shapes)


CASES = {
    "RingDecodeLayer": lambda device: ((16, 2, 8, device), (torch.randn(2, 1, 16, device=device),)),
    "nucleus_sample": lambda device: (
        torch.randn(2, 12, device=device),
        torch.full((2,), 0.8, device=device),
        torch.full((2,), 0.9, device=device),
        torch.zeros(2, 12, device=device),
        torch.full((2,), 0.1, device=device),
    ),
    "EulerFlow": lambda device: ((4, 3, 0.7, device), (torch.randn(1, 4, 10, device=device), torch.ones(1, 1, 10, device=device))),
    "LengthRegulator": lambda device: (
        (12, 6, 8, device),
        (torch.randn(5, 8, device=device), torch.full((5,), 1.0, device=device), torch.full((12,), 200.0, device=device)),
    ),
    "StreamingVad": lambda device: ((2, 8, 16, 5, device), (torch.randn(2, 32, device=device),)),
    "merge_image_features": lambda device: (
        longs([[1, 9, 9, 2, 9, 9]], device),
        torch.randn(1, 6, 8, device=device),
        torch.randn(4, 8, device=device),
        longs([[0, 0], [0, 1], [1, 0], [1, 1]], device),
    ),
    "TwoTowers": lambda device: ((8, device), (torch.randn(2, 8, device=device), torch.randn(2, 8, device=device))),
    "greedy_decode_step": lambda device: (
        *drawn(device, (2, 8), (8, 24)),
        torch.zeros(2, 256, 8, device=device),
        torch.zeros(2, 256, 8, device=device),
        torch.zeros((), dtype=torch.long, device=device),
        torch.randn(8, 12, device=device),
    ),
    "sample_next": lambda device: (
        torch.randn(2, 12, device=device),
        SamplingConfig(0.7, longs([0, 3], device), torch.Generator(device=device)),
    ),
    "ancestral_step": lambda device: (*drawn(device, *[(1, 4, 6, 6)] * 2), torch.linspace(10.0, 1.0, 6, device=device), 2),
    "IstftHead": lambda device: ((8, 16, 4, device), (torch.randn(2, 6, 8, device=device),)),
    "StatefulVad": lambda device: ((2, 32, 16, 0.01, device), (torch.randn(2, 32, device=device),)),
    "prepare_multimodal": lambda device: (
        torch.rand(1, 3, 8, 8, device=device),
        torch.randn(48, 16, device=device),
        torch.randn(1, 10, 16, device=device),
        (longs([0, 1, 1, 0, 0, 1, 1, 0, 0, 0], device) == 1).unsqueeze(0),
    ),
    "speaker_vector": lambda device: (
        torch.randn(2, 6, 5, 8, device=device),
        longs([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], device) == 1,
        torch.randn(48, 16, device=device),
    ),
    "positional_attention": lambda device: (
        *drawn(device, *[(1, 2, 5, 8)] * 3, (32, 8)),
        torch.ones(5, 5, dtype=torch.bool, device=device).tril(),
    ),
    "expand_and_pick": lambda device: (
        torch.randn(4, 8, device=device),
        longs([2, 1, 3, 2], device),
        torch.full((8,), 120.0, device=device),
    ),
    "GrowingAttention": lambda device: ((16, 2, device), (torch.randn(1, 1, 16, device=device),)),
    "attend_with_cache": lambda device: (
        *drawn(device, (1, 1, 8), *[(8, 8)] * 3),
        StaticLayerCache(1, 6, 8, device),
        longs([2], device),
    ),
    "draft_and_verify": lambda device: (
        longs([[1, 2], [3, 4]], device),
        torch.randn(12, 12, device=device),
        torch.randn(12, 12, device=device),
        [],
    ),
    "GuidedDenoiser": lambda device: (
        (4, device),
        (torch.randn(1, 4, 6, 6, device=device), torch.randn(1, 4, 6, 6, device=device), longs([500], device), 3.5),
    ),
}
