"""Values of device tensors that the host reads, openly or hidden."""

import io
import logging
import math
import pickle

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def scaled_by_peak(x):
    peak = x.abs().max().item()  # finds: host_read
    return x / peak


def kept_lengths(x, lengths):
    sizes = lengths.tolist()  # finds: host_read
    return x * len(sizes)


def best_on_host(logits):
    return logits.argmax(dim=-1).cpu()  # finds: host_read


def best_by_name(logits):
    return logits.argmax(dim=-1).to("cpu")  # finds: host_read


def clipped_if_large(x):
    if (x.abs() > 10).any():  # finds: host_read
        x = x.clamp(-10, 10)
    return x * 2


def halved_until_small(x):
    while x.norm() > 1.0:  # finds: host_read
        x = x * 0.5
    return x


def asserted_finite(x):
    assert torch.isfinite(x).all(), "not finite"  # finds: host_read
    return x + 1


def printed_mean(x):
    print("mean", x.mean())  # finds: host_read
    return x - x.mean()


def formatted_sum(x):
    label = f"sum {x.sum()}"  # finds: host_read
    return x, label


def numpy_argmax(logits):
    values = logits.detach().cpu().numpy()  # finds: host_read
    return int(np.argmax(values))


def rounded_frames(ratio, x):
    frames = int(ratio * 4)  # finds: host_read
    return x.repeat(1, frames)


def float_step(x, dt):
    step = float(dt)  # finds: host_read
    return x + step * x.sin()


def counted_loop(x, count):
    for _ in range(count):  # finds: host_read
        x = x * 1.5
    return x


def sliced_by_tensor(x, t):
    return x[:, :t].sum(dim=1)  # finds: host_read


def positions_by_tensor(x, t):
    ticks = torch.arange(0, t, device=x.device)  # finds: host_read
    return x.sum() + ticks.sum()


def branch_on_count(x, mask):
    count = mask.sum()
    if count > 0:  # finds: host_read
        x = x / count
    return x


def stops_at_token(x, tokens):
    if 5 in tokens:  # finds: host_read
        x = x * 0
    return x


def same_as_last(x, last):
    if torch.equal(x, last):  # finds: host_read
        return last
    return x + last


def nearly_the_same(x, last):
    if torch.allclose(x, last):  # finds: host_read
        return last
    return x


def larger_of_both(x, gain):
    gain = max(gain, 1.0)  # finds: host_read
    return x * gain


def square_root_of_tensor(x, dim):
    return x / math.sqrt(dim)  # finds: host_read


def rows_one_by_one(x, lengths):
    rows = []
    for row, length in zip(x, lengths):
        rows.append(row[: int(length)].mean())  # finds: host_read
    return torch.stack(rows)


def read_twice(x):
    low = x.min().item()  # finds: host_read
    high = x.max().item()  # finds: host_read
    return (x - low) / (high - low)


def largest(x):
    return x.max().item()  # finds: host_read


def read_in_helper(x):
    return x / largest(x)


def not_any(x):
    if not (x < 0).any():  # finds: host_read
        return x.sqrt()
    return x.abs().sqrt()


def chosen_expert(x, experts, scores):
    return x @ experts[scores.argmax().item()]  # finds: host_read


def solves(a, b):
    return torch.linalg.solve(a, b)  # finds: host_read


def solves_without_a_check(a, b):
    return torch.linalg.solve_ex(a, b).result



def raises_on_one_line(x):
    if (x < 0).any(): raise ValueError("negative")  # finds: host_read
    return x.sqrt()


def generated_until_end(logits, table, eos):
    tokens = []
    while True:
        token = (logits @ table).argmax()
        tokens.append(token)
        if token.item() == eos:  # finds: host_read
            break
        logits = table[token]  # finds: host_read
    return torch.stack(tokens)


def counted_down(mask, x):
    left = mask.sum().item()  # finds: host_read
    while left > 0:
        x = x * 0.5
        mask = mask & (x > 0.1)
        left = mask.sum().item()  # finds: host_read
    return x


def until_error_is_small(x):
    error = 1.0
    while error > 0.1:
        x = x * 0.5
        error = x.norm().cpu()  # finds: host_read
    return x


def asked_forty_times(x):
    for _ in range(40):
        x = x * 0.5
        assert torch.isfinite(x).all()  # finds: host_read
        if x.isnan().any():  # finds: host_read
            raise ValueError("not a number")
    return x


def layer_by_tensor(x, layers, index):
    return layers[index](x)  # finds: host_read


def item_by_tensor(x, others, index):
    return x * others[index]  # finds: host_read


