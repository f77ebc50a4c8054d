"""A setting made while the module is imported, by a name that its text does not show: told where the step begins."""

import torch
import torch._dynamo.config as dc

setattr(dc, "suppress_errors", True)


def projected(x, weight):  # finds: hidden_setting
    return (x @ weight).relu()


CASES = {"projected": lambda device: (torch.randn(2, 8, device=device), torch.randn(8, 8, device=device))}
