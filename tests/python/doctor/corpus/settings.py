"""Settings that hide a fault."""

import os

import torch
import torch._dynamo.config as dc


def errors_suppressed(x):
    torch._dynamo.config.suppress_errors = True  # finds: hidden_setting
    return x * 2


def scalars_captured(x):
    torch._dynamo.config.capture_scalar_outputs = True  # finds: hidden_setting
    return x / x.max().item()  # finds: host_read


def shapes_captured(x):
    torch._dynamo.config.capture_dynamic_output_shape_ops = True  # finds: hidden_setting
    return x[x > 0]  # finds: dynamic_shape



def by_another_name(x):
    dc.suppress_errors = True  # finds: hidden_setting
    return x * 2


def by_setattr(x):
    setattr(dc, "capture_scalar_outputs", True)  # finds: hidden_setting
    return x * 2


def patched(x):
    with dc.patch("suppress_errors", True):  # finds: hidden_setting
        return x * 2


def set_in_helper():
    dc.suppress_errors = True  # finds: hidden_setting


def by_helper(x):
    set_in_helper()
    return x * 2


def environment_updated(x):
    os.environ.update(TORCHDYNAMO_SUPPRESS_ERRORS="1")  # finds: hidden_setting
    return x * 2


CASES = {
    "errors_suppressed": lambda device: (torch.randn(4, device=device),),
    "scalars_captured": lambda device: (torch.randn(4, device=device),),
    "shapes_captured": lambda device: (torch.randn(4, device=device),),
    "by_another_name": lambda device: (torch.randn(4, device=device),),
    "by_setattr": lambda device: (torch.randn(4, device=device),),
    "patched": lambda device: (torch.randn(4, device=device),),
    "by_helper": lambda device: (torch.randn(4, device=device),),
    "environment_updated": lambda device: (torch.randn(4, device=device),),
}
