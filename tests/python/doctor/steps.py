"""Steps for the doctor's command line, good and bad."""

import asyncio
import math
import os
import sys
import threading
import time

import numpy as np
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention


def inputs(device):
    return torch.ones(2, 8, device=device), torch.tensor([3, 2], device=device)


def nothing(device):
    return ()


def of_module_argument(device):
    return "cpu"


def clean(x, lengths):
    return x * 2 + lengths.view(2, 1)


def branches(x, lengths):
    if lengths.max() > 2:
        x = x * 2
    for _ in range(lengths[0]):
        x = x[:, : lengths[1]]
    return x


def second_of_two(x, lengths):
    if lengths is not None and not x.any():
        x = x * 2
    return x


def raises(x, lengths):
    raise ValueError(f"no weights\nfor {x.shape}")


def lists_much(x, lengths):
    return x.new_empty(1 << 25).tolist()


def asks_address(x, lengths):
    return x + x.data_ptr() % 16


def exits():
    raise SystemExit(3)


def endless():
    while True:
        time.sleep(0.01)


def needs_package():
    import surely_not_installed  # noqa: F401


def custom(x, lengths):
    y = x * lengths.max().item()
    return torch.ops.doctor_test.secret(y)


def huge():
    x = torch.zeros(1 << 40, device="cuda")
    host = torch.zeros(1 << 40)
    return (x + 1).sum(), host.numpy().shape


def host_of_gpu():
    return torch.cuda.is_available(), torch.cuda.get_device_name(), torch.zeros(1, device="cuda").device.type


def swallows(x, lengths):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass


def never_python():
    return sum(range(10**15))


def kills():
    os.kill(os.getpid(), 11)


def captures_itself(x, lengths):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * lengths.min().item()
    graph.replay()
    twice = torch.cuda.make_graphed_callables(lambda one: one * 2, (x,))
    torch.cuda.memory_summary()
    return twice(y), torch.Event("cuda").record(torch.Stream("cuda"))


def of_a_driver(x, lengths):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


