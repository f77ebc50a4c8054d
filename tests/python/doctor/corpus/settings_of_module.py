"""A setting made while the module is imported, as people write it at the top of a file."""

import torch
import torch._dynamo

torch._dynamo.config.suppress_errors = True  # finds: hidden_setting


def projected(x, weight):
    return (x @ weight).relu()


CASES = {"projected": lambda device: (torch.randn(2, 8, device=device), torch.randn(8, 8, device=device))}
