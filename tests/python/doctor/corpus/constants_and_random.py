"""Python numbers that a captured graph keeps, and generators that no graph knows."""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn


def tempered(logits, temperature):
    return (logits / temperature).softmax(dim=-1)  # finds: baked_constant


def nucleus(logits, top_p):
    ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    drop = ordered.cumsum(dim=-1) - ordered > top_p  # finds: baked_constant
    return logits.masked_fill(drop.scatter(1, order, drop), float("-inf"))


def guided(cond, uncond, scale):
    return uncond + scale * (cond - uncond)  # finds: baked_constant


def written_at(cache, k, position):
    cache[:, position] = k  # finds: baked_constant
    return cache


def own_generator(x, generator):
    noise = torch.randn(x.shape, device=x.device, generator=generator)  # finds: rng
    return x + noise


def sampled_with_generator(probs, generator):
    return torch.bernoulli(probs, generator=generator)  # finds: rng


def seeded_each_step(x):
    torch.manual_seed(0)  # finds: rng
    return x + torch.randn_like(x)



class Sampling:
    def __init__(self, temperature):
        self.temperature = temperature


def tempered_by_object(logits, sampling):
    return (logits / sampling.temperature).softmax(dim=-1)  # finds: baked_constant


@dataclass(frozen=True, slots=True)
class Penalty:
    repeated: float = 1.2


@dataclass
class Request:
    penalty: Penalty = field(default_factory=Penalty)
    options: dict = field(default_factory=lambda: {"boost": 1.5})
    norm_eps: float = 1e-5
    num_heads: int = 2


def within_a_request(logits, request):
    logits = logits / logits.norm(dim=-1, keepdim=True).clamp(min=request.norm_eps)
    logits = logits / request.penalty.repeated  # finds: baked_constant
    return logits * request.options["boost"]  # finds: baked_constant


def tempered_by_default(logits, temperature=0.8, eps=1e-6):
    return logits / (temperature + eps)  # finds: baked_constant


class Sampler(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.temperature = 0.8
        self.eps = 1e-6
        self.scale = dim**-0.5
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        logits = self.linear(x) * self.scale / (x.norm() + self.eps)
        return logits / self.temperature  # finds: baked_constant


class Generator:
    def __init__(self, dim, device):
        self.sampler = Sampler(dim).to(device)
        self.options = {"guidance_scale": 3.0, "gamma": 0.5}

    def __call__(self, x):
        y = self.sampler(x)
        y = y + y * self.options["gamma"]
        return x + self.options["guidance_scale"] * (y - x)  # finds: baked_constant


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self._wet, self.dry, self.tone, self.width = 0.3, 0.7, 0.5, 0.9

    @property
    def wet(self):
        return self._wet

    @wet.setter
    def wet(self, wet):
        self._wet = wet

    def set_tone(self, tone):
        self.tone = tone

    def forward(self, x):
        y = x * self.dry
        y = y + x.flip(-1) * self._wet  # finds: baked_constant
        y = y * self.tone  # finds: baked_constant
        return y * self.width  # finds: baked_constant


MIXER = Mixer()


def widened(mixer, width):
    mixer.width = width
    return mixer


def mixed(x):
    return MIXER(x) if isinstance(MIXER, Mixer) else widened(MIXER, x)


class ScaledAttention(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, q, k):
        return (q / self.temperature) @ k


def guided_by_numpy(x, scale):
    return x * scale  # finds: baked_constant


def ninth_number(x, a, b, c, d, e, f, g, h, i):
    return x * i  # finds: baked_constant


def written_by_assignment(x, n):
    y = x.clone()
    y[0] = n  # finds: baked_constant
    y[1, 2] = n  # finds: host_copy baked_constant
    y[x > 1] = n  # finds: baked_constant
    return y


def padded_by_assignment(tokens, finished, pad):
    tokens[finished] = pad
    tokens[0] = pad
    return tokens


def jittered(x):
    shift = random.gauss(0.0, 0.1)  # finds: rng
    return x + shift


def layers_dropped(x):
    for _ in range(8):
        if random.random() < 0.5:  # finds: rng
            continue
        x = x * 2
    return x


def scaled_by_numpy(x):
    return x * np.random.uniform(0.5, 1.5)  # finds: rng


class DrawsOfItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)

    def forward(self, x):
        start = self.python.randrange(4)  # finds: rng
        return x[:, start : start + 4] * float(self.numpy.normal())  # finds: rng


CASES = {
    "tempered": lambda device: (torch.randn(2, 8, device=device), 0.7),
    "nucleus": lambda device: (torch.randn(2, 8, device=device), 0.9),
    "guided": lambda device: (torch.randn(2, 8, device=device), torch.randn(2, 8, device=device), 3.0),
    "written_at": lambda device: (torch.zeros(1, 8, 4, device=device), torch.randn(1, 4, device=device), 3),
    "own_generator": lambda device: (torch.randn(2, 8, device=device), torch.Generator(device=device)),
    "sampled_with_generator": lambda device: (torch.rand(2, 8, device=device), torch.Generator(device=device)),
    "seeded_each_step": lambda device: (torch.randn(2, 8, device=device),),
    "tempered_by_object": lambda device: (torch.randn(2, 8, device=device), Sampling(0.7)),
    "ninth_number": lambda device: (torch.randn(2, 8, device=device), *range(8), 0.5),
    "within_a_request": lambda device: (torch.randn(2, 8, device=device), Request()),
    "tempered_by_default": lambda device: (torch.randn(2, 8, device=device),),
    "Sampler": lambda device: ((8,), (torch.randn(2, 8, device=device),)),
    "Generator": lambda device: ((8, device), (torch.randn(2, 8, device=device),)),
    "mixed": lambda device: (torch.randn(2, 8, device=device),),
    "ScaledAttention": lambda device: ((2.0,), (torch.randn(2, 8, device=device), torch.randn(8, 2, device=device))),
    "guided_by_numpy": lambda device: (torch.randn(2, 8, device=device), np.float32(3.0)),
    "written_by_assignment": lambda device: (torch.randn(2, 8, device=device), 0.5),
    "padded_by_assignment": lambda device: (
        torch.zeros(2, 4, dtype=torch.long, device=device),
        torch.ones(2, 4, dtype=torch.bool, device=device),
        3,
    ),
    "jittered": lambda device: (torch.randn(2, 8, device=device),),
    "layers_dropped": lambda device: (torch.randn(2, 8, device=device),),
    "scaled_by_numpy": lambda device: (torch.randn(2, 8, device=device),),
    "DrawsOfItsOwn": lambda device: ((), (torch.randn(2, 8, device=device),)),
}