class Decoder(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.scale = torch.full((size,), 0.5)

    def forward(self, x):
        return self.linear(x) * self.scale


def decoder_inputs(device):
    return (8,), (torch.ones(2, 8, device=device),)


def sets_environment(x, lengths):
    os.environ["TORCHDYNAMO_SUPPRESS_ERRORS"] = "1"
    return x


if not hasattr(torch.ops.doctor_test, "secret"):  # a test may have loaded this file before
    torch.library.define("doctor_test::secret", "(Tensor x) -> Tensor")


def launches(x, lengths):
    import triton
    import triton.language as tl

    @triton.jit
    def double(source, result, n: tl.constexpr):
        index = tl.arange(0, n)
        tl.store(result + index, tl.load(source + index) * 2)

    y = torch.zeros_like(x)
    double[(1,)](x, y, 16)
    return y.sum().item()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = None

    def forward(self, x, temperature):
        if self.cache is None:
            self.cache = x
        else:
            self.cache = torch.cat([self.cache, x], 1)
        x = self.cache.sum(1) / temperature
        if not x.any().item() and self.training:
            return x
        return x if x.max().item() > 1 else x / 2

    def token(self, x):
        print("logits", x.sum())
        return max(x[0])


def attention_inputs(device):
    return (), (torch.ones(1, 1, 8, device=device), 0.5)


def token_inputs(device):
    return (), (torch.ones(1, 8, device=device),)


def one_input(device):
    return torch.ones(1, 8, device=device)


def on_cpu(device):
    return torch.ones(2, 8), torch.tensor([3, 2])


def moves(x, lengths):
    places = torch.zeros(8).to(lengths.device)
    return x + places + torch.LongTensor([2]).to(x.device) + torch.tensor([1, lengths[0]], device=x.device)


def moves_later(x, lengths):
    places = torch.zeros(8)
    x = x + places.to(lengths.device)
    return [number * 2 for number in x.sum(1).tolist()]


class Unmoved(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("scale", torch.ones(8))
        self.listed = [nn.Linear(8, 8)]
        self.bias = torch.zeros(8)

    def forward(self, x):
        return self.listed[0](self.linear(x) * self.weight * self.scale) + self.bias


unmoved = Unmoved()


def of_unmoved(x, lengths):
    return unmoved(x)


class Moves(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.ones(8)

    def forward(self, x):
        self.table = self.table.to(x.device)
        return x + self.table


async def awaited(x, lengths):
    return lengths.max().item()


def wrong_shape(x, lengths):
    return x @ x


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(16, 8))
        self.position = 0

    def forward(self, frame):
        self.cache[self.position : self.position + 1] = frame
        self.position += 1
        return self.cache * torch.linspace(0, 1, 8, dtype=frame.dtype)


def with_host_argument(x, on_host):
    return x + on_host.sum()


def host_argument(device):
    return torch.ones(2, 8, device=device), torch.ones(3)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, x, position, cache):
        self.cache.index_copy_(0, position, x)
        cache.index_copy_(0, position, x)
        return self.cache.sum(0) + cache.sum(0)


def table_inputs(device):
    return (), (
        torch.ones(1, 8, device=device),
        torch.zeros(1, dtype=torch.long, device=device),
        torch.zeros(4, 8, device=device),
    )


def scalar_in_graph(x, lengths):
    torch._dynamo.config.capture_scalar_outputs = True
    return x * lengths.max().item()


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
table = torch.arange(8).to(DEVICE)


made = Decoder(8)


class Holder:
    def __init__(self):
        self.held = nn.Linear(8, 8)

    def __call__(self, x):
        return self.held(x)


def of_module(x, lengths):
    return x + table * (lengths.max().item() if DEVICE == "cuda" else 1)


def shares_memory(x, lengths):
    return torch.from_dlpack(x) * 2


if not hasattr(torch.ops.doctor_test, "strict"):
    torch.library.define("doctor_test::strict", "(Tensor x) -> Tensor")

    @torch.library.register_fake("doctor_test::strict")
    def _(x):
        raise RuntimeError("x must have three dimensions")


def custom_raises(x, lengths):
    return torch.ops.doctor_test.strict(x)


def cancelled(x, lengths):
    raise asyncio.CancelledError


def größer(x, lengths):
    return "größer", x.sum().item()


def note(x):
    os.getpgrp()
    return x + 1


def breaks(x, lengths):
    x = x * 2
    os.getppid(); torch._dynamo.graph_break()  # noqa: E702
    return note(x * 2) * 2


def breaks_at_once(x, lengths):
    os.getuid()
    return x + 1


def breaks_in_loop(x, lengths):
    for _ in range(2):
        x = x * 2
        os.getgid()
    return x


def yields(x, lengths):
    yield x * 2


def equal_lines(x, lengths):
    x = x + x.sum().item()
    y = x * 2
    x = x + x.sum().item()
    return x + y


def ends_process(x, lengths):
    x = x * lengths.max().item()
    os._exit(0)


def ends_process_of_fork(x, lengths):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return x * 2


def ends_process_in_thread(x, lengths):
    thread = threading.Thread(target=lambda: os._exit(4))
    thread.start()
    thread.join()
    return x


def closes_output(x, lengths):
    sys.stderr.close()
    return x


def without_output(x, lengths):
    sys.stdout = sys.stderr = None
    return x


class Textless(Exception):
    def __str__(self):
        raise RuntimeError


def raises_textless(x, lengths):
    x = x * lengths.max().item()
    raise Textless


def not_a_number(x, lengths):
    return x * float("nan")


def calls_torch(x, lengths):
    return torch.cat([torch.relu(x), x])


def argmax_on_cpu(x, lengths):
    values = x.cpu().numpy()
    return int(np.argmax(values))


def of_gru(x, lengths):
    return nn.GRU(8, 8, device=x.device)(x)[0]


def asks_attribute(x, lengths):
    return x.no_such_attribute


def trains(x, lengths):
    x = x.clone().requires_grad_()
    x.sum().backward()


def in_cases(x, lengths):
    match lengths.max().item():
        case 3:
            return x
    return x * 2


async def tensor_awaited(x, lengths):
    return x * 2


async def tensors_yielded(x, lengths):
    yield x * 2


def ends_process_below_python(x, lengths):
    import ctypes

    ctypes.CDLL(None)._exit(0)


def writes_below_python(x, lengths):
    os.write(1, b"not part of the report")
    os.system("echo nor this")
    return x


def allocates_much(x, lengths):
    return x, bytearray(1 << 60)


def conditional(x, lengths):
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))


def attends(x, lengths):
    q = x.view(1, 1, 1, 16)
    return flex_attention(q, q, q)


def unbounded(device):
    return torch.ones(64, 128, device=device), 3  # more than the doctor computes


def waits_for_number(x, wanted):
    while x.sum().item() in (wanted, wanted + 1):
        pass
    token = 0
    while token != wanted:
        x = x * 2
        token = x.argmax().item()
    return x


def decides_later(x, lengths):
    first = lengths.tolist()
    if first[0] > 2:
        x = x * 2
    is_quiet = (x.sum() < 0).cpu()
    if is_quiet:
        return x
    level = math.log10(x.amax())
    if level < -80:
        return x
    for length in lengths.tolist():
        if length == 0:
            x = x + 1
    table = torch.arange(lengths.max().item(), device=x.device)
    assert torch.all(table >= 0) and table.min() >= 0
    return x


def best_of_unknown(x, wanted):
    best = x.sum(1).cpu().numpy().argmax()
    if best == 0:
        return x
    count = x.long().sum(1).cpu().numpy()[0]
    return x * x.max().item() if count else x


def least_squares(x, lengths):
    return torch.linalg.lstsq(x, x).solution


def drawn(x, generator):
    return x + torch.randn(x.shape, device=x.device, generator=generator)


def with_generator(device):
    return torch.ones(2, 8, device=device), torch.Generator(device=device)


def with_registered_generator(device):
    x, generator = with_generator(device)
    torch.cuda.CUDAGraph().register_generator_state(generator)
    return x, generator
