"""Settings that hide a fault."""

import torch


def errors_suppressed(x):
    torch._dynamo.config.suppress_errors = True  # finds: hidden_setting
    return x * 2


def scalars_captured(x):
    torch._dynamo.config.capture_scalar_outputs = True  # finds: hidden_setting
    return x / x.max().item()  # finds: host_read


def shapes_captured(x):
    torch._dynamo.config.capture_dynamic_output_shape_ops = True  # finds: hidden_setting
    return x[x > 0]  # finds: dynamic_shape


CASES = {
    "errors_suppressed": lambda device: (torch.randn(4, device=device),),
    "scalars_captured": lambda device: (torch.randn(4, device=device),),
    "shapes_captured": lambda device: (torch.randn(4, device=device),),
}
