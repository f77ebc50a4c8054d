"""Shapes that depend on values."""

import torch


def marked_positions(mask):
    return mask.nonzero()  # finds: dynamic_shape


def kept_rows(x, mask):
    return x[mask] * 2  # finds: dynamic_shape


def distinct_tokens(tokens):
    return torch.unique(tokens)  # finds: dynamic_shape


def positive_values(x):
    return torch.masked_select(x, x > 0)  # finds: dynamic_shape


def where_of_one(x):
    (found,) = torch.where(x > 0)  # finds: dynamic_shape
    return x.index_select(0, found)


def argwhere_pairs(x):
    return torch.argwhere(x > 0).float()  # finds: dynamic_shape


def without_repeats(tokens):
    return torch.unique_consecutive(tokens, dim=-1)  # finds: dynamic_shape


def spread_by_duration(x, durations):
    return torch.repeat_interleave(x, durations, dim=0)  # finds: dynamic_shape


def copied_where_marked(x, y, mask):
    x = x.clone()
    x[mask] = y[mask]  # finds: dynamic_shape
    return x


def first_end(tokens):
    ends = (tokens == 2).nonzero(as_tuple=True)[0]  # finds: dynamic_shape
    return ends.float().mean()



def added_where_marked(x, mask):
    x[mask] += 1  # finds: dynamic_shape
    return x


def column_of_marked(x, mask):
    return x[mask, 0]  # finds: dynamic_shape


def sparse(x):
    return x.to_sparse()  # finds: dynamic_shape


def cleared_by_mask_and_indices(x, rows, columns):
    x[rows, columns] = 0.0  # finds: dynamic_shape host_copy
    return x


CASES = {
    "marked_positions": lambda device: (torch.ones(4, dtype=torch.bool, device=device),),
    "kept_rows": lambda device: (torch.randn(4, 3, device=device), torch.ones(4, dtype=torch.bool, device=device)),
    "distinct_tokens": lambda device: (torch.arange(4, device=device),),
    "positive_values": lambda device: (torch.randn(4, device=device),),
    "where_of_one": lambda device: (torch.randn(4, device=device),),
    "argwhere_pairs": lambda device: (torch.randn(4, 3, device=device),),
    "without_repeats": lambda device: (torch.arange(4, device=device),),
    "spread_by_duration": lambda device: (torch.randn(3, 4, device=device), torch.tensor([1, 2, 1], device=device)),
    "copied_where_marked": lambda device: (torch.randn(4, device=device), torch.randn(4, device=device), torch.ones(4, dtype=torch.bool, device=device)),
    "first_end": lambda device: (torch.arange(4, device=device),),
    "added_where_marked": lambda device: (torch.randn(4, 3, device=device), torch.ones(4, dtype=torch.bool, device=device)),
    "column_of_marked": lambda device: (torch.randn(4, 3, device=device), torch.ones(4, dtype=torch.bool, device=device)),
    "sparse": lambda device: (torch.randn(4, 3, device=device),),
    "cleared_by_mask_and_indices": lambda device: (
        torch.randn(4, 3, device=device),
        torch.tensor([True, False, True, False], device=device),
        torch.tensor([0, 2], device=device),
    ),
}
