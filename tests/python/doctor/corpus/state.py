"""Python-side state that changes with each call."""

import itertools
import time

import numpy as np
import torch
from torch import nn

SEEN = []


def remembered_in_module(x):
    SEEN.append(x.mean())  # finds: python_state
    return x * 2


def mask_of_default(x, seen={"length": 3}):
    seen["length"] += 1  # finds: python_state
    mask = torch.ones(seen["length"], seen["length"], device=x.device).tril()
    return x.sum() * mask


class KeepsHistory(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.history = []

    def forward(self, x):
        y = self.linear(x)
        self.history.append(y)  # finds: python_state
        return y


class CountsCalls(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.table = nn.Embedding(16, dim)
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # finds: python_state
        return x + self.table.weight[0]


class GrowingCache(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.keys = nn.Linear(dim, dim)
        self.register_buffer("seen", torch.zeros(1, 1, dim), persistent=False)

    def forward(self, x):
        self.seen = torch.cat([self.seen, self.keys(x)], dim=1)  # finds: python_state
        return (x @ self.seen.transpose(1, 2)).softmax(dim=-1) @ self.seen


class GrowingMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 4), persistent=False)

    def forward(self, x):
        self.mask = torch.cat([self.mask, self.mask.new_ones(1, 1)], dim=-1)  # finds: python_state
        return x * self.mask.sum()


class CacheByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x):
        self.cache[len(self.cache)] = x * 2  # finds: python_state
        return x * 2


class ListOfLayersCache(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.cache = [None]

    def forward(self, x):
        k = self.linear(x)
        if self.cache[0] is not None:
            k = torch.cat([self.cache[0], k], dim=1)
        self.cache[0] = k  # finds: python_state
        return x + k[:, -1:]



class AppendsByAlias(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.history = []

    def forward(self, x):  # finds: python_state
        kept = self.history
        y = self.linear(x)
        kept.append(y)
        return y


def push(items, value):
    items.append(value)


class AppendsInHelper(nn.Module):
    def __init__(self):
        super().__init__()
        self.history = []

    def forward(self, x):  # finds: python_state
        y = x * 2
        push(self.history, y)
        return y


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, x):
        self.seen += 1  # finds: python_state
        return x * 2


REMEMBERS = Remembers()


def module_of_file(x):
    return REMEMBERS(x) if isinstance(REMEMBERS, Remembers) else x


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class CountsInSlot(nn.Module):
    def __init__(self):
        super().__init__()
        self.counter = Slotted()

    def forward(self, x):
        self.counter.count += 1  # finds: python_state
        return x * 2


class CountsByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        setattr(self, "calls", self.calls + 1)  # finds: python_state
        return x * 2


class CountsByIterator(nn.Module):
    def __init__(self):
        super().__init__()
        self.counter = itertools.count()

    def forward(self, x):
        next(self.counter)  # finds: python_state
        return x * 2


class CountsInClass(nn.Module):
    calls = 0

    def forward(self, x):
        type(self).calls += 1  # finds: python_state
        return x * 2


def timed(x, timings):
    y = x * 2
    timings.append(time.perf_counter())  # finds: python_state
    z = y + 1
    return z


def note(items, value):
    items.append(value)  # finds: python_state


def noted_in_helper(x, notes):
    y = x * 2
    note(notes, y)
    return y


def lengthened(logits, tokens):
    chosen = logits.argmax(-1)
    tokens = torch.cat([tokens, chosen[:, None]], -1)  # finds: python_state
    return tokens


def lengthened_ids(logits, input_ids):
    chosen = logits.argmax(-1)
    return torch.cat((input_ids, chosen[:, None]), dim=-1), chosen  # finds: python_state


class Slots:
    def __init__(self):
        self.positions = np.zeros(2, dtype=np.int64)
        self.scale = np.array([1.0, np.nan])


class CountsInArray(nn.Module):
    def __init__(self):
        super().__init__()
        self.slots = Slots()
        self.calls = np.int64(0)

    def forward(self, x):
        self.slots.positions[0] += 1  # finds: python_state
        self.calls += 1  # finds: python_state
        return x * 2


CASES = {
    "remembered_in_module": lambda device: (torch.randn(4, device=device),),
    "mask_of_default": lambda device: (torch.randn(4, device=device),),
    "KeepsHistory": lambda device: ((8,), (torch.randn(2, 8, device=device),)),
    "CountsCalls": lambda device: ((8,), (torch.randn(2, 8, device=device),)),
    "GrowingCache": lambda device: ((8,), (torch.randn(1, 1, 8, device=device),)),
    "GrowingMask": lambda device: ((), (torch.randn(2, 8, device=device),)),
    "CacheByName": lambda device: ((), (torch.randn(2, 8, device=device),)),
    "ListOfLayersCache": lambda device: ((8,), (torch.randn(1, 1, 8, device=device),)),
    "AppendsByAlias": lambda device: ((8,), (torch.randn(2, 8, device=device),)),
    "AppendsInHelper": lambda device: ((), (torch.randn(2, 8, device=device),)),
    "module_of_file": lambda device: (torch.randn(2, 8, device=device),),
    "CountsInSlot": lambda device: ((), (torch.randn(2, 8, device=device),)),
    "CountsByName": lambda device: ((), (torch.randn(2, 8, device=device),)),
    "CountsByIterator": lambda device: ((), (torch.randn(2, 8, device=device),)),
    "CountsInClass": lambda device: ((), (torch.randn(2, 8, device=device),)),
    "lengthened": lambda device: (torch.randn(1, 16, device=device), torch.ones(1, 3, dtype=torch.long, device=device)),
    "lengthened_ids": lambda device: (torch.randn(1, 16, device=device), torch.ones(1, 3, dtype=torch.long, device=device)),
    "CountsInArray": lambda device: ((), (torch.randn(2, 8, device=device),)),
    "timed": lambda device: (torch.randn(2, 8, device=device), []),
    "noted_in_helper": lambda device: (torch.randn(2, 8, device=device), []),
}
