"""What a graph can capture. No line has a finding."""

import asyncio
import copy
import queue
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def normalised(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(q, position, inv_freq):
    angles = position[:, None].float() * inv_freq[None]
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    half = q.shape[-1] // 2
    return q * cos + torch.cat([-q[..., half:], q[..., :half]], dim=-1) * sin


def scored_in_place(x, mask):
    x = x.clone()
    x[mask] = 0.0
    return x


def top_k_filtered(logits):
    kth = logits.topk(4, dim=-1).values[..., -1:]
    return torch.where(logits < kth, torch.full_like(logits, float("-inf")), logits)


def noised(x):
    return F.dropout(x + torch.randn_like(x) + torch.rand(x.shape, device=x.device), p=0.1, training=True)


def shape_decides(x):
    if x.shape[1] > 2 and x.dim() == 2 and x.is_floating_point():
        x = x[:, : x.shape[1] // 2]
    return x.numel() * x


def optional_mask(x, mask=None):
    if mask is None:
        mask = x.new_ones(x.shape)
    return x * mask


def same_device(x):
    return x.to(x.device).to(torch.float32).contiguous() + torch.zeros(4, device=x.device)


def layers_in_a_list(x, first, second):
    seen = []
    for weight in (first, second):
        x = (x @ weight).relu()
        seen.append(x)
    return torch.stack(seen).mean(dim=0)


def written_by_index(cache, k, position):
    cache.index_copy_(1, position, k)
    return cache.sum(dim=1)


def embedded(tokens, table):
    return F.embedding(tokens, table) + table.new_zeros(1)


def scattered(x, tokens):
    return torch.zeros(x.shape[0], 16, device=x.device).scatter_add_(1, tokens, x)


def attended(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def windows_unfolded(x):
    return F.pad(x, (2, 2)).unfold(-1, 4, 2).mean(dim=-1)


def tempered_by_tensor(logits, temperature):
    return (logits / temperature).softmax(dim=-1)


def chunked_by_shape(x):
    return torch.cat([part * 2 for part in x.split(2, dim=-1)], dim=-1)


def gathered_beams(states, beams):
    return states.gather(0, beams[:, None].expand(-1, states.shape[1]))


def mixed(a, b):
    return torch.einsum("bij,bjk->bik", a, b).half().float() / len(a)


def rounded_to_steps(x):
    step = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / step).round().clamp(-128, 127) * step


def named_parts(x):
    parts = {"low": x.clamp(max=0), "high": x.clamp(min=0)}
    parts["sum"] = parts["low"] + parts["high"]
    return parts


class Convolutions(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.down = nn.Conv1d(channels, channels, 4, stride=2, padding=1)
        self.norm = nn.BatchNorm1d(channels)
        self.up = nn.ConvTranspose1d(channels, channels, 4, stride=2, padding=1)

    def forward(self, x):
        return self.up(F.gelu(self.norm(self.down(x))))


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(dim, 2, dim * 2, batch_first=True)

    def forward(self, x, mask):
        return self.layer(x, src_key_padding_mask=mask)


class Recurrent(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.cell = nn.GRUCell(dim, dim)
        self.register_buffer("hidden", torch.zeros(1, dim), persistent=False)

    def forward(self, x):
        self.hidden.copy_(self.cell(x, self.hidden))
        return self.hidden * 2


class CountsOnDevice(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        self.steps += 1
        return self.linear(x) * self.steps


def attended_by_flash(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def copied_deeply(x):
    return copy.deepcopy(x) * 2


class StaticCache(nn.Module):
    def __init__(self, dim, length):
        super().__init__()
        self.scale = dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.register_buffer("keys", torch.zeros(1, length, dim), persistent=False)
        self.register_buffer("values", torch.zeros(1, length, dim), persistent=False)

    def forward(self, x, position):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        self.keys[:, position] = k
        self.values[:, position] = v
        scores = q @ self.keys.transpose(1, 2) * self.scale
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=x.device) > position, float("-inf"))
        return scores.softmax(dim=-1) @ self.values



class WithLstm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class WithGru(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gru = nn.GRU(dim, dim)

    def forward(self, x):
        return self.gru(x)[0]


class MovesItsList(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scales = [torch.ones(dim), torch.full((dim,), 2.0)]

    def _apply(self, fn, recurse=True):
        self.scales = [fn(scale) for scale in self.scales]
        return super()._apply(fn, recurse)

    def forward(self, x):
        return x * self.scales[0] + self.scales[1]


class ParentOfThat(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = MovesItsList(dim)

    def forward(self, x):
        return self.inner(x)


class TiedWeights(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embed = nn.Embedding(16, dim)
        self.head = nn.Linear(dim, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x)) * (1.0 if self.head.weight is self.embed.weight else x.sum().item())


def autocast(x, weight):
    with torch.autocast("cuda", dtype=torch.float16):
        return x @ weight


def marked_for_profiler(x):
    torch.cuda.nvtx.range_push("double")
    x = x * 2
    torch.cuda.nvtx.range_pop()
    return x


def waits_outside_of_capture(x):
    y = x * 2
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    return y


def one_hot_of_known_size(tokens):
    return F.one_hot(tokens, 8)


def one_drawn(probabilities):
    return torch.multinomial(probabilities, 1)


def copied_out_pinned(x, host):
    host.copy_(x * 2, non_blocking=True)
    return x


def part_copied_out_pinned(x, host):
    host[1:3].copy_(x[1:3], non_blocking=True)
    return x


def forked_and_joined(x, side):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
        done = side.record_event()
    y.record_stream(side)
    z = x * 3
    torch.cuda.current_stream().wait_event(done)
    return y + z


def forked_within(x, side, other):
    ready = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(side):
        side.wait_event(ready)
        y = x * 2
    other.wait_stream(side)
    with torch.cuda.stream(other):
        z = y * 3
    torch.cuda.current_stream().wait_stream(other)
    return z


def many_asserts(x):
    for _ in range(40):
        assert x.shape[0] > 1
        x = x + 1
    return x


def renormed(tokens, table):
    return F.embedding(tokens, table, max_norm=1.0)


def counted_within_bounds(x):
    return torch.histc(x, bins=4, min=0, max=1)


def banned_by_index_fill(x, banned):
    return x.index_fill(1, banned, float("-inf"))


def written_by_tensor_through_indices(x, banned, value):
    x[:, banned] = value
    return x


class DrawnBeforeTheStep(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.kv_proj = nn.Linear(dim, dim)
        self.scale = random.random()

    def forward(self, x):
        return self.kv_proj(x) * self.scale if hasattr(self.kv_proj, "bias") else x


def extended_copy(x, lengths):
    lengths = lengths + [x.shape[0]]
    return x * len(lengths)


def slices_and_rows_written(x, mask):
    x[:1] = 0.5
    x[1:] = x[0]
    mask[0] = True
    x.masked_fill_(mask[0], 0.0)
    return x.masked_fill(mask[1], float("-inf"))


def one_of_few(tokens, stops):
    return torch.isin(tokens, stops)


def one_of_a_number(tokens):
    return torch.isin(tokens, 3) | torch.isin(3, tokens)


class HandsOver(nn.Module):
    def __init__(self):
        super().__init__()
        self.waiting, self.ready = queue.Queue(), asyncio.Queue()

    def forward(self, x):
        self.waiting.put(x * 2)
        self.ready.put_nowait(self.waiting.get())
        return self.ready.get_nowait() + 1


def split_by_list(x):
    return x.tensor_split([2, 5], dim=-1)[0] * 2


def copied_shallowly(x):
    return copy.copy(x) * 2


def masked_by_kind_of_cache(x, past_key_values):
    return x.tril() if hasattr(past_key_values, "is_sliding") else x


def doubled_for_guidance(tokens):
    return torch.cat([tokens, tokens])


CASES = {
    "doubled_for_guidance": lambda device: (torch.ones(1, 3, dtype=torch.long, device=device),),
    "normalised": lambda device: (torch.randn(2, 8, device=device), torch.ones(8, device=device)),
    "rotated": lambda device: (torch.randn(3, 8, device=device), torch.arange(3, device=device), torch.rand(4, device=device)),
    "scored_in_place": lambda device: (torch.randn(4, device=device), torch.ones(4, dtype=torch.bool, device=device)),
    "top_k_filtered": lambda device: (torch.randn(2, 8, device=device),),
    "noised": lambda device: (torch.randn(2, 8, device=device),),
    "shape_decides": lambda device: (torch.randn(2, 8, device=device),),
    "optional_mask": lambda device: (torch.randn(2, 8, device=device),),
    "same_device": lambda device: (torch.randn(2, 4, device=device),),
    "layers_in_a_list": lambda device: (torch.randn(2, 8, device=device), torch.randn(8, 8, device=device), torch.randn(8, 8, device=device)),
    "written_by_index": lambda device: (torch.zeros(1, 8, 4, device=device), torch.randn(1, 1, 4, device=device), torch.tensor([3], device=device)),
    "embedded": lambda device: (torch.arange(4, device=device), torch.randn(16, 8, device=device)),
    "scattered": lambda device: (torch.randn(2, 3, device=device), torch.ones(2, 3, dtype=torch.long, device=device)),
    "attended": lambda device: tuple(torch.randn(1, 2, 4, 8, device=device) for _ in range(3)),
    "windows_unfolded": lambda device: (torch.randn(2, 8, device=device),),
    "tempered_by_tensor": lambda device: (torch.randn(2, 8, device=device), torch.tensor(0.7, device=device)),
    "chunked_by_shape": lambda device: (torch.randn(2, 8, device=device),),
    "gathered_beams": lambda device: (torch.randn(3, 8, device=device), torch.tensor([2, 0, 1], device=device)),
    "mixed": lambda device: (torch.randn(2, 3, 4, device=device), torch.randn(2, 4, 3, device=device)),
    "rounded_to_steps": lambda device: (torch.randn(2, 8, device=device),),
    "named_parts": lambda device: (torch.randn(2, 8, device=device),),
    "Convolutions": lambda device: ((4,), (torch.randn(1, 4, 16, device=device),)),
    "Encoder": lambda device: ((8,), (torch.randn(1, 4, 8, device=device), torch.zeros(1, 4, dtype=torch.bool, device=device))),
    "Recurrent": lambda device: ((8,), (torch.randn(1, 8, device=device),)),
    "CountsOnDevice": lambda device: ((8,), (torch.randn(1, 8, device=device),)),
    "attended_by_flash": lambda device: tuple(torch.randn(1, 2, 4, 64, dtype=torch.float16, device=device) for _ in range(3)),
    "copied_deeply": lambda device: (torch.randn(2, 8, device=device),),
    "StaticCache": lambda device: ((8, 16), (torch.randn(1, 1, 8, device=device), torch.tensor([3], device=device))),
    "WithLstm": lambda device: ((8,), (torch.randn(2, 5, 8, device=device),)),
    "WithGru": lambda device: ((8,), (torch.randn(5, 2, 8, device=device),)),
    "ParentOfThat": lambda device: ((8,), (torch.randn(2, 8, device=device),)),
    "TiedWeights": lambda device: ((8,), (torch.arange(4, device=device),)),
    "autocast": lambda device: (torch.randn(2, 8, device=device), torch.randn(8, 8, device=device)),
    "marked_for_profiler": lambda device: (torch.randn(2, 8, device=device),),
    "waits_outside_of_capture": lambda device: (torch.randn(2, 8, device=device),),
    "one_hot_of_known_size": lambda device: (torch.arange(4, device=device),),
    "one_drawn": lambda device: (torch.rand(2, 8, device=device),),
    "copied_out_pinned": lambda device: (torch.randn(4, device=device), torch.empty(4, pin_memory=True)),
    "part_copied_out_pinned": lambda device: (torch.randn(4, device=device), torch.empty(4, pin_memory=True)),
    "forked_and_joined": lambda device: (torch.randn(4, device=device), torch.cuda.Stream(device)),
    "forked_within": lambda device: (torch.randn(4, device=device), torch.cuda.Stream(device), torch.cuda.Stream(device)),
    "many_asserts": lambda device: (torch.randn(4, device=device),),
    "renormed": lambda device: (torch.arange(4, device=device), torch.randn(16, 8, device=device)),
    "counted_within_bounds": lambda device: (torch.rand(8, device=device),),
    "banned_by_index_fill": lambda device: (torch.randn(2, 8, device=device), torch.tensor([0, 3], device=device)),
    "written_by_tensor_through_indices": lambda device: (torch.randn(2, 8, device=device), torch.tensor([0, 3], device=device), torch.zeros((), device=device)),
    "DrawnBeforeTheStep": lambda device: ((8,), (torch.randn(2, 8, device=device),)),
    "slices_and_rows_written": lambda device: (torch.randn(3, device=device), torch.zeros(2, 3, dtype=torch.bool, device=device)),
    "one_of_few": lambda device: (torch.arange(4, device=device), torch.arange(3, device=device)),
    "one_of_a_number": lambda device: (torch.arange(4, device=device),),
    "HandsOver": lambda device: ((), (torch.randn(2, 8, device=device),)),
    "split_by_list": lambda device: (torch.randn(2, 8, device=device),),
    "copied_shallowly": lambda device: (torch.randn(2, 8, device=device),),
    "masked_by_kind_of_cache": lambda device: (torch.randn(4, 4, device=device), []),
    "extended_copy": lambda device: (torch.randn(2, 8, device=device), []),
}
