"""Tensors born on the CPU, and copies to the device in the step."""

import numpy as np
import torch
from torch import nn


def counted_without_device(x):
    return x + torch.arange(x.shape[-1])  # finds: cpu_tensor


def scaled_by_host_scalar(x):
    half = torch.tensor(0.5)  # finds: cpu_tensor
    return x * half


def zeros_moved(x):
    state = torch.zeros(x.shape[0], 4).to(x.device)  # finds: cpu_tensor
    return torch.cat([x, state], dim=-1)


def causal_mask_on_host(scores):
    mask = torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool)  # finds: cpu_tensor
    mask = mask.tril()
    return scores.masked_fill(~mask.to(scores.device), float("-inf"))  # finds: host_copy


def window_from_numpy(x):
    window = torch.from_numpy(np.hanning(x.shape[-1]).astype(np.float32))  # finds: cpu_tensor
    return x * window.to(x.device)  # finds: host_copy


def token_from_list(x, table):
    token = torch.tensor([[3]], device=x.device)  # finds: host_copy
    return x + table[token]


def weight_as_tensor(x):
    weight = torch.as_tensor(0.5, device=x.device, dtype=x.dtype)  # finds: host_copy
    return x * weight


def weight_to_cuda(x):
    weight = torch.linspace(0, 1, x.shape[-1])  # finds: cpu_tensor
    return x * weight.cuda()  # finds: host_copy


def rows_by_list(x):
    return x[[0, 1]] * 2  # finds: host_copy


def columns_by_array(x):
    return x[:, np.array([0, 3, 1])]  # finds: host_copy


def written_by_list(x):
    x = x.clone()
    x[:, [0, 2]] = 0.0  # finds: host_copy
    return x


def copied_into_slot(x, slot):
    slot.copy_(torch.full((4,), 2.0))  # finds: cpu_tensor
    return x + slot


class Unregistered(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = torch.ones(dim)  # finds: cpu_tensor

    def forward(self, x):
        return x * self.scale


class LazilyMoved(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.table = torch.randn(16, dim)  # finds: cpu_tensor

    def forward(self, x):
        self.table = self.table.to(x.device)  # finds: cpu_tensor
        return x + self.table[: x.shape[1]]


class NoiseMadeOnce(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.noise = torch.randn(1, dim)  # finds: cpu_tensor

    def forward(self, x):
        return self.linear(x) + self.noise


class TensorsInAList(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scales = [torch.full((dim,), float(level)) for level in range(2)]  # finds: cpu_tensor

    def forward(self, x):
        for scale in self.scales:
            x = x * scale.to(x.device)  # finds: host_copy
        return x



def literal_of_its_type(x):
    return x + x.new_tensor([0.0, 1.0])  # finds: host_copy


def array_to_device(x, array):
    return x * torch.as_tensor(array, device=x.device)  # finds: host_copy


def typed_constructor(x):
    return x + torch.Tensor([0.5])  # finds: cpu_tensor


def met_on_the_cpu(x):
    window = torch.hann_window(8)  # finds: cpu_tensor
    ramp = torch.arange(8)  # finds: cpu_tensor
    both = window * ramp
    return x * (both + torch.ones(8)).to(x.device)  # finds: cpu_tensor host_copy


class MetInInit(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.window = torch.hann_window(size)  # finds: cpu_tensor

    def forward(self, x):
        ramp = torch.arange(8)  # finds: cpu_tensor
        return x + self.window * ramp


def chosen_or_zero(x, mask):
    return torch.where(mask, x, torch.tensor(0.0))  # finds: cpu_tensor


def pinned_and_waited(x, host):
    return x + host.to(x.device)  # finds: host_copy


def pinned_part_not_waited(x, host):
    return x + host[1:].to(x.device, non_blocking=True)  # finds: host_copy


def written_through_indices(x, banned):
    x[:, banned] = float("-inf")  # finds: host_copy
    return x


def one_element_written(x, mask):
    x[0] = 0.5  # finds: host_copy
    mask[1, 2] = True  # finds: host_copy
    return x, mask


def written_where_indexed(x, at):
    x[:, at] = torch.tensor(0.0)  # finds: cpu_tensor
    return x


def split_by_argument(x, at):
    return torch.cat([part * 2 for part in x.tensor_split(at, dim=-1)], dim=-1)  # finds: host_copy


def split_by_tensor(x):
    at = torch.tensor([1, 3])  # finds: cpu_tensor
    low, _, _ = torch.tensor_split(x, tensor_indices_or_sections=at, dim=1)
    return low


def split_by_lengths_of_gpu(x, lengths):
    return x.tensor_split(lengths.cumsum(0).cpu())  # finds: host_read


CASES = {
    "one_element_written": lambda device: (torch.randn(4, device=device), torch.zeros(2, 3, dtype=torch.bool, device=device)),
    "written_where_indexed": lambda device: (torch.randn(2, 8, device=device), torch.tensor([0, 3], device=device)),
    "split_by_argument": lambda device: (torch.randn(2, 8, device=device), torch.tensor([2, 5])),
    "split_by_tensor": lambda device: (torch.randn(2, 8, device=device),),
    "split_by_lengths_of_gpu": lambda device: (torch.randn(8, device=device), torch.tensor([2, 5], device=device)),
    "counted_without_device": lambda device: (torch.randn(2, 4, device=device),),
    "scaled_by_host_scalar": lambda device: (torch.randn(2, 4, device=device),),
    "zeros_moved": lambda device: (torch.randn(2, 4, device=device),),
    "causal_mask_on_host": lambda device: (torch.randn(4, 4, device=device),),
    "window_from_numpy": lambda device: (torch.randn(2, 8, device=device),),
    "token_from_list": lambda device: (torch.randn(1, 1, 8, device=device), torch.randn(16, 8, device=device)),
    "weight_as_tensor": lambda device: (torch.randn(2, 8, device=device),),
    "weight_to_cuda": lambda device: (torch.randn(2, 8, device=device),),
    "rows_by_list": lambda device: (torch.randn(2, 4, device=device),),
    "columns_by_array": lambda device: (torch.randn(2, 4, device=device),),
    "written_by_list": lambda device: (torch.randn(2, 4, device=device),),
    "copied_into_slot": lambda device: (torch.randn(4, device=device), torch.zeros(4, device=device)),
    "Unregistered": lambda device: ((8,), (torch.randn(2, 8, device=device),)),
    "LazilyMoved": lambda device: ((8,), (torch.randn(1, 4, 8, device=device),)),
    "NoiseMadeOnce": lambda device: ((8,), (torch.randn(2, 8, device=device),)),
    "TensorsInAList": lambda device: ((8,), (torch.randn(2, 8, device=device),)),
    "literal_of_its_type": lambda device: (torch.randn(4, 2, device=device),),
    "array_to_device": lambda device: (torch.randn(4, device=device), np.ones(4, np.float32)),
    "typed_constructor": lambda device: (torch.randn(4, device=device),),
    "met_on_the_cpu": lambda device: (torch.randn(2, 8, device=device),),
    "MetInInit": lambda device: ((8,), (torch.randn(2, 8, device=device),)),
    "chosen_or_zero": lambda device: (torch.randn(4, device=device), torch.ones(4, dtype=torch.bool, device=device)),
    "pinned_and_waited": lambda device: (torch.randn(4, device=device), torch.ones(4).pin_memory()),
    "pinned_part_not_waited": lambda device: (torch.randn(4, device=device), torch.ones(5).pin_memory()),
    "written_through_indices": lambda device: (torch.randn(2, 8, device=device), torch.tensor([0, 3], device=device)),
}
