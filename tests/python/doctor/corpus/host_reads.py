"""Values of device tensors that the host reads, openly or hidden."""

import math

import numpy as np
import torch


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


CASES = {
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
}
