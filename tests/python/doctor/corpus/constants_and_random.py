"""Python numbers that a captured graph keeps, and generators that no graph knows."""

import random

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


def guided_by_numpy(x, scale):
    return x * scale  # finds: baked_constant


def ninth_number(x, a, b, c, d, e, f, g, h, i):
    return x * i  # finds: baked_constant


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
    "guided_by_numpy": lambda device: (torch.randn(2, 8, device=device), np.float32(3.0)),
    "jittered": lambda device: (torch.randn(2, 8, device=device),),
    "layers_dropped": lambda device: (torch.randn(2, 8, device=device),),
    "scaled_by_numpy": lambda device: (torch.randn(2, 8, device=device),),
    "DrawsOfItsOwn": lambda device: ((), (torch.randn(2, 8, device=device),)),
}
