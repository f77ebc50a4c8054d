"""Steps for the doctor's command line, good and bad."""

import os
import time

import torch
from torch import nn


def inputs(device):
    return torch.ones(2, 8, device=device), torch.tensor([3, 2], device=device)


def nothing(device):
    return ()


def clean(x, lengths):
    return x * 2 + lengths.view(2, 1)


def branches(x, lengths):
    if lengths.max() > 2:
        x = x * 2
    for _ in range(lengths[0]):
        x = x[:, : lengths[1]]
    return x


def raises(x, lengths):
    raise ValueError(f"no weights\nfor {x.shape}")


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