def one_of(x, t, wanted):
    return x * 2 if t in [wanted] else x  # finds: host_read


def in_order(values):
    return torch.stack(sorted(values))  # finds: host_read


def formatted_by_percent(x):
    return x, "%f" % x.mean()  # finds: host_read


def formatted_by_method(x):
    return x, "{}".format(x.mean())  # finds: host_read


def logged(x):
    logging.getLogger("corpus").warning("mean %s", x.mean())  # finds: host_read
    return x * 2


def asked_for_zero(x):
    return x * 2 if torch.is_nonzero(x.sum()) else x  # finds: host_read


def as_numpy(x):
    return np.asarray(x.cpu())  # finds: host_read


def split_by_lengths(x, lengths):
    return x.split(lengths.tolist())  # finds: host_read


def one_hot_of_unknown_size(tokens):
    return F.one_hot(tokens)  # finds: host_read


def packed(x, lengths):
    return nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False).data  # finds: host_read host_copy


def drawn_with_tensor_of_deviations(mean, deviation):
    return torch.normal(mean, deviation)  # finds: host_read


def drawn_from_distribution(mean, deviation):
    return torch.distributions.Normal(mean, deviation, validate_args=False).sample()  # finds: host_read


def counted_without_bounds(x):
    return torch.histc(x, bins=4)  # finds: host_read


def singular_values(x):
    return torch.linalg.svd(x).S  # finds: host_read


def eigenvalues(x):
    return torch.linalg.eigvalsh(x)  # finds: host_read


def exponential(x):
    return torch.linalg.matrix_exp(x)  # finds: host_read


def copied_out_and_waited(x, host):
    host.copy_(x * 2)  # finds: host_read
    return x


def copied_out_pageable(x, host):
    host.copy_(x * 2, non_blocking=True)  # finds: host_read
    return x



def chosen_by_cond(x):
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))  # finds: host_read



def filled_with_a_tensor(x, mask):
    x = x.masked_fill(mask, x.amin())  # finds: host_read
    x.masked_fill_(mask, x.amax())  # finds: host_read
    return x.index_fill(0, torch.zeros(1, dtype=torch.long, device=x.device), x.mean())  # finds: host_read


def one_of_many(tokens, stops):
    return torch.isin(tokens, stops)  # finds: host_read


def number_among_many(tokens):
    return torch.isin(3, tokens)  # finds: host_read


def saved(x):
    torch.save({"x": x, "half": [x / 2]}, io.BytesIO())  # finds: host_read
    return x * 2


def pickled(x):
    return x, len(pickle.dumps(x.sum()))  # finds: host_read


def inverted_and_checked(x):
    return torch.linalg.inv_ex(x, check_errors=True).inverse  # finds: host_read


def asserted_of_unknown(logits, bias):
    scores = logits @ logits.T
    assert not torch.isnan(scores).any(), "not a number"  # finds: host_read
    assert all(not torch.isinf(row).any() for row in (scores, logits))  # finds: host_read
    if bias is None or not scores.isfinite().all():  # finds: host_read
        scores = scores.nan_to_num()
    return scores.amax().item()  # finds: host_read


