"""Caches asked what they are, or made without their constructor."""

import torch
from transformers import DynamicCache


class StepCache:
    def __init__(self, device):
        self.keys = torch.zeros(1, 4, 8, device=device)

    def reset(self):
        self.keys.zero_()

    def update(self, new):
        self.keys.copy_(new)


def reset_if_it_can(x, cache):
    if hasattr(cache, "reset"):  # finds: duck_typed_cache
        cache.reset()
    return x + cache.keys.sum()


def cache_without_constructor(x):
    cache = object.__new__(DynamicCache)  # finds: duck_typed_cache
    cache._key_cache = [x]  # finds: duck_typed_cache
    return cache._key_cache[0] * 2  # finds: duck_typed_cache


def keys_by_attribute(x, cache):
    keys = getattr(cache, "key_cache", None)  # finds: duck_typed_cache
    return x * 2 if keys is None else x


def updated_if_it_can(x, past_key_values):
    if hasattr(past_key_values, "update"):  # finds: duck_typed_cache
        past_key_values.update(x)
    return x * past_key_values.keys


CASES = {
    "reset_if_it_can": lambda device: (torch.randn(4, device=device), StepCache(device)),
    "cache_without_constructor": lambda device: (torch.randn(1, 4, device=device),),
    "keys_by_attribute": lambda device: (torch.randn(4, device=device), StepCache(device)),
    "updated_if_it_can": lambda device: (torch.randn(1, 4, 8, device=device), StepCache(device)),
}