CASES = {
    "asserted_of_unknown": lambda device: (torch.randn(128, 64, device=device), 0),
    "number_among_many": lambda device: (torch.arange(16, device=device),),
    "scaled_by_peak": lambda device: (torch.randn(4, device=device),),
    "kept_lengths": lambda device: (torch.randn(2, 4, device=device), torch.tensor([2, 3], device=device)),
    "best_on_host": lambda device: (torch.randn(2, 4, device=device),),
    "best_by_name": lambda device: (torch.randn(2, 4, device=device),),
    "clipped_if_large": lambda device: (torch.randn(4, device=device),),
    "halved_until_small": lambda device: (torch.ones(4, device=device),),
    "asserted_finite": lambda device: (torch.ones(4, device=device),),
    "printed_mean": lambda device: (torch.ones(4, device=device),),
    "formatted_sum": lambda device: (torch.ones(4, device=device),),
    "numpy_argmax": lambda device: (torch.randn(4, device=device),),
    "rounded_frames": lambda device: (torch.tensor(0.5, device=device), torch.randn(1, 4, device=device)),
    "float_step": lambda device: (torch.randn(4, device=device), torch.tensor(0.1, device=device)),
    "counted_loop": lambda device: (torch.randn(4, device=device), torch.tensor(2, device=device)),
    "sliced_by_tensor": lambda device: (torch.randn(2, 4, device=device), torch.tensor(2, device=device)),
    "positions_by_tensor": lambda device: (torch.randn(2, 4, device=device), torch.tensor(2, device=device)),
    "branch_on_count": lambda device: (torch.randn(4, device=device), torch.ones(4, dtype=torch.bool, device=device)),
    "stops_at_token": lambda device: (torch.randn(4, device=device), torch.arange(4, device=device)),
    "same_as_last": lambda device: (torch.randn(4, device=device), torch.randn(4, device=device)),
    "nearly_the_same": lambda device: (torch.randn(4, device=device), torch.randn(4, device=device)),
    "larger_of_both": lambda device: (torch.randn(4, device=device), torch.tensor(2.0, device=device)),
    "square_root_of_tensor": lambda device: (torch.randn(4, device=device), torch.tensor(4.0, device=device)),
    "rows_one_by_one": lambda device: (torch.randn(2, 4, device=device), torch.tensor([2, 3], device=device)),
    "read_twice": lambda device: (torch.randn(4, device=device),),
    "read_in_helper": lambda device: (torch.randn(4, device=device),),
    "not_any": lambda device: (torch.ones(4, device=device),),
    "chosen_expert": lambda device: (torch.randn(2, 4, device=device), torch.randn(3, 4, 4, device=device), torch.randn(3, device=device)),
    "solves": lambda device: (torch.eye(4, device=device), torch.ones(4, 1, device=device)),
    "solves_without_a_check": lambda device: (torch.eye(4, device=device), torch.ones(4, 1, device=device)),
    "raises_on_one_line": lambda device: (torch.ones(5000, device=device),),
    "generated_until_end": lambda device: (torch.randn(8, device=device), torch.randn(8, 8, device=device), 5),
    "counted_down": lambda device: (torch.ones(5000, dtype=torch.bool, device=device), torch.ones(5000, device=device)),
    "until_error_is_small": lambda device: (torch.ones(5000, device=device),),
    "asked_forty_times": lambda device: (torch.ones(5000, device=device),),
    "layer_by_tensor": lambda device: (torch.randn(2, 8, device=device), nn.ModuleList([nn.Identity(), nn.ReLU()]), torch.tensor(1, device=device)),
    "item_by_tensor": lambda device: (torch.randn(2, 8, device=device), [torch.randn(8, device=device)] * 2, torch.tensor(1, device=device)),
    "one_of": lambda device: (torch.randn(2, 8, device=device), torch.tensor(1, device=device), torch.tensor(2, device=device)),
    "in_order": lambda device: ([torch.tensor(2, device=device), torch.tensor(1, device=device)],),
    "formatted_by_percent": lambda device: (torch.randn(2, 8, device=device),),
    "formatted_by_method": lambda device: (torch.randn(2, 8, device=device),),
    "logged": lambda device: (torch.randn(2, 8, device=device),),
    "asked_for_zero": lambda device: (torch.randn(2, 8, device=device),),
    "as_numpy": lambda device: (torch.randn(2, 8, device=device),),
    "split_by_lengths": lambda device: (torch.randn(5, 8, device=device), torch.tensor([2, 3], device=device)),
    "one_hot_of_unknown_size": lambda device: (torch.arange(4, device=device),),
    "packed": lambda device: (torch.randn(5, 2, 8, device=device), torch.tensor([5, 3], device=device)),
    "drawn_with_tensor_of_deviations": lambda device: (torch.zeros(4, device=device), torch.ones(4, device=device)),
    "drawn_from_distribution": lambda device: (torch.zeros(4, device=device), torch.ones(4, device=device)),
    "counted_without_bounds": lambda device: (torch.rand(8, device=device),),
    "singular_values": lambda device: (torch.randn(4, 4, device=device),),
    "eigenvalues": lambda device: (torch.eye(4, device=device),),
    "exponential": lambda device: (torch.randn(4, 4, device=device),),
    "copied_out_and_waited": lambda device: (torch.randn(4, device=device), torch.empty(4, pin_memory=True)),
    "copied_out_pageable": lambda device: (torch.randn(4, device=device), torch.empty(4)),
    "chosen_by_cond": lambda device: (torch.ones(5000, device=device),),
    "filled_with_a_tensor": lambda device: (torch.randn(4, device=device), torch.ones(4, dtype=torch.bool, device=device)),
    "one_of_many": lambda device: (torch.arange(4, device=device), torch.arange(20, device=device)),
    "saved": lambda device: (torch.randn(4, device=device),),
    "pickled": lambda device: (torch.randn(4, device=device),),
    "inverted_and_checked": lambda device: (torch.eye(4, device=device),),
}
